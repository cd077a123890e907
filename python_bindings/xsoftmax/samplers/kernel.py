"""Classes drawn in proportion to a kernel of query and class."""

import math
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from .adaptive import AdaptiveSampler, _check_ints, _check_positive, _detached, _proposal, _target_or_first
from .sampler import Proposal, draw_seed
from .static import Exclude


class KernelSampler(AdaptiveSampler):
    """Base of samplers with q in proportion to a kernel that is a product of features, drawn by a binary tree of feature sums (Blanc and
    Rendle, "Adaptive sampled softmax with kernel based sampling", ICML 2018): O(F log N) a draw, F features.

    Draws are private and independent. Buffers: ``rows`` float32 [A, E], a copy of the table or its features; ``sums`` float32 [nodes, F];
    ``order`` int64 [A], ``place`` int64 [N]; ``step`` int64.
    """

    _scale: float

    def _make_tree(self, excluded: Tensor, width: int, features: int, leaf_size: int) -> None:
        place = torch.zeros(self.num_classes, dtype=torch.int64).index_fill_(0, excluded, -1)
        order = (place >= 0).nonzero().squeeze(1)
        place[order] = torch.arange(len(order))
        leaves = 2 ** max(0, math.floor(math.log2(len(order) / leaf_size)))
        self.register_buffer("rows", torch.zeros(len(order), width))
        self.register_buffer("sums", torch.zeros(2 * leaves, features))
        self.register_buffer("order", order)
        self.register_buffer("place", place)

    def _excluded(self) -> Tensor:
        return (self.place < 0).nonzero().squeeze(1)

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Takes in ``weight [N, D]`` (and ``bias [N]``, where the sampler has one)."""
        self._check_table(weight, bias)
        torch.ops.xsoftmax.kernel_refresh_(weight.detach(), _detached(bias), self.directions, self.rows, self.sums, self.order, self.place,
                                           None, 0)
        self.step.clamp_(min=1)
        stats: Dict[str, float] = {}
        return stats

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        self._check_table(weight, bias)
        torch.ops.xsoftmax.kernel_refresh_(weight.detach(), _detached(bias), self.directions, self.rows, self.sums, self.order, self.place,
                                           self.step, self.refresh_every)

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """See :meth:`Sampler.sample`; private draws only."""
        input = self._checked(input)
        if shared:
            raise ValueError(f"{self._kind}: expected shared=False, got True: the kernel looks at the query")
        return _proposal(torch.ops.xsoftmax.kernel_sample(
            draw_seed(input, generator), input, self.directions, self.rows, self.sums, self.order, self.place, self._scale, num_samples,
            _target_or_first(target, input)), target, False)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids [S]`` for every query, ``[Q, S]``, or of ``ids [Q, P]``, ``[Q, P]``; float32, -inf for a class never drawn."""
        input = self._checked(input)
        return torch.ops.xsoftmax.kernel_log_prob(input, self.directions, self.rows, self.sums, self.order, self.place, self._scale, ids)


class SphereSampler(KernelSampler):
    r"""Draws classes in proportion to the square of their score::

        q(i | z) = (alpha s_i^2 + 1) / sum_j (alpha s_j^2 + 1),        s_i = z.w_i + bias_i

    (Blanc and Rendle, 2018; MIDX paper, section 6.1.3). O(D^2 log N) a draw, and about three times the table's memory. Note that classes with
    very negative scores are drawn as often as those with high ones.

    Args:
        num_classes, dim, bias, exclude, refresh_every: see :class:`AdaptiveSampler`.
        alpha: above 0.
    """

    def __init__(self, num_classes: int, dim: int, *, alpha: float = 100.0, bias: bool = False, exclude: Exclude = None,
                 refresh_every: int = 500):
        super().__init__(num_classes, dim, bias, refresh_every)
        self._scale = _check_positive(type(self).__name__, "alpha", alpha)
        self._begin(exclude)

    def _make_index(self, excluded: Tensor) -> None:
        width = self.dim + self._has_bias
        self._make_tree(excluded, width, width * (width + 1) // 2, width)  # leaves of this size: sums take twice the rows' memory
        self.register_buffer("directions", None)

    def _options(self) -> Dict[str, Any]:
        return {"alpha": self._scale, "refresh_every": self.refresh_every}

    def extra_repr(self) -> str:
        return super().extra_repr() + f", alpha={self._scale}"


class RffSampler(KernelSampler):
    r"""Draws classes by random Fourier features of the Gaussian kernel on normalised vectors::

        K(z, w) = max(phi(z).phi(w), floor),   phi(x) = [cos U x', sin U x'] / sqrt(R),   x' = x / |x|,   U ~ N(0, tau)

    (Rawat et al., "Sampled softmax with random Fourier features", NeurIPS 2019; MIDX paper, section 6.1.3). phi(z).phi(w) is about
    e^{-tau |z' - w'|^2 / 2}, and may be negative: each level of the tree raises what it compares to ``floor`` a class, and q is the product
    of the shares that result, exactly. O(R log N) a draw.

    Args:
        num_classes, dim, bias, exclude, refresh_every: see :class:`AdaptiveSampler`. A bias is a last column of the rows, 1 of the queries,
            before they are normalised.
        features: R; U is the same for queries and classes.
        tau: the inverse variance of the kernel, above 0.
        floor: above 0: no class is out of reach.

    Buffer beside those of :class:`KernelSampler`: ``directions`` U float32 [R, D] (or D + 1).
    """

    def __init__(self, num_classes: int, dim: int, *, features: int = 32, tau: float = 4.0, floor: float = 0.01, bias: bool = False,
                 exclude: Exclude = None, refresh_every: int = 500):
        super().__init__(num_classes, dim, bias, refresh_every)
        name = type(self).__name__
        _check_ints(name, (("features", features, 1),))
        self.features = features
        self.tau, self._scale = _check_positive(name, "tau", tau), _check_positive(name, "floor", floor)
        self._begin(exclude)

    def _make_index(self, excluded: Tensor) -> None:
        self._make_tree(excluded, 2 * self.features, 2 * self.features, 32)  # a leaf then costs what five levels do
        self.register_buffer("directions", math.sqrt(self.tau) * torch.randn(self.features, self.dim + self._has_bias))

    def _options(self) -> Dict[str, Any]:
        return {"features": self.features, "tau": self.tau, "floor": self._scale, "refresh_every": self.refresh_every}

    def extra_repr(self) -> str:
        return super().extra_repr() + f", features={self.features}, tau={self.tau}, floor={self._scale}"
