"""Two towers whose candidates are the items of all ranks."""

from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._placement import Table, attach
from .._ranks import Ragged, broadcast, check_alike, group_of
from ..two_tower import TwoTowerLoss
from ._exchange import GatherQueries


def _gathered(vectors: Tensor, ids: Tensor, group: dist.ProcessGroup) -> List[Tensor]:
    batch = Ragged(len(ids), ids.device, group)
    return [GatherQueries.apply(vectors, batch), batch.gather(ids)]


class SharedItems(Table):
    """The item vectors that all ranks have just computed, each those of its part of the batch."""

    is_local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def tower_step(self, loss: Any, query: Tensor, item: Tensor, item_id: Tensor,
                   negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        torch.ops.xsoftmax.check_two_tower(query, item, item_id, negatives, weight,
                                           loss._memories(), loss.counts is not None, loss._options)
        if negatives and negatives[0].dim() == 2:
            negatives = _gathered(negatives[0], negatives[1], self.group)
        options = loss._options.replace("reduction=mean", "reduction=sum")
        of_queries: Tensor = loss._step(query, item, item_id, negatives,
                                        _gathered(item, item_id, self.group), weight, True, options)
        if loss.reduction != "mean":
            return of_queries
        if weight is None:
            total = of_queries.new_full([], len(item_id))
        else:
            total = weight.detach().to(of_queries.dtype).sum()
        dist.all_reduce(total, group=self.group)
        return of_queries * (dist.get_world_size(self.group) / total)


def share_candidates(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
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
        `model`.

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
    if any(loss._shared for loss in losses):
        raise RuntimeError(f"{owner}: expected a model whose candidates are not shared yet, got "
                           "one that share_candidates was called with before")
    facts: Dict[str, Any] = {}
    for place, loss in enumerate(losses):
        facts |= {f"{name} of two towers {place}": fact for name, fact in (
            ("type", type(loss).__name__), ("options", loss._options), ("counts", repr(loss.counts)))}
    check_alike(owner, facts, group)
    for loss in losses:
        broadcast(list(loss.buffers()), group)
        loss._shared = True
        attach(SharedItems(group), loss)
    return model
