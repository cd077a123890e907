r"""Ranking metrics: precision, recall, normalised discounted cumulative gain (NDCG) and
propensity-scored precision of the first k predictions.

All functions take `predictions` and `truth`. `predictions` is an int64 tensor [Q, at least k] of
distinct class ids per query, best first, padded with -1; or a scipy sparse matrix or array [Q, N]
of scores, such as the result of XRLinear.predict, in which stored zeros are scores too. `truth`
holds the relevant classes in one of three forms:

- an int64 tensor [Q]: one class per query;
- a list of Q sequences or 1-D tensors of class ids, empty for queries without relevant classes;
- a scipy sparse matrix or array [Q, N]: the columns of the non-zeros of each row.

The results are fractions in [0, 1], averaged over the queries that have relevant classes. With
hit_i = 1 if the i-th prediction (counted from 1) is relevant, else 0, and T the number of relevant
classes of a query::

    precision_at_k = sum_{i <= k} hit_i / k
    recall_at_k    = sum_{i <= k} hit_i / T
    ndcg_at_k      = sum_{i <= k} hit_i / log2(i + 1)  /  sum_{i <= min(T, k)} 1 / log2(i + 1)

With p the propensity of a class, the probability that it is labelled if it is relevant, psp_at_k is
a ratio of sums over all queries::

    psp_at_k       = sum_q sum_{i <= k} hit_i / p_i
                     / sum_q (sum of the k largest 1 / p of the relevant classes of q)

All functions raise a ValueError if k is below 1; if predictions have fewer than k columns (sparse:
if no row has k scores), contain a class twice in a row or an id below -1, or have a NaN score; if
truth has another number of queries or a class id below 0; if the arrays of a sparse matrix are
inconsistent; or if no query has a relevant class. They raise a TypeError if k is not an int, or if
predictions or truth have another type or dtype.
"""

import math
from typing import Any, NamedTuple, Sequence, Tuple, TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from ._core.checks import check_count
from ._core.public import public_names
from ._core.sparse import canonical, Matrix, tensor_of
from .matcher.ensemble import ranks

if TYPE_CHECKING:
    import scipy.sparse

Predictions = Union[Tensor, Matrix]
Truth = Union[Tensor, Sequence[Union[Tensor, Sequence[int]]], Matrix]

__all__ = ["coverage", "ndcg_at_k", "precision_at_k", "propensity", "psp_at_k", "recall_at_k"]
__dir__ = public_names(__all__)


def precision_at_k(predictions: Predictions, truth: Truth, k: int) -> float:
    """Computes precision at k: the fraction of the first k predictions that are relevant,
    `sum_{i <= k} hit_i / k`, averaged over queries. Missing predictions (-1) count as wrong.

    Args:
        predictions: int64 [Q, at least k], or a scipy sparse matrix [Q, N] of scores; see
            :mod:`xsoftmax.metrics`.
        truth: int64 [Q], a list of Q sequences, or a scipy sparse matrix [Q, N]; see
            :mod:`xsoftmax.metrics`.
        k: at least 1.

    Raises:
        ValueError, TypeError: as listed in :mod:`xsoftmax.metrics`
    """
    return _precisions(predictions, truth, k).mean().item()


def recall_at_k(predictions: Predictions, truth: Truth, k: int) -> float:
    """Computes recall at k: the fraction of the relevant classes that are among the first k
    predictions, `sum_{i <= k} hit_i / T`, averaged over queries.

    Args:
        predictions, truth, k: as in :func:`precision_at_k`.

    Raises:
        ValueError, TypeError: as listed in :mod:`xsoftmax.metrics`
    """
    return _recalls(predictions, truth, k).mean().item()


def ndcg_at_k(predictions: Predictions, truth: Truth, k: int) -> float:
    """Computes the normalised discounted cumulative gain at k, averaged over queries. It is 1 if
    the relevant classes are ranked first.

    The value of a query is `sum_{i <= k} hit_i / log2(i + 1)  /  sum_{i <= min(T, k)} 1 / log2(i +
    1)`.

    Args:
        predictions, truth, k: as in :func:`precision_at_k`.

    Raises:
        ValueError, TypeError: as listed in :mod:`xsoftmax.metrics`
    """
    return _ndcgs(predictions, truth, k).mean().item()


