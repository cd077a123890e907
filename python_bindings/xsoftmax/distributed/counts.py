"""Shared counts of a stream that is split over ranks."""

import torch.distributed as dist
from typing import Optional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._core.ranks import ProcessGroupRanks, broadcast, check_equal, group_of
from ..samplers import StreamingCounts


def count_over_ranks(model: nn.Module, group: dist.ProcessGroup) -> None:
    for module in model.modules():
        if isinstance(module, StreamingCounts):
            module._ranks = ProcessGroupRanks("StreamingCounts", group)


def share_counts(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
    """Makes each :class:`xsoftmax.samplers.StreamingCounts` in `model` count the ids of all ranks.

    ``update(ids)``, and each step of a sampler with such counts, then gathers the ids of all ranks;
    a rank receives ``8 (W - 1)`` bytes per id. The counts are the same on all ranks, and equal to
    those of one process that sees all batches.

    All ranks must call them equally often, with batches of any size. :func:`replicate` already does
    this for the tables in its model, and samplers under :func:`shard_classes` see the targets of
    all ranks. Call this function for other counts, such as those of a loss whose class vectors are
    computed by a network.

    Args:
        model: a :class:`StreamingCounts`, or a module that contains some. Their state is set to
            that of the first rank.
        mesh: a one-dimensional DeviceMesh. None: all ranks.

    Returns:
        `model`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the model has no counts, or their options differ between ranks.
    """
    owner = "share_counts"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    counts = [module for module in model.modules() if isinstance(module, StreamingCounts)]
    if not counts:
        raise ValueError(f"{owner}: expected a model with StreamingCounts, got a "
                         f"{type(model).__name__} without one")
    check_equal(
        owner,
        {f"options of counts {place}": module.options
         for place, module in enumerate(counts)}, group)
    broadcast([table for module in counts for table in module.buffers()], group)
    count_over_ranks(model, group)
    return model
