"""beam_search against a search in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xsoftmax as xs
from tree_checks import TREES, edge_problem, parents_and_classes
from xsoftmax import LabelTree

ops = torch.ops.xsoftmax
INF = math.inf


def naive(input, weight, bias, tree, width):
    """Nodes with summed scores, kept as the docstring of the operator says."""
    edge = input.double() @ weight.double().T + (0 if bias is None else bias.double())
    first = tree.first_child.tolist()
    results = []
    for row in edge.tolist():
        beam = [(0.0, 0)]
        while any(first[v] < first[v + 1] for _, v in beam):
            expanded = []
            for score, v in beam:
                children = range(first[v], first[v + 1])
                expanded += [(score + row[c - 1], c)
                             for c in children] if children else [(score, v)]
            beam = sorted(expanded, key=lambda node: (-node[0], node[1]))[:width]
        beam.sort(key=lambda node: (-node[0], node[1]))
        beam = [(score, int(tree.node_class[v])) for score, v in beam]
        results.append(beam + [(-INF, -1)] * (width - len(beam)))
    return (torch.tensor([[s for s, _ in r] for r in results],
                         dtype=torch.float64).view(len(input), width),
            torch.tensor([[c for _, c in r] for r in results]).view(len(input), width))


def search(input, weight, bias, tree, width):
    return ops.beam_search(input, weight, bias, tree.first_child, tree.node_class, width)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, 10, 250])
@pytest.mark.parametrize("tree", TREES)
def test_equals_the_plain_search(impl, tree, width, bias):
    """Also if the beam is wider than the tree, so that every class is found."""
    tree = TREES[tree]
    args = edge_problem(tree, bias=bias)
    scores, classes = search(*args, tree, width)
    want_scores, want_classes = naive(*args, tree, width)
    torch.testing.assert_close(scores, want_scores, rtol=1e-10, atol=1e-10)
    assert torch.equal(classes, want_classes)
    if width >= tree.num_classes:
        assert torch.equal(classes.sort().values[:, width - tree.num_classes:],
                           torch.arange(tree.num_classes).expand(9, -1))


@given(parents_and_classes(), st.integers(1, 8), st.integers(0, 3))
@pytest.mark.parametrize("queries", [1, 70])
def test_any_tree_with_ties(queries, nodes, width, seed):
    """Integer scores tie often and are exact: the lower node wins. One query, and several blocks of
    them that share a product."""
    tree = LabelTree.from_parents(*nodes)
    args = edge_problem(tree, Q=queries, D=2, dtype=torch.float32, seed=seed, whole=True)
    scores, classes = search(*args, tree, width)
    want_scores, want_classes = naive(*args, tree, width)
    assert torch.equal(scores.double(), want_scores) and torch.equal(classes, want_classes)
    with xs.use_impl("reference"):
        assert all(torch.equal(a, b) for a, b in zip((scores, classes), search(*args, tree, width)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 40, 1400])
@pytest.mark.parametrize("tree", ["flat", "subsets"])
def test_many_children_and_wide_beams_with_ties(tree, width, dtype):
    """More children than a kernel holds at once."""
    tree = LabelTree.from_parents([-1] +
                                  [0] * 2600) if tree == "flat" else LabelTree.from_frequencies(
                                      torch.ones(1800), 45)
    args = edge_problem(tree, Q=2, D=16, dtype=dtype, whole=True)
    scores, classes = search(*args, tree, width)
    want_scores, want_classes = naive(*args, tree, width)
    assert torch.equal(scores.double(), want_scores) and torch.equal(classes, want_classes)


@pytest.mark.parametrize("queries", [1, 300])
def test_a_large_tree(queries):
    """Some layers share a product, others do not."""
    tree = LabelTree.random(30_000, 8, torch.Generator().manual_seed(0))
    args = edge_problem(tree, Q=queries, D=12)
    got = search(*args, tree, 6)
    few = slice(0, 5)
    want = naive(args[0][few], *args[1:], tree, 6)
    torch.testing.assert_close(got[0][few], want[0], rtol=1e-10, atol=1e-10)
    assert torch.equal(got[1][few], want[1])
    assert (got[0].diff(dim=1) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(impl, dtype):
    """Returned scores are those of the returned classes."""
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree, dtype=dtype)
    scores, classes = search(input, weight, bias, tree, 8)
    assert scores.dtype == torch.float32
    edges = input.double() @ weight.double().T + bias.double()
    path = tree.path(classes) - 1  # edges, then -2 after the leaf
    want = torch.where(path >= 0,
                       edges.gather(1,
                                    path.clamp_min(0).flatten(1)).view(path.shape), 0.0).sum(-1)
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_scores_that_are_not_finite(impl, value):
    """As in torch.topk, NaN is the largest. Other queries are not affected."""
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree, Q=4)
    want = search(input, weight, bias, tree, 5)
    broken = input.clone()
    broken[1] = value
    scores, classes = search(broken, weight, bias, tree, 5)
    others = [0, 2, 3]
    assert torch.equal(classes[others], want[1][others]) and classes.min() >= 0
    bias = bias.clone()
    leaf = int(tree.class_node[17])
    bias[leaf - 1] = value
    classes = search(input, weight, bias, tree, 200)[1]
    assert classes[:, -1 if value == -INF else 0].eq(17).all()


def test_strided(impl):
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree)
    want = search(input, weight, bias, tree, 5)

    def wide(t):
        return t.repeat_interleave(2, -1)[..., ::2]

    got = ops.beam_search(wide(input), wide(weight), wide(bias), wide(tree.first_child),
                          wide(tree.node_class), 5)
    assert torch.equal(got[1], want[1])
    # ATen's products add in an order that depends on strides
    torch.testing.assert_close(got[0], want[0])
    columns = torch.cat([weight, weight], 1)[:, :5]  # rows apart
    assert torch.equal(search(input, columns, bias, tree, 5)[1], want[1])


def test_shapes(impl):
    tree = TREES["balanced"]
    for shape in ((0, 5), (3, 0)):
        input, weight, bias = edge_problem(tree, *shape)
        scores, classes = search(input, weight, bias, tree, 4)
        assert scores.shape == classes.shape == (shape[0], 4)
    assert search(torch.zeros(2, 3), torch.zeros(0, 3), None, TREES["one class"],
                  2)[1].tolist() == [[0, -1], [0, -1]]


@pytest.mark.parametrize("Q, D", [(60, 16), (300, 16), (66, 1024)])
def test_threads_give_the_same_bits(same_for_any_threads, Q, D):
    tree = LabelTree.balanced(5000, 10)
    args = edge_problem(tree, Q=Q, D=D, dtype=torch.float32)
    same_for_any_threads(lambda: search(*args, tree, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree, dtype=dtype)
    torch.library.opcheck(
        ops.beam_search.default,
        (input, weight.requires_grad_(), bias, tree.first_child, tree.node_class, 5))
    scores, classes = search(input.requires_grad_(), weight, bias, tree, 5)
    assert not scores.requires_grad


BAD = [
    (dict(width=0), ValueError, "beam_search: expected width of at least 1, got 0"),
    (dict(weight=torch.zeros(7, 5)), ValueError, r"beam_search: expected first_child with size 9 "
     r".*got shape \[286\]"),
    (dict(input=torch.zeros(2, 4)), ValueError, "beam_search: expected"),
    (dict(node_class=TREES["balanced"].node_class.int()), TypeError, "beam_search: expected "
     "node_class of dtype int64, "
     "got int32"),
    (dict(first_child=torch.zeros(286, dtype=torch.int64)), ValueError,
     "beam_search: expected first_child to rise from above node 0 .*got 0 and 0"),
    (dict(first_child=torch.full((286,), 300)), ValueError,
     "beam_search: expected first_child to rise from above node 0 to at most 285, got 300 and 300"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(change, error, message):
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree, dtype=torch.float32)
    arguments = dict(input=input, weight=weight, bias=None, first_child=tree.first_child,
                     node_class=tree.node_class, width=5) | change
    with pytest.raises(error, match=message):
        ops.beam_search(**arguments)
