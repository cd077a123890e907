"""Counts of a stream of which each rank sees a part."""

import torch.distributed as dist
from typing import Optional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._ranks import Together, broadcast, check_alike, group_of
from ..samplers import StreamingCounts


def count_over(model: nn.Module, group: dist.ProcessGroup) -> None:
    for module in model.modules():
        if isinstance(module, StreamingCounts):
            module._ranks = Together("StreamingCounts", group)


def share_counts(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
    """Has each :class:`xsoftmax.samplers.StreamingCounts` in `model` count the ids of all ranks: ``update(ids)``, and each step of a sampler with such counts,
    then gathers the ids of all ranks, ``8 (W - 1)`` bytes an id, so that counts are those of one process that sees all batches, on all ranks alike.

    All ranks call them equally often, with batches of any size. :func:`replicate` does this for the tables in its model; under :func:`shard_classes` samplers
    see the targets of all ranks anyway. Call it for counts outside of both, such as those of a loss whose vectors a network makes.

    Args:
        model: :class:`StreamingCounts`, or a module that holds some. Their state becomes that of the first rank.
        mesh: a DeviceMesh of one dimension. None: all ranks.

    Returns:
        `model`.

    Raises:
        RuntimeError: no process group
        ValueError: a model without counts; ranks that disagree on their options
    """
    owner = "share_counts"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    counts = [module for module in model.modules() if isinstance(module, StreamingCounts)]
    if not counts:
        raise ValueError(f"{owner}: expected a model with StreamingCounts, got a {type(model).__name__} without one")
    check_alike(owner, {f"options of counts {place}": module.options for place, module in enumerate(counts)}, group)
    broadcast([table for module in counts for table in module.buffers()], group)
    count_over(model, group)
    return model
