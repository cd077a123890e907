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


def draws_for_a_part(sampler: Sampler) -> bool:
    """Returns whether drawing for a part of the batch gives the same samples as drawing for all."""
    if isinstance(sampler, UnionSampler):
        return all(draws_for_a_part(part) for part in sampler.parts)
    if isinstance(sampler, ComplementSampler):
        return sampler.sampler is None or draws_for_a_part(sampler.sampler)
    if isinstance(sampler, UnigramSampler) and sampler.streaming is not None:
        return False  # it counts the targets of the whole batch
    return isinstance(sampler, StaticSampler) or (isinstance(sampler, ShardedMidxSampler)
                                                  and not sampler.shared)


@contextlib.contextmanager
def drawing_for(sampler: Sampler, first_query: int) -> Iterator[None]:
    """Context manager in which samplers draw for a part of a batch that begins at `first_query`."""
    parts = [part for part in sampler.modules() if isinstance(part, Sampler)]
    for part in parts:
        part._first_query = first_query
    try:
        yield
    finally:
        for part in parts:
            part._first_query = 0


def of_rank(part: CandidateSet, shards: ClassShards) -> CandidateSet:
    """Restricts a set to the candidates whose classes this rank holds, as rows of its table.

    Private candidates are moved to the first columns of a query. The remaining columns hold row 0
    with a log count of +inf, which excludes it.
    """
    here = shards.here(part.ids)
    if part.ids.dim() == 1:
        places = here.nonzero().squeeze(1)
        return part._replace(ids=part.ids[places] - shards.begin, log_count=part.log_count[...,
                                                                                           places])
    width = int(here.sum(1).max()) if here.numel() > 0 else 0
    here, places = (
        found[:, :width]
        for found in torch.sort(here.to(torch.uint8), dim=1, descending=True, stable=True))
    here = here.bool()
    return part._replace(ids=torch.where(here,
                                         part.ids.gather(1, places) - shards.begin, 0),
                         log_count=torch.where(here, part.log_count.gather(1, places), torch.inf))


def without_a_draw(sets: List[CandidateSet], target: Tensor,
                   group: dist.ProcessGroup) -> List[CandidateSet]:
    """If there are sets with and without replacement, replaces one draw by the target: for each
    query whose target is not in a set without replacement, removes the first other draw."""
    if not any(part.distinct for part in sets) or all(part.distinct for part in sets):
        return sets
    covered = torch.zeros_like(target, dtype=torch.uint8)
    for part in sets:
        if part.distinct:
            covered |= ((part.ids == target.unsqueeze(1)) & (part.log_count != torch.inf)).any(1)
    # a rank may know only the ids of its own classes
    dist.all_reduce(covered, dist.ReduceOp.MAX, group=group)
    done, result = covered.bool(), []
    for part in sorted(sets, key=lambda part: part.ids.dim() == 1):
        if not part.distinct:
            present = (part.log_count != torch.inf).expand(len(target), -1)
            first = present & (present.cumsum(1) == 1) & ~done.unsqueeze(1)
            done = done | present.any(1)
            part = part._replace(log_count=torch.where(first, torch.inf, part.log_count))
        result.append(part)
    return result
