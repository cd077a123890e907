"""tree_scores against sums along paths in plain Python, its row-sparse gradient, and calls under
autograd, compile and autocast."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xsoftmax as xs
from score_checks import DTYPES, assert_same, opmath, scores_and_gradients
from tree_checks import TREES, edge_problem, parents_and_classes
from xsoftmax import LabelTree

ops = torch.ops.xsoftmax


def problem(tree, Q=7, P=4, D=5, dtype=torch.float64, bias=True, seed=0):
    """Nodes of any kind, with the root and repeated nodes."""
    nodes = torch.randint(tree.num_nodes, (Q, P), generator=torch.Generator().manual_seed(seed))
    return *edge_problem(tree, Q, D, dtype, bias, seed), tree.parent, nodes, tree.layer_sizes


def path(parent, node):
    return [] if node == 0 else [*path(parent, int(parent[node])), node]


def plain(input, weight, bias, parent, nodes, layer_sizes, differences_only=False,
          sparse_grad=False):
    """In float64 for any input dtype; differentiable by autograd."""
    edges = input.double() @ weight.double().T
    edges = edges if bias is None else edges + bias.double()
    rows = []
    for q, row in enumerate(nodes.tolist()):
        paths = [path(parent, node) for node in row]
        common = set.intersection(*map(set, paths)) if differences_only and paths else set()
        rows.append(
            torch.stack([
                sum((edges[q, v - 1] for v in p if v not in common), 0 * edges[q].sum())
                for p in paths
            ]))
    return torch.stack(rows)


@pytest.mark.parametrize("differences_only", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_equals_the_plain_sums(impl, tree, bias, differences_only):
    args = problem(TREES[tree], bias=bias)
    want = scores_and_gradients(plain, *args, differences_only)
    for sparse in (True, False):
        got = scores_and_gradients(ops.tree_scores, *args, differences_only, sparse_grad=sparse)
        assert got[2].is_sparse == sparse and (not bias or got[3].is_sparse == sparse)
        assert_same(got, want, torch.float64)


@pytest.mark.parametrize("differences_only", [False, True])
@pytest.mark.parametrize("D", [3, 16, 136])
@pytest.mark.parametrize("Q, P", [(70, 5), (3, 280)])
def test_many_paths(Q, P, D, differences_only):
    """Edges shared by very many paths, and rows with and without a multiple of 16 bytes."""
    args = problem(LabelTree.balanced(300, 3), Q, P, D, torch.float32)
    assert_same(scores_and_gradients(ops.tree_scores, *args, differences_only),
                scores_and_gradients(plain, *args, differences_only), torch.float32)


@given(parents_and_classes(), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_any_tree(nodes, paths, differences_only, seed):
    tree = LabelTree.from_parents(*nodes)
    args = problem(tree, 3, paths, seed=seed)
    want = scores_and_gradients(plain, *args, differences_only)
    for name in ("kernel", "reference"):
        with xs.use_impl(name):
            assert_same(scores_and_gradients(ops.tree_scores, *args, differences_only), want,
                        torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(impl, dtype):
    args = problem(TREES["balanced"], D=33, dtype=dtype)
    assert_same(scores_and_gradients(ops.tree_scores, *args), scores_and_gradients(plain, *args),
                dtype)


def test_edges_on_all_paths():
    """Proposition 1: a loss of differences has no gradient for them, so they may be left out, and
    are not read."""
    tree = LabelTree.balanced(200, 4)
    below = [c for c in range(200) if path(tree.parent, int(tree.class_node[c]))[0] == 2]
    input, weight, bias, parent, _, sizes = problem(tree, 5)
    nodes = tree.class_node[torch.tensor(below)[torch.randint(len(below), (5, 6))]]
    args = (input, weight, bias, parent, nodes, sizes)

    def loss(*args, **kwargs):
        return ops.tree_scores(*args, **kwargs).log_softmax(1)

    whole = scores_and_gradients(loss, *args, differences_only=False)
    assert_same(scores_and_gradients(loss, *args, differences_only=True), whole, torch.float64)
    broken = weight.clone()
    broken[1] = float("nan")
    assert ops.tree_scores(input, broken, *args[2:], True).isfinite().all()
    assert ops.tree_scores(input, broken, *args[2:], False).isnan().all()


def test_row_sparse_gradient(impl):
    """sum(min(Q P, layer)) rows for any nodes: each touched edge once, in order, then the last one
    repeated with zeros."""
    tree = LabelTree.balanced(200, 4)
    rows_wanted = sum(min(28, size) for size in tree.layer_sizes)
    for args in (problem(tree), problem(tree)[:4] + (torch.full(
        (7, 4), int(tree.class_node[8])), tree.layer_sizes)):
        _, _, grad, bias_grad = scores_and_gradients(ops.tree_scores, *args)
        want = scores_and_gradients(plain, *args)
        touched = sorted(
            {v - 1
             for node in args[4].flatten().tolist()
             for v in path(tree.parent, node)})
        for g, dense in ((grad, want[2]), (bias_grad, want[3])):
            rows, values = g._indices()[0], g._values()
            assert g._nnz() == rows_wanted and rows[:len(touched)].tolist() == touched
            assert rows[len(touched):].eq(touched[-1]).all() and values[len(touched):].eq(0).all()
            torch.testing.assert_close(values[:len(touched)], dense[touched])


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_subsets_of_gradients(impl, wanted):
    args = problem(TREES["huffman"])
    assert_same(scores_and_gradients(ops.tree_scores, *args, wanted=wanted),
                scores_and_gradients(plain, *args, wanted=wanted), torch.float64)


@pytest.mark.parametrize("Q, P, D", [(0, 4, 5), (7, 0, 5), (7, 4, 0), (300, 11, 16)])
def test_shapes(Q, P, D):
    tree = TREES["balanced"]
    args = problem(tree, Q, P, D)
    results = []
    for name in ("kernel", "reference"):
        with xs.use_impl(name):
            results.append(scores_and_gradients(ops.tree_scores, *args, True))
    assert results[0][0].shape == (Q, P)
    assert_same(*results, torch.float64)


def test_strided(impl):
    args = problem(TREES["balanced"])
    want = scores_and_gradients(ops.tree_scores, *args)

    def wide(t):
        return t.repeat_interleave(2, -1)[..., ::2]

    assert_same(scores_and_gradients(ops.tree_scores, *map(wide, args[:5]), args[5]), want,
                torch.float64)


def test_threads_give_the_same_bits(same_for_any_threads):
    args = problem(LabelTree.balanced(5000, 10), Q=300, P=9, D=16, dtype=torch.float32)
    same_for_any_threads(lambda: scores_and_gradients(ops.tree_scores, *args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    input, weight, bias, parent, nodes, sizes = problem(TREES["balanced"], dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    torch.library.opcheck(ops.tree_scores.default, (*leaves, parent, nodes, sizes, True, False))
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.tree_scores.default, (*leaves, parent, nodes, sizes), test_utils=some)
    for mask in ((True, True, True), (True, False, False), (False, False, True)):
        torch.library.opcheck(ops.tree_scores_backward.default,
                              (torch.ones(nodes.shape, dtype=opmath(dtype)), input, weight, parent,
                               nodes, sizes, True, list(mask)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """One graph, with the sparse gradient."""
    args = problem(TREES["balanced"])

    def step(*args):
        return ops.tree_scores(args[0] * 2, *args[1:])

    torch._dynamo.reset()
    got = scores_and_gradients(
        torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager"), *args)
    assert_same(got, scores_and_gradients(step, *args), torch.float64)
    assert got[2].is_sparse


def test_autocast():
    args = problem(TREES["balanced"], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scores = ops.tree_scores(args[0].bfloat16(), *args[1:])
    torch.testing.assert_close(scores, ops.tree_scores(args[0].bfloat16().float(), *args[1:]))


def test_second_derivative_is_an_error():
    args = problem(TREES["balanced"])
    input = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(
        ops.tree_scores(input, args[1].requires_grad_(), *args[2:]).square().sum(), input,
        create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


FLAT = TREES["flat"]
BAD = [
    (dict(nodes=torch.full((7, 4), 31)), IndexError, r"tree_scores: expected nodes in \[0, 31\), "
     r"got 31"),
    (dict(nodes=torch.zeros(7, 4)), TypeError, "tree_scores: expected nodes of dtype int64, got "
     "float32"),
    (dict(nodes=torch.zeros(6, 4, dtype=torch.int64)), ValueError, "tree_scores: expected nodes "
     "with size 7"),
    (dict(parent=FLAT.parent[1:]), ValueError, "tree_scores: expected parent with size 31"),
    (dict(parent=torch.arange(31)), ValueError, r"tree_scores: expected the parent of node .* in "
     r"\[0,"),
    (dict(parent=torch.arange(31) - 1, nodes=torch.full((7, 4), 5)), ValueError,
     "tree_scores: expected layer_sizes with node 4 in the layer that its path to node 5"),
    (dict(layer_sizes=[29]), ValueError, "tree_scores: expected layer_sizes with a sum of 30, the "
     "edges, got 1 fewer"),
    (dict(layer_sizes=[31]), ValueError, "tree_scores: expected layer_sizes with a sum of 30, the "
     "edges, got more"),
    (dict(layer_sizes=[2**63 - 1, 2**63 - 1, 32]), ValueError, "tree_scores: expected layer_sizes "
     "with a sum of 30, the edges, got "
     "more"),
    (dict(layer_sizes=[28, 1, 1], nodes=torch.full((7, 4), 29)), ValueError, "tree_scores: "
     "expected layer_sizes "
     "with"),
    (dict(layer_sizes=[29, -1]), ValueError, "tree_scores: expected layer_sizes of at least 1, got "
     "-1"),
    (dict(weight=torch.zeros(30, 4)), ValueError, "tree_scores: expected"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(change, error, message):
    names = ("input", "weight", "bias", "parent", "nodes", "layer_sizes")
    arguments = dict(zip(names, problem(FLAT, dtype=torch.float32))) | change
    if "parent" in change and "nodes" not in change:
        arguments["nodes"] = torch.ones(7, 4, dtype=torch.int64)
    with pytest.raises(error, match=message):
        ops.tree_scores(**arguments)
