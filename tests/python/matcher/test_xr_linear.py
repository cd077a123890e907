"""XRLinear: training data, classifiers, predictions and errors."""

import threading
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xr_linear_checks import layer_margins, parts, problem, same, small
from xsoftmax._core.sparse import index_tensors
from xsoftmax.matcher.xr_linear_training import Layers


def dense_scores(model, X, hinge=3):
    """Returns the score of every label by the definition."""
    above = np.ones((X.shape[0], 1))
    for first_child, margins in layer_margins(model, X):
        above = np.repeat(above, np.diff(first_child),
                          axis=1) * np.exp(-np.maximum(0, 1 - margins)**hinge)
    scores = np.empty_like(above)
    scores[:, model.model.labels().numpy()] = above
    return scores


def test_predictions_are_the_best_labels_by_definition():
    X, Y = problem()
    model = small(X, Y)
    scores = dense_scores(model, X)
    found = model.predict(X, topk=5, beam=100)
    assert found.shape == (300, 40) and found.dtype == np.float32 and (np.diff(found.indptr)
                                                                       == 5).all()
    labels = found.indices.reshape(300, 5)
    np.testing.assert_allclose(found.data.reshape(300, 5), -np.sort(-scores, axis=1)[:, :5],
                               rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(scores, labels, 1), found.data.reshape(300, 5),
                               rtol=1e-4, atol=1e-6)
    values, ids = model.topk(X, 5, beam=100)
    assert torch.equal(ids,
                       torch.from_numpy(labels).long()) and np.array_equal(
                           values.numpy().ravel(), found.data)


def test_it_learns_a_separable_problem():
    X, Y = problem(rows=600)
    model = small(X[:500], Y[:500])
    assert xs.metrics.precision_at_k(model.topk(X[500:], 1)[1], Y[500:], 1) > 0.9


def test_each_layer_is_trained_on_the_rows_of_its_parents():
    """Each layer equals a call of the operator on lists of rows made here."""
    X, Y = problem()
    tree = xs.LabelTree.from_nested([[[3, 0, 1], [2, 4]], [[5, 6], [9, 8, 7]]])
    Y = Y[:, :10].tocsr()
    model = xs.XRLinear.train(X, Y, tree=tree, dtype=torch.float32,
                              generator=torch.Generator().manual_seed(0))
    seed = int(torch.randint(0, 2**63 - 1, (), generator=torch.Generator().manual_seed(0)))
    nodes = [[range(300)], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[0, 1, 3], [2, 4], [5, 6],
                                                                [7, 8, 9]],
             [[c] for c in (3, 0, 1, 2, 4, 5, 6, 9, 8, 7)]]
    first_child = [[0, 2], [0, 2, 4], [0, 3, 5, 7, 10]]
    dense = Y.toarray() > 0

    def lists(labels):
        rows = [np.flatnonzero(dense[:, some].any(1)) for some in labels]
        return torch.tensor([0, *np.cumsum([len(some) for some in rows])
                             ]), torch.from_numpy(np.concatenate(rows).astype(np.int32))

    rows = torch.from_numpy(X.indptr).long(), torch.from_numpy(X.indices), torch.from_numpy(X.data)
    for depth in range(3):
        parents = (torch.tensor([0, 300]),
                   torch.arange(300, dtype=torch.int32)) if depth == 0 else lists(nodes[depth])
        first = torch.tensor(first_child[depth])
        *made, _, _ = torch.ops.xsoftmax.linear_layers_train(rows, 60, [first], parents,
                                                             lists(nodes[depth + 1]), [], [],
                                                             [f"seed={seed}"])
        assert same(model.model.layer(depth), [first, *made])
    assert model.model.labels().tolist() == [3, 0, 1, 2, 4, 5, 6, 9, 8, 7]


@pytest.mark.parametrize("negatives", ["tfn", "man", "tfn+man", ["tfn", "tfn+man", "man"]])
def test_any_number_of_threads_trains_the_same_model(negatives):
    X, Y = problem()
    threads, made = torch.get_num_threads(), []
    try:
        for n in (1, 4):
            torch.set_num_threads(n)
            made.append(small(X, Y, negatives=negatives, beam=2))
    finally:
        torch.set_num_threads(threads)
    assert same(parts(made[0]), parts(made[1]))
    assert (made[0].predict(X) != made[1].predict(X)).nnz == 0


