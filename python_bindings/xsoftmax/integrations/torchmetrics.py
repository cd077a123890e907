"""The metrics of :mod:`xsoftmax.metrics` as TorchMetrics metrics, which accumulate over batches and
ranks."""

from typing import Any, Tuple

import torch
import torchmetrics
from torch import Tensor

from .. import metrics
from .._core.checks import check_count
from .._core.public import public_names
from .._core.ranks import digest
from ..metrics import Predictions, Truth

__all__ = ["NdcgAtK", "PrecisionAtK", "PspAtK", "RecallAtK"]
__dir__ = public_names(__all__)


class _AtK(torchmetrics.Metric):
    """Base class. `update(predictions, truth)` takes the arguments of :mod:`xsoftmax.metrics`;
    `compute()` returns the metric over all batches as float64, NaN if no query had a relevant
    class. Batches without relevant classes do not count.

    State names contain the metric, k and all other parameters, because a MetricCollection with
    ``compute_groups=True`` merges the states of metrics whose states have equal names and, after
    the first batch, equal values.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = check_count(type(self).__name__, "k", k, 1)
        self._names = [
            f"{type(self).__name__}_{self.k}{self._dependence()}_{part}"
            for part in ("total", "count")
        ]
        for name in self._names:
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _dependence(self) -> str:
        """Returns the part of the state names that distinguishes metrics with the same class and
        k."""
        return ""

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        raise NotImplementedError

    def update(self, predictions: Predictions, truth: Truth) -> None:
        total, count = self._sums(predictions, truth)
        for name, value in zip(self._names, (total, count)):
            state = getattr(self, name)
            setattr(self, name,
                    state + (value.to(state.device) if isinstance(value, Tensor) else value))

    def compute(self) -> Tensor:
        total, count = (getattr(self, name) for name in self._names)
        return total / count


class PrecisionAtK(_AtK):
    """Accumulates :func:`xsoftmax.metrics.precision_at_k` over batches."""
    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._precisions(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class RecallAtK(_AtK):
    """Accumulates :func:`xsoftmax.metrics.recall_at_k` over batches."""
    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._recalls(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class NdcgAtK(_AtK):
    """Accumulates :func:`xsoftmax.metrics.ndcg_at_k` over batches."""
    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        values = metrics._ndcgs(predictions, truth, self.k, needs_any=False)
        return values.sum(), len(values)


class PspAtK(_AtK):
    """Accumulates :func:`xsoftmax.metrics.psp_at_k` over batches.

    Args:
        k: at least 1.
        propensity: floating-point [N], in (0, 1], one per class, such as the result of
            :func:`xsoftmax.metrics.propensity`.
    """
    def __init__(self, k: int, propensity: Tensor, **kwargs: Any) -> None:
        self._digest = digest(metrics._propensity(propensity, 0).cpu())
        super().__init__(k, **kwargs)
        self.propensity = propensity

    def _dependence(self) -> str:
        return f"_{self._digest[:16]}"

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        return metrics._psp_sums(predictions, truth, self.k, self.propensity, needs_any=False)
