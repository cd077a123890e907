"""Output layers for very many classes: what replaces nn.Linear + nn.CrossEntropyLoss where one dot product a class is too much."""

import importlib as _importlib
import sys as _sys
import typing as _typing

import torch as _torch

if _torch.distributed.is_available():
    # Its defaults take hold of the process group that they find when it is first imported, as many modules of torch do with theirs.
    # A group that outlives destroy_process_group() has threads, which abort a process that ends while they let go of a tensor.
    _importlib.import_module("torch.distributed.nn.functional")

from . import _library  # noqa: F401 (loads the operators)
from . import datasets, functional, label_vectors, metrics, optim, samplers, tables
from .advise import Advice, Choice, advise
from .cached_step import cached_step
from .cane import CaneLoss
from .clip_grad import clip_grad_norm_
from .config import cmake_prefix_path, cpu_capability, cpu_products, use_impl
from .diagnose import Diagnosis, diagnose, proposal_log_prob
from .ensemble import combine_predictions
from .estimators import CandidateBatch, register_estimator
from .export import decompositions
from .graphed_step import GraphedStep, make_graphed_step
from .hierarchical_matcher import HierarchicalMatcher
from .id_table import IdTable
from ._long_work import progress
from .label_tree import LabelTree
from .linear_losses import LinearCrossEntropyLoss, LinearLoss
from .replace import replace_head, restore_head
from .retrieval import SearchIndex, SearchResult, to_faiss
from .sampled_softmax_loss import SampledSoftmaxLoss
from .tree_losses import BeamTreeLoss, HierarchicalSoftmaxLoss
from .two_tower import TwoTowerLoss
from .xr_linear import XRLinear
from ._arguments import explain_constructors as _explain_constructors
from ._arguments import explain_functions as _explain_functions
from ._public import public_names as _public_names


if _typing.TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
else:
    def __getattr__(name):
        # With the first use: torch.distributed takes long to import, and not every build of torch has it; integrations are of packages that may be absent.
        if name in ("distributed", "integrations"):
            return _importlib.import_module("." + name, __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.2.0"

__all__ = [
    "Advice",
    "BeamTreeLoss",
    "CandidateBatch",
    "CaneLoss",
    "Choice",
    "Diagnosis",
    "GraphedStep",
    "HierarchicalMatcher",
    "HierarchicalSoftmaxLoss",
    "IdTable",
    "LabelTree",
    "LinearCrossEntropyLoss",
    "LinearLoss",
    "SampledSoftmaxLoss",
    "SearchIndex",
    "SearchResult",
    "TwoTowerLoss",
    "XRLinear",
    "advise",
    "cached_step",
    "clip_grad_norm_",
    "cmake_prefix_path",
    "combine_predictions",
    "cpu_capability",
    "cpu_products",
    "datasets",
    "decompositions",
    "diagnose",
    "functional",
    "label_vectors",
    "make_graphed_step",
    "metrics",
    "optim",
    "progress",
    "proposal_log_prob",
    "register_estimator",
    "replace_head",
    "restore_head",
    "samplers",
    "tables",
    "to_faiss",
    "use_impl",
]

__dir__ = _public_names([*__all__, "__version__", "distributed", "integrations"])

_explain_constructors(found for module in (_sys.modules[__name__], optim, samplers)
                      for name in module.__all__ if isinstance(found := getattr(module, name), type))
_explain_functions(functional, functional.__all__)
_explain_functions(XRLinear, ("train", "predict", "topk"))
_explain_functions(LabelTree, ("balanced", "from_frequencies", "from_vectors", "huffman", "random"))
