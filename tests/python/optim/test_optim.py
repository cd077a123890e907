"""Row-wise optimizers compute the same numbers as torch.optim does on the dense equivalent."""

import pytest
import torch

from gradient_checks import DTYPES, TOLERANCE, opmath, pair, random_grad, sparse
from gradient_checks import seeded  # noqa: F401 (an autouse fixture)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD

ops = torch.ops.xsoftmax


def test_a_step_increments_the_version_counter():
    """A backward pass through a value that a step has overwritten fails instead of using the new
    value."""
    weight = torch.nn.Parameter(torch.randn(5, 3))
    loss = (weight * weight).sum()
    weight.grad = sparse(torch.tensor([1]), torch.ones(1, 3), 5)
    RowAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def run_both(ours, theirs, steps, *, every_row=False, kind="duplicates", between=lambda i: None):
    """Steps both optimizers with the same random gradients: sparse for ours, dense for theirs."""
    (mine,), (other,) = ours.param_groups[0]["params"], theirs.param_groups[0]["params"]
    n, width = mine.shape[0], mine.shape[1] if mine.dim() == 2 else 0
    for i in range(steps):
        rows, values = random_grad(n, width, 6, mine.dtype, kind)
        if every_row:
            rows, values = torch.cat([rows, torch.arange(n)]), torch.cat(
                [values, torch.randn(n, *values.shape[1:]).to(mine.dtype)])
        mine.grad = sparse(rows, values, n)
        other.grad = mine.grad.to_dense()
        ours.step()
        theirs.step()
        between(i)
    return mine.detach(), other.detach()


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [
    dict(),
    dict(momentum=0.9),
    dict(momentum=0.9, dampening=0.3),
    dict(momentum=0.9, nesterov=True),
    dict(momentum=1.0),
    dict(momentum=0.7, maximize=True),
    dict(maximize=True)
], ids=str)
def test_sgd_equals_dense_sgd(options, dtype, width):
    mine, other = pair(width=width, dtype=dtype)
    ours, theirs = RowSGD([mine], lr=0.05, **options), torch.optim.SGD([other], lr=0.05, **options)
    got, expected = run_both(ours, theirs, 40)
    if options.get("momentum"):
        # momentum updates are pending; otherwise flush() below would test nothing
        assert not torch.allclose(got, expected, rtol=1e-4)
    ours.flush()
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    ours.flush()  # nothing is pending
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    got, expected = run_both(ours, theirs, 7)
    ours.flush()
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


# 0.98 = 1 - lr * weight_decay, so the ratio of the two factors is 1
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.98, False),
                                                (0.9, True), (0.98, True)])
def test_sgd_weight_decay_is_decoupled(momentum, nesterov):
    mine, other = pair(dtype=torch.float64)
    lr, weight_decay = 0.1, 0.2
    ours = RowSGD([mine], lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    class DecoupledSGD(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            other.mul_(1 - lr * weight_decay)
            super().step()

    theirs = DecoupledSGD([other], lr=lr, momentum=momentum, nesterov=nesterov)
    got, expected = run_both(ours, theirs, 30)
    assert not torch.allclose(got, expected)
    ours.flush()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("options", [
    dict(),
    dict(lr_decay=0.1),
    dict(initial_accumulator_value=0.5),
    dict(eps=0.1),
    dict(maximize=True)
], ids=str)
def test_adagrad_equals_dense_adagrad(options, width):
    mine, other = pair(width=width)
    got, expected = run_both(RowAdagrad([mine], lr=0.1, **options),
                             torch.optim.Adagrad([other], lr=0.1, **options), 20)
    torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])


def test_adagrad_decays_only_touched_rows():
    mine, other = pair()
    theirs = torch.optim.Adagrad([other], lr=0.1, weight_decay=0.3)
    got, expected = run_both(RowAdagrad([mine], lr=0.1, weight_decay=0.3), theirs, 20,
                             every_row=True)
    torch.testing.assert_close(got, expected, **TOLERANCE[torch.float32])
    before = got.clone()
    mine.grad = sparse(torch.tensor([2]), torch.ones(1, 5), 12)
    RowAdagrad([mine], lr=0.1, weight_decay=0.3).step()
    assert torch.equal((mine != before).any(1).nonzero().flatten(), torch.tensor([2]))


