"""Scores that float32 rounds to 0 or 1 keep their order, and no entry of a sparse result is 0,
which scipy would drop."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import xsoftmax as xs
from xr_linear_checks import layer_margins, problem, small

TRANSFORMS = [
    "l1-hinge", "l3-hinge", "l6-hinge", "sigmoid", "log-l3-hinge", "log-sigmoid", "identity"
]
LABELS = 40


@pytest.fixture(scope="module")
def model():
    return small(*problem())


def log_of(transform, margins):
    """The log of each node's value in float64; for "identity" the value."""
    base = transform.removeprefix("log-")
    if base == "identity":
        return margins
    if base == "sigmoid":
        return -np.logaddexp(0, -margins)
    return -np.maximum(0, 1 - margins)**int(base[1])


def expected(model, X, transform, combiner):
    """The score that orders the labels, in float64: a log except for "identity"."""
    start = -np.inf if combiner == "add" and not is_additive(transform) else 0.0
    above = np.full((X.shape[0], 1), start)
    for first_child, margins in layer_margins(model, X):
        above, values = np.repeat(above, np.diff(first_child), axis=1), log_of(transform, margins)
        if combiner == "last":
            above = values
        elif combiner == "add" and not is_additive(transform):
            above = np.logaddexp(above, values)
        else:
            above = above + values
    scores = np.empty_like(above)
    scores[:, model.model.labels().numpy()] = above
    return scores


def is_additive(transform):
    return transform.startswith("log-") or transform == "identity"


