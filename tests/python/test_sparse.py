"""Sparse matrices at every entrance: any format, order and dtype gives what canonical form gives.

One that is unsound is refused before compiled code reads memory by its indices.
"""

import contextlib
import os
import signal
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xsoftmax import label_vectors
from xsoftmax._sparse import canonical
from xsoftmax.datasets import read_examples, read_sparse
from xr_linear_checks import parts, problem, same, small

FORMATS = ["csr", "csc", "bsr", "coo", "lil", "dok", "dia"]
CONTAINERS = [getattr(sp, f"{name}_{kind}") for name in FORMATS for kind in ("matrix", "array")]
KINDS = ["features", "labels", "weights", "scores"]
X, Y = problem(rows=60, features=20, labels=12)
MODEL = small(X, Y)
FOUND = MODEL.predict(X, 5)


def messy(matrix, seed=0):
    """The same matrix with entries in two parts, entries that cancel, and rows in any order."""
    random, coo = np.random.default_rng(seed), matrix.tocoo()
    spot = random.integers(0, matrix.shape[0], 30), random.integers(0, matrix.shape[1], 30)
    row, column = (np.concatenate([index, index, at, at]) for index, at in zip((coo.row, coo.col), spot))
    value = np.concatenate([coo.data / 2, coo.data / 2, np.full(30, 3.0), np.full(30, -3.0)]).astype(np.float32)
    order = random.permutation(len(row))
    order = order[np.argsort(row[order], kind="stable")]
    ends = np.r_[0, np.cumsum(np.bincount(row, minlength=matrix.shape[0]))]
    return sp.csr_matrix((value[order], column[order], ends), shape=matrix.shape)


def scores_of(matrix):
    """Scores that differ, in the places of a matrix."""
    scores = matrix.copy()
    scores.data = np.linspace(1, 2, scores.nnz, dtype=np.float32)
    return scores


def saved(folder, matrix):
    path = folder / f"{len(list(folder.iterdir()))}.npz"
    sp.save_npz(path, matrix)
    return path


def ensemble(part):
    return xs.combine_predictions([part, FOUND], "rank")


def classifier(features, labels):
    sklearn = pytest.importorskip("xsoftmax.sklearn", reason="needs scikit-learn")
    return parts(sklearn.XRLinearClassifier(arity=3, max_leaf_size=5).fit(features, labels).model_)


# Name -> (what it makes of a matrix and a folder for files, the matrix that it takes).
ENTRANCES = {
    "train X": (lambda x, _: parts(small(x, Y)), X),
    "train Y": (lambda y, _: parts(small(X, y)), Y),
    "train user_negatives": (lambda y, _: parts(small(X, Y, negatives="tfn+user", user_negatives=y)), Y),
    "train relevance": (lambda y, _: parts(small(X, Y, relevance=y)), Y),
    "predict": (lambda x, _: MODEL.predict(x, 5).toarray(), X),
    "topk": (lambda x, _: MODEL.topk(x, 5), X),
    "targets": (lambda y, _: xs.HierarchicalMatcher.targets(y), Y),
    "tree": (lambda v, _: xs.LabelTree.from_vectors(v, 3, max_leaf_size=4, generator=torch.Generator().manual_seed(0)).tables(), X),
    "pii": (lambda y, _: label_vectors.pii(y).toarray(), Y),
    "pifa X": (lambda x, _: label_vectors.pifa(x, Y).toarray(), X),
    "pifa Y": (lambda y, _: label_vectors.pifa(X, y).toarray(), Y),
    "pifa_lf Z": (lambda z, _: label_vectors.pifa_lf(X, Y, z).toarray(), X[:12]),
    "spectral": (lambda y, _: label_vectors.spectral(y, 4), Y),
    "unit_rows": (lambda x, _: label_vectors.unit_rows(x).toarray(), X),
    "truth": (lambda y, _: [xs.metrics.precision_at_k(FOUND, y, 3), xs.metrics.psp_at_k(FOUND, y, 3, torch.linspace(0.1, 1, 12))], Y),
    "predictions": (lambda part, _: [xs.metrics.ndcg_at_k(part, Y, 2), xs.metrics.recall_at_k(part, Y, 1)], scores_of(Y)),
    "combine_predictions": (lambda part, _: ensemble(part).toarray(), scores_of(Y)),
    "read_sparse": (lambda x, folder: read_sparse(saved(folder, x)).toarray(), X),
    "read_examples X": (lambda x, folder: read_examples(saved(folder, x), saved(folder, Y))[0].toarray(), X),
    "read_examples Y": (lambda y, folder: read_examples(saved(folder, X), saved(folder, y))[1].toarray(), Y),
    "classifier X": (lambda x, _: classifier(x, Y), X),
    "classifier y": (lambda y, _: classifier(X, y), Y),
}
entrances = pytest.mark.parametrize("entrance", ENTRANCES)


