"""Two towers whose candidates are the items of all ranks."""

from typing import Optional, Tuple

import torch.distributed as dist
from torch import Tensor, nn

from ..two_tower import TwoTowerLoss
from ._exchange import GatherQueries
from ._group import Ragged, broadcast, check_alike, group_of


class SharedTwoTowerLoss(TwoTowerLoss):
    """One whose batch is that of all ranks, each of which has some of its queries."""

    _group: dist.ProcessGroup

    def _of_all(self, vectors: Tensor, ids: Tensor) -> Tuple[Tensor, Tensor]:
        batch = Ragged(len(ids), ids.device, self._group)
        return GatherQueries.apply(vectors, batch), batch.gather(ids)

    def forward(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: Optional[Tuple[Tensor, Tensor]] = None,
                weight: Optional[Tensor] = None) -> Tensor:
        loss = super().forward(query, item, item_id, negatives, weight)
        if self.reduction != "mean":
            return loss
        total = loss.new_full([], len(item_id)) if weight is None else weight.detach().to(loss.dtype).sum()
        dist.all_reduce(total, group=self._group)
        return loss * (dist.get_world_size(self._group) / total)


def share_candidates(model: nn.Module, mesh=None) -> nn.Module:
    """From then on the candidates of the TwoTowerLosses in `model` are the items of all ranks, and those of their negatives and memories.

    Each rank calls the loss with its part of the batch, as under data parallelism. It receives the item vectors and ids of the others, ``(W - 1) b (D e + 8)``
    bytes for b items a rank and e bytes a number, and the gradients of its items from their queries, ``(W - 1) b D e``. So W ranks compute what one
    process would with the whole batch::

        loss = xs.distributed.share_candidates(xs.TwoTowerLoss(num_items))
        towers = DistributedDataParallel(towers)
        loss(*towers(features), item_id).backward()

    With reduction "mean" each rank's loss is the sum over its queries times W over the number of all of them (over all their weights), so that the mean over
    ranks, which DistributedDataParallel makes of gradients, is that of one process, whatever part of the batch a rank has. With "sum" it is the sum over the
    rank's queries. Counts and memory are the same on all ranks.

    Args:
        model: a loss, or a module that holds some; its buffers become those of the first rank.
        mesh: a DeviceMesh of one dimension. None: all ranks.

    Returns:
        `model`. The class of its losses is now a subclass of what it was.

    Raises:
        RuntimeError: no process group, a loss that is shared already; TypeError, ValueError: a model without a TwoTowerLoss, ranks that disagree
    """
    owner = "share_candidates"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    losses = [module for module in model.modules() if isinstance(module, TwoTowerLoss)]
    if not losses:
        raise ValueError(f"{owner}: expected a model with a TwoTowerLoss, got a {type(model).__name__} without one")
    if any(isinstance(loss, SharedTwoTowerLoss) for loss in losses):
        raise RuntimeError(f"{owner}: expected a model whose candidates are not shared yet, got one whose are")
    facts = {}
    for place, loss in enumerate(losses):
        facts |= {f"{name} of two towers {place}": fact for name, fact in (
            ("type", type(loss).__name__), ("options", f"{loss._options}, {loss.similarity}, {loss.num_items} items, warm-up {loss.memory_warmup}"),
            ("counts", repr(loss.counts)), ("memory", list(loss.memory.shape)))}
    check_alike(owner, facts, group)
    for loss in losses:
        broadcast(list(loss.buffers()), group)
        loss.__class__ = SharedTwoTowerLoss
        loss._group = group
        if loss.reduction == "mean":
            loss._options = loss._options.replace("reduction=mean", "reduction=sum")
    return model
