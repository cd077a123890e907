"""Output layers over many classes: replacements for nn.Linear + nn.CrossEntropyLoss where one dot
product per class costs too much."""

import importlib as _importlib
import sys as _sys
import typing as _typing

import torch as _torch

if _torch.distributed.is_available():
    # Import it before a process group exists. On first import its default arguments capture the
    # current group, which then outlives destroy_process_group(); the threads of such a group may
    # abort the process at exit, when they release a tensor.
    _importlib.import_module("torch.distributed.nn.functional")

from ._core import library as _library  # noqa: F401 (loads the operators)
from . import datasets, functional, label_vectors, metrics, optim, samplers, tables
from .tools.advice import Advice, Choice
from .tools.advise import advise
from .losses.cached_step import cached_step
from .losses.cane import CaneLoss
from .optim.clip_grad import clip_grad_norm_
from ._core.config import cmake_prefix_path, cpu_capability, cpu_products, use_impl
from .tools.diagnose import Diagnosis, diagnose, proposal_log_prob
from .draft_head import DraftHead, draft_head
from .matcher.ensemble import combine_predictions
from .estimators import CandidateBatch, register_estimator
from .tools.export import decompositions
from .tools.graphed_step import GraphedStep, make_graphed_step
from .matcher.hierarchical_matcher import HierarchicalMatcher
from .tables.id_table import IdTable
from ._core.long_work import progress
from .trees.label_tree import LabelTree
from .losses.linear_cross_entropy import LinearCrossEntropyLoss
from .losses.linear_loss import LinearLoss
from .integrations.replace import replace_head, restore_head
from .retrieval import SearchIndex, SearchResult, to_faiss
from .losses.sampled_softmax_loss import SampledSoftmaxLoss
from .trees.beam_tree_loss import BeamTreeLoss
from .trees.hierarchical_softmax_loss import HierarchicalSoftmaxLoss
from .losses.two_tower import TwoTowerLoss
from .matcher.xr_linear import XRLinear
from ._core.arguments import explain_constructors as _explain_constructors
from ._core.arguments import explain_functions as _explain_functions
from ._core.public import public_names as _public_names

if _typing.TYPE_CHECKING:
    from . import distributed as distributed
    from . import integrations as integrations
else:

    def __getattr__(name):
        # Imported on first use: torch.distributed is slow to import and missing from some builds of
        # torch, and the packages behind the integrations may not be installed.
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
    "DraftHead",
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
    "draft_head",
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
                      for name in module.__all__
                      if isinstance(found := getattr(module, name), type))
_explain_functions(functional, functional.__all__)
_explain_functions(XRLinear, ("train", "predict", "topk"))
_explain_functions(LabelTree, ("balanced", "from_frequencies", "from_vectors", "huffman", "random"))
