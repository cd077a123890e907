r"""Label vectors for :meth:`xsoftmax.LabelTree.from_vectors`, which places labels with similar
vectors on the same branch of the tree (Yu et al., 2022, section 2.2).

For examples X [n, D] and labels Y [n, L], both scipy sparse matrices::

    pii(Y)           = normalize(Y.T)
    pifa(X, Y)       = normalize(Y.T @ X)
    pifa_lf(X, Y, Z) = [(1 - w) pifa(X, Y) | w normalize(Z)]
    spectral(Y, dim) = normalize(V)
- `pii` (positive instance indices): the examples of each label.
- `pifa` (positive instance feature aggregation): the sum of the features of those examples.
- `pifa_lf`: `pifa` together with label features Z [L, F]; or the sum of both parts, if F = D.
- `spectral`: the scaled right singular vectors of Y, without the first (Dhillon, Eq. 12).
- `spectral`: the scaled right singular vectors of Y, without the first (Dhillon, Eq. 12).
`normalize` is :func:`unit_rows`. Rows of labels without examples are 0. All results are float32;
the first three are CSR, the last is dense.
"""

from typing import TYPE_CHECKING, Union

import numpy as np
import torch

from ._core import long_work
from ._core.checks import check_count
from ._core.public import public_names
from ._core.sparse import canonical, csr_matrix, index_tensors, Matrix, sparse_tensors

if TYPE_CHECKING:
    import scipy.sparse

# Singular values and lengths below these fractions are treated as rounding errors.
_NO_VALUE, _NO_LENGTH = 1e-7, 1e-10

__all__ = ["pifa", "pifa_lf", "pii", "spectral", "unit_rows"]
__dir__ = public_names(__all__)


def pii(Y: Matrix) -> "scipy.sparse.csr_matrix":
    """Returns ``normalize(Y.T)`` [L, n]: each label's vector is the indicator of its examples. See
    :mod:`xsoftmax.label_vectors`."""
    return unit_rows(canonical("pii", "Y", Y, "labels").T.tocsr())


def pifa(X: Matrix, Y: Matrix) -> "scipy.sparse.csr_matrix":
    """Returns ``normalize(Y.T @ X)`` [L, D]: each label's vector is the normalised sum of the
    features of its examples. Rows of X should have length 1. See :mod:`xsoftmax.label_vectors`."""
    X, Y = canonical("pifa", "X", X), canonical("pifa", "Y", Y, "labels")
    if X.shape[0] != Y.shape[0]:
        raise ValueError(f"pifa: expected X and Y with as many rows, got {X.shape[0]} and "
                         f"{Y.shape[0]}")
    offsets, labels = index_tensors(Y)
    label_rows = torch.ops.xsoftmax.node_rows([offsets], [labels],
                                              [torch.arange(Y.shape[1], dtype=torch.int32)],
                                              Y.shape[1])[:2]
    sums = long_work.run("label vectors", torch.ops.xsoftmax.sparse_row_sums,
                         *sparse_tensors(X, "pifa"), X.shape[1], *label_rows)
    return csr_matrix(sums[0], sums[1], sums[2], (Y.shape[1], X.shape[1]))


def pifa_lf(X: Matrix, Y: Matrix, Z: Matrix, weight: Union[float, np.ndarray] = 0.5,
            concatenate: bool = True) -> "scipy.sparse.csr_matrix":
    """Combines :func:`pifa` with features of the labels themselves. See
    :mod:`xsoftmax.label_vectors`.

    Args:
        X: scipy sparse [n, D], the examples.
        Y: scipy sparse [n, L], their labels.
        Z: scipy sparse [L, F], label features such as tf-idf of the labels' titles.
        weight: the weight of Z, in [0, 1]: one for all labels, or one per label, an array [L],
            for example larger for labels with few examples.
        concatenate: True: concatenate both parts to [L, D + F]. False: add them, which requires
            F = D.

    Returns:
        A scipy CSR matrix, float32, whose rows have length 1.
    """
    import scipy.sparse as sp

    weights = np.asarray(weight)
    if weights.dtype.kind not in "fiu":
        raise TypeError("pifa_lf: expected weight as a number or an array of numbers, got "
                        f"{type(weight).__name__} of dtype {weights.dtype}")
    weights = weights.astype(np.float32)
    is_outside = ~((weights >= 0) & (weights <= 1))
    if is_outside.any():
        raise ValueError(f"pifa_lf: expected weight in [0, 1], got {weights[is_outside][0]}")
    example_vectors, feature_vectors = pifa(X, Y), unit_rows(canonical("pifa_lf", "Z", Z))
    if feature_vectors.shape[0] != example_vectors.shape[0]:
        raise ValueError(f"pifa_lf: expected Z with a row for each of {example_vectors.shape[0]} "
                         f"labels, got {feature_vectors.shape[0]}")
    if weights.shape not in ((), example_vectors.shape[:1]):
        raise ValueError(f"pifa_lf: expected weight as a number or an array of "
                         f"{example_vectors.shape[0]} labels, got shape {list(weights.shape)}")
    column = np.broadcast_to(weights, example_vectors.shape[:1])
    parts = sp.diags(1 - column) @ example_vectors, sp.diags(column) @ feature_vectors
    if concatenate:
        return unit_rows(sp.hstack(parts, format="csr"))
    if parts[0].shape != parts[1].shape:
        raise ValueError(f"pifa_lf: expected Z of shape {list(parts[0].shape)} for a sum, got "
                         f"{list(parts[1].shape)}")
    return unit_rows((parts[0] + parts[1]).tocsr())


def spectral(Y: Matrix, dim: int = 100, seed: Union[int, None] = 0) -> np.ndarray:
    """Returns label vectors [L, dim] by spectral co-clustering of labels and examples, as the two
    sides of a bipartite graph (Dhillon, KDD 2001), with scipy's sparse SVD. See
    :mod:`xsoftmax.label_vectors`.

    The vector is 0 for a label without examples, and for a label whose first ``dim`` components are
    numerically 0.

    Args:
        Y: scipy sparse [n, L], the labels of each example.
        dim: at least 1 and less than min(n, L) - 1. Columns beyond the rank of Y are 0.
        seed: the random state of the SVD.
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
    vectors = vectors[::-1][1:].T  # the first vector is trivial: it does not separate anything
    # singular vectors of a zero singular value are arbitrary
    vectors[:, values[::-1][1:] < _NO_VALUE * values.max()] = 0
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    has_length = (lengths > _NO_LENGTH) & (counts[1] > 0)[:, None]
    return np.divide(vectors, lengths, out=np.zeros_like(vectors),
                     where=has_length).astype(np.float32, order="C")


def unit_rows(X: Matrix) -> "scipy.sparse.csr_matrix":
    """Divides each row of a scipy sparse matrix by its Euclidean length; zero rows stay 0. Returns
    CSR, float32, with sorted columns."""
    rows = canonical("unit_rows", "X", X)
    counts = np.diff(rows.indptr)
    squares = np.add.reduceat(np.append(np.square(rows.data, dtype=np.float64), 0),
                              np.minimum(rows.indptr[:-1], rows.nnz)) * (counts > 0)
    lengths = np.sqrt(squares)  # in float64: a length may overflow or underflow in float32
    data = np.empty(rows.nnz, np.float32)
    np.divide(rows.data, np.repeat(np.where(lengths > 0, lengths, 1), counts), out=data,
              casting="same_kind")
    return type(rows)((data, rows.indices.copy(), rows.indptr.copy()), shape=rows.shape)
