"""Combines the predictions of several models."""

from typing import Any, List, Optional, Sequence, Tuple, TYPE_CHECKING

import numpy as np
from torch import Tensor

from .._core.checks import check_count
from .._core.sparse import canonical

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["combine_predictions"]

METHODS = ("average", "rank", "softmax", "round_robin")


def combine_predictions(predictions: Sequence["scipy.sparse.csr_matrix"], method: str = "average",
                        topk: int = 10,
                        weights: Optional[Sequence[float]] = None) -> "scipy.sparse.csr_matrix":
    """Combines the predictions [n, L] of several models, such as those of
    :meth:`XRLinear.predict`, into one (Yu et al., 2022, section 2.5).

    Args:
        predictions: scipy sparse [n, L], one matrix per model, one row of scores per query. A label
            without an entry has the score 0.
        method: how scores are combined.

            - ``"average"``: the mean of the scores. For models with comparable, non-negative
              scores.
            - ``"softmax"``: the mean of the softmax over each row.
            - ``"rank"``: the mean of ``(T - r) / T``, where r = 0, 1, .. is the rank of the label
              in its row and T the length of the longest row of the query.
            - ``"round_robin"``: the best label of each model, then the second best of each model,
              and so on, without duplicates; the scores decrease from 1.

        topk: the number of labels per row in the result, at least 1.
        weights: one weight per model, for the mean. None: equal weights.

    Returns:
        A scipy CSR matrix [n, L], float32, of the ``topk`` best labels of each row. The entries of
        a row are ordered by decreasing score, then by label. No entry is 0, because sparse formats
        drop zeros: smaller scores are replaced by 2^-126 and the float32 numbers directly above it,
        in order.

    Raises:
        TypeError: predictions are a single matrix instead of a list, or a prediction is not a scipy
            sparse matrix.
        ValueError: the predictions have different shapes, inconsistent arrays or non-finite scores;
            or an option is out of range.
    """
    # a single matrix would be iterated row by row, one "model" per row
    # its rows would count as models
    if getattr(predictions, "format", None) is not None or isinstance(predictions,
                                                                      (np.ndarray, Tensor)):
        hint = "[P]" if getattr(predictions, "format",
                                None) is not None else "[scipy.sparse.csr_matrix(P)]"
        raise TypeError("combine_predictions: expected predictions as a list of matrices, got "
                        f"{type(predictions).__name__}: use {hint}")
    predictions = [_check_prediction(i, part) for i, part in enumerate(predictions)]
    if not predictions:
        raise ValueError("combine_predictions: expected at least one prediction, got none")
    shape = predictions[0].shape
    for i, part in enumerate(predictions):
        if part.shape != shape:
            raise ValueError("combine_predictions: expected predictions of one shape, got "
                             f"{list(shape)} and {list(part.shape)} at [{i}]")
    if method not in METHODS:
        raise ValueError(f"combine_predictions: expected method as one of {METHODS}, got "
                         f"{method!r}")
    topk = check_count("combine_predictions", "topk", topk, 1)
    if weights is not None and (method == "round_robin" or len(weights) != len(predictions)):
        raise ValueError(f"combine_predictions: expected weights for {len(predictions)} "
                         f"predictions and a mean, got {len(weights)} and {method!r}")
    shares = np.ones(len(predictions)) if weights is None else np.asarray(weights, float)
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise ValueError("combine_predictions: expected weights of at least 0 that are not all 0, "
                         f"got {list(weights or ())}")

    votes = _rank_in_turn(predictions) if method == "round_robin" else _weigh(
        predictions, method, shares / shares.sum())
    combine = {"round_robin": np.maximum, "softmax": np.logaddexp}.get(method, np.add)
    rows = np.concatenate([_rows(part) for part in predictions])
    labels = np.concatenate([part.indices for part in predictions])
    return _select_best(rows, labels,
                        np.concatenate(votes).astype(np.float64), combine, topk, shape)


def _rank_in_turn(predictions: Sequence["scipy.sparse.csr_matrix"]) -> List[np.ndarray]:
    """Returns, for each model, the score of each entry. Earlier turns score higher."""
    label_counts = _count_labels(predictions)
    turns = label_counts * len(predictions)
    return [
        1 - (ranks(part) * len(predictions) + model) / turns[_rows(part)]
        for model, part in enumerate(predictions)
    ]