def equal(found, want):
    if isinstance(found, tuple) or (isinstance(found, list) and isinstance(found[0], torch.Tensor)):
        return same(list(found), list(want))
    return np.array_equal(np.asarray(found), np.asarray(want))


@entrances
def test_any_format_gives_what_canonical_form_gives(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    want = call(matrix, tmp_path)
    for container in CONTAINERS:
        given = container(matrix)
        if "read" in entrance and given.format in ("lil", "dok"):
            continue  # scipy does not write them
        assert equal(call(given, tmp_path), want), container.__name__


@entrances
def test_entries_that_stand_twice_are_summed_and_those_that_cancel_are_none(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    want = call(matrix, tmp_path)
    given = messy(matrix)
    kept = given.copy()
    assert equal(call(given, tmp_path), want)
    assert equal(call(given.tocsc(), tmp_path), want)
    wide = given.copy()
    wide.indices, wide.indptr, wide.data = wide.indices.astype(np.int64), wide.indptr.astype(np.int64), wide.data.astype(np.float64)
    assert equal(call(wide, tmp_path), want)
    for name in ("data", "indices", "indptr"):  # the caller's stay as they are
        assert np.array_equal(getattr(given, name), getattr(kept, name))


@entrances
def test_read_only_arrays_are_read_without_a_warning(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    want = call(matrix, tmp_path)
    for given in (matrix.copy(), messy(matrix), matrix.tocsc(), matrix.tocoo()):
        for name in ("data", "indices", "indptr", "row", "col"):
            if hasattr(given, name):
                getattr(given, name).flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(call(given, tmp_path), want)


@entrances
def test_a_row_of_one_dimension_is_refused_by_name(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    for container in (sp.csr_array, sp.coo_array):
        with pytest.raises(ValueError, match=r": expected .* of two dimensions, got shape \[\d+\]"):
            call(container(np.ones(matrix.shape[1])), tmp_path)


def unsound(matrix):
    """Matrices whose parts lead out of memory, by name."""
    def changed(name, change):
        part = matrix.asformat(name, copy=True)
        change(part)
        return part

    def put(name, at, value):
        return lambda part: getattr(part, name).__setitem__(at, value)

    def falls(part):
        part.indptr[1:-1], part.indptr[-1] = 10**6, 0

    yield from ((f"{name} {what}", changed(name, change)) for name in ("csr", "csc", "bsr") for what, change in (
        ("no entries at the end", falls), ("offsets that fall", put("indptr", 2, 10**8)), ("a negative offset", put("indptr", 1, -5)),
        ("a first offset", put("indptr", 0, 1)), ("more entries than there are", put("indptr", -1, 10**8)), ("a far index", put("indices", 3, 10**6)),
        ("a negative index", put("indices", 3, -7)), ("too few offsets", lambda part: setattr(part, "indptr", part.indptr[:-2])),
        ("too few indices", lambda part: setattr(part, "indices", part.indices[:2])), ("too few values", lambda part: setattr(part, "data", part.data[:2]))))
    for what, change in (("a far row", put("row", 3, 10**6)), ("a negative column", put("col", 3, -7)),
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
    """Matrices whose parts are no arrays of numbers, by name."""
    for name in ("csr", "csc", "bsr", "coo", "dia"):
        for attribute in ("data", "indices", "indptr", "offsets"):
            if hasattr(matrix.asformat(name), attribute):
                for what, other in (("a list", list), ("None", lambda part: None), ("objects", lambda part: part.astype(object))):
                    part = matrix.asformat(name, copy=True)
                    setattr(part, attribute, other(getattr(part, attribute)))
                    yield f"{name} {attribute} {what}", part
    for attribute, value in (("rows", 2**70), ("rows", None), ("rows", "x"), ("data", None), ("data", "x")):
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
        if hasattr(part, "coords"):  # not of older scipy
            part.coords = coords
            yield f"coo coords of {type(coords).__name__}", part
    for key, value in (((2**70, 0), 1.0), ((0, None), 1.0), (3, 1.0), ((0, 0), None)):
        keys = matrix.todok()
        keys._dict[key] = value
        yield f"dok {key} {value}", keys


@entrances
def test_parts_that_are_no_arrays_are_refused(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    if "read" in entrance:
        return  # files hold arrays
    for what, given in of_other_objects(matrix):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(given, tmp_path)
        assert ": expected " in str(caught.value), what


@pytest.mark.parametrize("offsets", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.longlong, ">i4"])
@pytest.mark.parametrize("indices", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.longlong, ">i4"])
def test_queries_with_indices_of_any_dtype(offsets, indices):
    """scipy keeps the dtype that is assigned; few of them are those of operators."""
    given = X[:3].copy()
    want = MODEL.topk(given, 5)
    given.indptr, given.indices = given.indptr.astype(offsets), given.indices.astype(indices)
    assert equal(MODEL.topk(given, 5), want)
    assert (MODEL.predict(given, 5) != FOUND[:3]).nnz == 0


@entrances
def test_an_unsound_matrix_is_refused_before_its_indices_are_followed(entrance, tmp_path):
    call, matrix = ENTRANCES[entrance]
    for what, given in unsound(matrix):
        if "read" in entrance and given.format == "lil":
            continue  # scipy does not write them
        with pytest.raises((ValueError, IndexError)) as caught:
            call(given, tmp_path)
        assert ": expected " in str(caught.value), what


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.longdouble, ">f4", ">i4"])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind, dtype):
    """Against a dense array. Sums do not overflow the dtype of a matrix: two times 128 in uint8 are no label less."""
    dense = (np.random.default_rng(0).random((9, 7)) < 0.4).astype(dtype)
    rows, twice = sp.csr_matrix(dense.astype(np.float32)), sp.csr_matrix((np.ones(2, np.float32), [3, 3], [0, 2]), shape=(1, 7))
    for part in (rows, twice):
        part.data = part.data.astype(dtype)
    unknown = np.dtype(dtype) in (np.float16, np.dtype(">f4"), np.dtype(">i4"))  # to what scipy compiled
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


def test_what_is_canonical_is_not_copied():
    for given in (X, sp.csr_array(X)):
        assert canonical("test", "X", given) is given
        assert canonical("test", "X", given, "weights") is given and canonical("test", "X", given, "scores") is given
    assert canonical("test", "Y", Y, "labels") is Y
    for other in (X.astype(np.float64), canonical("test", "Y", X, "labels")):
        assert np.shares_memory(canonical("test", "X", other).indices, other.indices)
    longer = sp.csr_matrix(X)
    longer.data, longer.indices = np.append(X.data, np.nan).astype(np.float32), np.append(X.indices, 10**6).astype(np.int32)
    assert np.array_equal(canonical("test", "X", longer).toarray(), X.toarray())  # what stands behind the last row is not read


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_float32_lacks(kind):
    def of(values):
        return canonical("test", "X", sp.csr_matrix((np.array(values), np.zeros(len(values), int), [0, len(values)]), shape=(1, 3)), kind)

    for values in ([np.nan], [np.inf], [1e300], [1.8e308, 1e308], [3e38, 3e38], [1e308, 1e308, -1e308]):
        with np.errstate(over="ignore"):
            total = np.sum(values)
        fine = kind == "scores" and not np.isnan(total)
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match="test: expected X .*finite"):
            assert of(values).nnz == 1
    assert of([1e-60]).nnz == (0 if kind == "features" else 1)
    assert of([0.0]).nnz == (1 if kind in ("weights", "scores") else 0)
    assert of([3.0, -3.0]).nnz == 0 and of([1e30, -1e30]).nnz == 0


