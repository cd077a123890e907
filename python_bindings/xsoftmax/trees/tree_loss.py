"""The base class of losses over a label tree."""

from typing import Any, Dict, List, Optional

import torch
from torch import Tensor
from torch.types import Device

from .._core.memory import device_of_values
from ..tables.table_module import TableModule, make_linear
from .._core.typing import Numbers
from .label_tree import LabelTree


class TreeLoss(TableModule):
    """Base class of losses over a label tree. It holds the tree, and its edges as ``edges``, an
    ``nn.Linear`` with one row per edge."""

    # All losses over one tree can load each other's checkpoints: only the beam tree counts steps
    # and has a noise sampler, whose state may be empty.
    _optional_state = ("steps", "noise.")

    def __init__(self, in_features: int, tree: LabelTree, *, bias: bool = False,
                 weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: Optional[bool] = None,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        if not isinstance(tree, LabelTree):
            raise TypeError(f"{type(self).__name__}: expected tree as a LabelTree, such as "
                            f"LabelTree.balanced(num_classes), got {type(tree).__name__}")
        self._init_table(in_features, tree.num_classes, reduction=reduction, weight=weight,
                         ignore_index=ignore_index, sparse_grad=sparse_grad)
        # A copy, so that loading a checkpoint into this loss changes no other loss.
        self.tree = tree.clone().to(device_of_values(device))
        self.edges = make_linear(self._name, self.in_features, tree.num_edges, bias, device, dtype)
        self._watch_tables()

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.edges.weight, self.edges.bias]
        return tables

    def _edge_scores(self, input: Tensor) -> Tensor:
        """Computes the scores of all edges: input [*, D] -> [Q, E]."""
        return torch.ops.xsoftmax.linear_scores(self._table_queries(input, None), self.edges.weight,
                                                self.edges.bias)

    def _explain_table_size(self, state_dict: Dict[str, Any], prefix: str) -> List[str]:
        saved_rows, rows = state_dict.get(prefix + "edges.weight"), self.edges.weight
        if not isinstance(saved_rows, Tensor) or len(saved_rows) == len(rows):
            return []
        got = f"expected a checkpoint of a tree of {len(rows)} edges, got one of {len(saved_rows)}"
        hint = ("make the loss with the tree that was saved, xs.LabelTree(first_child, parent, "
                "node_class, class_node) of the checkpoint's tree.*")
        return [f"{self._name}: {got}: {hint}"]
