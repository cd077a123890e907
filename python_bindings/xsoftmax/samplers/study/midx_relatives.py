"""Variants of MIDX for study: exact, corrected for the spread inside cells, and with learnable
codebooks."""

from typing import Any, List, Optional

import torch
from torch import Tensor

from ..._core.checks import check_count
from ..midx import MidxSampler
from ..sampler import register


@register("midx_exact")
class ExactMidxSampler(MidxSampler):
    """MIDX without quantisation error (Chen et al., 2025, Theorem 1): cell weights include the
    quantisation residual, so q is the softmax itself, in float32.

    It costs O(N D) per query. Samples are private to each query, with replacement, from a copy of
    the table that each training step renews.

    Args: same as :class:`MidxSampler`.

    Buffers: those of :class:`MidxSampler`, ``table`` float32 [N, D] and ``table_bias`` float32 [N].

    Shapes, dtypes and errors: same as :class:`MidxSampler`. ``shared=True`` or ``distinct=True``
    raises ValueError.
    """

    _tables = (*MidxSampler._tables[:-2], "table", "table_bias", "recent", "step")
    _form = "exact"

    def _index(self) -> List[Tensor]:
        return [
            self.codewords1, self.codewords2, self.cell, self.order, self.start, self.mass,
            self.log_weight, self.prefix, self.heaviest, self.touched, self.table, self.table_bias,
            self.recent, self.step
        ]


@register("midx_spread")
class SpreadMidxSampler(MidxSampler):
    """MIDX that draws classes with a large quantisation error more often.

    Each class gets the additional weight e^{|r|^2 |z|^2 / 2D}, where r is the residual of its row
    after quantisation and |z|^2 a running mean over the queries seen in train(). This is the mean
    of e^{z.r} if r were Gaussian. The weights change with the next refresh or update.

    Args: same as :class:`MidxSampler`.

    Buffers: those of :class:`MidxSampler`, ``spread`` float32 [N], |r|^2, and ``query_square``
    float64, the running mean.

    Shapes, dtypes and errors: same as :class:`MidxSampler`.
    """

    _tables = (*MidxSampler._tables[:-2], "spread", "query_square", "recent", "step")
    _form = "spread"

    def _index(self) -> List[Tensor]:
        return [
            self.codewords1, self.codewords2, self.cell, self.order, self.start, self.mass,
            self.log_weight, self.prefix, self.heaviest, self.touched, self.spread,
            self.query_square, self.recent, self.step
        ]


@register("midx_learnable")
class LearnableMidxSampler(MidxSampler):
    """MIDX whose codewords are parameters (after Chen et al., 2025, section 6.2.3).

    Add :meth:`codebook_loss` to the loss, and pass ``sampler.parameters()`` to an optimizer. A
    refresh reassigns the classes to cells of the learnt codewords, and leaves the codewords
    unchanged.

    Args:
        learn_rows: the number of classes that ``codebook_loss`` samples in each call; at least 1.
        others: same as :class:`MidxSampler`.

    Shapes, dtypes and errors: same as :class:`MidxSampler`.
    """

    _parameter_names = ("codewords1", "codewords2")
    _form = "learnable"

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, learn_rows: int = 1024,
                 **others: Any):
        super().__init__(num_classes, dim, num_samples, **others)
        self.learn_rows = check_count(type(self).__name__, "learn_rows", learn_rows, 1)

    def _make_like(self, excluded_ids: Tensor) -> "LearnableMidxSampler":
        sampler: Any = super()._make_like(excluded_ids)
        sampler.learn_rows = self.learn_rows
        return sampler

    @torch.jit.export
    def codebook_loss(self, queries: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                      generator: Optional[torch.Generator] = None) -> Tensor:
        """Computes the loss that trains the codewords (after Chen et al., 2025, section 6.2.3): the
        distance of the rows from their codewords, and of q from the softmax.

        Args:
            queries: floating ``[Q, D]``. Queries of zeros do not count.
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` or None.
            generator: the generator that samples the classes, on the device of the codewords.

        Returns:
            A float32 scalar, differentiable with respect to the codewords only.
        """
        size = self.order.size(0)
        ids = self.order[torch.randint(size, [min(self.learn_rows, size)], generator=generator,
                                       device=self.order.device)]
        bias_of_rows: Optional[Tensor] = None
        if bias is not None:
            bias_of_rows = bias.detach()[ids].float()
        return torch.ops.xsoftmax.midx_codebook_loss(self.codewords1, self.codewords2,
                                                     weight.detach()[ids].float(), bias_of_rows,
                                                     queries.detach().float())
