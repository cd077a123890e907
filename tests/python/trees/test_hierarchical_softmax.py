"""HierarchicalSoftmaxLoss and its operators against log-probabilities in plain Python."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import xsoftmax as xs
from sampler_checks import check_scripted_compiled_and_saved
from score_checks import DTYPES, assert_same, assert_same_gradients, opmath, scores_and_gradients
from tree_checks import TREES, edge_problem, parents_and_classes
from xsoftmax import HierarchicalSoftmaxLoss, LabelTree

ops = torch.ops.xsoftmax
INF = math.inf
LARGER = [name for name in TREES if name != "one class"]


def plain(input, weight, bias, first_child, parent, nodes, layer_sizes, group_sizes,
          sparse_grad=False):
    """In float64; differentiable by autograd."""
    edges = input.double() @ weight.double().T
    edges = edges if bias is None else edges + bias.double()
    losses = []
    for q, v in enumerate(nodes.tolist()):
        loss = 0 * edges[q].sum()
        while v != 0:
            above = int(parent[v])
            group = edges[q, int(first_child[above]) - 1:int(first_child[above + 1]) - 1]
            loss = loss - group.log_softmax(0)[v - int(first_child[above])]
            v = above
        losses.append(loss)
    return torch.stack(losses)


def problem(tree, Q=9, D=5, dtype=torch.float64, bias=True, seed=0):
    nodes = torch.randint(tree.num_nodes, (Q,), generator=torch.Generator().manual_seed(seed))
    return *edge_problem(
        tree, Q, D, dtype, bias,
        seed), tree.first_child, tree.parent, nodes, tree.layer_sizes, tree.group_sizes


def make(tree, D=5, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    loss = HierarchicalSoftmaxLoss(D, tree, dtype=dtype, **kwargs)
    torch.nn.init.normal_(loss.edges.weight)
    return loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_equals_the_plain_loss(impl, tree, bias):
    args = problem(TREES[tree], bias=bias)
    want = scores_and_gradients(plain, *args)
    for sparse in (True, False):
        got = scores_and_gradients(ops.hierarchical_softmax, *args, sparse_grad=sparse)
        assert got[2].is_sparse == sparse
        assert_same(got, want, torch.float64)


@pytest.mark.parametrize("D", [5, 136])
@pytest.mark.parametrize("tree", ["wide", "deep"])
def test_wide_and_deep_trees(impl, tree, D):
    """More children than a kernel's block has threads, and many layers."""
    parents = [-1] + [0] * 300 if tree == "wide" else [-1] + [
        2 * (v // 2) - 1 if v > 1 else 0 for v in range(140)
    ]
    args = problem(LabelTree.from_parents(parents), 70, D, torch.float32)
    assert_same(scores_and_gradients(ops.hierarchical_softmax, *args),
                scores_and_gradients(plain, *args), torch.float32)


@given(parents_and_classes(), st.integers(0, 3))
def test_any_tree(nodes, seed):
    tree = LabelTree.from_parents(*nodes)
    args = problem(tree, 4, seed=seed)
    want = scores_and_gradients(plain, *args)
    for name in ("kernel", "reference"):
        with xs.use_impl(name):
            assert_same(scores_and_gradients(ops.hierarchical_softmax, *args), want, torch.float64)
            loss = HierarchicalSoftmaxLoss(5, tree, dtype=torch.float64)
            k = min(3, tree.num_classes)
            values, classes = loss.topk(args[0], k)
            want_values, want_classes = loss.log_prob(args[0]).topk(k)
            torch.testing.assert_close(values, want_values)
            torch.testing.assert_close(loss.log_prob(args[0]).gather(1, classes), want_values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(impl, dtype):
    args = problem(TREES["balanced"], D=33, dtype=dtype)
    assert_same(scores_and_gradients(ops.hierarchical_softmax, *args),
                scores_and_gradients(plain, *args), dtype)


def test_row_sparse_gradient(impl):
    """A static number of rows: each touched edge once, then the last one repeated with zeros."""
    tree = TREES["balanced"]
    for args in (problem(tree), problem(tree)[:5] + (torch.full(
        (9,), int(tree.class_node[8])), tree.layer_sizes, tree.group_sizes)):
        grad = scores_and_gradients(ops.hierarchical_softmax, *args)[2]
        rows, values = grad._indices()[0], grad._values()
        assert grad._nnz() == sum(
            min(9 * group, size) for size, group in zip(tree.layer_sizes, tree.group_sizes))
        touched = values.ne(0).any(1).nonzero().flatten()
        assert rows[touched].diff().gt(0).all() and touched.tolist() == list(range(len(touched)))
        assert rows[len(touched):].eq(rows[len(touched) - 1]).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tree", LARGER)
def test_module_equals_nll_loss(tree, weighted, reduction):
    tree = TREES[tree]
    class_weight = torch.linspace(0.5, 2.0, tree.num_classes,
                                  dtype=torch.float64) if weighted else None
    loss = make(tree, bias=True, weight=class_weight, reduction=reduction)
    input, target = torch.randn(4, 3, 5, dtype=torch.float64,
                                requires_grad=True), torch.randint(tree.num_classes, (4, 3))
    target[1, 2] = -100
    want = F.nll_loss(
        loss.log_prob(input).flatten(0, 1), target.flatten(), class_weight, reduction=reduction)
    got = loss(input, target)
    torch.testing.assert_close(got.flatten(), want.flatten())
    leaves = (input, *loss.parameters())
    assert_same_gradients(torch.autograd.grad(got.sum(), leaves),
                          torch.autograd.grad(want.sum(), leaves))
    torch.testing.assert_close(loss.eval()(input, target), got)


@pytest.mark.parametrize("tree", LARGER)
def test_log_prob_is_normalised(tree):
    loss = make(TREES[tree], bias=True)
    # some probabilities underflow float32
    log_prob = loss.log_prob(50 * torch.randn(6, 5, dtype=torch.float64))
    torch.testing.assert_close(log_prob.logsumexp(1), torch.zeros(6, dtype=torch.float64))
    assert log_prob.isfinite().all()


@pytest.mark.parametrize("k", [0, 1, 3, 60, 250])
@pytest.mark.parametrize("tree", TREES)
def test_topk(impl, tree, k):
    tree = TREES[tree]
    loss, input = make(tree, bias=True), torch.randn(4, 2, 5, dtype=torch.float64)
    values, classes = ops.hierarchical_topk(input.flatten(0, 1), loss.edges.weight, loss.edges.bias,
                                            tree.first_child, tree.node_class, k)
    assert values.shape == classes.shape == (8, k)
    n = min(k, tree.num_classes)
    want = loss.log_prob(input).topk(n)
    torch.testing.assert_close(values[:, :n], want.values.flatten(0, 1))
    assert torch.equal(classes[:, :n], want.indices.flatten(0, 1))
    assert values[:, n:].eq(-INF).all() and classes[:, n:].eq(-1).all()
    if k > n:
        return
    values, classes = loss.topk(input, k)
    torch.testing.assert_close(values, want.values)
    assert torch.equal(classes, want.indices)
    if k == 1:
        assert torch.equal(loss.predict(input), classes.squeeze(-1))


def test_topk_with_ties(impl):
    """The lower leaf is first; inner nodes that tie with leaves are expanded before them."""
    tree = LabelTree.from_nested([3, [[0]], [1, 2]])
    input = torch.zeros(1, 2)
    _, classes = ops.hierarchical_topk(input, torch.zeros(tree.num_edges, 2), None,
                                       tree.first_child, tree.node_class, 4)
    assert classes.tolist() == [[3, 0, 1, 2]]


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_scores_that_are_not_finite(impl, value):
    tree = TREES["balanced"]
    input, weight, bias = edge_problem(tree, Q=3)
    broken = input.clone()
    broken[1] = value
    want = ops.hierarchical_topk(input, weight, bias, tree.first_child, tree.node_class, 4)
    values, classes = ops.hierarchical_topk(broken, weight, bias, tree.first_child, tree.node_class,
                                            4)
    assert values[1].isnan().all() and classes[1].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(values[[0, 2]], want[0][[0, 2]])
    assert torch.equal(classes[[0, 2]], want[1][[0, 2]])


def test_ignored_queries_change_nothing(impl):
    loss = make(TREES["balanced"])
    input, target = torch.randn(5, 5, dtype=torch.float64), torch.tensor([3, -100, 7, -100, 9])
    input[1] = INF
    input.requires_grad_()
    value = loss(input, target)
    value.backward()
    torch.testing.assert_close(value, loss(input[::2], target[::2]))
    assert input.grad[1::2].eq(0).all() and loss.edges.weight.grad.to_dense().isfinite().all()
    input.grad = loss.edges.weight.grad = None
    nothing = loss(input, torch.full((5,), -100))
    nothing.backward()
    assert nothing.isnan() and input.grad.eq(0).all() and loss.edges.weight.grad.to_dense().eq(
        0).all()


def test_threads():
    args = problem(LabelTree.balanced(5000, 10), Q=300, D=16, dtype=torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(scores_and_gradients(ops.hierarchical_softmax, *args))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][:2], other[:2]))
        for a, b in zip(results[0][2:], other[2:]):
            assert torch.equal(a._indices(), b._indices()) and torch.equal(a._values(), b._values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    input, weight, bias, *tree = problem(TREES["balanced"], dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (input, weight, bias)]
    torch.library.opcheck(ops.hierarchical_softmax.default, (*leaves, *tree, False))
    torch.library.opcheck(ops.hierarchical_topk.default,
                          (input, weight, bias, tree[0], TREES["balanced"].node_class, 5))
    for mask in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.hierarchical_softmax_forward.default,
                              (input, weight, bias, *tree, list(mask)))
    width = sum(tree[4])
    torch.library.opcheck(
        ops.hierarchical_softmax_backward.default,
        (torch.ones(9, dtype=opmath(dtype)), torch.randn(
            9, width, dtype=opmath(dtype)), input, weight, *tree, [False, True, True]))


