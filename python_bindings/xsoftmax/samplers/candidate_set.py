"""Candidate sets, as samplers return them and operators take them."""

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class CandidateSet(NamedTuple):
    """Classes to score and their expected counts: how often the whole proposal would contain each
    class on average.

    A proposal is a list of such sets. In an estimate of a sum over all classes, a candidate has the
    weight ``1 / expected count``.
    """

    ids: Tensor
    """int64 ``[M]``, shared by the batch, or ``[Q, M]``, private to each query."""
    log_count: Tensor
    """float32, the shape of ``ids``, or ``[Q, M]`` for shared ids whose counts depend on the query:
    ``log(M q)`` for samples with replacement, ``log pi`` for samples without replacement, where pi
    is the inclusion probability, and 0 for a class that is always scored. In a union, counts are
    summed over all sets. +inf: the candidate is left out."""
    target_log_count: Optional[Tensor]
    """float32, the shape of ``target``: the targets' log expected counts in this set only; -inf
    where it cannot contain them. None: not computed, for estimators that do not need it."""
    distinct: bool
    """Whether the set was sampled without replacement, so that no class appears twice."""


def _check_sets(sets: Any) -> None:
    if isinstance(sets, CandidateSet) or not isinstance(sets, (list, tuple)):
        raise TypeError("expected a list of CandidateSet, as Sampler.sample returns it, got "
                        f"{type(sets).__name__} without a list")
    for part in sets:
        if not isinstance(part, CandidateSet):
            raise TypeError("expected a list of CandidateSet, as Sampler.sample returns it, got "
                            f"{type(part).__name__} in the list")


def columns_of(
    sets: List[CandidateSet]
) -> Tuple[List[Tensor], List[Tensor], List[Optional[Tensor]], List[bool]]:
    """Returns ids, log_count, target_log_count and distinct of all sets of a proposal, as operators
    take them."""
    if not torch.jit.is_scripting():
        _check_sets(sets)
    target_log_count: List[Optional[Tensor]] = []
    for part in sets:
        target_log_count.append(part.target_log_count)
    return [part.ids for part in sets], [part.log_count for part in sets
                                         ], target_log_count, [part.distinct for part in sets]


def one_set(tensors: Tuple[Tensor, Tensor, Tensor], target: Optional[Tensor],
            distinct: bool) -> List[CandidateSet]:
    """Returns the result of a sampling operator (ids, log_count, target_log_count) as a proposal of
    one set. target_log_count is None if target is None."""
    ids, log_count, target_log_count = tensors
    return [CandidateSet(ids, log_count, None if target is None else target_log_count, distinct)]
