"""An embedding whose rows are those of a split class table."""

import torch.nn.functional as F
from torch import Tensor

from .._typing import Module
from ._exchange import FetchRows, ScaleGradient, row_requests, unique_of
from .class_parallel import ShardedLoss


class TiedEmbedding(Module):
    """The embedding of an encoder whose rows are those of a loss that :func:`shard_classes` split, as ``loss.linear.weight = embedding.weight`` ties the
    two in one process. All ranks call it together, each with its ids; the rows are fetched from the ranks that have them, and their gradients go back.
    A rank receives ``2 (W - 1) / W U D e`` bytes a step, U different ids of a rank. It has no parameters: those of the loss are its own.

    Args:
        loss: whose `linear.weight` the rows are.
        sparse: the gradient is row-sparse, as in nn.Embedding.

    Raises:
        TypeError: a loss that was not split
    """

    def __init__(self, loss: ShardedLoss, sparse: bool = True) -> None:
        super().__init__()
        if not isinstance(loss, ShardedLoss):
            raise TypeError(f"TiedEmbedding: expected a loss that shard_classes was called with, got {type(loss).__name__}")
        self._of = (loss,)  # in a tuple: its parameters are not this module's
        self.sparse = sparse

    @property
    def weight(self) -> Tensor:
        """The rows of this rank, [classes of the rank, D]."""
        return self._of[0].linear.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 in [0, N), any shape -> their rows [*ids.shape, D]. Where a rank has others, all ranks raise IndexError."""
        loss, = self._of
        shards = loss._shards
        classes, (places,) = unique_of([ids])
        rows = F.embedding(places, FetchRows.apply(self.weight, row_requests("TiedEmbedding", "ids", classes, shards), self.sparse))
        # What arrives of a mean or a sum is W times a rank's share, see shard_classes.
        return rows if loss.reduction == "none" else ScaleGradient.apply(rows, 1 / shards.size)

    def extra_repr(self) -> str:
        return f"{self._of[0].num_classes}, {self._of[0].in_features}, sparse={self.sparse}"
