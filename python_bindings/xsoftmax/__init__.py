"""Output layers for very many classes: what replaces nn.Linear + nn.CrossEntropyLoss where one dot product a class is too much."""

from . import _library
from . import metrics, optim, samplers
from .cane import CaneLoss
from .clip_grad import clip_grad_norm_
from .config import cmake_prefix_path, cpu_capability, use_impl
from .diagnose import Diagnosis, diagnose, proposal_log_prob
from .label_tree import LabelTree
from .losses import LinearCrossEntropyLoss, LinearLoss, SampledSoftmaxLoss
from .replace import replace_head
from .tree_losses import BeamTreeLoss, HierarchicalSoftmaxLoss

__version__ = "0.1.0"

__all__ = [
    "BeamTreeLoss",
    "CaneLoss",
    "Diagnosis",
    "HierarchicalSoftmaxLoss",
    "LabelTree",
    "LinearCrossEntropyLoss",
    "LinearLoss",
    "SampledSoftmaxLoss",
    "clip_grad_norm_",
    "cmake_prefix_path",
    "cpu_capability",
    "diagnose",
    "metrics",
    "optim",
    "proposal_log_prob",
    "replace_head",
    "samplers",
    "use_impl",
]