def _weigh(predictions: Sequence["scipy.sparse.csr_matrix"], method: str,
           shares: np.ndarray) -> List[np.ndarray]:
    """Returns, for each model, the contribution of each entry to the mean. For "softmax" this is
    the logarithm of the contribution, which does not underflow."""
    label_counts, votes = _count_labels(predictions), []
    for model, (part, share) in enumerate(zip(predictions, shares)):
        row = _rows(part)
        if method == "average":
            if (part.data < 0).any():
                raise ValueError("combine_predictions: expected scores of at least 0 for "
                                 "\"average\", since a label that a model does not name has 0, "
                                 f"got {part.data.min()} at [{model}]; see \"softmax\" and "
                                 "\"rank\"")
            votes.append(share * part.data.astype(np.float64))
        elif method == "softmax":
            with np.errstate(divide="ignore"):  # log(0) for a weight of 0
                votes.append(np.log(share) + _log_softmax(part, row))
        else:
            votes.append(share * (label_counts[row] - ranks(part)) / label_counts[row])
    return votes


def _select_best(rows: np.ndarray, labels: np.ndarray, votes: np.ndarray, combine: Any, topk: int,
                 shape: Tuple[int, int]) -> "scipy.sparse.csr_matrix":
    """Returns the ``topk`` best labels of each row. ``combine`` is the ufunc that combines the
    votes for one label; with logaddexp, votes are logarithms."""
    import scipy.sparse as sp

    order = np.lexsort((labels, rows))
    rows, labels, votes = rows[order], labels[order], votes[order]
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]) |
                                  (labels[1:] != labels[:-1])]) if len(rows) else np.zeros(0, int)
    scores = combine.reduceat(votes, starts) if len(rows) else votes
    rows, labels = rows[starts], labels[starts]
    order = np.lexsort((labels, -scores, rows))
    rows, labels, scores = rows[order], labels[order], scores[order]
    first = np.searchsorted(rows, np.arange(shape[0]))
    is_kept = np.arange(len(rows)) - first[rows] < topk
    counts = np.bincount(rows[is_kept], minlength=shape[0])
    scores = np.exp(scores[is_kept]) if combine is np.logaddexp else scores[is_kept]
    ends = np.cumsum(counts)
    later_counts = np.repeat(ends, counts) - 1 - np.arange(
        len(scores))  # number of later entries in row
    limits = np.finfo(np.float32)
    # no entry may be 0, because sparse formats drop zeros
    scores = np.maximum(scores, limits.tiny * (1 + later_counts * float(limits.eps)))
    return sp.csr_matrix((scores.astype(np.float32), labels[is_kept], np.r_[0, ends]), shape=shape)


def _rows(part: "scipy.sparse.csr_matrix") -> np.ndarray:
    """Returns the row of each entry."""
    return np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))


def _count_labels(predictions: Sequence["scipy.sparse.csr_matrix"]) -> np.ndarray:
    """Returns, for each row, the largest number of labels that any model predicts, at least 1."""
    return np.maximum(np.max([np.diff(part.indptr) for part in predictions], axis=0), 1)


def ranks(predictions: "scipy.sparse.csr_matrix") -> np.ndarray:
    """Returns the rank of each entry in its row by score, from 0; ties keep their order."""
    row = _rows(predictions)
    order = np.lexsort((-predictions.data, row))
    rank = np.empty(len(row), np.int64)
    rank[order] = np.arange(len(row)) - predictions.indptr[row]
    return rank


def _log_softmax(part: "scipy.sparse.csr_matrix", row: np.ndarray) -> np.ndarray:
    best = np.full(part.shape[0], -np.inf)
    np.maximum.at(best, row, part.data)
    below = part.data - best[row]
    total = np.bincount(row, np.exp(below), minlength=part.shape[0])
    return below - np.log(np.maximum(total, 1))[row]


def _check_prediction(number: int, part: Any) -> "scipy.sparse.csr_matrix":
    part = canonical("combine_predictions", f"predictions[{number}]", part, "scores")
    if not np.isfinite(part.data).all():
        raise ValueError("combine_predictions: expected finite scores, got "
                         f"{part.data[~np.isfinite(part.data)][0]} at [{number}]")
    return part