def test_each_scheme_of_negatives_selects_its_rows():
    """"tfn" has rows with a label below, "man" those that the beam reaches, "user" given pairs."""
    X, Y = problem()
    rows = {
        scheme: [layer["rows"] for layer in small(X, Y, negatives=scheme, beam=2).stats]
        for scheme in ("tfn", "man", "tfn+man")
    }
    assert rows["man"] == [300, 600, 600] and rows["tfn"][0] == 300
    assert all(both >= max(one, other)
               for both, one, other in zip(rows["tfn+man"], rows["tfn"], rows["man"]))
    named = sp.csr_matrix((np.ones(1), ([7], [np.flatnonzero(Y[7].toarray()[0] == 0)[0]])),
                          shape=Y.shape)
    more = [
        layer["rows"] for layer in small(X, Y, negatives="tfn+user", user_negatives=named).stats
    ]
    assert all(0 <= other - one <= 1
               for one, other in zip(rows["tfn"], more)) and more != rows["tfn"]
    everyone = small(X, Y, negatives="user", user_negatives=sp.csr_matrix(np.ones(Y.shape)))
    assert [layer["rows"] for layer in everyone.stats
            ] == [300 * (len(everyone.model.layer(depth)[0]) - 1) for depth in range(3)]


def test_relevance_acts_as_a_positive_cost():
    """A relevance of c for all pairs equals positive_cost=c."""
    X, Y = problem()
    twice = Y.copy()
    twice.data[:] = 2
    assert same(parts(small(X, Y, relevance=twice)), parts(small(X, Y, positive_cost=2.0)))
    assert not same(parts(small(X, Y, positive_cost=2.0)), parts(small(X, Y)))
    assert not same(parts(small(X, Y, negative_cost=0.5)), parts(small(X, Y)))


def test_relevance_of_an_inner_node_is_the_largest_below():
    layers = Layers(xs.LabelTree.balanced(8, 2))
    pairs = sp.random(30, 8, 0.5, format="csr", random_state=0)
    for depth in range(3):
        want = {}
        for row, label, relevance in zip(*pairs.nonzero(), pairs.data.astype(np.float32)):
            key = int(layers.label_nodes[depth][label]), int(row)
            want[key] = max(want.get(key, 0), relevance)
        offsets, rows, costs = layers.lists(depth, index_tensors(pairs),
                                            torch.from_numpy(pairs.data).float())
        assert want == {(node, int(rows[t])): costs[t].item()
                        for node in range(len(offsets) - 1)
                        for t in range(offsets[node], offsets[node + 1])}


@pytest.mark.parametrize("loss", ["squared_hinge", "hinge", "logistic"])
def test_training_from_an_initial_model_takes_fewer_sweeps(loss):
    X, Y = problem(rows=500)
    options = dict(loss=loss, threshold=0.0, tolerance=1e-3, sweeps=5000, dtype=torch.float32)
    tree = xs.LabelTree.from_vectors(xs.label_vectors.pifa(X, Y), 3,
                                     generator=torch.Generator().manual_seed(0), max_leaf_size=5)

    def train(rows, initial=None):
        return xs.XRLinear.train(X[:rows], Y[:rows], tree=tree, initial=initial,
                                 generator=torch.Generator().manual_seed(0), **options)

    def sweeps(model):
        return sum(layer["sweeps"] for layer in model.stats)

    cold, warm = train(500), train(500, train(490))
    assert sweeps(warm) < sweeps(cold)
    if loss != "hinge":  # the dual variables cannot be recovered from its weights
        assert sweeps(train(500, cold)) < 0.5 * sweeps(cold)
    np.testing.assert_allclose(dense_scores(warm, X), dense_scores(cold, X), atol=0.02)
    with pytest.raises(ValueError, match="initial with the features of X and the same tree"):
        xs.XRLinear.train(
            X, Y, tree=xs.LabelTree.from_vectors(xs.label_vectors.pii(Y), 3, max_leaf_size=5),
            initial=cold)


