"""MIDX: sampling by a quantised copy of the class table."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .adaptive import AdaptiveSampler
from .sampler import register
from .static import Exclude


@register("midx")
class MidxSampler(AdaptiveSampler):
    r"""Samples classes by their scores under a quantised copy of the class table (MIDX; Chen et
    al., 2025, the fast variant).

    K-means gives two codebooks of K codewords, and each class belongs to the cell (k1, k2) of its
    nearest codewords. A query z samples a cell by the scores of its two codewords, and then a class
    in the cell (Theorem 2)::

        q(i | z) = w_i e^{z1.c1[k1] + z2.c2[k2]} / Z,        w_i = e^{bias_i}, or 1 without a bias

    This costs O(K D + K^2) per query and O(log K) per sample, for any number of classes. With
    ``kind="rq"``, a row is approximated by c1 + c2, and z1 = z2 = z. With ``"pq"``, it is
    approximated by [c1; c2], and z = [z1; z2].

    Private samples are drawn with replacement, as in the paper, or without. A set shared by the
    batch is drawn from the mixture of the queries' q, without replacement unless
    ``distinct=False``. The counts of private samples without replacement are only known for what
    was drawn, so :meth:`log_count` raises for them.

    A *refresh* trains the codebooks further by K-means on ``train_points`` rows and assigns every
    class to a cell again, in O((N + iterations train_points) K D). Between refreshes, an *update*
    every ``update_every`` steps reassigns the classes scored since the last one (samples and
    targets), under the same codebooks.

    Args:
        num_classes, dim, num_samples, bias, shared, exclude, refresh_every: see
            :class:`AdaptiveSampler`. D is at least 2 for "pq".
        codewords: K in [1, 1024]; 64 suits a million classes.
        kind: "rq" (residual quantisation) or "pq" (product quantisation).
        distinct: whether a set is sampled without replacement. None: shared sets are, private ones
            are not.
        mixture: a shared set is drawn from the "mean" of the queries' q, or from its root mean
            square, "rms", which minimises the variance.
        update_every: steps between two updates; 0: none. An update reassigns only the touched
            classes, but rebuilds the order of all N.
        iterations: K-means iterations for each codebook, at least 0.
        train_points: number of rows for K-means, at least 1; None: 256 per codeword.

    Shapes and dtypes: same as :class:`AdaptiveSampler`.

    Buffers (of size 0 if not needed): ``codewords1`` and ``codewords2`` float32 [K, D1] and [K,
    D2], ``cell`` int32 [N], ``order`` int64 [A], ``start`` int64 [K K + 1], ``mass`` float64 [K,
    K]; with a bias ``log_weight`` float32 [N], ``prefix`` float64 [A], ``heaviest`` float64 [K K];
    with update_every > 0 ``touched`` bool [N]; ``recent`` and ``step`` int64. A is the number of
    classes that are not excluded.

    A refresh returns ``distortion``, the mean squared distance of a row from its codewords;
    ``mean_square``, the mean squared norm of a row; ``inertia1`` and ``inertia2``, the K-means
    inertia of each codebook over its training rows; and ``cells``, the number of cells in use.

    Raises:
        ValueError: an option is out of range, there are more samples without replacement than
            classes, :meth:`log_count` is called for private samples without replacement; and same
            as :class:`AdaptiveSampler`.
        TypeError, IndexError: same as :class:`AdaptiveSampler`.
    """

    _family = "midx"
    _tables: Tuple[str, ...] = ("codewords1", "codewords2", "cell", "order", "start", "mass",
                                "log_weight", "prefix", "heaviest", "touched", "recent", "step")
    _places = "cell"
    _statistics = ["distortion", "mean_square", "inertia1", "inertia2", "cells"]
    _form = "plain"

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, codewords: int = 64,
                 kind: str = "rq", bias: bool = False, shared: Optional[bool] = False,
                 distinct: Optional[bool] = None, exclude: Exclude = None, mixture: str = "mean",
                 refresh_every: int = 500, update_every: int = 0, iterations: int = 10,
                 train_points: Optional[int] = None):
        self._begin(num_classes, dim, num_samples, shared, exclude, codewords=codewords, kind=kind,
                    bias=bias, distinct=distinct, mixture=mixture, refresh_every=refresh_every,
                    update_every=update_every, iterations=iterations, train_points=train_points,
                    form=self._form)

    def _index(self) -> List[Tensor]:
        return [
            self.codewords1.detach(),
            self.codewords2.detach(), self.cell, self.order, self.start, self.mass, self.log_weight,
            self.prefix, self.heaviest, self.touched, self.recent, self.step
        ]

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        cells = isinstance(state_dict.get(prefix + "cell"), Tensor) and isinstance(
            state_dict.get(prefix + "log_weight", self.log_weight), Tensor)
        if cells and prefix + "order" not in state_dict:
            # A checkpoint of sharded classes (xs.distributed) omits the tables that follow from the
            # cells: rebuild them.
            cell, weights = state_dict[prefix + "cell"], state_dict.get(
                prefix + "log_weight", self.log_weight)
            tables = torch.ops.xsoftmax.midx_cells(cell, weights if weights.numel() > 0 else None,
                                                   len(self.codewords1), int((cell >= 0).sum()))
            state_dict |= {
                prefix + name: table
                for name, table in zip(("order", "start", "mass", "prefix", "heaviest"), tables)
            }
            for name in ("log_weight", "touched"):
                state_dict.setdefault(prefix + name, getattr(self, name))
            state_dict.setdefault(prefix + "recent", torch.zeros_like(self.recent))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        step = int(self.step)
        # The running mean of squared queries weights step t by 1 / t up to step 100, so these steps
        # differ.
        return self.refresh_due() or (self._update_every > 0
                                      and step % self._update_every == 0) or (self._form == "spread"
                                                                              and step < 100)

    @torch.jit.unused
    def forget(self, ids: Tensor) -> None:
        """Marks classes to be reassigned to cells by the next update. Until then their expected
        counts are exact for their current cells."""
        if self.touched.numel() > 0:
            self.touched[ids] = True

    @torch.jit.export
    def update(self, weight: Tensor, bias: Optional[Tensor], rows: Tensor) -> None:
        """Reassigns some classes to cells under the current codebooks, and updates all biases.

        Args:
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` if the sampler was constructed with bias=True, else None.
            rows: int64 ``[R]``, the classes.

        Raises:
            ValueError, TypeError: same as :meth:`refresh`; TypeError if rows are not int64.
            IndexError: a row is not in [0, N).
        """
        plain_bias: Optional[Tensor] = None
        if bias is not None:
            plain_bias = bias.detach()
        torch.ops.xsoftmax.midx_update_(weight.detach(), plain_bias, rows, self.step,
                                        self._index()[:-1], self.options)
