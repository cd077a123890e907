"""Several samplers as one."""

from typing import Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .sampler import Proposal, Sampler, one_set


class UnionSampler(Sampler):
    r"""The draws of several samplers together: what one of them misses, another proposes.

    ``UnionSampler((UnigramSampler(counts), 64), (MidxSampler(n, d), 20))`` draws 64 classes that the batch shares and 20 for each query.
    Expected counts add up: a class's count is the sum of what each sampler would draw of it, whoever drew it (the balance heuristic of
    multiple importance sampling; Veach and Guibas, 1995), so that no candidate weighs more than under any one of them.

    Args:
        *parts: pairs of a sampler and its number of draws, which are shared or private as suits each sampler. A
            :class:`MidxSampler` draws independently here (``distinct`` None or False, private).

    ``num_samples`` of :meth:`sample`, and of a loss, is ignored.
    """

    def __init__(self, *parts: Tuple[Sampler, int]):
        if not parts:
            raise ValueError("UnionSampler: expected at least one pair (sampler, number of draws), got none")
        for part in parts:
            if not (isinstance(part, (tuple, list)) and len(part) == 2 and isinstance(part[0], Sampler) and isinstance(part[1], int)
                    and not isinstance(part[1], bool)):
                raise TypeError(f"UnionSampler: expected pairs (sampler, number of draws), got {part!r}")
            if part[1] < 0:
                raise ValueError(f"UnionSampler: expected a number of draws of at least 0, got {part[1]}")
            if part[0].proposes_targets or isinstance(part[0], UnionSampler):
                raise TypeError(f"UnionSampler: expected samplers of independent or distinct draws, got {type(part[0]).__name__}")
        if not any(count for _, count in parts):
            raise ValueError("UnionSampler: expected at least one draw, got none")
        sizes = {sampler.num_classes for sampler, _ in parts}
        if len(sizes) > 1:
            raise ValueError(f"UnionSampler: expected samplers of one number of classes, got {sorted(sizes)}")
        for sampler, _ in parts:
            if not sampler.shared_by_default and sampler.draws_distinct(False):
                raise ValueError(f"UnionSampler: expected private draws to be independent, got distinct ones of {type(sampler).__name__}")
        super().__init__(parts[0][0].num_classes)
        # Distinct shared draws first: an estimator renormalises the columns behind them. Samplers that count what stands before them last.
        parts = sorted(parts, key=lambda part: (not part[0].draws_distinct(part[0].shared_by_default), part[0].counts_beside))
        self.parts = nn.ModuleList(sampler for sampler, _ in parts)
        self.counts: List[int] = [count for _, count in parts]
        self.learns = any(sampler.learns for sampler, _ in parts)
        independent = [sampler for sampler, count in parts if count > 0 and not sampler.draws_distinct(sampler.shared_by_default)]
        self.renormalises = len(independent) < 2
        self.shared_by_default = False  # private draws, perhaps none, and shared ones beside them

    def draws_by_kind(self, num_samples: int, shared: bool) -> Tuple[int, int]:
        kinds = [part.draws_by_kind(count, part.shared_by_default) for part, count in zip(self.parts, self.counts)]
        return sum(distinct for distinct, _ in kinds), sum(independent for _, independent in kinds)

    def excluding(self, exclude: Union[int, Tensor]) -> "UnionSampler":
        return UnionSampler(*[(part.excluding(exclude), count) for part, count in zip(self.parts, self.counts)])

    def for_table(self, dim: int, bias: bool) -> "UnionSampler":
        return UnionSampler(*[(part.for_table(dim, bias), count) for part, count in zip(self.parts, self.counts)])

    def check_num_samples(self, num_samples: int, shared: bool) -> None:
        for part, count in zip(self.parts, self.counts):
            part.check_num_samples(count, part.shared_by_default)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Refreshes every part; their statistics by the number of the part: ``"1.distortion"``."""
        stats: Dict[str, float] = {}
        for i, part in enumerate(self.parts):
            for name, value in part.refresh(weight, bias).items():
                stats[str(i) + "." + name] = value
        return stats

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        for part in self.parts:
            part.prepare(weight, bias, generator)

    @torch.jit.export
    def auxiliary_loss(self, input: Tensor, weight: Tensor, bias: Optional[Tensor],
                       generator: Optional[torch.Generator] = None) -> Optional[Tensor]:
        total: Optional[Tensor] = None
        for part in self.parts:
            loss = part.auxiliary_loss(input, weight, bias, generator)
            if loss is not None:
                total = loss if total is None else total + loss
        return total

    @torch.jit.export
    def note(self, ids: Tensor) -> None:
        for part in self.parts:
            part.note(ids)

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """See :meth:`Sampler.sample`; ``num_samples`` and ``shared`` are the samplers' own.

        Private draws stand in ``ids [Q, P]``, shared ones in ``shared_ids [S]``, whose counts are ``[Q, S]`` where a sampler looks at the query.
        """
        queries = input.size(0)
        # A sampler that looks at the query says what it would have drawn of the others' ids while it draws.
        proposals: List[Proposal] = []
        beside: List[Optional[Tensor]] = []  # its counts of the ids of the parts before it
        before: List[Tensor] = []
        for i, part in enumerate(self.parts):
            if part.counts_beside and len(before) > 0:
                first = torch.zeros([queries], dtype=torch.int64, device=input.device) if target is None else target
                own = part.sample(input, self.counts[i], part.shared_by_default, torch.cat([first.unsqueeze(1)] + before, 1), generator)
                counts = own.target_log_count
                assert counts is not None
                beside.append(counts[:, 1:])
                of_target: Optional[Tensor] = None
                if target is not None:
                    of_target = counts[:, 0]
                proposals.append(one_set(own.ids, own.log_count, of_target, own.distinct))
            else:
                beside.append(None)
                proposals.append(part.sample(input, self.counts[i], part.shared_by_default, target, generator))
            ids = proposals[i].ids
            before.append(ids.expand(queries, ids.size(-1)))

        private_ids: List[Tensor] = []
        private_counts: List[Tensor] = []
        shared_ids: List[Tensor] = []
        shared_counts: List[Tensor] = []
        shared_distinct, begin = 0, 0
        by_query = False
        total: Optional[Tensor] = None
        draws: Optional[Tensor] = None
        for i, part in enumerate(self.parts):
            proposal = proposals[i]
            log_count = proposal.log_count
            end = begin + proposal.ids.size(-1)
            for j, other in enumerate(self.parts):
                known = beside[j]
                if i < j and known is not None:
                    log_count = torch.logaddexp(log_count, known[:, begin:end])
                elif i != j:
                    log_count = torch.logaddexp(log_count, other.log_count(input, self.counts[j], other.shared_by_default, proposal.ids))
            begin = end
            if part.shared_by_default:
                shared_ids.append(proposal.ids)
                shared_counts.append(log_count)
                by_query = by_query or log_count.dim() == 2
                if proposal.distinct:
                    shared_distinct += proposal.ids.size(0)
            else:
                private_ids.append(proposal.ids)
                private_counts.append(log_count)
            count = proposal.target_log_count
            if count is not None:
                total = count if total is None else torch.logaddexp(total, count)
                if not proposal.distinct:
                    draws = count if draws is None else torch.logaddexp(draws, count)
        if total is not None and draws is None:
            draws = torch.full_like(total, float("-inf"))
        ids = torch.cat(private_ids, 1) if len(private_ids) > 0 else torch.zeros([queries, 0], dtype=torch.int64, device=input.device)
        counts = torch.cat(private_counts, 1) if len(private_counts) > 0 else torch.zeros([queries, 0], device=input.device)
        if len(shared_ids) == 0:
            return Proposal(ids, counts, total, False, None, None, 0, draws)
        if by_query:
            shared_counts = [count.expand(queries, count.size(-1)) for count in shared_counts]
        return Proposal(ids, counts, total, False, torch.cat(shared_ids), torch.cat(shared_counts, -1), shared_distinct, draws)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids`` in a draw of the union: the log of its expected count over the number of draws."""
        size = torch.full([], sum(self.counts), dtype=torch.float64, device=ids.device)
        return (self.log_count(input, 0, False, ids) - size.log()).to(torch.float32)

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        total: Optional[Tensor] = None
        for i, part in enumerate(self.parts):
            log_count = part.log_count(input, self.counts[i], part.shared_by_default, ids)
            total = log_count if total is None else torch.logaddexp(total, log_count)
        assert total is not None
        return total

    def extra_repr(self) -> str:
        return f"draws={self.counts}"