def psp_at_k(predictions: Predictions, truth: Truth, k: int, propensity: Tensor) -> float:
    """Computes propensity-scored precision at k, in which rarely labelled classes count more (Jain
    et al., 2016). It is 1 if the relevant classes with the smallest propensities are ranked first.
    See :mod:`xsoftmax.metrics` for the formula.

    Args:
        predictions, truth, k: as in :func:`precision_at_k`.
        propensity: floating-point [N], in (0, 1], one per class, such as the result of
            :func:`propensity`.

    Raises:
        ValueError: propensity has another shape or a value outside (0, 1]; or as listed in
            :mod:`xsoftmax.metrics`.
        TypeError: propensity is not a floating-point tensor; or as listed in
            :mod:`xsoftmax.metrics`.
    """
    gain, best_gain = _psp_sums(predictions, truth, k, propensity)
    return (gain / best_gain).item()


# The functions below return one value per query that has relevant classes. With needs_any=False,
# no query needs to have any.


def _precisions(predictions: Predictions, truth: Truth, k: int, needs_any: bool = True) -> Tensor:
    hits, _, _ = _hits("precision_at_k", predictions, truth, k, needs_any)
    return hits.sum(1) / k


def _recalls(predictions: Predictions, truth: Truth, k: int, needs_any: bool = True) -> Tensor:
    hits, sizes, _ = _hits("recall_at_k", predictions, truth, k, needs_any)
    return hits.sum(1) / sizes


def _ndcgs(predictions: Predictions, truth: Truth, k: int, needs_any: bool = True) -> Tensor:
    hits, sizes, _ = _hits("ndcg_at_k", predictions, truth, k, needs_any)
    discount = 1.0 / torch.arange(2, k + 2, dtype=torch.float64, device=hits.device).log2()
    ideal = discount.cumsum(0)[sizes.clamp(max=k) - 1]
    return hits @ discount / ideal


def _psp_sums(predictions: Predictions, truth: Truth, k: int, propensity: Tensor,
              needs_any: bool = True) -> Tuple[Tensor, Tensor]:
    hits, _, pairs = _hits("psp_at_k", predictions, truth, k, needs_any)
    gains = 1 / _propensity(
        propensity,
        1 + max(int(ids.max()) if ids.numel() > 0 else 0 for ids in (pairs.ids, pairs.predicted)))
    gain = (hits * gains[pairs.predicted.clamp_min(0)]).sum()
    pair_gains = gains[pairs.ids]
    order = torch.argsort(pair_gains, descending=True, stable=True)
    # grouped by query, with the largest gain first in each group
    order = order[torch.argsort(pairs.queries[order], stable=True)]
    queries, sorted_gains = pairs.queries[order], pair_gains[order]
    first = torch.searchsorted(queries, queries)
    return gain, sorted_gains[torch.arange(len(queries), device=queries.device) - first < k].sum()


def propensity(counts: Union[Tensor, Sequence[float]], num_examples: int, a: float = 0.55,
               b: float = 1.5) -> Tensor:
    """Estimates the propensity of each class, the probability that it is labelled if it is
    relevant, from its frequency (Jain et al., 2016).

    The estimate is ``1 / (1 + C (counts + b)^-a)`` with C = (log n - 1) (b + 1)^a.

    Args:
        counts: [N], the number of training examples of each class; finite and non-negative.
        num_examples: n, the number of training examples; at least 3.
        a, b: as in the paper.

    Returns:
        float64 [N].

    Raises:
        ValueError: counts have another shape or a value that is negative or not finite;
            num_examples is below 3; or b is not above -1.
        TypeError: counts are not numbers, or num_examples is not an int.
    """
    counts = (tensor_of(counts) if isinstance(counts, np.ndarray) else torch.as_tensor(counts)).to(
        torch.float64)
    num_examples = check_count("propensity", "num_examples", num_examples, 3)
    if counts.dim() != 1 or not ((counts >= 0) & counts.isfinite()).all():
        raise ValueError("propensity: expected counts of shape [N], each finite and at least 0, "
                         f"got shape {list(counts.shape)} and values {counts}")
    if not b > -1:
        raise ValueError(f"propensity: expected b above -1, got {b}")
    c = (math.log(num_examples) - 1) * (b + 1)**a
    return 1 / (1 + c * (counts + b)**-a)