def test_weights_are_float16_where_they_fit():
    X, Y = problem()
    narrow, wide = small(X, Y), small(X, Y, dtype=torch.float32)
    assert {part[-1].dtype
            for part in map(narrow.model.layer, range(narrow.depth))} == {torch.float16}
    for depth in range(wide.depth):
        assert same(wide.model.layer(depth)[:5], narrow.model.layer(depth)[:5])
        assert torch.equal(wide.model.layer(depth)[5].half(), narrow.model.layer(depth)[5])
    tiny = small(X * 1e6, Y, threshold=0.0, bias=0.0)  # weights too small for float16
    assert torch.float32 in {part[-1].dtype for part in map(tiny.model.layer, range(tiny.depth))}
    with pytest.raises(ValueError, match="for float16"):
        small(X * 1e6, Y, threshold=0.0, bias=0.0, dtype=torch.float16)


def test_queries_of_any_format_give_the_same_predictions():
    X, Y = problem()
    model = small(X, Y)
    want = model.predict(X)
    for form in (X.toarray(), torch.from_numpy(X.toarray()), X.astype(np.float64), X.tocsc(),
                 X.tocoo(), sp.csr_array(X)):
        found = model.predict(form)
        assert abs(found - want).max() < 1e-5
    hybrid = model.predict(X[:, :25].tocsr(), dense=X[:, 25:].toarray())
    assert abs(hybrid - want).max() < 1e-5
    assert model.predict(X[:0]).shape == (0, 40) and model.predict(X, topk=0).nnz == 0
    few = model.predict(X, only=[3, 7])
    assert set(few.indices) == {3, 7} and few.nnz == 600
    one = [model.predict(X[i]) for i in range(5)]
    assert (sp.vstack(one) != want[:5]).nnz == 0


def test_changing_one_prediction_does_not_change_the_next():
    X, Y = problem()
    model = small(X, Y)
    whole = model.predict(X[:3], 5, 5)
    first = model.predict(X[0], 5, 5)
    assert first.shape == (
        1, 40) and first.dtype == np.float32 and first.indices.dtype == whole.indices.dtype
    best_first = first.indices.copy()
    first.sort_indices()
    first.data[:] = 7
    for i in range(3):
        one = model.predict(X[i], 5, 5)
        assert not one.has_sorted_indices or (np.diff(one.indices) > 0).all()
        one.check_format(full_check=True)
        np.testing.assert_array_equal(one.toarray(), whole[i].toarray())
        np.testing.assert_array_equal((one + one).toarray(), 2 * whole[i].toarray())
    np.testing.assert_array_equal(model.predict(X[0], 5, 5).indices, best_first)


def test_sparse_tensors_work_and_wrong_types_are_refused():
    X, Y = problem()
    model = small(X, Y)
    for index in (torch.int32, torch.int64):
        queries = torch.sparse_csr_tensor(
            torch.from_numpy(X.indptr).to(index),
            torch.from_numpy(X.indices).to(index), torch.from_numpy(X.data), X.shape)
        np.testing.assert_array_equal(model.predict(queries).toarray(), model.predict(X).toarray())
    for options, message in (({"topk": 5.0}, "topk of type int, got float"),
                             ({"beam": "5"}, "beam of type int, got str"),
                             ({"topk": None}, "topk of type int"), ({"only": np.ones(40, np.uint8)},
                                                                    "uint8, which may be either")):
        with pytest.raises(TypeError, match=message):
            model.predict(X, **options)
    assert same(model.topk(X, np.int64(3)), model.topk(X, 3))


def test_margins_are_added_by_default():
    """The product of two negative margins would be a good score."""
    X, Y = problem()
    model = small(X, Y)
    assert same(model.topk(X, 5, 40, transform="identity"),
                model.topk(X, 5, 40, transform="identity", combiner="add"))
    scores = [
        model.topk(X, 1, 40, transform="identity", combiner=combiner)[1]
        for combiner in (None, "multiply")
    ]
    right = [sum(Y[i, int(best)] for i, best in enumerate(found)) for found in scores]
    assert right[0] > right[1]


