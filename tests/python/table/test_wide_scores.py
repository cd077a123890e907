"""16-bit tables: sums, scores and losses are float32, without rounding to 16 bits in between."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs

N, D, Q = 3000, 48, 20
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def problem(dtype, positive=False):
    """Scores so large that 16 bits would round them by far more than float32 does."""
    torch.manual_seed(0)
    return torch.randn(Q, D).mul(3).to(dtype), torch.randn(
        N, D).to(dtype), torch.randn(N).to(dtype), torch.randint(N, (Q,))


def wide(*tensors):
    return [tensor.double().requires_grad_() for tensor in tensors]


def with_table(loss, weight, bias):
    with torch.no_grad():
        loss.linear.weight.copy_(weight)
        loss.linear.bias.copy_(bias)
    return loss


@LOW
def test_exact_loss_of_each_query(impl, dtype):
    """Losses are within float32 rounding of float64, gradients within one rounding to the dtype of
    the table."""
    input, weight, bias, target = problem(dtype)
    leaves, exact = [tensor.requires_grad_()
                     for tensor in (input, weight, bias)], wide(input.detach(), weight.detach(),
                                                                bias.detach())
    loss = xs.functional.linear_cross_entropy(input, weight, target, bias=bias, reduction="none",
                                              label_smoothing=.1)
    want = F.cross_entropy(F.linear(*exact), target, reduction="none", label_smoothing=.1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4)
    for got, of_exact in zip(torch.autograd.grad(loss.sum(), leaves),
                             torch.autograd.grad(want.sum(), exact), strict=True):
        assert got.dtype == dtype and (got.double() - of_exact).norm() <= 2**-7 * of_exact.norm()


@LOW
@pytest.mark.parametrize("positives", ["mean", "sum"])
def test_several_positives(dtype, positives):
    input, weight, bias, _ = problem(dtype)
    target = torch.randint(N, (Q, 3))
    options = f"reduction=none,positives={positives}"
    loss = torch.ops.xsoftmax.linear_positives_loss(input, weight, bias, target, None, options)
    want = torch.ops.xsoftmax.linear_positives_loss(input.double(), weight.double(), bias.double(),
                                                    target, None, options)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-4)
    # Also the sums of the table's gradient over blocks of queries.
    weight.requires_grad_()
    loss = torch.ops.xsoftmax.linear_positives_loss(input, weight, bias, target, None,
                                                    options).sum()
    table = weight.detach().double().requires_grad_()
    exact = torch.ops.xsoftmax.linear_positives_loss(input.double(), table, bias.double(), target,
                                                     None, options).sum()
    got, of_exact = torch.autograd.grad(loss,
                                        weight)[0].double(), torch.autograd.grad(exact, table)[0]
    assert (got - of_exact).norm() <= 2**-7 * of_exact.norm()


@LOW
def test_topk_and_search_match_float64(impl, dtype):
    """The best classes and their order are those of float64, also with the certified search."""
    input, weight, bias, _ = problem(dtype)
    loss = with_table(xs.LinearCrossEntropyLoss(D, N, bias=True, dtype=dtype), weight, bias).eval()
    log_p = F.log_softmax(F.linear(*wide(input, weight, bias)), 1)
    values, ids = loss.topk(input, 7)
    assert values.dtype == torch.float32 and torch.equal(ids, log_p.topk(7).indices)
    torch.testing.assert_close(values.double(), log_p.topk(7).values, rtol=1e-5, atol=1e-4)
    assert torch.equal(ids, loss.search(input, 7).ids)
    assert torch.equal(loss.predict(input), ids[:, 0])


@LOW
def test_log_prob_of_all_classes(dtype):
    input, weight, bias, _ = problem(dtype)
    loss = with_table(xs.LinearCrossEntropyLoss(D, N, bias=True, dtype=dtype), weight, bias)
    log_p = loss.log_prob(input)
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double(), F.log_softmax(F.linear(*wide(input, weight, bias)),
                                                             1), rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", dtype):
        assert torch.equal(loss.log_prob(input), log_p)


@LOW
@pytest.mark.parametrize("hierarchical", [False, True])
def test_trees(dtype, hierarchical):
    """Log-probabilities of all classes, and the best classes, from 16-bit edges."""
    torch.manual_seed(0)
    tree, options = xs.LabelTree.balanced(
        200, 5), {} if hierarchical else dict(num_candidates=5, num_noises=2)
    kind = xs.HierarchicalSoftmaxLoss if hierarchical else xs.BeamTreeLoss
    loss = kind(D, tree, bias=True, **options).to(dtype).eval()
    reference = kind(D, tree, bias=True, **options).double().eval()
    reference.load_state_dict({
        name: value.double() if value.is_floating_point() else value
        for name, value in loss.state_dict().items()
    })
    input = torch.randn(Q, D).mul(9).to(dtype)
    log_p, want = loss.log_prob(input), reference.log_prob(input.double())
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(loss.topk(input, 3)[1], reference.topk(input.double(), 3)[1])


@LOW
def test_routed_candidates(dtype):
    """A query is routed to the subset of its best score in float32."""
    torch.manual_seed(0)
    tree = xs.LabelTree.balanced(2500, 50)
    loss = xs.BeamTreeLoss(D, tree, num_candidates=5, num_noises=1, routed=True).to(dtype)
    input = torch.randn(300, D).to(dtype)
    subsets = input.double() @ loss.edges.weight[:tree.layer_sizes[0]].detach().double().T
    found = loss.candidates(input)
    parents = tree.parent[tree.class_node[found.clamp(min=0)]] - 1
    assert torch.equal(parents[:, 0], subsets.argmax(1))


@pytest.mark.parametrize("width", [33, 48])
def test_a_nan_query_does_not_affect_others(width):
    """With a bfloat16 table of any width."""
    torch.manual_seed(0)
    input, weight, target = torch.randn(8, width).bfloat16(), torch.randn(
        500, width).bfloat16(), torch.randint(500, (8,))
    want = xs.functional.linear_cross_entropy(input, weight, target, reduction="none")
    input[5] = torch.nan
    got = xs.functional.linear_cross_entropy(input, weight, target, reduction="none")
    others = torch.arange(8) != 5
    assert torch.equal(got[others], want[others]) and got[5].isnan()
