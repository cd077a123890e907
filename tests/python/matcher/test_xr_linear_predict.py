"""XRLinear.predict with per-layer settings and per-query labels."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xr_linear_checks import layer_margins

L = 40


@pytest.fixture(scope="module")
def trained():
    random = np.random.default_rng(0)
    X = sp.random(200, 60, 0.3, format="csr", dtype=np.float32, random_state=1)
    Y = sp.csr_matrix(
        (np.ones(400, np.float32), (np.repeat(np.arange(200), 2), random.integers(0, L, 400))),
        shape=(200, L))
    tree = xs.LabelTree.from_vectors(xs.label_vectors.pifa(X, Y), 3, max_leaf_size=5,
                                     generator=torch.Generator().manual_seed(0))
    model = xs.XRLinear.train(X, Y, tree=tree, threshold=0.0, dtype=torch.float32,
                              generator=torch.Generator().manual_seed(0))
    return model, X, Y


TRANSFORMS = {
    "l3-hinge": lambda z: np.exp(-np.maximum(0, 1 - z)**3),
    "l1-hinge": lambda z: np.exp(-np.maximum(0, 1 - z)), "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "identity": lambda z: z, "log-sigmoid": lambda z: -np.log1p(np.exp(-z))
}
COMBINERS = {
    "multiply": lambda parent, own: parent * own, "add": lambda parent, own: parent + own,
    "last": lambda parent, own: own
}


def by_hand(model, X, transforms, combiners):
    """Returns the scores [n, L] of a search that keeps all nodes."""
    scores = None
    for (first_child, products), transform, combiner in zip(layer_margins(model, X), transforms,
                                                            combiners):
        own = TRANSFORMS[transform](products)
        first = {"multiply": 1.0, "add": 0.0, "last": 0.0}[combiners[0]]
        above = np.full(own.shape, first) if scores is None else np.repeat(
            scores, np.diff(first_child), axis=1)
        scores = COMBINERS[combiner](above, own)
    labels = np.empty_like(scores)
    labels[:, model.model.labels().numpy()] = scores
    return labels


@pytest.mark.parametrize("transforms, combiners", [
    (["l3-hinge"] * 3, ["multiply", "multiply", "last"]),
    (["sigmoid", "l3-hinge", "l1-hinge"], ["multiply"] * 3),
    (["l3-hinge", "sigmoid", "sigmoid"], ["add", "multiply", "add"]),
    (["log-sigmoid", "identity", "l3-hinge"], ["add", "add", "last"]),
    (["identity", "l3-hinge", "sigmoid"], ["add", "multiply", "multiply"]),
])
def test_each_layer_has_its_transform_and_combiner(trained, transforms, combiners):
    model, X, _ = trained
    assert model.depth == 3
    found = model.predict(X, L, L, transform=transforms, combiner=combiners)
    np.testing.assert_allclose(found.toarray(), by_hand(model, X, transforms, combiners), rtol=2e-4,
                               atol=1e-6)


def test_one_name_applies_to_all_layers(trained):
    model, X, _ = trained
    one = model.predict(X, 5, transform="sigmoid", combiner="add")
    each = model.predict(X, 5, transform=["sigmoid"] * 3, combiner=("add",) * 3)
    assert (one != each).nnz == 0


def test_the_labels_of_each_query_are_all_scored(trained):
    """Whatever the beam is; a row may have no labels."""
    model, X, _ = trained
    whole = model.predict(X, L, L, transform="sigmoid").toarray()
    random = np.random.default_rng(3)
    wanted = sp.csr_matrix(random.random((X.shape[0], L)) < random.random((X.shape[0], 1)) * 0.3)
    wanted = wanted.tolil()
    wanted[5] = False
    wanted = wanted.tocsr()
    found = model.predict(X, L, 1, only=wanted, transform="sigmoid")
    assert found.nnz == wanted.nnz and found[5].nnz == 0
    np.testing.assert_array_equal(found.toarray(), whole * wanted.toarray())
    scores, labels = model.topk(X, 2, 1, only=wanted, transform="sigmoid")
    best = np.sort(whole * wanted.toarray(), 1)[:, ::-1][:, :2]
    np.testing.assert_array_equal(scores.numpy(), best)
    assert ((labels >= 0).sum(1).numpy() == np.minimum(2, np.diff(wanted.indptr))).all()


def test_a_model_ranks_the_shortlist_of_another(trained):
    """The matcher's predictions, and the labels that the ranker gives to them, for many queries (in
    blocks and on several threads) and for one."""
    model, X, Y = trained
    matcher = xs.XRLinear.train(X[:, :30], Y, arity=2, max_leaf_size=2, threshold=0.0,
                                generator=torch.Generator().manual_seed(1))
    queries = sp.vstack([X] * 3).tocsr()
    shortlist = matcher.predict(queries[:, :30].tocsr(), 6, 6)
    ranked = model.predict(queries, 6, only=shortlist)
    assert (np.diff(ranked.indptr) == np.diff(shortlist.indptr)).all()
    assert ((ranked != 0) != (shortlist != 0)).nnz == 0
    tensor = torch.sparse_csr_tensor(
        *map(torch.from_numpy, (shortlist.indptr, shortlist.indices, shortlist.data)),
        size=shortlist.shape)
    assert (model.predict(queries, 6, only=tensor) != ranked).nnz == 0
    zero = shortlist.copy()
    zero.data[:] = 0  # scores of a transform whose best score is 0
    assert (model.predict(queries, 6, only=zero) != ranked).nnz == 0
    one = model.predict(queries[[7]], 6, only=shortlist[[7]])
    assert (one != ranked[[7]]).nnz == 0


@pytest.mark.parametrize("options, error, message", [
    (dict(transform=["sigmoid"] * 2), ValueError,
     "transform as one name, or one for each of 3 layers, got 2"),
    (dict(combiner=["last"] * 4), ValueError,
     "combiner as one name, or one for each of 3 layers, got 4"),
    (dict(combiner=["last", "mean", "last"]), ValueError, "combiner as .*got \"mean\""),
    (dict(transform=[1, 2, 3]), TypeError, "transform as a name or a list of names"),
    (dict(combiner=[]), TypeError, "combiner as a name or a list of names"),
    (dict(only=sp.csr_matrix((200, L - 1))), ValueError, r"only of shape \[200, 40\].*\[200, 39\]"),
    (dict(only=sp.csr_matrix((199, L))), ValueError, r"only of shape \[200, 40\].*\[199, 40\]"),
])
def test_wrong_settings_of_layers_are_refused(trained, options, error, message):
    model, X, _ = trained
    with pytest.raises(error, match=message):
        model.predict(X, **options)