@pytest.mark.parametrize("length", [1, 5, 50])
@pytest.mark.parametrize("combiner", ["multiply", "add", "last"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_scores_that_underflow_keep_their_order(model, transform, combiner, length):
    """In long rows scores are far below 1e-38: as float32 products they would be 0, ordered by
    id."""
    if combiner == "multiply" and is_additive(transform):
        combiner = "add"  # a product of logs has no meaningful order
    X = problem()[0][:50] * np.float32(length)
    wanted = expected(model, X, transform, combiner)
    found = model.predict(X, LABELS, LABELS, transform=transform, combiner=combiner)
    assert (np.diff(found.indptr) == LABELS).all() and (found.data != 0).all()
    labels, data = found.indices.reshape(-1, LABELS), found.data.reshape(-1, LABELS)
    in_order = np.take_along_axis(wanted, labels, 1)
    slack = 1e-5 * (1 + np.abs(in_order[:, 1:]) * length)
    assert (in_order[:, :-1] >= in_order[:, 1:] - slack).all()
    assert (np.sort(labels, 1) == np.arange(LABELS)).all() and (np.diff(data, axis=1) <= 0).all()
    if is_additive(transform):
        np.testing.assert_allclose(data, in_order, rtol=1e-4, atol=1e-5 * length)
    else:
        sound = in_order > np.log(1e-37)  # scores within the range of float32
        np.testing.assert_allclose(np.log(data[sound]), in_order[sound], rtol=1e-5 * length,
                                   atol=1e-5)
        assert (data[~sound] < 1.1e-37).all()


@pytest.mark.parametrize("transform", ["l3-hinge", "sigmoid"])
def test_the_tail_keeps_its_order_in_sparse_formats(model, transform):
    """Converted to scipy's canonical form, sorted by label and without zeros, a row still has its
    order."""
    X = problem()[0] * np.float32(200 if transform == "l3-hinge" else 5000)
    found = model.predict(X, 10, 10, transform=transform)
    assert (found.data < 1e-37).mean() > 0.2, "the case must have scores that underflow float32"
    canonical = found.copy()
    canonical.sort_indices()
    canonical.eliminate_zeros()
    assert canonical.nnz == found.nnz == 10 * X.shape[0]
    by_score = np.argsort(-canonical.data.reshape(-1, 10), axis=1, kind="stable")
    same_label = np.take_along_axis(canonical.indices.reshape(-1, 10), by_score,
                                    1) == found.indices.reshape(-1, 10)
    assert same_label[found.data.reshape(-1, 10) <
                      0.5].all(), "larger scores may be 1 for several labels"
    queries = torch.sparse_csr_tensor(
        *(torch.from_numpy(part) for part in (X.indptr, X.indices, X.data)), X.shape)
    tensor = model.model.predict_csr(queries, 10, 10) if transform == "l3-hinge" else None
    if tensor is not None:
        assert np.array_equal(tensor.values().numpy(), canonical.data) and np.array_equal(
            tensor.col_indices().numpy(), canonical.indices)


def test_large_scores_that_round_to_one_are_in_order():
    """sigmoid(20) and sigmoid(25) are 1 in float32, but the larger score is the better label."""
    layer = [
        torch.tensor([0, 3]),
        torch.tensor([0, 1]),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([2], dtype=torch.uint8),
        torch.tensor([0, 1, 2], dtype=torch.uint8),
        torch.tensor([20.0, 25.0, 22.0])
    ]
    for bias_of, transform in ((0.0, "sigmoid"), (0.0, "log-sigmoid")):
        made = xs.XRLinear(
            torch.classes.xsoftmax.XRLinear(1, bias_of, transform, torch.arange(3), [layer]))
        scores, labels = made.topk(torch.ones(1, 1), 3)
        assert labels.tolist() == [[1, 2, 0]]
        assert transform != "sigmoid" or scores.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("transform", ["identity", "log-l3-hinge", "l3-hinge"])
def test_a_score_of_zero_is_an_entry(model, transform):
    """A row without features, or the best possible log, scores 0; scipy must not drop the label."""
    layers = [model.model.layer(depth) for depth in range(model.depth)]
    unbiased = xs.XRLinear(
        torch.classes.xsoftmax.XRLinear(model.num_features, 0.0, transform, model.model.labels(),
                                        layers))
    nothing = sp.csr_matrix((3, model.num_features), dtype=np.float32)
    found = unbiased.predict(nothing, 7, 40)
    found.eliminate_zeros()
    assert (np.diff(found.indptr) == 7).all()
    if transform == "identity":
        np.testing.assert_allclose(found.data, 0, atol=1e-30)


def test_matcher_scores_that_underflow_keep_their_order():
    """HierarchicalMatcher adds logs: labels beyond float32's range are in order, and differ from
    missing labels."""
    tree = xs.LabelTree.balanced(40, 3)
    torch.manual_seed(0)
    matcher = xs.HierarchicalMatcher(8, tree, beam=40)
    double = xs.HierarchicalMatcher(8, tree, beam=40, dtype=torch.float64)
    for each in (matcher, double):
        each.layer.fill_(tree.depth)
    with torch.no_grad():
        matcher.edges.weight.normal_(std=10)
    double.load_state_dict(matcher.state_dict())
    input = torch.randn(20, 8)
    scores, labels = matcher.topk(input, 40)
    logs, of_logs = torch.ops.xsoftmax.beam_search(input.double(), double.edges.weight,
                                                   double.edges.bias, tree.first_child,
                                                   tree.node_class, 40, "log-l3-hinge")
    in_order = logs.gather(1, of_logs.argsort(1)).gather(1, labels)
    assert (in_order.diff(dim=1) <= 1e-5 * (1 + in_order[:, 1:].abs())).all()
    assert (scores > 0).all() and (scores < 1e-37).any() and (scores.diff(dim=1) <= 0).all()
    scores, labels = matcher.topk(input, 40, exclude=torch.zeros(20, 1, dtype=torch.int64))
    assert torch.equal(scores == 0, labels == -1) and (labels == -1).sum() == 20


def test_combined_predictions_keep_the_order_of_small_scores(model):
    """Means of scores that underflow float32, and softmaxes of logs thousands apart, are not
    ties."""
    X = problem()[0] * np.float32(50)
    for method, transform in (("average", "l3-hinge"), ("softmax", "log-l3-hinge")):
        found = model.predict(X, 40, 40, transform=transform)
        both = xs.combine_predictions([found, found], method, topk=40)
        assert (both.data > 0).all() and (both.data < 1e-37).any()
        of_labels = np.zeros(found.shape, np.float32)
        of_labels[np.repeat(np.arange(len(found.indptr) - 1), 40), found.indices] = found.data
        assert (np.diff(np.take_along_axis(of_labels, both.indices.reshape(-1, 40), 1)) <= 0).all()
        assert (np.diff(both.data.reshape(-1, 40)) <= 0).all()
