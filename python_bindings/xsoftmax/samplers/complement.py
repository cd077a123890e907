"""Draws from what a set of candidates leaves over."""

import math
from typing import Optional

import torch
from torch import Tensor, nn

from .sampler import Proposal, Sampler, draw_seed, one_set
from .static import StaticSampler, UniformSampler
from .union import UnionSampler


class ComplementSampler(nn.Module):
    """Draws of a sampler restricted to the classes outside a set of its own for each query: the noise of CANE (CANE paper, Eq. 2).

    A draw is made up to ``tries`` times, until it is outside; if none is, it is uniform over the classes outside. Its probability is known
    in closed form, with f the mass that the sampler's q gives the set C::

        q_x(j) = q_j (1 + f + ... + f^(tries - 1)) + f^tries / (N - |C|)        j outside C

    which is q_j / (1 - f) where f is small, and which no data-dependent number of tries slows down. Uniform noise needs one try.

    Args:
        sampler: any :class:`Sampler` whose private draws are independent, and whose ``log_prob`` says its q.
        tries: at least 1.
    """

    def __init__(self, sampler: Sampler, tries: int = 4):
        super().__init__()
        if not isinstance(sampler, Sampler):
            raise TypeError(f"ComplementSampler: expected sampler to be a Sampler, got {type(sampler).__name__}")
        if sampler.proposes_targets or sampler.draws_distinct(False) or isinstance(sampler, UnionSampler):
            raise ValueError(f"ComplementSampler: expected one sampler whose private draws are independent, got {sampler}")
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise ValueError(f"ComplementSampler: expected tries of at least 1, got {tries!r}")
        self.sampler = sampler
        self.num_classes = sampler.num_classes
        # Of those only the uniform draws over all that is outside are needed.
        self.tries = 0 if isinstance(sampler, UniformSampler) and sampler.low == 0 and not sampler.from_tables else tries
        self.static = isinstance(sampler, StaticSampler)  # its q is the same for all queries

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, candidates: Tensor, target: Tensor,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """``num_samples`` independent draws for each query.

        Args:
            input: queries ``[Q, D]``.
            candidates: int64 ``[C]``, for all queries, or ``[Q, C]``: no class twice in a set; -1 where there is none.
            target: int64 ``[Q]``. Its log count is that among the draws if it is outside; of a target inside it means nothing.

        Returns:
            A private :class:`Proposal` with log counts ``log(num_samples q_x)``. Where nothing is outside: log counts of +inf.
        """
        queries = input.size(0)
        if candidates.dim() != 1 and (candidates.dim() != 2 or candidates.size(0) != queries):
            raise ValueError(f"ComplementSampler: expected candidates of shape [C] or [{queries}, C], got {list(candidates.shape)}")
        held = torch.ops.xsoftmax.complement_of(candidates if candidates.dim() == 2 else candidates.unsqueeze(0), self.num_classes)
        inside = held < self.num_classes
        left = self.num_classes - inside.sum(1, keepdim=True)  # [Q, 1] or [1, 1]
        resolution = 1 << 53
        share = torch.ops.xsoftmax.uniform_sample(draw_seed(input, generator), 0, resolution, queries, num_samples, False)
        ids = torch.ops.xsoftmax.outside_uniform(held, share.to(torch.float64) / resolution, self.num_classes)
        log_uniform = -left.to(torch.float64).log()
        scale = math.log(num_samples) if num_samples > 0 else 0.0
        if self.tries == 0:
            log_count = (log_uniform + scale).to(torch.float32)
            return one_set(ids, torch.where(left > 0, log_count, math.inf).expand(queries, num_samples), log_count.expand(queries, 1)[:, 0],
                           False)
        each = held.clamp(max=self.num_classes - 1)
        if not self.static:
            each = each.expand(queries, -1)
        mass = torch.where(inside, self._q(input, each), 0.0).sum(1, keepdim=True).clamp(max=1.0)
        kept = torch.ones_like(mass)
        for _ in range(self.tries - 1):
            kept = kept * mass + 1.0
        rest = torch.where(left > 0, (log_uniform + self.tries * mass.log()).exp(), 0.0)

        draws = self.sampler.sample(input, num_samples * self.tries, False, None, generator).ids
        outside = torch.ops.xsoftmax.is_held(held, draws).logical_not().view(queries, num_samples, self.tries)
        first = outside.to(torch.int8).argmax(2, keepdim=True)
        drawn = draws.view(queries, num_samples, self.tries).gather(2, first).squeeze(2)
        ids = torch.where(outside.any(2), drawn, ids)

        log_count = (self._q(input, ids) * kept + rest).log() + scale
        of_target = (self._q(input, target.unsqueeze(1)) * kept + rest).log() + scale
        return one_set(ids, torch.where(left > 0, log_count, math.inf).to(torch.float32), of_target.squeeze(1).to(torch.float32), False)

    def _q(self, input: Tensor, ids: Tensor) -> Tensor:
        return self.sampler.log_prob(input, ids).to(torch.float64).exp()
