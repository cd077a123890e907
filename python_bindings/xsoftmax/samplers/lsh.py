"""Classes drawn from the hash buckets that a query falls into."""

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from .adaptive import AdaptiveSampler, _check_ints, _check_number, _detached, _proposal, _target_or_first
from .sampler import Proposal, draw_seed
from .static import Exclude


class LshSampler(AdaptiveSampler):
    r"""Draws classes that share a bucket with the query in one of several hash tables (MIDX paper, section 6.1.3).

    Each table hashes a vector to the side on which it lies of ``bits`` random planes (SimHash; Charikar, 2002). A draw picks one of the T'
    tables in which the query's bucket is not empty, and any class of the bucket::

        q(i | z) = u / A + (1 - u) / T' sum_t [h_t(w_i) = h_t(z)] / |bucket_t(z)|

    over the A classes that are not excluded, so u = ``uniform`` > 0 keeps every class within reach. This is the probability given the
    planes at hand, exactly, not the collision probability averaged over planes that is often put in its place. A query costs O(T bits D), a
    draw O(T). Draws are private and independent.

    Args:
        num_classes, dim, bias, exclude, refresh_every: see :class:`AdaptiveSampler`. A bias is a last column of the rows, 1 of the queries.
        tables: T.
        bits: in [1, 20].
        uniform: u in [0, 1].

    Buffers: ``planes`` float32 [T bits, D] (or D + 1), ``code`` int32 [N, T], ``order`` int64 [T, A], ``start`` int64 [T, 2^bits + 1], ``step`` int64.
    """

    def __init__(self, num_classes: int, dim: int, *, tables: int = 16, bits: int = 4, uniform: float = 0.1, bias: bool = False,
                 exclude: Exclude = None, refresh_every: int = 500):
        super().__init__(num_classes, dim, bias, refresh_every)
        name = type(self).__name__
        _check_ints(name, (("tables", tables, 1), ("bits", bits, 1)))
        if bits > 20:
            raise ValueError(f"{name}: expected bits of at most 20, got {bits}")
        if not 0 <= _check_number(name, "uniform", uniform) <= 1:
            raise ValueError(f"{name}: expected uniform in [0, 1], got {uniform}")
        self.tables, self.bits, self.uniform = tables, bits, float(uniform)
        self._begin(exclude)

    def _make_index(self, excluded: Tensor) -> None:
        # As if all rows were on one side of all planes, until the first refresh.
        self.register_buffer("planes", torch.randn(self.tables * self.bits, self.dim + self._has_bias))
        self.register_buffer("code", torch.zeros(self.num_classes, self.tables, dtype=torch.int32).index_fill_(0, excluded, -1))
        drawn = (self.code[:, 0] >= 0).nonzero().squeeze(1)
        self.register_buffer("order", drawn.repeat(self.tables, 1))
        self.register_buffer("start", torch.full((self.tables, 2**self.bits + 1), len(drawn)).index_fill_(1, torch.tensor([0]), 0))

    def _excluded(self) -> Tensor:
        return (self.code[:, 0] < 0).nonzero().squeeze(1)

    def _options(self) -> Dict[str, Any]:
        return {"tables": self.tables, "bits": self.bits, "uniform": self.uniform, "refresh_every": self.refresh_every}

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Hashes every row of ``weight [N, D]`` (with ``bias [N]``, where the sampler has one). Returns ``largest``, the share of the classes
        that the fullest bucket holds."""
        self._check_table(weight, bias)
        torch.ops.xsoftmax.lsh_refresh_(weight.detach(), _detached(bias), self.planes, self.code, self.order, self.start, None, 0)
        self.step.clamp_(min=1)
        return {"largest": float(self.start.diff().max()) / self.order.size(1)}

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        self._check_table(weight, bias)
        torch.ops.xsoftmax.lsh_refresh_(weight.detach(), _detached(bias), self.planes, self.code, self.order, self.start, self.step,
                                        self.refresh_every)

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """See :meth:`Sampler.sample`; private draws only."""
        input = self._checked(input)
        if shared:
            raise ValueError("LshSampler: expected shared=False, got True: buckets are those of a query")
        return _proposal(torch.ops.xsoftmax.lsh_sample(
            draw_seed(input, generator), input, self.planes, self.code, self.order, self.start, self.uniform, num_samples,
            _target_or_first(target, input)), target, False)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids [S]`` for every query, ``[Q, S]``, or of ``ids [Q, P]``, ``[Q, P]``; float32, -inf for a class never drawn."""
        input = self._checked(input)
        return torch.ops.xsoftmax.lsh_log_prob(input, self.planes, self.code, self.order, self.start, self.uniform, ids)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", tables={self.tables}, bits={self.bits}, uniform={self.uniform}"
