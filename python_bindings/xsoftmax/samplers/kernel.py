"""Classes drawn in proportion to a kernel of query and row, by a tree of feature sums."""

from typing import List, Optional

from torch import Tensor

from .adaptive import AdaptiveSampler
from .sampler import register
from .static import Exclude


class KernelSampler(AdaptiveSampler):
    """Base of samplers with q in proportion to a kernel that is a product of features, drawn by a binary tree of feature sums (Blanc and
    Rendle, "Adaptive sampled softmax with kernel based sampling", ICML 2018): O(F log N) a draw, F features.

    Draws are private and independent. Buffers: ``rows`` float32 [A, E], a copy of the table or its features; ``sums`` float32 [nodes, F];
    ``order`` int64 [A], ``place`` int64 [N]; ``directions`` float32, of size 0 but for RFF; ``recent`` and ``step`` int64.
    """

    _family = "kernel"
    _tables = ("directions", "rows", "sums", "order", "place", "recent", "step")
    _places = "place"

    def _index(self) -> List[Tensor]:
        return [self.directions, self.rows, self.sums, self.order, self.place, self.recent, self.step]


@register("sphere")
class SphereSampler(KernelSampler):
    r"""Draws classes in proportion to the square of their score::

        q(i | z) = (alpha s_i^2 + 1) / sum_j (alpha s_j^2 + 1),        s_i = z.w_i + bias_i

    (Blanc and Rendle, 2018; Chen et al., 2025, section 6.1.3). O(D^2 log N) a draw, and about three times the table's memory. Note that classes with
    very negative scores are drawn as often as those with high ones.

    Args:
        num_classes, dim, num_samples, bias, exclude, refresh_every: see :class:`AdaptiveSampler`.
        shared: None or False; True is a ValueError.
        alpha: above 0.
    """

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, shared: Optional[bool] = None, alpha: float = 100.0,
                 bias: bool = False, exclude: Exclude = None, refresh_every: int = 500):
        self._begin(num_classes, dim, num_samples, shared, exclude, kernel="sphere", alpha=alpha, bias=bias, refresh_every=refresh_every)


@register("rff")
class RffSampler(KernelSampler):
    r"""Draws classes by random Fourier features of the Gaussian kernel on normalised vectors::

        K(z, w) = max(phi(z).phi(w), floor),   phi(x) = [cos U x', sin U x'] / sqrt(R),   x' = x / |x|,   U ~ N(0, tau)

    (Rawat et al., "Sampled softmax with random Fourier features", NeurIPS 2019; Chen et al., 2025, section 6.1.3). phi(z).phi(w) is about
    e^{-tau |z' - w'|^2 / 2}, and may be negative: each level of the tree raises what it compares to ``floor`` a class, and q is the product
    of the shares that result, exactly. O(R log N) a draw.

    Args:
        num_classes, dim, num_samples, bias, exclude, refresh_every: see :class:`AdaptiveSampler`. A bias is a last column of the rows, 1 of the
            queries, before they are normalised.
        shared: None or False; True is a ValueError.
        features: R; U is the same for queries and classes.
        tau: the inverse variance of the kernel, above 0.
        floor: above 0: no class is out of reach.

    ``directions`` holds U, float32 [R, D] (or D + 1).
    """

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, shared: Optional[bool] = None, features: int = 32,
                 tau: float = 4.0, floor: float = 0.01, bias: bool = False, exclude: Exclude = None, refresh_every: int = 500):
        self._begin(num_classes, dim, num_samples, shared, exclude, kernel="rff", features=features, tau=tau, floor=floor, bias=bias,
                    refresh_every=refresh_every)
