"""Candidates of a training step over several ranks."""

import contextlib
from typing import Iterator, List, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..samplers import (CandidateSet, ComplementSampler, Sampler, StaticSampler, UnigramSampler,
                        UnionSampler)
from ..samplers.sampler import OF_BATCH
from .exchange import ClassShards
from .midx import ShardedMidxSampler


def candidate_numbers(sampler: Sampler, queries: int) -> Tuple[int, int]:
    """Returns how many candidates a step with so many queries has: the number shared by the batch,
    and the number per query."""
    if isinstance(sampler, UnionSampler):
        numbers = [candidate_numbers(part, queries) for part in sampler.parts]
        return sum(shared for shared, _ in numbers), sum(private for _, private in numbers)
    number = queries if sampler.num_samples == OF_BATCH else sampler.num_samples
    return (number, 0) if sampler.shared else (0, number)


def can_draw_for_part(sampler: Sampler) -> bool:
    """Returns whether drawing for a part of the batch gives the same samples as drawing for all."""
    if isinstance(sampler, UnionSampler):
        return all(can_draw_for_part(part) for part in sampler.parts)
    if isinstance(sampler, ComplementSampler):
        return sampler.sampler is None or can_draw_for_part(sampler.sampler)
    if isinstance(sampler, UnigramSampler) and sampler.streaming is not None:
        return False  # it counts the targets of the whole batch
    return isinstance(sampler, StaticSampler) or (isinstance(sampler, ShardedMidxSampler)
                                                  and not sampler.shared)


@contextlib.contextmanager
def draw_for_part(sampler: Sampler, first_query: int) -> Iterator[None]:
    """Context manager in which samplers draw for a part of a batch that begins at `first_query`."""
    parts = [part for part in sampler.modules() if isinstance(part, Sampler)]
    for part in parts:
        part._first_query = first_query
    try:
        yield
    finally:
        for part in parts:
            part._first_query = 0


def restrict_to_rank(part: CandidateSet, shards: ClassShards) -> CandidateSet:
    """Restricts a set to the candidates whose classes this rank holds, as rows of its table.

    Private candidates are moved to the first columns of a query. The remaining columns hold row 0
    with a log count of +inf, which excludes it.
    """
    is_local = shards.contains(part.ids)
    if part.ids.dim() == 1:
        places = is_local.nonzero().squeeze(1)
        return part._replace(ids=part.ids[places] - shards.begin, log_count=part.log_count[...,
                                                                                           places])
    width = int(is_local.sum(1).max()) if is_local.numel() > 0 else 0
    is_local, places = (sorted_values[:, :width] for sorted_values in torch.sort(
        is_local.to(torch.uint8), dim=1, descending=True, stable=True))
    is_local = is_local.bool()
    return part._replace(
        ids=torch.where(is_local,
                        part.ids.gather(1, places) - shards.begin, 0),
        log_count=torch.where(is_local, part.log_count.gather(1, places), torch.inf))


def remove_a_draw(sets: List[CandidateSet], target: Tensor,
                  group: dist.ProcessGroup) -> List[CandidateSet]:
    """If there are sets with and without replacement, replaces one draw by the target: for each
    query whose target is not in a set without replacement, removes the first other draw."""
    if not any(part.distinct for part in sets) or all(part.distinct for part in sets):
        return sets
    has_target = torch.zeros_like(target, dtype=torch.uint8)
    for part in sets:
        if part.distinct:
            has_target |= ((part.ids == target.unsqueeze(1)) & (part.log_count != torch.inf)).any(1)
    # a rank may know only the ids of its own classes
    dist.all_reduce(has_target, dist.ReduceOp.MAX, group=group)
    is_done, result = has_target.bool(), []
    for part in sorted(sets, key=lambda part: part.ids.dim() == 1):
        if not part.distinct:
            is_present = (part.log_count != torch.inf).expand(len(target), -1)
            is_first = is_present & (is_present.cumsum(1) == 1) & ~is_done.unsqueeze(1)
            is_done = is_done | is_present.any(1)
            part = part._replace(log_count=torch.where(is_first, torch.inf, part.log_count))
        result.append(part)
    return result
