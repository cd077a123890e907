"""Sampling in proportion to a kernel of query and row, by a tree of feature sums."""

from typing import List, Optional

from torch import Tensor

from ..adaptive import AdaptiveSampler
from ..sampler import register
from ..static import Exclude


class KernelSampler(AdaptiveSampler):
    """Base class of samplers whose q is proportional to a kernel that is a product of features,
    sampled with a binary tree of feature sums (Blanc and Rendle, 2018).

    A sample costs O(F log N), with F the number of features. Samples are private to each query,
    with replacement.

    Buffers: ``rows`` float32 [A, E], a copy of the table or its features; ``sums`` float32 [nodes,
    F]; ``order`` int64 [A]; ``place`` int64 [N]; ``directions`` float32, of size 0 except for RFF;
    ``recent`` and ``step`` int64. A is the number of classes that are not excluded.

    Shapes, dtypes and errors: same as :class:`AdaptiveSampler`.
    """

    _family = "kernel"
    _tables = ("directions", "rows", "sums", "order", "place", "recent", "step")
    _places = "place"

    def _index(self) -> List[Tensor]:
        return [
            self.directions, self.rows, self.sums, self.order, self.place, self.recent, self.step
        ]


@register("sphere")
class SphereSampler(KernelSampler):
    r"""Samples classes in proportion to the square of their score (Blanc and Rendle, 2018; Chen et
    al., 2025, section 6.1.3)::

        q(i | z) = (alpha s_i^2 + 1) / sum_j (alpha s_j^2 + 1),        s_i = z.w_i + bias_i

    A sample costs O(D^2 log N), and the index takes about three times the table's memory. Note that
    classes with very negative scores are drawn as often as those with very positive ones.

    Args:
        num_classes, dim, num_samples, bias, exclude, refresh_every: see :class:`AdaptiveSampler`.
        shared: None or False; True raises ValueError.
        alpha: finite, above 0.

    Shapes, dtypes and errors: same as :class:`AdaptiveSampler`.
    """
    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *,
                 shared: Optional[bool] = None, alpha: float = 100.0, bias: bool = False,
                 exclude: Exclude = None, refresh_every: int = 500):
        self._begin(num_classes, dim, num_samples, shared, exclude, kernel="sphere", alpha=alpha,
                    bias=bias, refresh_every=refresh_every)


@register("rff")
class RffSampler(KernelSampler):
    r"""Samples classes by random Fourier features of the Gaussian kernel on normalised vectors
    (Rawat et al., 2019; Chen et al., 2025, section 6.1.3)::

        K(z, w) = max(phi(z).phi(w), floor)
        phi(x) = [cos U x', sin U x'] / sqrt(R),   x' = x / |x|,   U ~ N(0, tau)

    phi(z).phi(w) approximates e^{-tau |z' - w'|^2 / 2}, and may be negative. At each level of the
    tree, both sums are raised to at least ``floor`` per class, and q is exactly the product of the
    resulting shares. A sample costs O(R log N).

    Args:
        num_classes, dim, num_samples, bias, exclude, refresh_every: see :class:`AdaptiveSampler`. A
            bias is one more column of the rows, where queries are 1, before they are normalised.
        shared: None or False; True raises ValueError.
        features: R >= 1; U is the same for queries and classes.
        tau: the inverse variance of the kernel; finite, above 0.
        floor: finite, above 0, so that every class can be drawn.

    ``directions`` holds U, float32 [R, D] (or D + 1).

    Shapes, dtypes and errors: same as :class:`AdaptiveSampler`.
    """
    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *,
                 shared: Optional[bool] = None, features: int = 32, tau: float = 4.0,
                 floor: float = 0.01, bias: bool = False, exclude: Exclude = None,
                 refresh_every: int = 500):
        self._begin(num_classes, dim, num_samples, shared, exclude, kernel="rff", features=features,
                    tau=tau, floor=floor, bias=bias, refresh_every=refresh_every)
