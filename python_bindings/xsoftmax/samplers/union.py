"""Unions of samplers."""

from typing import Any, Callable, Dict, List, Optional, TYPE_CHECKING

import torch
from torch import Tensor, nn

from .candidate_set import CandidateSet, columns_of
from .sampler import OF_BATCH, DescribedSampler, Sampler


class UnionSampler(DescribedSampler):
    """Combines several samplers, so that one proposes what another misses.

    ``UnionSampler(UnigramSampler(counts, 64), MidxSampler(n, d, 20))`` draws 64 classes shared by
    the batch and 20 per query. Expected counts add up: the count of a class is the sum of its
    counts in all parts, whichever part drew it. This is the balance heuristic of multiple
    importance sampling (Veach and Guibas, 1995). No candidate weighs more than it would under any
    single part.

    Shared parts draw first, then private ones, one after another, and those without replacement
    last. While a private part draws, it also computes its expected counts of the ids drawn before.
    A part whose counts are only known for what it draws can therefore be in a union if it is the
    last.

    Args:
        *parts: samplers of one number of classes, which may be unions too. They cannot be used
            elsewhere.

    Shapes and dtypes: one set for each set of the parts; ids int64 [M] or [Q, M], log counts
    float32 of that shape, or [Q, M] if those of a part depend on the query.

    Raises:
        ValueError: there are no parts, parts have different numbers of classes, a part is passed
            twice, or a part belongs to a loss or a union already. In :meth:`sample`: the counts of
            two parts are only known for what they draw.
        TypeError: a part is not a sampler.
        IndexError: same as the parts.
    """

    if TYPE_CHECKING:
        parts: Any

    def __init__(self, *parts: Sampler):
        if not parts:
            raise ValueError("UnionSampler: expected at least one sampler, got none")
        for part in parts:
            if not isinstance(part, Sampler):
                raise TypeError("UnionSampler: expected Sampler objects, got "
                                f"{type(part).__name__}")
        sizes = sorted({part.num_classes for part in parts})
        if len(sizes) > 1:
            raise ValueError("UnionSampler: expected samplers of one number of classes, got "
                             f"{sizes}")
        if len(set(parts)) < len(parts):
            raise ValueError("UnionSampler: expected different samplers, got one of them twice")
        counts = [part.num_samples for part in parts]
        super().__init__(sizes[0], OF_BATCH if OF_BATCH in counts else sum(counts),
                         shared=all(part.shared for part in parts),
                         distinct=all(part.distinct for part in parts))
        # Parts with an owner first: they raise before any part is claimed.
        for part in sorted(parts, key=lambda part: not part._owner):
            part._claim("UnionSampler")
        self.parts = nn.ModuleList(parts)
        self.follows_table = any(part.follows_table for part in parts)
        self.has_distinct, self.has_independent = any(part.has_distinct
                                                      for part in parts), any(part.has_independent
                                                                              for part in parts)
        self._turns: List[int] = [0 if part.shared else 2 if part.distinct else 1 for part in parts]
        ranks = all(turn == 1 for turn in self._turns) and any(part.default_estimator == "ranking"
                                                               for part in parts)
        self.default_estimator = "ranking" if ranks else "sampled_softmax"

    def _describe(self) -> str:
        descriptions: List[str] = []
        for part in self.parts:
            descriptions.append(part.describe())
        return "" if "" in descriptions else "union:0:[" + ";".join(descriptions) + "]"

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        tensors: List[Tensor] = []
        for part in self.parts:
            tensors.extend(part.state_tensors())
        return tensors

    @torch.jit.unused
    def refresh_due(self) -> bool:
        return any(part.refresh_due() for part in self.parts)

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        return self._draw(queries, target,
                          generator) if self._describe() != "" else self._draw_in_turn(
                              queries, target, generator)

    def _draw_in_turn(self, queries: Tensor, target: Optional[Tensor],
                      generator: Optional[torch.Generator]) -> List[CandidateSet]:
        """Draws from each part in turn, if a part is written in Python."""
        sets: List[CandidateSet] = []
        cross_counts: List[Tensor] = []  # log counts of a set's ids in other parts
        set_numbers: List[int] = []
        part_numbers: List[int] = []
        first_private = 0
        for turn in range(3):
            for i, part in enumerate(self.parts):
                if self._turns[i] == turn:
                    sampler_target = target if turn == 0 else torch.ops.xsoftmax.union_classes(
                        queries, target, [candidates.ids for candidates in sets])
                    new_sets = part.sample(queries, sampler_target, generator)
                    if turn == 0:
                        for k, candidates in enumerate(sets):
                            cross_counts.append(part.log_count(queries, candidates.ids))
                            set_numbers.append(k)
                    for candidates in new_sets:
                        for j, other_part in enumerate(self.parts):
                            if self._turns[j] < turn or (self._turns[j] == turn and j < i):
                                cross_counts.append(other_part.log_count(queries, candidates.ids))
                                set_numbers.append(len(sets))
                        sets.append(candidates)
                        part_numbers.append(turn * len(self.parts) + i)
                        first_private += int(turn == 0)
        ids, log_count, target_log_count, _ = columns_of(sets)
        merged_log_count, merged_target_log_count = torch.ops.xsoftmax.union_merge(
            ids, log_count, target_log_count, part_numbers, first_private, cross_counts,
            set_numbers, target)
        proposal: List[CandidateSet] = []
        for k, candidates in enumerate(sets):
            has_target = target is not None and candidates.target_log_count is not None
            proposal.append(
                CandidateSet(candidates.ids, merged_log_count[k],
                             merged_target_log_count[k] if has_target else None,
                             candidates.distinct))
        return proposal

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.merge_log_counts(
            [part.log_count(queries, ids) for part in self.parts])

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor],
                generator: Optional[torch.Generator] = None) -> None:
        for part in self.parts:
            part.prepare(weight, bias, generator)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Refreshes every part. Statistics are named by the index of the part: ``"1.distortion"``.
        """
        stats: Dict[str, float] = {}
        for i, part in enumerate(self.parts):
            for name, value in part.refresh(weight, bias).items():
                stats[str(i) + "." + name] = value
        return stats

    @torch.jit.unused
    def plan_growth(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Optional[Callable[[], None]]:
        return self._plan_all([part.plan_growth(num_classes, rows, bias) for part in self.parts],
                              num_classes)

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Any:
        return self._plan_all([part.plan_resize(num_classes, rows, bias) for part in self.parts],
                              num_classes)

    @torch.jit.unused
    def _plan_all(self, plans: List[Any], num_classes: int) -> Optional[Callable[[], None]]:
        def resize() -> None:
            for plan in plans:
                plan()
            self.num_classes = num_classes

        return None if any(plan is None for plan in plans) else resize

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> Optional["UnionSampler"]:
        """Returns a union of parts that exclude ``ids``, or None if a part cannot exclude classes.
        """
        parts = [part.excluding(ids) for part in self.parts]
        return None if any(part is None for part in parts) else UnionSampler(*parts)