def test_scripted_compiled_and_saved():
    check_scripted_compiled_and_saved(lambda: HierarchicalSoftmaxLoss(5, TREES["balanced"]))


def test_state_dict_and_optimizer():
    """A step changes only the edges on the paths of the targets."""
    tree = LabelTree.random(500, 6, torch.Generator().manual_seed(1))
    loss = make(tree, dtype=torch.float32)
    before = loss.edges.weight.detach().clone()
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.1)
    target = torch.tensor([5, 80])
    first = loss(torch.ones(2, 5), target)
    first.backward()
    optimizer.step()
    moved = (loss.edges.weight.detach() != before).any(1).nonzero().flatten().tolist()
    above = {int(tree.parent[v]) for v in tree.path(target).flatten().tolist() if v > 0}
    assert moved == sorted(v - 1 for v in range(1, tree.num_nodes) if int(tree.parent[v]) in above)
    assert loss(torch.ones(2, 5), target) < first
    other = HierarchicalSoftmaxLoss(5, LabelTree.random(500, 6))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(torch.ones(2, 5), target), loss(torch.ones(2, 5), target))


def test_autocast():
    loss = make(TREES["balanced"], dtype=torch.float32)
    input, target = torch.randn(6, 5).bfloat16(), torch.randint(200, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(input, target)
        classes = loss.topk(input, 3)[1]
    torch.testing.assert_close(value, loss(input.float(), target))
    assert torch.equal(classes, loss.topk(input.float(), 3)[1])


TREE = TREES["balanced"]
BAD = [
    (lambda: HierarchicalSoftmaxLoss(5, 10), TypeError, "HierarchicalSoftmaxLoss: expected tree as "
     "a LabelTree, .* got int"),
    (lambda: HierarchicalSoftmaxLoss(5.0, TREE), TypeError, "HierarchicalSoftmaxLoss: expected "
     "in_features of type int, got float"),
    (lambda: HierarchicalSoftmaxLoss(5, TREE, reduction="max"), ValueError,
     "HierarchicalSoftmaxLoss: expected reduction to be \"mean\", \"sum\" or \"none\", got 'max'"),
    (lambda: HierarchicalSoftmaxLoss(5, TREE, weight=torch.ones(3)), ValueError,
     r"expected weight of shape \(200,\), got \(3,\)"),
    (lambda: make(TREE)(torch.zeros(2, 5).double(), torch.tensor([3, 200])), IndexError,
     r"expected target in \[0, 200\).*got 200 at \[1\]"),
    (lambda: make(TREE)(torch.zeros(2, 4).double(), torch.tensor([3, 1])), ValueError,
     r"expected input of shape \[\*, 5\], got \[2, 4\]"),
    (lambda: make(TREE)(torch.zeros(2, 5).double(), torch.tensor([3])), ValueError,
     r"expected target of shape \[2\].*got \[1\]"),
    (lambda: make(TREE)(torch.zeros(2, 5).double(), torch.tensor([3.0, 1.0])), TypeError,
     "expected target of dtype int64, got float32"),
    (lambda: make(TREE)
     (torch.zeros(2, 5), torch.tensor([3, 1])), TypeError, "hierarchical_softmax_loss: expected"),
    (lambda: make(TREE).topk(torch.zeros(2, 5).double(), -1), ValueError,
     r"HierarchicalSoftmaxLoss: expected k in \[0, 200\], got -1"),
    (lambda: make(TREE).topk(torch.zeros(2, 5).double(), 201), ValueError,
     r"HierarchicalSoftmaxLoss: expected k in \[0, 200\], got 201"),
    (lambda: ops.hierarchical_topk(torch.zeros(2, 5), torch.zeros(TREE.num_edges, 5), None, TREE.
                                   first_child, TREE.node_class, -1), ValueError,
     "hierarchical_topk: expected k of at least 0, got -1"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("change, message", [
    (dict(grad_edges=torch.ones(1, 1).double()), "expected grad_edges with size 9"),
    (dict(grad_edges=torch.ones(9, 29).double()), "expected grad_edges with size 30"),
    (dict(scale=torch.ones(8).double()), "expected scale with size 9"),
    (dict(first_child=torch.tensor([1, 2, 3])), "expected first_child with size 32"),
])
def test_bad_calls_of_the_backward(impl, change, message):
    input, weight, _, *tree = problem(TREES["flat"])
    names = ("scale", "grad_edges", "input", "weight", "first_child", "parent", "nodes",
             "layer_sizes", "group_sizes")
    arguments = dict(
        zip(names,
            (torch.ones(9).double(), torch.ones(9, 30).double(), input, weight, *tree))) | change
    with pytest.raises(ValueError, match=message):
        ops.hierarchical_softmax_backward(**arguments, output_mask=[False, True, True])


BAD_TREES = [
    (dict(parent=torch.arange(31)), ValueError, "expected the parent of node"),
    (dict(first_child=torch.zeros(32, dtype=torch.int64)), ValueError, "expected node .* among at "
     "most 30 children"),
    (dict(group_sizes=[29]), ValueError, "expected node .* among at most 29 children"),
    (dict(group_sizes=[31]), ValueError, r"expected group_sizes in \[1, 30\].*got 31"),
    (dict(group_sizes=[]), ValueError, "expected group_sizes of 1 layers.*got 0"),
    (dict(nodes=torch.full((9,), 31)), IndexError, r"expected nodes in \[0, 31\), got 31"),
]


@pytest.mark.parametrize("change, error, message", BAD_TREES,
                         ids=[message[:40] for *_, message in BAD_TREES])
def test_bad_trees(change, error, message):
    names = ("input", "weight", "bias", "first_child", "parent", "nodes", "layer_sizes",
             "group_sizes")
    arguments = dict(zip(names, problem(TREES["flat"]))) | change
    with pytest.raises(error, match="hierarchical_softmax_loss: " + message):
        ops.hierarchical_softmax(**arguments)
