"""Sampling from the hash buckets of a query."""

from typing import List, Optional

from torch import Tensor

from ..adaptive import AdaptiveSampler
from ..sampler import register
from ..static import Exclude


@register("lsh")
class LshSampler(AdaptiveSampler):
    r"""Samples classes that share a bucket with the query in one of several hash tables (Chen et
    al., 2025, section 6.1.3).

    Each table hashes a vector to its side of ``bits`` random planes (SimHash; Charikar, 2002). A
    sample picks one of the T' tables in which the query's bucket is not empty, and a class of that
    bucket uniformly::

        q(i | z) = u / A + (1 - u) / T' sum_t [h_t(w_i) = h_t(z)] / |bucket_t(z)|

    where A is the number of classes that are not excluded, and u = ``uniform`` > 0 ensures that
    every class can be drawn. This is the exact probability given the current planes, not the
    collision probability averaged over planes that is often used instead. A query costs O(T bits
    D), a sample O(T). Samples are private to each query, with replacement.

    Args:
        num_classes, dim, num_samples, bias, exclude, refresh_every: see :class:`AdaptiveSampler`. A
            bias is one more column of the rows, where queries are 1.
        shared: None or False; True raises ValueError.
        tables: T >= 1.
        bits: in [1, 20].
        uniform: u in [0, 1].

    Buffers: ``planes`` float32 [T bits, D] (or D + 1), ``code`` int32 [N, T], ``order`` int64 [A,
    T], ``start`` int64 [T, 2^bits + 1], ``recent`` and ``step`` int64.

    A refresh returns ``largest``, the share of the classes that are in the fullest bucket.

    Shapes, dtypes and errors: same as :class:`AdaptiveSampler`.
    """

    _family = "lsh"
    _tables = ("planes", "code", "order", "start", "recent", "step")
    _places = "code"
    _statistics = ["largest"]

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *,
                 shared: Optional[bool] = None, tables: int = 16, bits: int = 4,
                 uniform: float = 0.1, bias: bool = False, exclude: Exclude = None,
                 refresh_every: int = 500):
        self._begin(num_classes, dim, num_samples, shared, exclude, tables=tables, bits=bits,
                    uniform=uniform, bias=bias, refresh_every=refresh_every)

    def _index(self) -> List[Tensor]:
        return [self.planes, self.code, self.order, self.start, self.recent, self.step]
