"""Losses as functions of what a caller has: a table or vectors, and candidate sets with their counts."""

from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

from ._checks import check_reduction
from ._options import option_text
from ._table import flat_queries
from .samplers import CandidateSet, columns_of

__all__ = ["linear_cross_entropy", "sampled_softmax_loss", "tower_loss"]


def linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor, *, bias: Optional[Tensor] = None, class_weight: Optional[Tensor] = None,
                         reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """``F.cross_entropy(F.linear(input, weight, bias), target, ...)`` without the logits ``[Q, N]`` in memory.

    Args:
        input: ``[*, D]``; weight ``[N, D]`` and bias ``[N]``: a class table, or vectors that a network has made; target int64 ``[*]``.
        class_weight: ``[N]``. The other arguments are those of ``F.cross_entropy``.

    Returns:
        A scalar, or ``[*]`` with reduction="none"; in float32 or float64. Where gradients are recorded they are made together with the value.

    Raises:
        ValueError, TypeError, IndexError: as :class:`xsoftmax.LinearCrossEntropyLoss`
    """
    name = "linear_cross_entropy"
    check_reduction(name, reduction)
    if weight.dim() != 2:
        raise ValueError(f"{name}: expected weight of shape [N, D], got {list(weight.shape)}")
    queries = flat_queries(name, weight.size(1), input, target)
    loss = torch.ops.xsoftmax.linear_cross_entropy(queries, weight, bias, target.reshape(-1), class_weight, ["none", "mean", "sum"].index(reduction),
                                                   ignore_index, label_smoothing)
    return loss.reshape(target.shape) if reduction == "none" else loss


def sampled_softmax_loss(input: Tensor, weight: Tensor, target: Tensor, sets: List[CandidateSet], *, bias: Optional[Tensor] = None,
                         class_weight: Optional[Tensor] = None, log_z: Optional[Tensor] = None, **options: Union[str, bool, int, float]) -> Tensor:
    """What :class:`xsoftmax.SampledSoftmaxLoss` computes in train() once its sampler has drawn.

    Args:
        input: ``[*, D]``; weight ``[N, D]`` and bias ``[N]``: the class table; target int64 ``[*]``, or ``[*, T]`` several positives.
        sets: of a sampler (``sampler.sample(queries, target)``) or of yours: ids ``[M]`` or ``[Q, M]``, how often each would be there, and whether no class
            stands twice. For several positives ``target_log_count`` is ``[Q, T]``, of the different positives in falling order.
        class_weight: ``[N]``.
        log_z: 0-dim, with a gradient where it asks for one: all scores are lowered by it, which matters to the estimator "nce".
        options: ``estimator="sampled_softmax"``, ``remove_accidental_hits=True``, ``label_smoothing=0.0``, ``reduction="mean"``, ``ignore_index=-100``,
            ``positives="mean"`` and ``sparse_grad=True``, as those of the module.

    Returns:
        A scalar, or ``[*]`` with reduction="none"; in float32 or float64.

    Raises:
        ValueError, TypeError, IndexError: as the module; ValueError: an option that is none of these
    """
    return torch.ops.xsoftmax.sampled_softmax_loss(input, weight, bias, target, *columns_of(sets), class_weight, log_z, option_text(**options))


def tower_loss(query: Tensor, item: Tensor, item_id: Tensor, candidates: List[Tuple[Tensor, CandidateSet]], *, estimator: str = "sampled_softmax",
               remove_accidental_hits: bool = True, weight: Optional[Tensor] = None, reduction: str = "mean") -> Tensor:
    """What :class:`xsoftmax.TwoTowerLoss` computes of its candidates and their counts.

    The equivalent PyTorch expression, for one shared set of distinct candidates and the estimator "sampled_softmax"::

        s = query @ vectors.T - log_count
        s = s.masked_fill(ids == item_id[:, None], -inf)
        positive = (query * item).sum(1, keepdim=True)
        F.cross_entropy(torch.cat([positive, s], 1), zeros)

    without ``[Q, S]`` in memory, forward or backward (on the CPU).

    Args:
        query, item: ``[Q, D]``, each query beside the vector of its item.
        item_id: int64 ``[Q]``, any numbers.
        candidates: vectors and what they are: ``[S, D]`` beside a set of ids ``[S]`` that all queries share, ``[Q, P, D]`` beside one of ids ``[Q, P]``.
            All vectors have gradients.
        estimator, remove_accidental_hits: as in :class:`xsoftmax.TwoTowerLoss`.
        weight: ``[Q]`` of the losses; the mean is weighted by it, and NaN over no query.

    Returns:
        A scalar, or ``[Q]`` with reduction="none"; in float32 or float64.

    Raises:
        ValueError: shapes that do not fit together, an estimator without a kernel; TypeError: dtypes
    """
    options = option_text(estimator=estimator, remove_accidental_hits=remove_accidental_hits, reduction=reduction)
    vectors, sets = [part for part, _ in candidates], [one for _, one in candidates]
    return torch.ops.xsoftmax.tower_loss(query, item, item_id, vectors, *columns_of(sets), weight, options)
