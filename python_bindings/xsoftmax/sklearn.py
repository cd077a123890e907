"""A scikit-learn estimator for XR-Linear. Requires scikit-learn 1.6 or newer."""

from typing import Any, Optional

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (check_array, check_consistent_length, check_is_fitted,
                                      column_or_1d, validate_data)

from ._core.public import public_names
from ._core.sparse import canonical
from .trees.label_tree import LabelTree
from .label_vectors import pifa
from .matcher.xr_linear import XRLinear

__all__ = ["XRLinearClassifier"]
__dir__ = public_names(__all__)

_HINT = ("sklearn.preprocessing.MultiLabelBinarizer(sparse_output=True).fit_transform(labels) "
         "makes them of lists of labels")


class XRLinearClassifier(ClassifierMixin, BaseEstimator):
    """A scikit-learn classifier that trains an :class:`xsoftmax.XRLinear` model. It works in
    pipelines and in hyper-parameter searches.

    The target y of ``fit(X, y)`` is an indicator matrix [n, L], sparse or dense, for multi-label
    problems, or one class per row, [n]. X is [n, D].

    Args:
        topk: the number of labels per row that ``predict`` considers and ``predict_scores``
            returns. Raise it if rows have more than ten labels.
        min_score: the score from which on ``predict`` assigns a label. Only for multi-label
            problems.
        random_state: the seed, or a numpy RandomState.
        arity, max_leaf_size, negatives, beam: as in :meth:`xsoftmax.XRLinear.train`.
        loss, positive_cost, negative_cost, tolerance, sweeps, bias, max_weights: as in
            :meth:`xsoftmax.XRLinear.train`.
        threshold: as in :meth:`xsoftmax.XRLinear.train`. The default suits rows of length 1
            (``TfidfVectorizer``, ``Normalizer``); longer rows need a smaller threshold.

    Attributes:
        model_: the fitted :class:`xsoftmax.XRLinear`.
        classes_: the classes [L] that ``fit`` has seen.
    """
    def __init__(self, *, arity: int = 16, max_leaf_size: int = 100, negatives: str = "tfn",
                 loss: str = "squared_hinge", positive_cost: float = 1.0,
                 negative_cost: float = 1.0, tolerance: float = 0.1, sweeps: int = 100,
                 bias: float = 1.0, threshold: float = 0.1, max_weights: Optional[int] = None,
                 beam: int = 10, topk: int = 10, min_score: float = 0.5,
                 random_state: Any = 0) -> None:
        self.arity, self.max_leaf_size, self.negatives = arity, max_leaf_size, negatives
        self.loss, self.positive_cost, self.negative_cost = loss, positive_cost, negative_cost
        self.tolerance, self.sweeps = tolerance, sweeps
        self.bias, self.threshold, self.max_weights = bias, threshold, max_weights
        self.beam, self.topk, self.min_score = beam, topk, min_score
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "XRLinearClassifier":
        X = validate_data(self, _canonicalize("X", X), accept_sparse="csr", dtype=np.float32)
        if y is None:
            raise ValueError("XRLinearClassifier.fit: requires y to be passed, but the target y is "
                             "None")
        _check_lists(y)
        y = check_array(_canonicalize("y", y, "weights"), accept_sparse="csr", ensure_2d=False,
                        dtype=None, input_name="y")
        check_consistent_length(X, y)
        self.sparse_output_ = sp.issparse(y)
        if not self.sparse_output_ and y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        self.multilabel_ = y.ndim == 2
        if self.multilabel_:
            Y = sp.csr_matrix(y, dtype=np.float32)
            if not np.isin(Y.data, (0, 1)).all():
                raise ValueError("XRLinearClassifier.fit: expected y of several labels as zeros "
                                 f"and ones, got {Y.data[~np.isin(Y.data, (0, 1))][0]}: {_HINT}")
            self.classes_ = np.arange(Y.shape[1])
        else:
            check_classification_targets(y)
            self.classes_, ids = np.unique(y, return_inverse=True)
            Y = sp.csr_matrix((np.ones(len(ids), np.float32), ids, np.arange(len(ids) + 1)),
                              shape=(len(ids), len(self.classes_)))
        X = sp.csr_matrix(X)
        generator = torch.Generator().manual_seed(
            int(check_random_state(self.random_state).randint(2**31 - 1)))
        tree = LabelTree.from_vectors(pifa(X, Y), self.arity, generator=generator,
                                      max_leaf_size=self.max_leaf_size)
        self.model_ = XRLinear.train(X, Y, tree=tree, negatives=self.negatives, beam=self.beam,
                                     loss=self.loss, positive_cost=self.positive_cost,
                                     negative_cost=self.negative_cost, tolerance=self.tolerance,
                                     sweeps=self.sweeps, bias=self.bias, threshold=self.threshold,
                                     max_weights=self.max_weights, generator=generator)
        return self

    def predict_scores(self, X: Any) -> sp.csr_matrix:
        """Returns the scores of the ``topk`` best labels of each row as CSR [n, L]. The entries of
        a row are ordered by decreasing score."""
        check_is_fitted(self)
        return self.model_.predict(
            validate_data(self, _canonicalize("X", X), accept_sparse="csr", dtype=np.float32,
                          reset=False), self.topk, self.beam)

    def decision_function(self, X: Any) -> Any:
        """Returns the log scores of all classes, dense [n, L]. For binary classification returns
        [n], the log score of the second class minus that of the first.

        Unlike ``predict``, which uses a beam search, this scores every class.
        """
        scores = self._log_scores(X)
        return scores[:, 1] - scores[:, 0] if self._is_binary() else scores

    def predict_proba(self, X: Any) -> Any:
        """Returns probabilities of all classes, dense [n, L].

        For multi-label problems these are the scores of the labels; otherwise scores normalised to
        a sum of 1. With ``loss="logistic"`` a score is a product of conditional probabilities; the
        scores of other losses are not calibrated.
        """
        scores = self._log_scores(X)
        if self.multilabel_:
            # scikit-learn requires probabilities in the open interval (0, 1)
            return np.clip(np.exp(scores), np.finfo(np.float64).tiny, 1 - np.finfo(np.float64).eps)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def _is_binary(self) -> bool:
        return not self.multilabel_ and len(self.classes_) == 2

    def _log_scores(self, X: Any) -> Any:
        check_is_fitted(self)
        X = validate_data(self, _canonicalize("X", X), accept_sparse="csr", dtype=np.float32,
                          reset=False)
        classes = len(self.classes_)
        predictions = self.model_.predict(X, classes, classes,
                                          transform=f"log-{self.model_.transform}")
        scores = np.empty(predictions.shape)
        scores[np.repeat(np.arange(predictions.shape[0]), np.diff(predictions.indptr)),
               predictions.indices] = predictions.data
        return scores

    def predict(self, X: Any) -> Any:
        """Predicts labels in the form of the training target.

        For multi-label problems returns an indicator matrix [n, L] of the labels among the ``topk``
        best that score at least ``min_score``; it is sparse if the training target was sparse.
        Otherwise returns the best class of each row, [n].
        """
        scores = self.predict_scores(X)
        if not self.multilabel_:
            return self.classes_[scores.indices[scores.indptr[:-1]]]
        is_kept = scores.data >= self.min_score
        ends = np.r_[0, np.cumsum(is_kept)][scores.indptr]
        labels = sp.csr_matrix((np.ones(int(ends[-1]), np.int64), scores.indices[is_kept], ends),
                               shape=scores.shape)
        return labels if self.sparse_output_ else labels.toarray()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags


def _canonicalize(argument: str, value: Any, kind: str = "features") -> Any:
    """Returns a sparse matrix in canonical form, so that scikit-learn converts a valid matrix.
    Other arguments are returned unchanged."""
    return canonical("XRLinearClassifier", argument, value, kind) if sp.issparse(value) else value


def _check_lists(y: Any) -> None:
    """Raises a ValueError if y holds lists of labels of varying length, or sets."""
    if not isinstance(y, (list, tuple)) or not all(
            isinstance(row, (list, tuple, set, frozenset)) for row in y):
        return
    if any(isinstance(row, (set, frozenset)) for row in y) or len({len(row) for row in y}) > 1:
        raise ValueError("XRLinearClassifier.fit: expected y of several labels as zeros and ones "
                         f"[n, L], got lists of labels: {_HINT}")
