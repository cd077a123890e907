"""MIDX: classes drawn by a quantised copy of the class table."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from .adaptive import AdaptiveSampler
from .sampler import register
from .static import Exclude


@register("midx")
class MidxSampler(AdaptiveSampler):
    r"""Draws classes by their scores under a quantised copy of the class table (MIDX; Chen et al., 2025, the fast form).

    K-means gives two codebooks of K codewords. Each class stands in the cell (k1, k2) of its nearest codewords. A query z draws a cell by the scores of its two
    codewords, and a class inside the cell (Theorem 2)::

        q(i | z) = w_i e^{z1.c1[k1] + z2.c2[k2]} / Z,        w_i = e^{bias_i}, or 1 without a bias

    This costs O(K D + K^2) for a query and O(log K) for a draw, whatever the number of classes. ``kind="rq"``: a row is about c1 + c2, and z1 = z2 = z.
    ``"pq"``: a row is about [c1; c2], and z = [z1; z2].

    Private draws are independent, as in the paper, or distinct. A set that the batch shares comes from the mixture of the queries' q, and is distinct unless
    ``distinct=False``. The counts of distinct private draws are known to a draw alone, and :meth:`log_count` refuses them.

    A *refresh* computes new codebooks from the present ones, by K-means on ``train_points`` rows, and codes every class again. It costs O((N + iterations
    train_points) K D). Between refreshes, every ``update_every`` steps, the classes scored since (those drawn, and the targets) are coded again under the same
    codebooks.

    Args:
        num_classes, dim, num_samples, bias, shared, exclude, refresh_every: see :class:`AdaptiveSampler`. D is at least 2 for "pq".
        codewords: K in [1, 1024]: 64 suits a million classes.
        kind: "rq" (residual quantisation) or "pq" (product quantisation).
        distinct: whether a set holds no class twice. None: shared sets are distinct, private ones independent.
        mixture: a shared set is drawn from the "mean" of the queries' q, or from its root mean square, "rms", which minimises the variance.
        update_every: steps between two updates; 0: none. An update codes the touched classes only, but lays out all N anew.
        iterations: of K-means, for each codebook; at least 0.
        train_points: rows that K-means sees, at least 1; None: 256 a codeword.

    Buffers (of size 0 where there is none): ``codewords1``, ``codewords2`` float32 [K, D1] and [K, D2], ``cell`` int32 [N], ``order`` int64 [A],
    ``start`` int64 [K K + 1], ``mass`` float64 [K, K]; with a bias ``log_weight`` float32 [N], ``prefix`` float64 [A], ``heaviest`` float64
    [K K]; ``touched`` bool [N] where update_every > 0; ``recent`` and ``step`` int64. A is the number of classes that are not excluded.

    A refresh returns ``distortion``: mean squared distance of a row from its codewords; ``mean_square``: of a row from 0; ``inertia1``, ``inertia2``: what
    K-means left for each codebook, over its training rows; ``cells``: cells in use.

    Shapes and dtypes as :class:`AdaptiveSampler`.

    Raises:
        ValueError: an option out of range, more distinct draws than classes, :meth:`log_count` of distinct private draws; and as :class:`AdaptiveSampler`.
        TypeError, IndexError: as :class:`AdaptiveSampler`
    """

    _family = "midx"
    _tables: Tuple[str, ...] = ("codewords1", "codewords2", "cell", "order", "start", "mass", "log_weight", "prefix", "heaviest", "touched", "recent", "step")
    _places = "cell"
    _statistics = ["distortion", "mean_square", "inertia1", "inertia2", "cells"]
    _form = "plain"

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, codewords: int = 64, kind: str = "rq", bias: bool = False,
                 shared: Optional[bool] = False, distinct: Optional[bool] = None, exclude: Exclude = None, mixture: str = "mean",
                 refresh_every: int = 500, update_every: int = 0, iterations: int = 10, train_points: Optional[int] = None):
        self._begin(num_classes, dim, num_samples, shared, exclude, codewords=codewords, kind=kind, bias=bias, distinct=distinct,
                    mixture=mixture, refresh_every=refresh_every, update_every=update_every, iterations=iterations, train_points=train_points,
                    form=self._form)

    def _index(self) -> List[Tensor]:
        return [self.codewords1.detach(), self.codewords2.detach(), self.cell, self.order, self.start, self.mass, self.log_weight, self.prefix,
                self.heaviest, self.touched, self.recent, self.step]

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        cells = isinstance(state_dict.get(prefix + "cell"), Tensor) and isinstance(state_dict.get(prefix + "log_weight", self.log_weight), Tensor)
        if cells and prefix + "order" not in state_dict:
            # As ranks that have split the classes save it (xs.distributed): what follows from the cells is left out.
            cell, weights = state_dict[prefix + "cell"], state_dict.get(prefix + "log_weight", self.log_weight)
            made = torch.ops.xsoftmax.midx_cells(cell, weights if weights.numel() > 0 else None, len(self.codewords1), int((cell >= 0).sum()))
            state_dict |= {prefix + name: table for name, table in zip(("order", "start", "mass", "prefix", "heaviest"), made)}
            for name in ("log_weight", "touched"):
                state_dict.setdefault(prefix + name, getattr(self, name))
            state_dict.setdefault(prefix + "recent", torch.zeros_like(self.recent))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        step = int(self.step)
        # The running mean of the squares of queries weighs a step by 1 / its number, up to 100.
        return self.refresh_due() or (self._update_every > 0 and step % self._update_every == 0) or (self._form == "spread" and step < 100)

    @torch.jit.unused
    def forget(self, ids: Tensor) -> None:
        """The next update codes them again; until then their counts are exact for where they stand."""
        if self.touched.numel() > 0:
            self.touched[ids] = True

    @torch.jit.export
    def update(self, weight: Tensor, bias: Optional[Tensor], rows: Tensor) -> None:
        """Codes some classes again under the present codebooks, and takes in all biases.

        Args:
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` where the sampler was made with bias=True, else None.
            rows: int64 ``[R]``, the classes.

        Raises:
            ValueError, TypeError: as :meth:`refresh`; rows that are not int64.
            IndexError: a row is not in [0, N).
        """
        detached: Optional[Tensor] = None
        if bias is not None:
            detached = bias.detach()
        torch.ops.xsoftmax.midx_update_(weight.detach(), detached, rows, self.step, self._index()[:-1], self.options)