def test_row_wise_adagrad_keeps_one_number_per_row_and_equals_its_formula():
    mine, _ = pair()
    expected, total = mine.detach().clone(), torch.full((12,), 0.25)
    optimizer = RowAdagrad([mine], lr=0.1, initial_accumulator_value=0.25, row_wise=True)
    for _ in range(5):
        rows, values = random_grad(12, 5, 6)
        mine.grad = sparse(rows, values, 12)
        grad = mine.grad.to_dense()
        optimizer.step()
        total += grad.square().mean(1)
        expected -= 0.1 * grad / (total.sqrt() + 1e-10)[:, None]
    assert optimizer.state[mine]["sum"].shape == (12,)
    torch.testing.assert_close(mine.detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(betas=(0.5, 0.9)),
     dict(eps=0.1), dict(weight_decay=0.3)], ids=str)
def test_adam_equals_dense_adamw_where_every_row_is_touched(options, width, dtype):
    mine, other = pair(width=width, dtype=dtype)
    theirs = torch.optim.AdamW([other], lr=0.01, **{"weight_decay": 0, **options})
    got, expected = run_both(RowAdam([mine], lr=0.01, **options), theirs, 25, every_row=True)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("options, every", [(dict(), 1), (dict(), 40), (dict(betas=(0.5, 0.9)), 3),
                                            (dict(betas=(0.95, 0.99)), 3),
                                            (dict(betas=(0.0, 0.9)), 3), (dict(maximize=True), 3)],
                         ids=str)
