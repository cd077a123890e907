"""An embedding that shares its rows with a sharded class table."""

import torch.nn.functional as F
from torch import Tensor

from .._core.typing import Module
from .exchange import FetchRows, ScaleGradient, row_requests, find_unique
from .class_parallel import ShardedLoss


class TiedEmbedding(Module):
    """An embedding that shares its rows with the table of a loss sharded by :func:`shard_classes`,
    as ``loss.linear.weight = embedding.weight`` does in one process.

    All ranks call it together, each with its own ids. Rows are fetched from the ranks that own
    them, and their gradients are sent back: a rank receives ``2 (W - 1) / W U D e`` bytes per step
    for U distinct ids per rank. The module has no parameters of its own; those of the loss are
    trained.

    Args:
        loss: a sharded loss, whose `linear.weight` holds the rows.
        sparse: produce a row-sparse gradient, as in nn.Embedding.

    Shape:
        - ids: int64 [*] in [0, N).
        - output: [*, D].

    Raises:
        TypeError: the loss is not sharded.
    """
    def __init__(self, loss: ShardedLoss, sparse: bool = True) -> None:
        super().__init__()
        if not isinstance(loss, ShardedLoss):
            raise TypeError("TiedEmbedding: expected a loss that shard_classes was called with, "
                            f"got {type(loss).__name__}")
        self._loss_in_tuple = (loss,)  # in a tuple, so that its parameters are not registered here
        self.sparse = sparse

    @property
    def weight(self) -> Tensor:
        """The rows held by this rank, [number of its classes, D]."""
        return self._loss_in_tuple[0].linear.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of ids, int64 [*] in [0, N) -> [*, D]. If an id is out of range on any
        rank, all ranks raise an IndexError."""
        loss, = self._loss_in_tuple
        shards = loss._shards
        classes, (places,) = find_unique([ids])
        rows = F.embedding(
            places,
            FetchRows.apply(self.weight, row_requests("TiedEmbedding", "ids", classes, shards),
                            self.sparse))
        # The gradient of a mean or sum arrives multiplied by W; see shard_classes.
        return rows if loss.reduction == "none" else ScaleGradient.apply(rows, 1 / shards.size)

    def extra_repr(self) -> str:
        loss, = self._loss_in_tuple
        return f"{loss.num_classes}, {loss.in_features}, sparse={self.sparse}"