def test_scores_keep_their_order_and_their_zeros():
    """0 is the best score of "log-l3-hinge", and equal scores rank as they stand."""
    scores = sp.csr_matrix((np.array([0.0, -1.0, -1.0, -3.0, 2.0, 5.0]), [4, 2, 0, 1, 1, 1], [0, 3, 6]), shape=(2, 5))
    found = canonical("test", "scores", scores, "scores")
    assert found.indices.tolist() == [4, 2, 0, 1] and found.data.tolist() == [0.0, -1.0, -1.0, 4.0]
    assert xs.metrics.precision_at_k(scores, [[4], [1]], 1) == 1 and xs.metrics.recall_at_k(scores, [[2], [1]], 2) == 1


def test_predictions_of_files_keep_their_order_and_their_zeros(tmp_path):
    logs = MODEL.predict(X, 5, transform="log-l3-hinge")
    assert logs.data.max() < 1e-30, "logs of scores in (0, 1], the best of which are stored as 2^-126"
    logs.data[logs.indptr[:-1]] = 0.0
    found = read_sparse(saved(tmp_path, logs), scores=True)
    assert np.array_equal(found.indices, logs.indices) and np.array_equal(found.data, logs.data)
    with pytest.raises(TypeError, match="read_sparse: expected scores of type bool"):
        read_sparse(tmp_path / "0.npz", scores=1)