def test_adam_follows_dense_adamw_after_a_flush(options, every, width, dtype):
    """Rows that often have no gradient match, once flushed, dense AdamW with zero gradients."""
    n = 12
    mine, other = pair(width=width, dtype=dtype)
    ours, theirs = RowAdam([mine], lr=0.01, **options), torch.optim.AdamW([other], lr=0.01,
                                                                          weight_decay=0, **options)
    for step in range(400):
        rows, values = random_grad(n, width, 1 + 3 // every, dtype)
        if step % every:
            rows, values = rows[:0], values[:0]
        mine.grad = sparse(rows, values, n)
        other.grad = mine.grad.to_dense()
        ours.step()
        theirs.step()
        if step in (7, 50, 399):
            ours.flush()
            moved = (other.detach() - pair(width=width, dtype=dtype)[1].detach()).abs().max()
            assert (mine - other).abs().max() < 1e-4 * moved
    before = mine.detach().clone()
    ours.flush()
    assert torch.equal(mine.detach(), before)
    assert ours.state[mine]["exp_avg"].dtype == opmath(dtype)


def test_lazy_weight_decay_is_exact_under_a_schedule():
    """A row without gradients is its first value times the product of all decay factors."""
    mine = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer = RowAdam([mine], lr=0.3, weight_decay=0.5, betas=(0.0, 0.0), eps=0.0)
    factor = 1.0
    for i in range(20):
        optimizer.param_groups[0].update(lr=0.3 / (i + 1), weight_decay=0.5 + 0.1 * (i % 3))
        factor *= 1 - optimizer.param_groups[0]["lr"] * optimizer.param_groups[0]["weight_decay"]
        row = 1 if i == 19 else 0
        mine.grad = sparse(torch.tensor([row]), torch.ones(1, 2, dtype=torch.float64), 3)
        optimizer.step()
    assert torch.equal(mine[2].detach(), torch.ones(2, dtype=torch.float64))  # its decay is pending
    torch.testing.assert_close(mine[1].detach(),
                               torch.full((2,), factor - 0.3 / 20, dtype=torch.float64), rtol=1e-12,
                               atol=0)
    optimizer.flush()
    torch.testing.assert_close(mine[2].detach(), torch.full((2,), factor, dtype=torch.float64),
                               rtol=1e-12, atol=0)
    before = mine.detach().clone()
    optimizer.flush()
    assert torch.equal(mine.detach(), before)


# ---- empty, zero and NaN gradients ----


@pytest.mark.parametrize("make",
                         [lambda p: RowSGD(p, momentum=0.9, weight_decay=0.1), RowAdagrad, RowAdam])
def test_empty_and_zero_gradients_touch_nothing(make):
    mine, _ = pair()
    before = mine.detach().clone()
    optimizer = make([mine])
    mine.grad = sparse(torch.empty(0, dtype=torch.long), torch.empty(0, 5), 12)
    optimizer.step()
    # sums to zero
    mine.grad = sparse(torch.tensor([3, 3, 7]),
                       torch.stack([torch.ones(5), -torch.ones(5),
                                    torch.zeros(5)]), 12)
    optimizer.step()
    assert torch.equal(mine.detach(), before)
    empty = torch.nn.Parameter(torch.empty(0, 4))
    empty.grad = sparse(torch.empty(0, dtype=torch.long), torch.empty(0, 4), 0)
    make([empty]).step()


@pytest.mark.parametrize("make", [
    RowSGD, lambda p: RowSGD(p, momentum=0.9), RowAdagrad, lambda p: RowAdagrad(p, row_wise=True),
    RowAdam, lambda p: RowAdam(p, row_wise=True), lambda p: RowAdam(p, state_dtype=torch.bfloat16)
])
@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_nan_gradients_propagate(make, impl):
    ops.set_impl(impl)
    mine, _ = pair()
    mine.grad = sparse(torch.tensor([2, 5]), torch.tensor([[float("nan")] * 5, [1.0] * 5]), 12)
    make([mine]).step()
    assert torch.equal(mine.detach().isnan().any(1).nonzero().flatten(), torch.tensor([2]))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_torch_optimizers_accept_row_sparse_gradients(make):
    """Optimizers of torch compute the same from the sparse gradient of candidate_scores and from
    the dense one."""
    tables = []
    for is_sparse in (True, False):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(20, 4))
        optimizer = make([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ids = torch.randint(20, (5, 2))
            ops.candidate_scores(torch.randn(5, 4), weight, None, ids, torch.randint(20, (6,)),
                                 True).square().sum().backward()
            assert weight.grad.is_sparse
            if not is_sparse:
                weight.grad = weight.grad.to_dense().to_sparse(
                    1) if make is torch.optim.SparseAdam else weight.grad.to_dense()
            optimizer.step()
        tables.append(weight.detach())
    torch.testing.assert_close(*tables)


# ---- dense gradients ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "ours, theirs, options",
    [(RowSGD, torch.optim.SGD, dict(lr=0.1)),
     (RowSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
     (RowSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
     (RowAdagrad, torch.optim.Adagrad,
      dict(lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3, eps=1e-3)),
     (RowAdagrad, torch.optim.Adagrad, dict(lr=0.1, weight_decay=0.1, maximize=True)),
     (RowAdam, torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1, maximize=True)),
     (RowAdam, torch.optim.AdamW, dict(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1))],
    ids=str)
def test_dense_gradients_equal_torch(ours, theirs, options, dtype):
    shapes = [(3, 4), (7,), (2, 3, 4), ()]
    mine = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    mine.append(torch.nn.Parameter(torch.randn(4, 6).to(dtype).t()))  # not contiguous
    other = [
        torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in mine
    ]
    a, b = ours(mine, **options), theirs(other, **options)
    for i in range(6):
        for p, q in zip(mine, other):
            p.grad, q.grad = (None, None) if i == 2 else (torch.randn(p.shape).to(dtype),) * 2
        # its first gradient comes in the fourth step
        mine[0].grad = other[0].grad = None if i < 3 else torch.ones(3, 4, dtype=dtype)
        a.step()
        b.step()
    tolerance = TOLERANCE[dtype] if dtype in (torch.float32,
                                              torch.float64) else dict(rtol=5e-2, atol=2e-2)
    for p, q in zip(mine, other):
        torch.testing.assert_close(p.detach(), q.detach(), **tolerance)


def test_sparse_and_dense_gradients_may_follow_each_other():
    """The first gradient decides whether state is dense or per row; gradients of the other kind
    then give the same numbers."""
    rows, values = random_grad(12, 5, 6)
    first, second = pair()
    a, b = RowAdam([first], lr=0.1), RowAdam([second], lr=0.1)
    full = torch.randn(12, 5)
    for grads in ((sparse(rows, values, 12), sparse(rows, values,
                                                    12)), (full, sparse(torch.arange(12), full,
                                                                        12))):
        first.grad, second.grad = grads
        a.step()
        b.step()
    assert "last_step" in a.state[first] and torch.equal(first, second)

    first, second = pair()
    a, b = RowAdam([first], lr=0.1), torch.optim.AdamW([second], lr=0.1, weight_decay=0)
    for grad in (full, sparse(rows, values, 12)):
        first.grad, second.grad = grad, grad.to_dense()
        a.step()
        b.step()
    assert "last_step" not in a.state[first]
    torch.testing.assert_close(first, second)
