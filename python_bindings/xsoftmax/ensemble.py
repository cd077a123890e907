"""Predictions of several models as one."""

from typing import Any, List, Optional, Sequence, Tuple, TYPE_CHECKING

import numpy as np
from torch import Tensor

from ._checks import check_count
from ._sparse import canonical

if TYPE_CHECKING:
    import scipy.sparse

__all__ = ["combine_predictions"]

METHODS = ("average", "rank", "softmax", "round_robin")


def combine_predictions(predictions: Sequence["scipy.sparse.csr_matrix"], method: str = "average", topk: int = 10,
                        weights: Optional[Sequence[float]] = None) -> "scipy.sparse.csr_matrix":
    """The ``topk`` best labels of each row by several predictions [n, L], such as :meth:`XRLinear.predict` gives; entries stand best first,
    equal ones by label (Yu et al., 2022, section 2.5). No entry is 0, which sparse formats drop: 2^-126
    and the floats after it take the place of smaller scores, in order.

    Args:
        predictions: of any models, a row of scores a query. A label that one of them does not name has the score 0 from it.
        method: ``"average"``: the mean of the scores, for models whose scores mean the same, none below 0. ``"softmax"``: the mean of their softmax over
            each row. ``"rank"``: the mean of ``(T - r) / T``, r = 0, 1, .. the rank in the row, T the length of the longest of the query's
            rows. ``"round_robin"``: the best of each, the second best of each and so on, each label once; the scores fall from 1.
        weights: of the models in a mean. None: equal.

    Raises:
        TypeError: predictions are one matrix in the place of a list; a prediction is not a scipy sparse matrix.
        ValueError: predictions of other shapes, of parts that contradict each other, or not finite; an option out of range.
    """
    if getattr(predictions, "format", None) is not None or isinstance(predictions, (np.ndarray, Tensor)):  # its rows would count as models
        hint = "[P]" if getattr(predictions, "format", None) is not None else "[scipy.sparse.csr_matrix(P)]"
        raise TypeError(f"combine_predictions: expected predictions as a list of matrices, got {type(predictions).__name__}: use {hint}")
    predictions = [_checked(i, part) for i, part in enumerate(predictions)]
    if not predictions:
        raise ValueError("combine_predictions: expected at least one prediction, got none")
    shape = predictions[0].shape
    for i, part in enumerate(predictions):
        if part.shape != shape:
            raise ValueError(f"combine_predictions: expected predictions of one shape, got {list(shape)} and {list(part.shape)} at [{i}]")
    if method not in METHODS:
        raise ValueError(f"combine_predictions: expected method as one of {METHODS}, got {method!r}")
    topk = check_count("combine_predictions", "topk", topk, 1)
    if weights is not None and (method == "round_robin" or len(weights) != len(predictions)):
        raise ValueError(f"combine_predictions: expected weights for {len(predictions)} predictions and a mean, got {len(weights)} and {method!r}")
    shares = np.ones(len(predictions)) if weights is None else np.asarray(weights, float)
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise ValueError(f"combine_predictions: expected weights of at least 0 that are not all 0, got {list(weights or ())}")

    votes = _round_robin(predictions) if method == "round_robin" else _weighed(predictions, method, shares / shares.sum())
    together = {"round_robin": np.maximum, "softmax": np.logaddexp}.get(method, np.add)
    rows = np.concatenate([_rows(part) for part in predictions])
    labels = np.concatenate([part.indices for part in predictions])
    return _best(rows, labels, np.concatenate(votes).astype(np.float64), together, topk, shape)


def _round_robin(predictions: Sequence["scipy.sparse.csr_matrix"]) -> List[np.ndarray]:
    """Of each model, for each entry: earlier turns score more."""
    longest = _longest(predictions)
    turns = longest * len(predictions)
    return [1 - (ranks(part) * len(predictions) + model) / turns[_rows(part)] for model, part in enumerate(predictions)]


def _weighed(predictions: Sequence["scipy.sparse.csr_matrix"], method: str, shares: np.ndarray) -> List[np.ndarray]:
    """Of each model, for each entry: its part of the mean; of "softmax" the log of it, which does not underflow."""
    longest, votes = _longest(predictions), []
    for model, (part, share) in enumerate(zip(predictions, shares)):
        row = _rows(part)
        if method == "average":
            if (part.data < 0).any():
                raise ValueError(f"combine_predictions: expected scores of at least 0 for \"average\", since a label that a model does not name has 0, "
                                 f"got {part.data.min()} at [{model}]; see \"softmax\" and \"rank\"")
            votes.append(share * part.data.astype(np.float64))
        elif method == "softmax":
            with np.errstate(divide="ignore"):  # the log of a share of 0
                votes.append(np.log(share) + _log_softmax(part, row))
        else:
            votes.append(share * (longest[row] - ranks(part)) / longest[row])
    return votes


def _best(rows: np.ndarray, labels: np.ndarray, votes: np.ndarray, together: Any, topk: int,
          shape: Tuple[int, int]) -> "scipy.sparse.csr_matrix":
    """The ``topk`` best labels of each row; ``together``: what makes one number of the votes for one label, logs where it is logaddexp."""
    import scipy.sparse as sp

    order = np.lexsort((labels, rows))
    rows, labels, votes = rows[order], labels[order], votes[order]
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]) | (labels[1:] != labels[:-1])]) if len(rows) else np.zeros(0, int)
    scores = together.reduceat(votes, starts) if len(rows) else votes
    rows, labels = rows[starts], labels[starts]
    order = np.lexsort((labels, -scores, rows))
    rows, labels, scores = rows[order], labels[order], scores[order]
    first = np.searchsorted(rows, np.arange(shape[0]))
    kept = np.arange(len(rows)) - first[rows] < topk
    counts = np.bincount(rows[kept], minlength=shape[0])
    scores = np.exp(scores[kept]) if together is np.logaddexp else scores[kept]
    ends = np.cumsum(counts)
    behind = np.repeat(ends, counts) - 1 - np.arange(len(scores))  # entries of the row
    limits = np.finfo(np.float32)
    scores = np.maximum(scores, limits.tiny * (1 + behind * float(limits.eps)))  # no entry is 0, which sparse formats drop
    return sp.csr_matrix((scores.astype(np.float32), labels[kept], np.r_[0, ends]), shape=shape)


def _rows(part: "scipy.sparse.csr_matrix") -> np.ndarray:
    """Of each entry its row."""
    return np.repeat(np.arange(part.shape[0]), np.diff(part.indptr))


def _longest(predictions: Sequence["scipy.sparse.csr_matrix"]) -> np.ndarray:
    """Of each row how many labels a model names at most, at least 1."""
    return np.maximum(np.max([np.diff(part.indptr) for part in predictions], axis=0), 1)


def ranks(predictions: "scipy.sparse.csr_matrix") -> np.ndarray:
    """Of each entry its rank in its row by score, from 0; equal scores in the order in which they stand."""
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


def _checked(at: int, part: Any) -> "scipy.sparse.csr_matrix":
    part = canonical("combine_predictions", f"predictions[{at}]", part, "scores")
    if not np.isfinite(part.data).all():
        raise ValueError(f"combine_predictions: expected finite scores, got {part.data[~np.isfinite(part.data)][0]} at [{at}]")
    return part
