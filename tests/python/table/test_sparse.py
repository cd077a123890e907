"""Sparse matrices at every entry point: any format, order and dtype gives the results of canonical
form.

Malformed matrices are refused before compiled code reads memory by their indices.
"""

import contextlib
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from sparse_checks import CONTAINERS, MODEL, X, Y, saved
from xr_linear_checks import parts, same, small
from xsoftmax import label_vectors
from xsoftmax._core.sparse import canonical
from xsoftmax.datasets import read_examples, read_sparse

KINDS = ["features", "labels", "weights", "scores"]
FOUND = MODEL.predict(X, 5)


def messy(matrix, seed=0):
    """The same matrix with split entries, entries that cancel, and unordered rows."""
    random, coo = np.random.default_rng(seed), matrix.tocoo()
    spot = random.integers(0, matrix.shape[0], 30), random.integers(0, matrix.shape[1], 30)
    row, column = (np.concatenate([index, index, at, at])
                   for index, at in zip((coo.row, coo.col), spot))
    value = np.concatenate([coo.data / 2, coo.data / 2,
                            np.full(30, 3.0),
                            np.full(30, -3.0)]).astype(np.float32)
    order = random.permutation(len(row))
    order = order[np.argsort(row[order], kind="stable")]
    ends = np.r_[0, np.cumsum(np.bincount(row, minlength=matrix.shape[0]))]
    return sp.csr_matrix((value[order], column[order], ends), shape=matrix.shape)


def scores_of(matrix):
    """Distinct scores at the entries of a matrix."""
    scores = matrix.copy()
    scores.data = np.linspace(1, 2, scores.nnz, dtype=np.float32)
    return scores


def ensemble(part):
    return xs.combine_predictions([part, FOUND], "rank")


def classifier(features, labels):
    sklearn = pytest.importorskip("xsoftmax.sklearn", reason="needs scikit-learn")
    return parts(sklearn.XRLinearClassifier(arity=3, max_leaf_size=5).fit(features, labels).model_)


# Name -> (function of a matrix and a folder for files, the matrix to pass).
ENTRY_POINTS = {
    "train X": (lambda x, _: parts(small(x, Y)), X),
    "train Y": (lambda y, _: parts(small(X, y)), Y),
    "train user_negatives": (
        lambda y, _: parts(small(X, Y, negatives="tfn+user", user_negatives=y)), Y),
    "train relevance": (lambda y, _: parts(small(X, Y, relevance=y)), Y),
    "predict": (lambda x, _: MODEL.predict(x, 5).toarray(), X),
    "topk": (lambda x, _: MODEL.topk(x, 5), X),
    "targets": (lambda y, _: xs.HierarchicalMatcher.targets(y), Y),
    "tree": (lambda v, _: xs.LabelTree.from_vectors(v, 3, max_leaf_size=4, generator=torch.
                                                    Generator().manual_seed(0)).tables(), X),
    "pii": (lambda y, _: label_vectors.pii(y).toarray(), Y),
    "pifa X": (lambda x, _: label_vectors.pifa(x, Y).toarray(), X),
    "pifa Y": (lambda y, _: label_vectors.pifa(X, y).toarray(), Y),
    "pifa_lf Z": (lambda z, _: label_vectors.pifa_lf(X, Y, z).toarray(), X[:12]),
    "spectral": (lambda y, _: label_vectors.spectral(y, 4), Y),
    "unit_rows": (lambda x, _: label_vectors.unit_rows(x).toarray(), X),
    "truth": (lambda y, _: [
        xs.metrics.precision_at_k(FOUND, y, 3),
        xs.metrics.psp_at_k(FOUND, y, 3, torch.linspace(0.1, 1, 12))
    ], Y),
    "predictions": (
        lambda part, _: [xs.metrics.ndcg_at_k(part, Y, 2),
                         xs.metrics.recall_at_k(part, Y, 1)], scores_of(Y)),
    "combine_predictions": (lambda part, _: ensemble(part).toarray(), scores_of(Y)),
    "read_sparse": (lambda x, folder: read_sparse(saved(folder, x)).toarray(), X),
    "read_examples X": (
        lambda x, folder: read_examples(saved(folder, x), saved(folder, Y))[0].toarray(), X),
    "read_examples Y": (
        lambda y, folder: read_examples(saved(folder, X), saved(folder, y))[1].toarray(), Y),
    "classifier X": (lambda x, _: classifier(x, Y), X),
    "classifier y": (lambda y, _: classifier(X, y), Y),
}
entry_points = pytest.mark.parametrize("entry_point", ENTRY_POINTS)


