"""Label vectors equal their dense definitions."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xsoftmax import label_vectors

X = sp.random(80, 300, 0.1, format="csr", dtype=np.float32, random_state=1)
Y = sp.random(80, 150, 0.05, format="csr", random_state=2)
Z = sp.random(150, 300, 0.1, format="csr", random_state=3)
HAS = (Y.toarray() != 0).astype(float)


def normalized(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def test_vectors_equal_their_definitions():
    assert (HAS.sum(0) == 0).any()  # some labels have no example
    pifa = normalized(HAS.T @ X.toarray())
    np.testing.assert_allclose(label_vectors.pii(Y).toarray(), normalized(HAS.T), atol=1e-6)
    np.testing.assert_allclose(label_vectors.pifa(X, Y).toarray(), pifa, atol=1e-6)
    np.testing.assert_allclose(
        label_vectors.pifa_lf(X, Y, Z, 0.25).toarray(),
        normalized(np.hstack([0.75 * pifa, 0.25 * normalized(Z.toarray())])), atol=1e-6)
    np.testing.assert_allclose(
        label_vectors.pifa_lf(X, Y, Z, concatenate=False).toarray(),
        normalized(pifa + normalized(Z.toarray())), atol=1e-6)
    found = label_vectors.spectral(Y, 6)
    scale = [1 / np.sqrt(np.maximum(HAS.sum(axis), 1)) for axis in (1, 0)]
    _, _, vectors = np.linalg.svd(scale[0][:, None] * HAS * scale[1])
    want = normalized((vectors[1:7] * scale[1]).T)  # the first singular vector is left out
    np.testing.assert_allclose(abs(found), abs(want), atol=1e-4)  # signs are free
    assert all(part.dtype == np.float32 and part.has_canonical_format
               for part in (label_vectors.pii(Y), label_vectors.pifa(X, Y)))


def test_unit_rows_have_length_one_and_zero_rows_stay():
    rows = sp.csr_matrix(np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -2.0]]))
    np.testing.assert_allclose(
        label_vectors.unit_rows(rows).toarray(), [[0.6, 0.8, 0], [0, 0, 0], [0, 0, -1]], rtol=1e-6)
    # the argument is unchanged
    assert rows[0, 0] == 3 and label_vectors.unit_rows(sp.csr_matrix((0, 4))).shape == (0, 4)


def test_sparse_row_sums_equal_dense_sums_for_any_threads(same_for_any_threads):
    """With few and many features, and lists that repeat a row."""
    op = torch.ops.xsoftmax.sparse_row_sums
    rows = [
        torch.from_numpy(X.indptr).long(),
        torch.from_numpy(X.indices),
        torch.from_numpy(X.data)
    ]
    lists = [[3, 3, 7], [], [79], list(range(80))] * 50
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in lists])])
    chosen = torch.tensor([row for part in lists for row in part], dtype=torch.int32)
    found = op(*rows, 300, offsets, chosen)
    for width in (300, 10**6):
        same_for_any_threads(lambda: op(*rows, width, offsets, chosen))
        assert all(
            torch.equal(one, two) for one, two in zip(found, op(*rows, width, offsets, chosen)))
    want = normalized(np.stack([X.toarray()[part].sum(0) for part in lists]))
    np.testing.assert_allclose(
        sp.csr_matrix(tuple(part.numpy() for part in (found[2], found[1], found[0])),
                      shape=(200, 300)).toarray(), want, atol=1e-6)
    for changed, message in (((rows[0], rows[1], rows[2], 299, offsets, chosen),
                              r"columns in \[0, 299\)"), ((*rows, 300, offsets, chosen + 1),
                                                          r"list_rows in \[0, 80\)"),
                             ((*rows, 300, offsets + 1, chosen), "list_offsets")):
        with pytest.raises((ValueError, IndexError), match=message):
            op(*changed)


@pytest.mark.parametrize("call, error, message", [
    (lambda: label_vectors.pifa(X.toarray(), Y), TypeError, "pifa: expected X as a scipy sparse "
     "matrix, got ndarray"),
    (lambda: label_vectors.pifa(X, Y[:70]), ValueError, "as many rows, got 80 and 70"),
    (lambda: label_vectors.pifa_lf(X, Y, Z, 1.5), ValueError, r"weight in \[0, 1\]"),
    (lambda: label_vectors.pifa_lf(X, Y, Z, np.full(150, -0.1)), ValueError,
     r"weight in \[0, 1\], got -0.1"),
    (lambda: label_vectors.pifa_lf(X, Y, Z, 0.5j), TypeError, "weight as a number or an array"),
    (lambda: label_vectors.pifa_lf(X, Y, Z, "a"), TypeError, "weight as a number or an array"),
    (lambda: label_vectors.pifa_lf(X, Y, Z, np.full(9, 0.1)), ValueError,
     r"an array of 150 labels, got shape \[9\]"),
    (lambda: label_vectors.pifa_lf(X, Y, Z[:9]), ValueError, "each of 150 labels, got 9"),
    (lambda: label_vectors.pifa_lf(X, Y, Z[:, :9], concatenate=False), ValueError,
     r"Z of shape \[150, 300\]"),
    (lambda: label_vectors.spectral(Y, 80), ValueError, r"dim in \[1, 79\)"),
])
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_each_label_has_its_weight_of_features():
    weights = np.linspace(0, 1, 150)
    found = label_vectors.pifa_lf(X, Y, Z, weights).toarray()
    for label in (0, 40, 149):
        want = label_vectors.pifa_lf(X, Y, Z, float(weights[label])).toarray()[label]
        np.testing.assert_allclose(found[label], want, atol=1e-6)


def test_a_tree_is_built_from_spectral_vectors():
    tree = xs.LabelTree.from_vectors(label_vectors.spectral(Y, 5), 4, max_leaf_size=10)
    assert tree.num_classes == 150


def test_unit_rows_sums_duplicate_entries():
    parts = sp.csr_matrix((np.full(2, 0.5, np.float32), np.zeros(2, int), [0, 2]), shape=(1, 3))
    np.testing.assert_allclose(label_vectors.unit_rows(parts).toarray(), [[1, 0, 0]])
    assert parts.nnz == 2


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rank", [None, 2])
def test_spectral_vectors_of_labels_without_examples_are_zero(seed, rank):
    """Rounding errors are not normalized, neither for such labels nor beyond the rank of Y."""
    has = (np.random.default_rng(1).random((60, 25)) < 0.15).astype(np.float32)
    if rank is not None:
        has = has[np.arange(60) % rank][:, np.arange(25)]
    has[:, [0, 7]] = 0
    found = label_vectors.spectral(sp.csr_matrix(has), 5, seed=seed)
    lengths = np.linalg.norm(found, axis=1)
    assert not found[[0, 7]].any() and np.isfinite(found).all()
    assert np.allclose(lengths[has.any(0)], 1, atol=1e-6) or rank is not None
    if rank is not None:
        assert not found[:, rank - 1:].any() and ((lengths < 1e-6) |
                                                  (abs(lengths - 1) < 1e-6)).all()


def test_unit_rows_of_very_small_and_very_large_numbers():
    """Lengths that overflow float32 or are subnormal."""
    for size in (3e38, 1e-42, 1e-45):
        rows = sp.csr_matrix(np.full((1, 4), size, np.float32))
        np.testing.assert_allclose(
            label_vectors.unit_rows(rows).toarray(), np.full((1, 4), 0.5), rtol=1e-6)
