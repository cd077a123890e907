r"""Vectors of labels, for :meth:`xsoftmax.LabelTree.from_vectors`: labels with near vectors share a branch of the tree (Yu et al., 2022, section 2.2).

Where X [n, D] are the examples and Y [n, L] says which labels each has, both scipy sparse matrices::

    pii(Y)            = normalize(Y.T)                            each label by the examples that have it (positive instance indices)
    pifa(X, Y)        = normalize(Y.T @ X)                        by the sum of their features (positive instance feature aggregation)
    pifa_lf(X, Y, Z)  = [(1 - w) pifa(X, Y) | w normalize(Z)]     beside features Z [L, F] of the label itself; or their sum, where F = D
    spectral(Y, dim)  = normalize(V)                              the right singular vectors of Y, scaled, after the first (Dhillon, Eq. 12)

`normalize` is :func:`unit_rows`; rows of labels without an example stay 0. All are float32; the first three are CSR, the last is dense.
"""

from typing import TYPE_CHECKING, Union

import numpy as np
import torch

from . import _long_work
from ._checks import check_count
from ._public import public_names
from ._sparse import canonical, csr_matrix, index_tensors, Matrix, sparse_tensors

if TYPE_CHECKING:
    import scipy.sparse

# Singular values and lengths below these, relative to the largest, are rounding errors.
_NO_VALUE, _NO_LENGTH = 1e-7, 1e-10

__all__ = ["pifa", "pifa_lf", "pii", "spectral", "unit_rows"]
__dir__ = public_names(__all__)


def pii(Y: Matrix) -> "scipy.sparse.csr_matrix":
    """``normalize(Y.T)`` [L, n]; see :mod:`xsoftmax.label_vectors`."""
    return unit_rows(canonical("pii", "Y", Y, "labels").T.tocsr())


def pifa(X: Matrix, Y: Matrix) -> "scipy.sparse.csr_matrix":
    """``normalize(Y.T @ X)`` [L, D]; see :mod:`xsoftmax.label_vectors`. Rows of X should be of length 1."""
    X, Y = canonical("pifa", "X", X), canonical("pifa", "Y", Y, "labels")
    if X.shape[0] != Y.shape[0]:
        raise ValueError(f"pifa: expected X and Y with as many rows, got {X.shape[0]} and {Y.shape[0]}")
    sums = _long_work.run("label vectors", torch.ops.xsoftmax.sparse_row_sums, *sparse_tensors(X, "pifa"), X.shape[1], *index_tensors(Y.tocsc()))
    return csr_matrix(sums[0], sums[1], sums[2], (Y.shape[1], X.shape[1]))


def pifa_lf(X: Matrix, Y: Matrix, Z: Matrix, weight: float = 0.5, concatenate: bool = True) -> "scipy.sparse.csr_matrix":
    """:func:`pifa` beside features of the labels themselves; see :mod:`xsoftmax.label_vectors`.

    Args:
        Z: [L, F], such as tf-idf of the labels' titles.
        weight: of Z, in [0, 1]; the rows of the result are of length 1 again.
        concatenate: [L, D + F]; False: the weighted sum, which wants F = D.
    """
    import scipy.sparse as sp

    if not 0 <= weight <= 1:
        raise ValueError(f"pifa_lf: expected weight in [0, 1], got {weight}")
    of_examples, of_labels = pifa(X, Y), unit_rows(canonical("pifa_lf", "Z", Z))
    if of_labels.shape[0] != of_examples.shape[0]:
        raise ValueError(f"pifa_lf: expected Z with a row for each of {of_examples.shape[0]} labels, got {of_labels.shape[0]}")
    parts = np.float32(1 - weight) * of_examples, np.float32(weight) * of_labels
    if concatenate:
        return unit_rows(sp.hstack(parts, format="csr"))
    if parts[0].shape != parts[1].shape:
        raise ValueError(f"pifa_lf: expected Z of shape {list(parts[0].shape)} for a sum, got {list(parts[1].shape)}")
    return unit_rows((parts[0] + parts[1]).tocsr())


def spectral(Y: Matrix, dim: int = 100, seed: Union[int, None] = 0) -> np.ndarray:
    """Of labels as nodes of a graph beside the examples [L, dim]: the co-clustering of Dhillon (KDD 2001), by scipy's sparse SVD; see
    :mod:`xsoftmax.label_vectors`.

    A label without examples has the vector 0; so has one that the first ``dim`` vectors do not tell from 0.

    Args:
        dim: below the numbers of examples and labels, less 1. Columns beyond the rank of Y are 0.
    """
    from scipy.sparse import diags
    from scipy.sparse.linalg import svds

    Y = canonical("spectral", "Y", Y, "labels")
    dim = check_count("spectral", "dim", dim, None)
    if not 1 <= dim < min(Y.shape) - 1:
        raise ValueError(f"spectral: expected dim in [1, {min(Y.shape) - 1}), got {dim}")
    if Y.nnz == 0:
        raise ValueError("spectral: expected Y with at least one label of an example, got none")
    counts = [np.asarray(Y.sum(axis), np.float64).ravel() for axis in (1, 0)]
    scale = [1 / np.sqrt(np.maximum(count, 1)) for count in counts]
    scaled = (diags(scale[0]) @ Y @ diags(scale[1])).astype(np.float64)
    _, values, vectors = svds(scaled, k=dim + 1, random_state=seed)
    vectors = vectors[::-1][1:].T  # the first says only that all belong together
    vectors[:, values[::-1][1:] < _NO_VALUE * values.max()] = 0  # any vectors of these are singular
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    there = (lengths > _NO_LENGTH) & (counts[1] > 0)[:, None]
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=there).astype(np.float32, order="C")


def unit_rows(X: Matrix) -> "scipy.sparse.csr_matrix":
    """Each row of X, scipy sparse, divided by its length; rows of zeros stay. CSR, float32, columns sorted."""
    rows = canonical("unit_rows", "X", X)
    counts = np.diff(rows.indptr)
    squares = np.add.reduceat(np.append(np.square(rows.data, dtype=np.float64), 0), np.minimum(rows.indptr[:-1], rows.nnz)) * (counts > 0)
    lengths = np.sqrt(squares)  # of float32 numbers a length may be above or below what float32 has
    data = np.empty(rows.nnz, np.float32)
    np.divide(rows.data, np.repeat(np.where(lengths > 0, lengths, 1), counts), out=data, casting="same_kind")
    return type(rows)((data, rows.indices.copy(), rows.indptr.copy()), shape=rows.shape)