def test_more_columns_than_int32_has(tmp_path):
    """Indices are not cut off; operators, which take int32, refuse such a matrix."""
    wide = sp.csr_matrix((np.ones(4, np.float32), np.array([0, 2**32 + 1, 2**32 + 1, 3]), np.arange(5)), shape=(4, 2**33))
    labels = sp.csr_matrix(np.eye(4, dtype=np.float32))
    found, _ = read_examples(saved(tmp_path, wide), saved(tmp_path, labels))
    assert found.shape == wide.shape and found.indices.tolist() == wide.indices.tolist()
    for call in (lambda: xs.XRLinear.train(wide, labels), lambda: label_vectors.pifa(wide, labels), lambda: MODEL.predict(wide),
                 lambda: label_vectors.pii(wide), lambda: xs.HierarchicalMatcher.targets(wide), lambda: xs.LabelTree.from_vectors(wide, 2, max_leaf_size=2)):
        with pytest.raises(ValueError, match=r"2\^31 - 1|expected 20 features"):
            call()


def test_queries_of_the_torch_class_are_brought_to_canonical_form():
    """In C++ and TorchScript, too: the same bits for any order and for entries in parts."""
    given = messy(X)
    canon = canonical("test", "X", given)

    def predict(matrix, dtype):
        return MODEL.model.predict(torch.from_numpy(matrix.indptr).to(dtype), torch.from_numpy(matrix.indices).to(dtype), torch.from_numpy(matrix.data),
                                   None, 20, 5, 10, "", "", None)

    for dtype in (torch.int32, torch.int64):
        assert same(predict(given, dtype), predict(canon, dtype))
    lists = torch.sparse_csr_tensor(torch.from_numpy(canon.indptr), torch.from_numpy(canon.indices), torch.from_numpy(canon.data), canon.shape)
    assert same(MODEL.topk(lists, 5), MODEL.topk(given, 5))