def equal(found, want):
    if isinstance(found, tuple) or (isinstance(found, list) and isinstance(found[0], torch.Tensor)):
        return same(list(found), list(want))
    return np.array_equal(np.asarray(found), np.asarray(want))


@entry_points
def test_any_format_gives_what_canonical_form_gives(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    want = call(matrix, tmp_path)
    for container in CONTAINERS:
        given = container(matrix)
        if "read" in entry_point and given.format in ("lil", "dok"):
            continue  # scipy does not write them
        assert equal(call(given, tmp_path), want), container.__name__


@entry_points
def test_repeated_entries_are_summed_and_zero_sums_dropped(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    want = call(matrix, tmp_path)
    given = messy(matrix)
    kept = given.copy()
    assert equal(call(given, tmp_path), want)
    assert equal(call(given.tocsc(), tmp_path), want)
    wide = given.copy()
    wide.indices, wide.indptr, wide.data = wide.indices.astype(np.int64), wide.indptr.astype(
        np.int64), wide.data.astype(np.float64)
    assert equal(call(wide, tmp_path), want)
    for name in ("data", "indices", "indptr"):  # the caller's arrays are not modified
        assert np.array_equal(getattr(given, name), getattr(kept, name))


@entry_points
def test_read_only_arrays_are_read_without_a_warning(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    want = call(matrix, tmp_path)
    for given in (matrix.copy(), messy(matrix), matrix.tocsc(), matrix.tocoo()):
        for name in ("data", "indices", "indptr", "row", "col"):
            if hasattr(given, name):
                getattr(given, name).flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(call(given, tmp_path), want)


@entry_points
def test_a_row_of_one_dimension_is_refused_by_name(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    for container in (sp.csr_array, sp.coo_array):
        with pytest.raises(ValueError, match=r": expected .* of two dimensions, got shape \[\d+\]"):
            call(container(np.ones(matrix.shape[1])), tmp_path)


def unsound(matrix):
    """Matrices whose parts would lead reads out of bounds, by name."""
    def changed(name, change):
        part = matrix.asformat(name, copy=True)
        change(part)
        return part

    def put(name, at, value):
        return lambda part: getattr(part, name).__setitem__(at, value)

    def falls(part):
        part.indptr[1:-1], part.indptr[-1] = 10**6, 0

    yield from ((f"{name} {what}", changed(name, change)) for name in ("csr", "csc", "bsr")
                for what, change in (("no entries at the end", falls), ("offsets that fall",
                                                                        put("indptr", 2, 10**8)),
                                     ("a negative offset", put("indptr", 1, -5)),
                                     ("a first offset",
                                      put("indptr", 0, 1)), ("more entries than there are",
                                                             put("indptr", -1, 10**8)),
                                     ("a far index",
                                      put("indices", 3, 10**6)), ("a negative index",
                                                                  put("indices", 3, -7)),
                                     ("too few offsets",
                                      lambda part: setattr(part, "indptr", part.indptr[:-2])),
                                     ("too few indices",
                                      lambda part: setattr(part, "indices", part.indices[:2])),
                                     ("too few values",
                                      lambda part: setattr(part, "data", part.data[:2]))))
    for what, change in (("a far row", put("row", 3,
                                           10**6)), ("a negative column", put("col", 3, -7)),
                         ("too few values", lambda part: setattr(part, "data", part.data[:2]))):
        yield f"coo {what}", changed("coo", change)
    lists = matrix.tolil()
    lists.data[0] = [1.0] * 10**4
    yield "lil more values than columns", lists
    lists = matrix.tolil()
    lists.rows[0][0] = 10**6
    yield "lil a far column", lists
    diagonals = matrix.todia()
    diagonals.offsets = diagonals.offsets[:-1]
    yield "dia too few offsets", diagonals


def of_other_objects(matrix):
    """Matrices whose parts are not numeric arrays, by name."""
    for name in ("csr", "csc", "bsr", "coo", "dia"):
        for attribute in ("data", "indices", "indptr", "offsets"):
            if hasattr(matrix.asformat(name), attribute):
                for what, other in (("a list", list), ("None", lambda part: None),
                                    ("objects", lambda part: part.astype(object))):
                    part = matrix.asformat(name, copy=True)
                    setattr(part, attribute, other(getattr(part, attribute)))
                    yield f"{name} {attribute} {what}", part
    for attribute, value in (("rows", 2**70), ("rows", None), ("rows", "x"), ("data", None),
                             ("data", "x")):
        lists = matrix.tolil()
        getattr(lists, attribute)[0] = [value, *getattr(lists, attribute)[0][1:]]
        yield f"lil {attribute} with {value}", lists
        if value is None:
            lists = matrix.tolil()
            getattr(lists, attribute)[0] = None
            yield f"lil {attribute}[0] of None", lists
            setattr(lists, attribute, None)
            yield f"lil {attribute} of None", lists
    rows = matrix.tocoo().row
    for coords in (None, (rows.tolist(), rows.tolist()), (1, 2)):
        part = matrix.tocoo()
        if hasattr(part, "coords"):  # older scipy has no coords
            part.coords = coords
            yield f"coo coords of {type(coords).__name__}", part
    for key, value in (((2**70, 0), 1.0), ((0, None), 1.0), (3, 1.0), ((0, 0), None)):
        keys = matrix.todok()
        keys._dict[key] = value
        yield f"dok {key} {value}", keys


@entry_points
def test_parts_that_are_not_arrays_are_refused(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    if "read" in entry_point:
        return  # files can hold arrays only
    for what, given in of_other_objects(matrix):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(given, tmp_path)
        assert ": expected " in str(caught.value), what


@pytest.mark.parametrize(
    "offsets", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.longlong, ">i4"])
@pytest.mark.parametrize(
    "indices", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.longlong, ">i4"])
def test_queries_with_indices_of_any_dtype(offsets, indices):
    """scipy keeps an assigned dtype, but operators accept few."""
    given = X[:3].copy()
    want = MODEL.topk(given, 5)
    given.indptr, given.indices = given.indptr.astype(offsets), given.indices.astype(indices)
    assert equal(MODEL.topk(given, 5), want)
    assert (MODEL.predict(given, 5) != FOUND[:3]).nnz == 0


@entry_points
def test_a_malformed_matrix_is_refused_before_its_indices_are_read(entry_point, tmp_path):
    call, matrix = ENTRY_POINTS[entry_point]
    for what, given in unsound(matrix):
        if "read" in entry_point and given.format == "lil":
            continue  # scipy does not write them
        with pytest.raises((ValueError, IndexError)) as caught:
            call(given, tmp_path)
        assert ": expected " in str(caught.value), what


@pytest.mark.parametrize("dtype", [
    bool, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.longdouble,
    ">f4", ">i4"
])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind, dtype):
    """Against a dense array. Sums do not overflow the dtype of the matrix: 128 + 128 in uint8 must
    not drop a label."""
    dense = (np.random.default_rng(0).random((9, 7)) < 0.4).astype(dtype)
    rows, twice = sp.csr_matrix(dense.astype(np.float32)), sp.csr_matrix(
        (np.ones(2, np.float32), [3, 3], [0, 2]), shape=(1, 7))
    for part in (rows, twice):
        part.data = part.data.astype(dtype)
    # to compiled code of scipy
    unknown = np.dtype(dtype) in (np.float16, np.dtype(">f4"), np.dtype(">i4"))
    for given in (rows,) if unknown else [container(dense) for container in CONTAINERS]:
        found = canonical("test", "X", given, kind)
        found.check_format(full_check=True)
        exact = np.can_cast(dtype, np.float32) or kind != "scores"
        assert found.format == "csr" and found.data.dtype == (np.float32 if exact else np.float64)
        assert np.array_equal(found.toarray(), dense.astype(np.float64))
    assert canonical("test", "X", twice, kind).toarray()[0, 3] == (1 if kind == "labels" else 2)


def test_sums_do_not_overflow_small_dtypes():
    twice = sp.csr_matrix((np.full(2, 128, np.uint8), [3, 3], [0, 2]), shape=(1, 7))
    for container in CONTAINERS[:4]:
        given = container(twice) if container.__name__.startswith("csr") else twice.tocsc()
        assert canonical("test", "Y", given, "labels").indices.tolist() == [3]
        assert canonical("test", "X", given).data.tolist() == [256.0]


def test_a_canonical_matrix_is_not_copied():
    for given in (X, sp.csr_array(X)):
        assert canonical("test", "X", given) is given
        assert canonical("test", "X", given, "weights") is given and canonical(
            "test", "X", given, "scores") is given
    assert canonical("test", "Y", Y, "labels") is Y
    for other in (X.astype(np.float64), canonical("test", "Y", X, "labels")):
        assert np.shares_memory(canonical("test", "X", other).indices, other.indices)
    longer = sp.csr_matrix(X)
    longer.data, longer.indices = np.append(X.data, np.nan).astype(np.float32), np.append(
        X.indices, 10**6).astype(np.int32)
    # entries behind the last row are not read
    assert np.array_equal(canonical("test", "X", longer).toarray(), X.toarray())


@pytest.mark.parametrize("kind", KINDS)
def test_values_outside_the_range_of_float32(kind):
    def of(values):
        return canonical(
            "test", "X",
            sp.csr_matrix((np.array(values), np.zeros(len(values), int), [0, len(values)]),
                          shape=(1, 3)), kind)

    for values in ([np.nan], [np.inf], [1e300], [1.8e308, 1e308], [3e38,
                                                                   3e38], [1e308, 1e308, -1e308]):
        with np.errstate(over="ignore"):
            total = np.sum(values)
        fine = kind == "scores" and not np.isnan(total)
        with contextlib.nullcontext() if fine else pytest.raises(ValueError,
                                                                 match="test: expected X .*finite"):
            assert of(values).nnz == 1
    assert of([1e-60]).nnz == (0 if kind == "features" else 1)
    assert of([0.0]).nnz == (1 if kind in ("weights", "scores") else 0)
    assert of([3.0, -3.0]).nnz == 0 and of([1e30, -1e30]).nnz == 0


def test_scores_keep_their_order_and_their_zeros():
    """0 is the best score of "log-l3-hinge", and equal scores keep their order."""
    scores = sp.csr_matrix(
        (np.array([0.0, -1.0, -1.0, -3.0, 2.0, 5.0]), [4, 2, 0, 1, 1, 1], [0, 3, 6]), shape=(2, 5))
    found = canonical("test", "scores", scores, "scores")
    assert found.indices.tolist() == [4, 2, 0, 1] and found.data.tolist() == [0.0, -1.0, -1.0, 4.0]
    assert xs.metrics.precision_at_k(scores, [[4], [1]], 1) == 1 and xs.metrics.recall_at_k(
        scores, [[2], [1]], 2) == 1


def test_more_columns_than_int32_holds(tmp_path):
    """Indices are not truncated; operators that take int32 refuse the matrix."""
    wide = sp.csr_matrix(
        (np.ones(4, np.float32), np.array([0, 2**32 + 1, 2**32 + 1, 3]), np.arange(5)),
        shape=(4, 2**33))
    labels = sp.csr_matrix(np.eye(4, dtype=np.float32))
    found, _ = read_examples(saved(tmp_path, wide), saved(tmp_path, labels))
    assert found.shape == wide.shape and found.indices.tolist() == wide.indices.tolist()
    for call in (lambda: xs.XRLinear.train(wide, labels), lambda: label_vectors.pifa(wide, labels),
                 lambda: MODEL.predict(wide), lambda: label_vectors.pii(wide),
                 lambda: xs.HierarchicalMatcher.targets(wide),
                 lambda: xs.LabelTree.from_vectors(wide, 2, max_leaf_size=2)):
        with pytest.raises(ValueError, match=r"2\^31 - 1|expected 20 features"):
            call()


def test_queries_of_the_torch_class_are_brought_to_canonical_form():
    """Also in C++ and TorchScript: the same bits for any order and for split entries."""
    given = messy(X)
    canon = canonical("test", "X", given)

    def predict(matrix, dtype):
        return MODEL.model.predict(
            torch.from_numpy(matrix.indptr).to(dtype),
            torch.from_numpy(matrix.indices).to(dtype), torch.from_numpy(matrix.data), None, 20, 5,
            10, "", "", None)

    for dtype in (torch.int32, torch.int64):
        assert same(predict(given, dtype), predict(canon, dtype))
    lists = torch.sparse_csr_tensor(torch.from_numpy(canon.indptr), torch.from_numpy(canon.indices),
                                    torch.from_numpy(canon.data), canon.shape)
    assert same(MODEL.topk(lists, 5), MODEL.topk(given, 5))


def test_the_operator_for_any_number_of_threads(same_for_any_threads):
    given = messy(sp.random(3000, 200, 0.2, format="csr", dtype=np.float32, random_state=0))
    rows = torch.from_numpy(given.indptr).long(), torch.from_numpy(given.indices), torch.from_numpy(
        given.data)
    for kind in KINDS:
        same_for_any_threads(lambda kind=kind: torch.ops.xsoftmax.canonical_rows(*rows, 200, kind))
        offsets, columns, values = torch.ops.xsoftmax.canonical_rows(*rows, 200, kind)
        want = given.copy()
        want.sum_duplicates()
        want.data[abs(want.data) < 1e-6] = 0
        want.eliminate_zeros()
        found = sp.csr_matrix((values.numpy(), columns.numpy(), offsets.numpy()), shape=want.shape)
        assert np.array_equal(found.toarray() != 0, want.toarray() != 0)
        assert kind == "labels" or np.allclose(found.toarray(), want.toarray(), atol=1e-6)
    with pytest.raises(ValueError, match="canonical_rows: expected kind as features"):
        torch.ops.xsoftmax.canonical_rows(*rows, 200, "rows")
    for args, error, message in (((rows[0] + 1, *rows[1:]), ValueError, "offsets"),
                                 ((rows[0], rows[1] + 7, rows[2]), IndexError,
                                  "columns in"), ((*rows[:2], rows[2][:-1]), ValueError, "values"),
                                 ((rows[0], rows[1].float(), rows[2]), TypeError, "columns")):
        with pytest.raises(error, match=f"canonical_rows: .*{message}"):
            torch.ops.xsoftmax.canonical_rows(*args, 200, "features")


def test_errors_say_how_to_make_a_sparse_matrix():
    for call, words in ((lambda: xs.XRLinear.train(X, [[1, 2], [3]]), "MultiLabelBinarizer"),
                        (lambda: xs.XRLinear.train(X.toarray(), Y), "csr_matrix"),
                        (lambda: label_vectors.pii([[1], [2]]), "MultiLabelBinarizer"),
                        (lambda: xs.HierarchicalMatcher.targets([[1]]), "MultiLabelBinarizer")):
        with pytest.raises(TypeError, match=f"as a scipy sparse matrix, got .*{words}"):
            call()
    with pytest.raises(
            ValueError, match=r"as many rows, got 60 and 50: X is \[n, D\], here \[60, "
            r"20\], Y is \[n, L\], here \[50, 12\]"):
        xs.XRLinear.train(X, Y[:50])
    with pytest.warns(UserWarning, match="as if they had been swapped"):
        xs.XRLinear.train(Y, X)
    for metric in (xs.metrics.precision_at_k, xs.metrics.recall_at_k, xs.metrics.ndcg_at_k):
        with pytest.raises(
                ValueError, match=r"at least 10 predictions of a query, got 5 at most: "
                r"predict with topk=10, or choose k=5"):
            metric(FOUND, Y, 10)
    with pytest.raises(
            ValueError, match=r"truth of shape \[Q\], got \[60, 12\]: "
            r"scipy.sparse.csr_matrix\(truth.numpy\(\)\)"):
        xs.metrics.precision_at_k(FOUND, torch.from_numpy(Y.toarray()).long(), 1)


def test_the_classifier_error_says_how_to_pass_lists_of_labels():
    sklearn = pytest.importorskip("xsoftmax.sklearn", reason="needs scikit-learn")
    for labels in ([[i % 12] for i in range(59)] + [[0, 1]], [{i % 12} for i in range(60)],
                   [[i % 12, 11] for i in range(60)]):
        with pytest.raises(ValueError, match=r"zeros and "
                           r"ones.*MultiLabelBinarizer\(sparse_output=True\)"):
            sklearn.XRLinearClassifier().fit(X, labels)
