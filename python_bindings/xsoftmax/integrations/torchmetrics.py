"""The figures of :mod:`xsoftmax.metrics` as metrics of TorchMetrics, which add up over batches and ranks."""

from typing import Any, Tuple

import torch
import torchmetrics
from torch import Tensor

from .. import metrics
from .._checks import check_count
from .._public import public_names
from ..metrics import Predictions, Truth

__all__ = ["NdcgAtK", "PrecisionAtK", "PspAtK", "RecallAtK"]
__dir__ = public_names(__all__)


class _AtK(torchmetrics.Metric):
    """`update(predictions, truth)` takes what :mod:`xsoftmax.metrics` takes; `compute()` is the figure of all batches together, float64, nan where
    no query had anything right. A batch in which nothing is right counts nothing."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = check_count(type(self).__name__, "k", k, 1)
        for name in ("total", "count"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        raise NotImplementedError

    def update(self, predictions: Predictions, truth: Truth) -> None:
        total, count = self._sums(predictions, truth)
        self.total += total.to(self.total.device)
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class PrecisionAtK(_AtK):
    """:func:`xsoftmax.metrics.precision_at_k` of all batches together."""

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._precisions(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class RecallAtK(_AtK):
    """:func:`xsoftmax.metrics.recall_at_k` of all batches together."""

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._recalls(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class NdcgAtK(_AtK):
    """:func:`xsoftmax.metrics.ndcg_at_k` of all batches together."""

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._ndcgs(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class PspAtK(_AtK):
    """:func:`xsoftmax.metrics.psp_at_k` of all batches together.

    Args:
        propensity: [N], in (0, 1], of each class: :func:`xsoftmax.metrics.propensity`.
    """

    def __init__(self, k: int, propensity: Tensor, **kwargs: Any) -> None:
        super().__init__(k, **kwargs)
        self.propensity = propensity

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        found, best = metrics._psp_sums(predictions, truth, self.k, self.propensity, needs_any=False)
        return found, best.to(self.count.device)