def test_the_operator_for_any_number_of_threads(same_for_any_threads):
    given = messy(sp.random(3000, 200, 0.2, format="csr", dtype=np.float32, random_state=0))
    rows = torch.from_numpy(given.indptr).long(), torch.from_numpy(given.indices), torch.from_numpy(given.data)
    for kind in KINDS:
        offsets, columns, values = same_for_any_threads(lambda kind=kind: torch.ops.xsoftmax.canonical_rows(*rows, 200, kind)) or \
            torch.ops.xsoftmax.canonical_rows(*rows, 200, kind)
        want = given.copy()
        want.sum_duplicates()
        want.data[abs(want.data) < 1e-6] = 0
        want.eliminate_zeros()
        found = sp.csr_matrix((values.numpy(), columns.numpy(), offsets.numpy()), shape=want.shape)
        assert np.array_equal(found.toarray() != 0, want.toarray() != 0)
        assert kind == "labels" or np.allclose(found.toarray(), want.toarray(), atol=1e-6)
    with pytest.raises(ValueError, match="canonical_rows: expected kind as features"):
        torch.ops.xsoftmax.canonical_rows(*rows, 200, "rows")
    for args, error, message in (((rows[0] + 1, *rows[1:]), ValueError, "offsets"), ((rows[0], rows[1] + 7, rows[2]), IndexError, "columns in"),
                                 ((*rows[:2], rows[2][:-1]), ValueError, "values"), ((rows[0], rows[1].float(), rows[2]), TypeError, "columns")):
        with pytest.raises(error, match=f"canonical_rows: .*{message}"):
            torch.ops.xsoftmax.canonical_rows(*args, 200, "features")


def test_users_are_told_how_to_make_a_sparse_matrix():
    for call, words in ((lambda: xs.XRLinear.train(X, [[1, 2], [3]]), "MultiLabelBinarizer"), (lambda: xs.XRLinear.train(X.toarray(), Y), "csr_matrix"),
                        (lambda: label_vectors.pii([[1], [2]]), "MultiLabelBinarizer"), (lambda: xs.HierarchicalMatcher.targets([[1]]), "MultiLabelBinarizer")):
        with pytest.raises(TypeError, match=f"as a scipy sparse matrix, got .*{words}"):
            call()
    with pytest.raises(ValueError, match=r"as many rows, got 60 and 50: X is \[n, D\], here \[60, 20\], Y is \[n, L\], here \[50, 12\]"):
        xs.XRLinear.train(X, Y[:50])
    with pytest.warns(UserWarning, match="as if they had been swapped"):
        xs.XRLinear.train(Y, X)
    for metric in (xs.metrics.precision_at_k, xs.metrics.recall_at_k, xs.metrics.ndcg_at_k):
        with pytest.raises(ValueError, match=r"at least 10 predictions of a query, got 5 at most: predict with topk=10, or choose k=5"):
            metric(FOUND, Y, 10)
    with pytest.raises(ValueError, match=r"truth of shape \[Q\], got \[60, 12\]: scipy.sparse.csr_matrix\(truth.numpy\(\)\)"):
        xs.metrics.precision_at_k(FOUND, torch.from_numpy(Y.toarray()).long(), 1)


def test_a_classifier_tells_how_to_give_lists_of_labels():
    sklearn = pytest.importorskip("xsoftmax.sklearn", reason="needs scikit-learn")
    for labels in ([[i % 12] for i in range(59)] + [[0, 1]], [{i % 12} for i in range(60)], [[i % 12, 11] for i in range(60)]):
        with pytest.raises(ValueError, match=r"zeros and ones.*MultiLabelBinarizer\(sparse_output=True\)"):
            sklearn.XRLinearClassifier().fit(X, labels)


class Stuck(Exception):
    pass


@contextlib.contextmanager
def within(seconds):
    def stop(*_):
        raise Stuck

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.txt.gz", "pipe.npz"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    sp.save_npz(tmp_path / "y.npz", Y)
    labels = tmp_path / "y.npz" if name.endswith(".npz") else None
    calls = [lambda: read_examples(pipe, labels), lambda: read_sparse(pipe), lambda: torch.ops.xsoftmax.read_examples(str(pipe))]
    for call in calls:
        with within(10), pytest.raises(ValueError, match="as a file, got a (FIFO|device)"):
            call()
    if sys.platform.startswith("linux"):
        with within(10), pytest.raises(ValueError, match="as a file, got a (FIFO|device)"):
            read_sparse("/dev/zero")
    for call, error in ((lambda: read_sparse(tmp_path), IsADirectoryError), (lambda: read_sparse(tmp_path / "none"), FileNotFoundError)):
        with pytest.raises(error, match="read_sparse: "):
            call()