def coverage(candidates: Tensor, target: Tensor, ignore_index: int = -100) -> float:
    """Computes the fraction of targets that are among the candidates, `(candidates == target[...,
    None]).any(-1).mean()` (Han et al., 2018, Table 3).

    Args:
        candidates: int64 [*, C], padded with -1; or [C], shared by all queries.
        target: int64 [*], at least one-dimensional. Negative targets and those equal to
            ignore_index are skipped; at least one target must remain.
        ignore_index: the target value to skip.

    Raises:
        ValueError: a shape does not match, or all targets are skipped.
        TypeError: candidates or target are not int64 tensors.
    """
    for argument, tensor in (("candidates", candidates), ("target", target)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
            raise TypeError(f"coverage: expected {argument} as an int64 tensor, got "
                            f"{_describe_type(tensor)}")
    if target.dim() < 1 or candidates.dim() != 1 and candidates.shape[:-1] != target.shape:
        raise ValueError("coverage: expected candidates of shape [C] or [*, C] and target of shape "
                         "[*], "
                         f"got {list(candidates.shape)} and {list(target.shape)}")
    is_counted = (target >= 0) & (target != ignore_index)
    if not is_counted.any():
        raise ValueError("coverage: expected a target of 0 or more, got none")
    return (candidates == target.unsqueeze(-1)).any(-1)[is_counted].double().mean().item()


class _RelevantPairs(NamedTuple):
    """The relevant classes as (query, id) pairs, and the predictions of the queries that have
    any."""

    queries: Tensor
    ids: Tensor
    predicted: Tensor


def _hits(name: str, predictions: Predictions, truth: Any, k: int,
          needs_any: bool = True) -> Tuple[Tensor, Tensor, _RelevantPairs]:
    """Returns, for the queries that have relevant classes: whether each of the k predictions is
    relevant (float64 [Q, k], 0 or 1), the number of relevant classes (int64 [Q]), and the relevant
    classes."""
    k = check_count(name, "k", k, 1)
    if _is_sparse(predictions):
        scores = canonical(name, "predictions", predictions, "scores")
        _check_scores(name, scores, truth, k if needs_any else 0)
        predictions = _select_best(scores, k)
    if not isinstance(predictions, Tensor):
        raise TypeError(f"{name}: expected predictions as a tensor or a scipy sparse matrix, got "
                        f"{_describe_type(predictions)}")
    if predictions.dtype != torch.int64:
        raise TypeError(f"{name}: expected predictions of dtype int64, got {predictions.dtype}")
    if predictions.dim() != 2 or predictions.shape[1] < k:
        raise ValueError(f"{name}: expected predictions of shape [Q, {k} or more], got "
                         f"{list(predictions.shape)}")
    predictions = predictions[:, :k]
    queries, ids = _pairs(name, truth, len(predictions))
    queries, ids = queries.to(predictions.device), ids.to(predictions.device)
    if predictions.numel() > 0 and predictions.min() < -1:
        raise ValueError(f"{name}: expected predictions of -1 (none) or more, got "
                         f"{predictions.min().item()}")
    if ids.numel() > 0 and ids.min() < 0:
        raise ValueError(f"{name}: expected classes of 0 or more in truth, got {ids.min().item()}")
    sorted_predictions = predictions.sort(dim=1).values
    is_repeated = (sorted_predictions[:, 1:]
                   == sorted_predictions[:, :-1]) & (sorted_predictions[:, 1:] >= 0)
    if is_repeated.any():
        row, column = is_repeated.nonzero()[0].tolist()
        raise ValueError(f"{name}: expected different predictions for a query, got "
                         f"{sorted_predictions[row, column].item()} twice in row {row}")

    # Encode each (query, class) pair as one number, so that one isin() call looks up all of them.
    # A missing prediction becomes -1, which matches no pair.
    span = 1 + max(
        int(id_values.max()) if id_values.numel() > 0 else 0 for id_values in (predictions, ids))
    if span > (1 << 63) // max(len(predictions), 1):
        raise ValueError(f"{name}: expected class ids below 2^63 / {len(predictions)} queries, got "
                         f"{span - 1}")
    keys_of_pairs = torch.unique(queries * span + ids)
    sizes = torch.bincount(keys_of_pairs // span, minlength=len(predictions))
    rows = torch.arange(len(predictions), device=predictions.device).unsqueeze(1)
    keys = torch.where(predictions >= 0, rows * span + predictions, -1)
    has_relevant = sizes > 0
    if needs_any and not has_relevant.any():
        raise ValueError(f"{name}: expected a query for which a class is right, got none of "
                         f"{len(predictions)}")
    return torch.isin(keys[has_relevant],
                      keys_of_pairs).double(), sizes[has_relevant], _RelevantPairs(
                          keys_of_pairs // span, keys_of_pairs % span, predictions[has_relevant])


def _describe_type(value: Any) -> str:
    """Describes the type of an argument that is not a tensor, and suggests a conversion."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}: use sorted(...) of each query's set of classes"
    return type(value).__name__ + (": use torch.as_tensor(...)" if isinstance(
        value, (np.ndarray, list, tuple)) else "")


def _is_sparse(value: Any) -> bool:
    """Whether the argument is a scipy matrix or array. Does not import scipy, which is optional."""
    return getattr(value, "format", None) is not None


def _check_scores(name: str, scores: "scipy.sparse.csr_matrix", truth: Any, least: int) -> None:
    """Checks that scores match a sparse truth, and that some row has ``least`` predictions."""
    if _is_sparse(truth) and len(truth.shape) == 2:
        if scores.shape != truth.shape:
            raise ValueError(f"{name}: expected predictions and truth of one shape, got "
                             f"{list(scores.shape)} and {list(truth.shape)}")
        if _is_constant(
                scores.data) and not _is_constant(canonical(name, "truth", truth, "weights").data):
            raise ValueError(f"{name}: expected scores in predictions, then truth, got predictions "
                             f"of {scores.data[0]:g} alone, which rank nothing, and a "
                             "truth with several values: are they the other way round?")
    longest = int(np.diff(scores.indptr).max(initial=0))
    if longest < least and scores.shape[0] > 0:
        raise ValueError(f"{name}: expected at least {least} predictions of a query, got {longest} "
                         f"at most: predict with topk={least}, or choose k={longest}")


def _is_constant(values: Any) -> bool:
    return len(values) > 0 and bool((values == values[0]).all())


def _select_best(scores: "scipy.sparse.csr_matrix", k: int) -> Tensor:
    """Returns the classes of the k best scores of each row, padded with -1."""
    rank, counts = ranks(scores), np.diff(scores.indptr)
    row, is_kept = np.repeat(np.arange(len(counts)), counts), rank < k
    ids = np.full((len(counts), k), -1)
    ids[row[is_kept], rank[is_kept]] = scores.indices[is_kept]
    return torch.from_numpy(ids)


def _propensity(propensity: Tensor, least: int) -> Tensor:
    if not isinstance(propensity, Tensor) or not propensity.is_floating_point():
        raise TypeError("psp_at_k: expected propensity as a floating tensor, got "
                        f"{_describe_type(propensity)}")
    if propensity.dim() != 1 or len(propensity) < least:
        raise ValueError(f"psp_at_k: expected propensity of shape [{least} or more], got "
                         f"{list(propensity.shape)}")
    if not ((propensity > 0) & (propensity <= 1)).all():
        raise ValueError("psp_at_k: expected propensity in (0, 1], got " +
                         str(propensity[~((propensity > 0) & (propensity <= 1))][0].item()))
    return propensity.double()


def _pairs(name: str, truth: Any, num_queries: int) -> Tuple[Tensor, Tensor]:
    """Returns the relevant classes as pairs: queries int64 [P] and class ids int64 [P]."""
    if isinstance(truth, Tensor):
        if truth.dim() != 1:
            raise ValueError(f"{name}: expected truth of shape [Q], got {list(truth.shape)}" +
                             (": scipy.sparse.csr_matrix(truth.numpy()) is one of several "
                              "classes a query" if truth.dim() == 2 else ""))
        if truth.dtype != torch.int64:
            raise TypeError(f"{name}: expected truth of dtype int64, got {truth.dtype}")
        rows, ids = torch.arange(len(truth)), truth
        count = len(truth)
    elif _is_sparse(truth):
        right = canonical(name, "truth", truth, "labels")
        count, ids = right.shape[0], tensor_of(right.indices).long()
        rows = torch.repeat_interleave(torch.arange(count), tensor_of(right.indptr).long().diff())
    elif isinstance(truth, (list, tuple)):
        parts = [_ids(name, row, part) for row, part in enumerate(truth)]
        count = len(parts)
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        rows = torch.repeat_interleave(
            torch.arange(count), torch.tensor([len(part) for part in parts], dtype=torch.int64))
    else:
        raise TypeError(f"{name}: expected truth as an int64 tensor, a list of class ids for each "
                        "query or a scipy sparse matrix, "
                        f"got {_describe_type(truth)}")
    if count != num_queries:
        raise ValueError(f"{name}: expected truth for {num_queries} queries, as many as "
                         f"predictions has, got {count}")
    return rows, ids


def _ids(name: str, row: int, part: Union[Tensor, Sequence[int]]) -> Tensor:
    """Returns the class ids of one query as an int64 CPU tensor."""
    if isinstance(part, (set, frozenset)):
        raise TypeError(f"{name}: expected class ids in truth[{row}] as a sequence or a tensor, "
                        f"got {_describe_type(part)}")
    try:
        ids = tensor_of(part) if isinstance(part, np.ndarray) else torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected class ids in truth[{row}], got {type(part).__name__} "
                        f"({error})") from error
    if ids.dim() != 1:
        raise ValueError(f"{name}: expected truth[{row}] with one dimension, got shape "
                         f"{list(ids.shape)}")
    if ids.numel() > 0 and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise TypeError(f"{name}: expected class ids of an integer dtype in truth[{row}], got "
                        f"{ids.dtype}")
    return ids.long().cpu()
