"""Two-tower losses whose candidates are the items of all ranks."""

from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._core.placement import Table, attach
from .._core.ranks import Ragged, broadcast, check_equal, group_of
from ..losses.two_tower import TwoTowerLoss
from .exchange import GatherQueries


def _gather_items(vectors: Tensor, ids: Tensor, group: dist.ProcessGroup) -> List[Tensor]:
    batch = Ragged(len(ids), ids.device, group)
    return [GatherQueries.apply(vectors, batch), batch.gather(ids)]


class SharedItems(Table):
    """The item vectors that all ranks have computed, each for its part of the batch."""

    is_local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def tower_step(self, loss: Any, query: Tensor, item: Tensor, item_id: Tensor,
                   negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        torch.ops.xsoftmax.check_two_tower(query, item, item_id, negatives, weight,
                                           loss._memories(), loss.counts is not None, loss._options)
        if negatives and negatives[0].dim() == 2:
            negatives = _gather_items(negatives[0], negatives[1], self.group)
        options = loss._options.replace("reduction=mean", "reduction=sum")
        value: Tensor = loss._step(query, item, item_id, negatives,
                                   _gather_items(item, item_id, self.group), weight, True, options)
        if loss.reduction != "mean":
            return value
        if weight is None:
            total = value.new_full([], len(item_id))
        else:
            total = weight.detach().to(value.dtype).sum()
        dist.all_reduce(total, group=self.group)
        return value * (dist.get_world_size(self.group) / total)


def share_candidates(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
    """Makes the items of all ranks, with their negatives and memories, the candidates of each
    TwoTowerLoss in `model`.

    Each rank calls the loss with its part of the batch, as under data parallelism. It receives the
    item vectors and ids of the other ranks, ``(W - 1) b (D e + 8)`` bytes for b items per rank and
    e bytes per number, and the gradients of its own items from the queries of the others, ``(W - 1)
    b D e`` bytes. W ranks then compute the same as one process with the whole batch::

        loss = xs.distributed.share_candidates(xs.TwoTowerLoss(num_items))
        towers = DistributedDataParallel(towers)
        loss(*towers(features), item_id).backward()

    With reduction "mean", the loss of a rank is the sum over its queries, times W, divided by the
    number (or the sum of weights) of all ranks' queries. DistributedDataParallel averages gradients
    over ranks, which then gives the gradient of one process, even if parts of the batch differ in
    size. With "sum", the loss is the sum over the rank's queries. Counts and memory are the same on
    all ranks.

    Args:
        model: a TwoTowerLoss, or a module that contains some. Their buffers are set to those of the
            first rank.
        mesh: a one-dimensional DeviceMesh. None: all ranks.

    Returns:
        `model`.

    Raises:
        RuntimeError: there is no process group, or a loss is already shared.
        TypeError: model is not a module.
        ValueError: the model has no TwoTowerLoss, or losses differ between ranks.
    """
    owner = "share_candidates"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    losses = [module for module in model.modules() if isinstance(module, TwoTowerLoss)]
    if not losses:
        raise ValueError(f"{owner}: expected a model with a TwoTowerLoss, got a "
                         f"{type(model).__name__} without one")
    if any(loss._shared for loss in losses):
        raise RuntimeError(f"{owner}: expected a model whose candidates are not shared yet, got "
                           "one that share_candidates was called with before")
    facts: Dict[str, Any] = {}
    for place, loss in enumerate(losses):
        facts |= {
            f"{name} of two towers {place}": fact
            for name, fact in (("type", type(loss).__name__), ("options", loss._options),
                               ("counts", repr(loss.counts)))
        }
    check_equal(owner, facts, group)
    for loss in losses:
        broadcast(list(loss.buffers()), group)
        loss._shared = True
        attach(SharedItems(group), loss)
    return model