def arrays_of(matrix):
    kept = {"format": np.array(matrix.format.encode()), "shape": np.array(matrix.shape), "data": matrix.data}
    names = {"coo": ("row", "col"), "dia": ("offsets",)}.get(matrix.format, ("indices", "indptr"))
    return {**kept, **{name: getattr(matrix, name) for name in names}}


def spoilt(random, arrays):
    """One to three changes of the arrays of a .npz."""
    arrays = {name: np.array(part) for name, part in arrays.items()}
    far = [-1, 0, 1, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 10**6]
    for _ in range(random.integers(1, 4)):
        name = random.choice([name for name in arrays if name != "format"])
        part = arrays[name]
        change = random.integers(7)
        if change == 0 and part.size:  # one number
            part = part.astype(np.int64) if part.dtype.kind == "i" else part
            part.flat[random.integers(part.size)] = random.choice(far) if part.dtype.kind == "i" else random.choice([np.nan, np.inf, 0, 1e30])
        elif change == 1:
            part = part[: random.integers(len(part) + 1)]
        elif change == 2 and part.size:
            part = part[random.permutation(len(part))]
        elif change == 3:
            part = part.astype(random.choice(["f8", "i8", "u1", "u8", "i2", "f2", "c8", "?", "S3", ">i4"]))
        elif change == 4:
            part = part.reshape(random.choice([1, -1]), *part.shape[:: random.choice([1, -1])])
        elif change == 5 and name == "indptr":
            part = np.r_[0, np.full(max(len(part) - 2, 0), 10**6), 0]
        elif change == 6:
            arrays["format"] = np.array(random.choice([b"csr", b"csc", b"bsr", b"coo", b"dia", b"lil", b"none"]))
        if name == "shape":  # large sizes ask for much memory, which is no fault
            part = np.where(np.abs(part.astype(np.int64, casting="unsafe")) > 10**6, 10**6, part) if part.dtype.kind in "iu" else part
        arrays[name] = part
    return arrays


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("container", [*CONTAINERS[:8], *CONTAINERS[-2:]], ids=lambda container: container.__name__)
def test_malformed_files(container, tmp_path):
    """Parts changed at random: a sound matrix or a ValueError, never a crash, and never an index outside the shape."""
    random = np.random.default_rng(CONTAINERS.index(container))
    source = arrays_of(container(X[:8, :6]))
    path, labels = tmp_path / "x.npz", saved(tmp_path, Y[:8])
    refused = 0
    for _ in range(250):
        np.savez(path, **spoilt(random, source))
        try:
            found = [read_examples(path, labels)[0], read_examples(labels, path)[1]]
        except ValueError as error:
            assert "x.npz" in str(error)
            refused += 1
            continue
        for part in found:
            assert part.ndim == 2 and part.indptr[0] == 0 and (np.diff(part.indptr) >= 0).all() and part.indptr[-1] == len(part.data) == len(part.indices)
            assert part.nnz == 0 or (0 <= part.indices.min() and part.indices.max() < part.shape[1])
            assert np.isfinite(part.data).all() and part.has_canonical_format and (part.data != 0).all() and part.dtype == np.float32
    assert 20 < refused < 250


@pytest.mark.filterwarnings("ignore")
def test_files_with_changed_bytes(tmp_path):
    random = np.random.default_rng(0)
    sound, path = saved(tmp_path, X[:8]).read_bytes(), tmp_path / "x.npz"
    for _ in range(150):
        text = bytearray(sound[: random.integers(1, len(sound))] if random.random() < 0.2 else sound)
        for _ in range(random.integers(1, 5)):
            text[random.integers(len(text))] = random.integers(256)
        path.write_bytes(text)
        with contextlib.suppress(ValueError, MemoryError):
            read_sparse(path).check_format(full_check=True)