def test_predict_csr_works_in_torchscript(tmp_path):
    class Labels(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, queries: torch.Tensor) -> torch.Tensor:
            return self.model.predict_csr(queries, 3, 10)

    X, Y = problem()
    model = small(X, Y)
    queries = torch.sparse_csr_tensor(torch.from_numpy(X.indptr), torch.from_numpy(X.indices),
                                      torch.from_numpy(X.data), X.shape)
    torch.jit.save(torch.jit.script(Labels(model.model)), tmp_path / "labels.pt")
    found = torch.jit.load(tmp_path / "labels.pt")(queries)
    want = model.predict(X, 3)
    want.sort_indices()
    torch.sparse_csr_tensor(found.crow_indices(), found.col_indices(), found.values(), found.shape,
                            check_invariants=True)
    assert found.shape == (300, 40) and found.col_indices().tolist() == want.indices.tolist()
    assert found.values().tolist() == want.data.tolist() and found.crow_indices().tolist(
    ) == want.indptr.tolist()
    with pytest.raises(TypeError, match="sparse CSR tensor, got layout Strided"):
        model.model.predict_csr(queries.to_dense(), 3, 10)
    with pytest.raises(ValueError, match="queries with size 60"):
        model.model.predict_csr(
            torch.sparse_csr_tensor(torch.zeros(2), torch.zeros(0), torch.zeros(0), (1, 59)), 3, 10)


def test_one_label_and_labels_without_examples():
    X, Y = problem()
    alone = xs.XRLinear.train(X, Y[:, :1].tocsr())
    assert alone.predict(X).shape == (300, 1)
    empty = sp.csr_matrix(Y.shape)
    assert small(X, empty).predict(X, topk=3).nnz == 900  # any three labels


def test_training_does_not_change_its_arguments():
    X, Y = problem()
    Y.data[3] = 0  # a stored zero
    X.indices[X.indptr[0]:X.indptr[1]] = X.indices[X.indptr[0]:X.indptr[1]][::-1]
    X.has_sorted_indices = False
    before = [a.copy() for a in (X.data, X.indices, Y.data, Y.indices)]
    small(X, Y)
    assert all(np.array_equal(a, b) for a, b in zip(before, (X.data, X.indices, Y.data, Y.indices)))


def test_progress_reports_every_layer():
    X, Y = problem()
    seen = []
    model = small(X, Y, progress=lambda *numbers: seen.append(numbers))
    assert [layer for layer, _, done, total in seen if done == total][-1] == model.depth - 1
    assert all(layers == model.depth and 0 <= done <= total for _, layers, done, total in seen)
    small(X, Y, progress=True)  # a bar of tqdm


def test_an_interrupt_stops_training():
    X, Y = problem(rows=4000, features=400, labels=400)

    def interrupt(layer, layers, done, total):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        small(X, Y, tolerance=1e-9, sweeps=10**6, progress=interrupt)
    assert threading.active_count() == before


BAD = [
    (dict(X=np.zeros((300, 60))), TypeError, "X as a scipy sparse matrix, got ndarray"),
    (dict(Y=[[1]]), TypeError, "Y as a scipy sparse matrix, got list"),
    (dict(Y=sp.csr_matrix((299, 40))), ValueError, "as many rows, got 300 and 299"),
    (dict(Y=sp.csr_matrix((300, 0))), ValueError, "at least one label"),
    (dict(loss="huber"), ValueError, "loss as one of"),
    (dict(dtype=torch.float64), ValueError, "dtype as torch.float16"),
    (dict(tree=xs.LabelTree.random(39, 3)), ValueError, "tree of 40 labels, as Y has, got one of "
     "39"),
    (dict(tree=xs.LabelTree.from_nested([0, list(range(1, 40))])), ValueError,
     "all labels on its last layer, .*got label 0"),
    (dict(tree=[1]), TypeError, "tree as LabelTree or None, got list"),
    (dict(initial=3), TypeError, "initial as XRLinear or None, got int"),
    (dict(negatives="hard"), ValueError, "negatives as"),
    (dict(negatives=["tfn"]), ValueError, "negatives for 3 layers"),
    (dict(negatives=3), TypeError, "negatives as a name or a list of names, got 3"),
    (dict(negatives=["tfn", None, "tfn"]), TypeError, "negatives as a name or a list of names"),
    (dict(progress="yes"), TypeError, "progress as a bool or a function, got str"),
    (dict(negatives="user"), ValueError, "user_negatives together with"),
    (dict(user_negatives=sp.csr_matrix((300, 40))), ValueError, 'negatives that contain "user"'),
    (dict(negatives="user", user_negatives=sp.csr_matrix(
        (300, 39))), ValueError, r"user_negatives of shape \[300, 40\]"),
    (dict(relevance=sp.csr_matrix((300, 40))), ValueError, "pairs of Y and no others, got 0"),
    (dict(max_weights=0), ValueError, "max_weights of at least 1"),
    (dict(positive_cost=0.0), ValueError, "positive_cost as a finite number above 0"),
    (dict(sweeps=0), ValueError, "sweeps of at least 1"),
    (dict(threshold=-1.0), ValueError, "threshold"),
]


