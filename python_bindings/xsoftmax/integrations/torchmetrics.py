"""The figures of :mod:`xsoftmax.metrics` as metrics of TorchMetrics, which add up over batches and ranks."""

from typing import Any, Tuple

import torch
import torchmetrics
from torch import Tensor

from .. import metrics
from .._checks import check_count
from .._public import public_names
from .._ranks import digest
from ..metrics import Predictions, Truth

__all__ = ["NdcgAtK", "PrecisionAtK", "PspAtK", "RecallAtK"]
__dir__ = public_names(__all__)


class _AtK(torchmetrics.Metric):
    """`update(predictions, truth)` takes what :mod:`xsoftmax.metrics` takes; `compute()` is the figure of all batches together, float64, nan where
    no query had anything right. A batch in which nothing is right counts nothing.

    States are named after the metric, its k and what else it depends on: a MetricCollection with ``compute_groups=True`` shares the states of metrics whose
    states have equal names and, after the first batch, equal values."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = check_count(type(self).__name__, "k", k, 1)
        self._names = [f"{type(self).__name__}_{self.k}{self._dependence()}_{part}" for part in ("total", "count")]
        for name in self._names:
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _dependence(self) -> str:
        """What tells metrics of one class and one k apart."""
        return ""

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        raise NotImplementedError

    def update(self, predictions: Predictions, truth: Truth) -> None:
        total, count = self._sums(predictions, truth)
        for name, more in zip(self._names, (total, count)):
            state = getattr(self, name)
            setattr(self, name, state + (more.to(state.device) if isinstance(more, Tensor) else more))

    def compute(self) -> Tensor:
        total, count = (getattr(self, name) for name in self._names)
        return total / count


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
        self._digest = digest(metrics._propensity(propensity, 0).cpu())
        super().__init__(k, **kwargs)
        self.propensity = propensity

    def _dependence(self) -> str:
        return f"_{self._digest[:16]}"

    def _sums(self, predictions: Predictions, truth: Truth) -> Tuple[Tensor, Any]:
        return metrics._psp_sums(predictions, truth, self.k, self.propensity, needs_any=False)
