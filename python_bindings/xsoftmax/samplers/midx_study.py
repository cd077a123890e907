"""Forms of MIDX to study it by: exact, with the spread inside cells, with codebooks that are learnt."""

from typing import Any, List, Optional

import torch
from torch import Tensor

from .._checks import check_count
from .midx import MidxSampler
from .sampler import register


@register("midx_exact")
class ExactMidxSampler(MidxSampler):
    """MIDX without its error (Chen et al., 2025, Theorem 1): a cell's weight includes what quantisation leaves out, so q is the softmax itself, in float32.

    It costs O(N D) for a query. Draws are private and independent, from a copy of the table that each training step renews.

    Args: as :class:`MidxSampler`. Buffers beside its: ``table`` float32 [N, D], ``table_bias`` float32 [N].

    Shapes, dtypes and errors as :class:`MidxSampler`. ``shared=True`` or ``distinct=True`` is a ValueError.
    """

    _tables = (*MidxSampler._tables[:-2], "table", "table_bias", "recent", "step")
    _form = "exact"

    def _index(self) -> List[Tensor]:
        return [self.codewords1, self.codewords2, self.cell, self.order, self.start, self.mass, self.log_weight, self.prefix, self.heaviest,
                self.touched, self.table, self.table_bias, self.recent, self.step]


@register("midx_spread")
class SpreadMidxSampler(MidxSampler):
    """MIDX that draws classes which its codewords describe badly more often.

    Each class is weighed by e^{|r|^2 |z|^2 / 2D} as well: r is what the codewords leave of its row, and |z|^2 a running mean over the queries that were drawn
    for in train(). The weight is the mean of e^{z.r}, were r Gaussian. Weights change with the next refresh or update.

    Args: as :class:`MidxSampler`. Buffers beside its: ``spread`` float32 [N], |r|^2; ``query_square`` float64, the mean.

    Shapes, dtypes and errors as :class:`MidxSampler`.
    """

    _tables = (*MidxSampler._tables[:-2], "spread", "query_square", "recent", "step")
    _form = "spread"

    def _index(self) -> List[Tensor]:
        return [self.codewords1, self.codewords2, self.cell, self.order, self.start, self.mass, self.log_weight, self.prefix, self.heaviest,
                self.touched, self.spread, self.query_square, self.recent, self.step]


@register("midx_learnable")
class LearnableMidxSampler(MidxSampler):
    """MIDX whose codewords are parameters (after Chen et al., 2025, section 6.2.3).

    Add :meth:`codebook_loss` to the loss, and give ``sampler.parameters()`` to an optimizer. A refresh codes the classes again under the learnt codewords, and
    leaves the codewords as they are.

    Args:
        learn_rows: how many classes ``codebook_loss`` looks at, drawn anew in each call; at least 1.
        others: as :class:`MidxSampler`.

    Shapes, dtypes and errors as :class:`MidxSampler`.
    """

    _learnt = ("codewords1", "codewords2")
    _form = "learnable"

    def __init__(self, num_classes: int, dim: int, num_samples: int = 20, *, learn_rows: int = 1024, **others: Any):
        super().__init__(num_classes, dim, num_samples, **others)
        self.learn_rows = check_count(type(self).__name__, "learn_rows", learn_rows, 1)

    def _like(self, excluded: Tensor) -> "LearnableMidxSampler":
        other: Any = super()._like(excluded)
        other.learn_rows = self.learn_rows
        return other

    @torch.jit.export
    def codebook_loss(self, queries: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                      generator: Optional[torch.Generator] = None) -> Tensor:
        """The loss that the codewords minimise (after Chen et al., 2025, section 6.2.3): how far the codes are from the rows, and q from the softmax.

        Args:
            queries: floating ``[Q, D]``. Queries of zeros do not count.
            weight: floating ``[N, D]``, the class table.
            bias: floating ``[N]`` or None.
            generator: that draws the classes, on the device of the codewords.

        Returns:
            A float32 scalar, with a gradient in the codewords alone.
        """
        size = self.order.size(0)
        ids = self.order[torch.randint(size, [min(self.learn_rows, size)], generator=generator, device=self.order.device)]
        bias_of_rows: Optional[Tensor] = None
        if bias is not None:
            bias_of_rows = bias.detach()[ids].float()
        return torch.ops.xsoftmax.midx_codebook_loss(self.codewords1, self.codewords2, weight.detach()[ids].float(), bias_of_rows,
                                                     queries.detach().float())