@pytest.mark.parametrize("options, error, message", BAD)
def test_wrong_options_are_refused(options, error, message):
    X, Y = problem()
    with pytest.raises(error, match=message):
        small(options.pop("X", X), options.pop("Y", Y), **options)


def test_a_seed_is_not_a_generator():
    X, Y = problem()
    with pytest.raises(TypeError, match="generator as a torch.Generator or None, got int"):
        xs.XRLinear.train(X, Y, generator=3)


def test_nan_is_refused_with_its_place():
    X, Y = problem()
    X.data[5] = np.nan
    with pytest.raises(ValueError, match="X with finite numbers, got nan in row 0, column "
                       f"{X.indices[5]}"):
        small(X, Y)


def test_numbers_outside_float32_and_invalid_counts_are_refused():
    X, Y = problem(rows=30)
    for options, error, message in (({"bias": 1e300}, ValueError, "bias as a finite number"), ({
            "bias": 1e20
    }, ValueError, "rows whose squares"), ({"threshold": 1e300}, ValueError,
                                           "threshold as a finite"), ({"positive_cost": 1e-50},
                                                                      ValueError, "above 0"),
                                    ({"max_weights": 2.5}, TypeError, "max_weights of type int"),
                                    ({"sweeps": 0}, ValueError, "sweeps of at least 1"),
                                    ({"beam": -5}, ValueError, "beam of at least 1"),
                                    ({"beam": None}, TypeError, "beam of type int")):
        with pytest.raises(error, match=message):
            small(X, Y, **options)
    with pytest.raises(ValueError, match="rows whose squares .* in row 0"):
        small(X * np.float32(1e20), Y)
    assert same(parts(small(X, Y, sweeps=np.int64(7))), parts(small(X, Y, sweeps=7)))


def test_a_column_beyond_int32_is_refused():
    X, Y = problem()
    model = small(X, Y)
    for column in (2**32 + 3, -(2**32) + 3, 60):
        with pytest.raises(IndexError, match=rf"columns in \[0, 60\), got {column} at \[1\]"):
            model.model.predict(torch.tensor([0, 2]), torch.tensor([0, column]), torch.ones(2),
                                None, 60, 5, 5, "", "", None)
    narrow, wide = (model.model.predict(torch.tensor([0, 2]), torch.tensor([0, 3], dtype=dtype),
                                        torch.ones(2), None, 60, 5, 5, "", "", None)
                    for dtype in (torch.int32, torch.int64))
    assert same(narrow, wide)


def test_wrong_queries_are_refused():
    X, Y = problem()
    model = small(X, Y)
    for argument, options, message in ((X[:, :59], {}, "expected 60 features, got 59"),
                                       (X, dict(dense=np.zeros((300, 2))),
                                        "60 and 2 dense"), (X, dict(beam=0), "beam of at least 1"),
                                       (X, dict(only=[40]), r"only in \[0, 40\)"),
                                       (X, dict(transform="l9-hinge"), "transform as"), (np.full(
                                           (2, 60), np.inf), {}, "finite numbers, got inf"),
                                       (X[:, :50], dict(dense=np.zeros((3, 10))),
                                        r"shape \[300, d\]")):
        with pytest.raises((ValueError, IndexError), match=message):
            model.predict(argument, **options)
    with pytest.raises(TypeError, match="X as a scipy sparse matrix, a tensor or an array, got "
                       "list"):
        model.predict([1.0])
    with pytest.raises(TypeError, match="transform as a name or a list of names, got 3"):
        model.predict(X, transform=3)
    with pytest.raises(TypeError, match="topk: expected k of type int, got float"):
        model.topk(X, 2.0)
    with pytest.raises(TypeError, match="topk: expected exclude as a tensor, got list"):
        model.topk(X, 2, exclude=[[1]])


def test_a_threshold_that_drops_all_weights_gives_a_warning():
    X, Y = problem()
    with pytest.warns(
            UserWarning, match=r"threshold=0.1 leaves the 40 classifiers of layer \d 0 "
            r"weights; rows are of length 1e\+03"):
        small(X * np.float32(1000), Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(X, Y)
        small(X * np.float32(1000), Y, threshold=0.0)


def test_only_restricts_labels_by_mask_or_ids():
    X, Y = problem()
    model = small(X, Y)
    mask = np.zeros(40, bool)
    mask[[7, 9, 31]] = True
    want = model.topk(X, 2, 40, only=[7, 9, 31])
    for only in (mask, torch.from_numpy(mask), {7, 9, 31}, np.array([31, 7, 9], np.int32)):
        assert same(model.topk(X, 2, 40, only=only), want)
    assert set(want[1].unique().tolist()) <= {7, 9, 31}
    for only, error, message in ((mask[:9], ValueError, r"a mask of shape \[40\], got \[9\]"),
                                 ([7.9], TypeError, "ids of labels or a mask"), ([40], IndexError,
                                                                                 "only"),
                                 (3, TypeError, "only as a tensor, an array or a list"),
                                 ([[3], [4]], ValueError, r"one dimension, got shape \[2, 1\]"),
                                 (torch.ones(40).to_sparse(), TypeError,
                                  "layout torch.sparse_coo")):
        with pytest.raises(error, match=message):
            model.predict(X, 2, only=only)


def test_log_transforms_give_the_logarithms_of_scores():
    X, Y = problem()
    model = small(X, Y)
    scores, labels = model.topk(X, 5, 40)
    logs, same_labels = model.topk(X, 5, 40, transform="log-l3-hinge")
    near = (scores[:, :-1] - scores[:, 1:]).min(1).values > 1e-5
    assert torch.equal(labels[near], same_labels[near])
    torch.testing.assert_close(logs.exp(), scores, rtol=1e-4, atol=1e-6)
    assert same((logs, same_labels), model.topk(X, 5, 40, transform="log-l3-hinge", combiner="add"))


def test_scores_that_overflow_are_the_lowest_finite_number():
    """Such labels are neither left out nor NaN, which has no order."""
    X, Y = problem()
    model = small(X, Y)
    for transform, combiner in (("log-l3-hinge", "add"), ("log-sigmoid", "multiply"), ("identity",
                                                                                       "add")):
        found = model.predict(X * np.float32(1e30), 10, 40, transform=transform, combiner=combiner)
        assert (np.diff(found.indptr) == 10).all() and np.isfinite(found.data).all()


def test_topk_larger_than_the_beam_reaches_returns_fewer_labels():
    X, Y = problem()
    model = small(X, Y)
    found = model.predict(X, 40, 1)
    assert (np.diff(found.indptr) <= 5).all() and same(model.topk(
        X, 5, 1), [part[:, :5] for part in model.topk(X, 40, 1)])


def test_inconsistent_matrices_are_refused_by_name():
    X, Y = problem()
    broken = Y.copy()
    broken.indices[3] = 10**6
    missing, negative = Y.copy(), X.astype(np.float64)
    missing.data[0] = np.nan
    negative.data[0] = 1e300
    for args, message in (((X, broken), "parts contradict each other"),
                          ((X, missing), r"Y with finite numbers, got nan in row 0"),
                          ((negative, Y),
                           r"X with finite numbers in float32, got 1e\+300 in row 0")):
        with pytest.raises(ValueError, match=message):
            xs.XRLinear.train(*args)
    relevance = Y.copy()
    relevance.data[5] = 0
    xs.XRLinear.train(X, Y, relevance=relevance)  # a stored zero is accepted
