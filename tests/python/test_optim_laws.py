"""Laws of the row-wise optimizers: when a table is made up changes nothing; a refused step changes nothing; dense equals."""

import copy
import io
import math
import threading

import numpy
import pytest
import torch

from gradient_checks import opmath, random_grad, seeded, sparse  # noqa: F401 (seeded: a fixture of every test)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD, settle

ops = torch.ops.xsoftmax
N, WIDTH, STEPS = 20, 3, 120
SCHEDULES = {"constant": lambda t: 1.0, "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t / STEPS)), "step": lambda t: 0.1 ** (t // 40)}
CASES = {"sgd": (RowSGD, dict(lr=0.05, weight_decay=0.3)), "momentum": (RowSGD, dict(lr=0.05, momentum=0.9, dampening=0.3)),
         "momentum-decay": (RowSGD, dict(lr=0.05, momentum=0.9, weight_decay=0.3)),
         "nesterov-decay": (RowSGD, dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.3)),
         "momentum-1": (RowSGD, dict(lr=0.05, momentum=1.0, weight_decay=0.1)),
         "adagrad": (RowAdagrad, dict(lr=0.1, lr_decay=0.01)), "adagrad-row": (RowAdagrad, dict(lr=0.1, row_wise=True)),
         "adam": (RowAdam, dict(lr=0.05)), "adam-decay": (RowAdam, dict(lr=0.05, weight_decay=0.1)),
         "adam-strong-decay": (RowAdam, dict(lr=0.05, weight_decay=15.0)), "adam-beta1-0": (RowAdam, dict(lr=0.05, betas=(0.0, 0.9))),
         "adam-row": (RowAdam, dict(lr=0.05, row_wise=True)),
         "adam-row-decay": (RowAdam, dict(lr=0.05, row_wise=True, weight_decay=0.1, betas=(0.8, 0.99)))}


class DecoupledSGD(torch.optim.SGD):
    """torch.optim.SGD whose weight decay is a factor on the parameter."""

    def __init__(self, params, weight_decay=0.0, **options):
        super().__init__(params, **options)
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * self.weight_decay)
        super().step()


class RowWise(torch.optim.Optimizer):
    """One second moment a row, in dense PyTorch: Adagrad, or with betas Adam."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state, squares, lr = self.state[param], param.grad.square().mean(1), group["lr"]
                if "betas" not in group:
                    state["sum"] = state.get("sum", 0) + squares
                    param -= lr * param.grad / (state["sum"].sqrt() + 1e-10)[:, None]
                    continue
                t, (beta1, beta2) = state.get("step", 0) + 1, group["betas"]
                state["step"] = t
                state["exp_avg"] = beta1 * state.get("exp_avg", 0) + (1 - beta1) * param.grad
                state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * squares
                param *= 1 - lr * group["weight_decay"]
                param -= lr / (1 - beta1 ** t) * state["exp_avg"] / ((state["exp_avg_sq"] / (1 - beta2 ** t)).sqrt() + group["eps"])[:, None]


def dense_twin(ours, groups, options):
    if options.get("row_wise"):
        return RowWise(groups, **({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} if ours is RowAdam else {}) | options)
    make = {RowSGD: DecoupledSGD, RowAdagrad: torch.optim.Adagrad, RowAdam: torch.optim.AdamW}[ours]
    return make(groups, **({"weight_decay": 0.0} if ours is RowAdam else {}) | options)


def two_groups(factor=0.3):
    torch.manual_seed(0)
    tables = [torch.nn.Parameter(torch.randn(N, WIDTH, dtype=torch.float64)) for _ in range(2)]
    return tables, lambda lr: [{"params": tables[:1]}, {"params": tables[1:], "lr": factor * lr}]


def follow(optimizer, schedule, between=lambda t: None, twin=None, steps=STEPS):
    """Steps under a schedule; gradients are seeded and do not depend on the tables. Every row has one at the first step."""
    generator = torch.Generator().manual_seed(1)
    rates = [group["lr"] for group in optimizer.param_groups]
    for t in range(steps):
        for i, (group, rate) in enumerate(zip(optimizer.param_groups, rates)):
            table, lr = group["params"][0], rate * SCHEDULES[schedule](t)
            rows = torch.arange(N) if t == 0 else torch.randint(N, (2,), generator=generator)
            table.grad = sparse(rows, torch.randn(len(rows), WIDTH, generator=generator, dtype=torch.float64), N)
            group["lr"] = lr
            if twin is not None:
                twin.param_groups[i]["lr"] = lr
                twin.param_groups[i]["params"][0].grad = table.grad.to_dense()
        optimizer.step()
        if twin is not None:
            twin.step()
        between(t)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_dense_optimizer_is_equalled_under_schedules(name, schedule):
    make, options = CASES[name]
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    ours = make(groups(options["lr"]), **options)
    follow(ours, schedule, twin=dense_twin(make, twin_groups(options["lr"]), options))
    if make is not RowAdagrad and name != "adam-beta1-0":
        assert not torch.allclose(tables[0], twins[0], atol=1e-5)  # it owes
    ours.flush()
    for table, twin in zip(tables, twins):
        assert (table - twin).abs().max() < (1e-6 if make is RowAdam else 1e-12)


@pytest.mark.parametrize("row_wise", [False, True])
def test_adam_without_eps_is_dense_adamw_to_rounding(row_wise):
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    options = dict(lr=0.05, eps=0.0, weight_decay=0.1) | (dict(row_wise=True) if row_wise else {})
    ours = RowAdam(groups(0.05), **options)
    follow(ours, "cosine", twin=dense_twin(RowAdam, twin_groups(0.05), options))
    ours.flush()
    assert (tables[0] - twins[0]).abs().max() < 1e-13 and tables[0].isfinite().all()


def test_adam_with_a_large_eps_is_within_its_bound():
    """Owed movements are larger than the dense ones, by the factor 1 + eps / root at most; one gradient, then steps without."""
    eps, lr = 1e-2, 0.01
    for size in (1e-3, 1.0):
        table, twin = (torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64)) for _ in range(2))
        ours, theirs = RowAdam([table], lr=lr, eps=eps), torch.optim.AdamW([twin], lr=lr, eps=eps, weight_decay=0.0)
        smallest_root, first = math.inf, None
        for t in range(60):
            rows = torch.tensor([0] if t == 0 else [1])
            table.grad = sparse(rows, torch.full((1, 1), size, dtype=torch.float64), 2)
            twin.grad = table.grad.to_dense()
            ours.step()
            theirs.step()
            first = twin[0].item() if t == 0 else first
            smallest_root = min(smallest_root, size * math.sqrt(0.001 * 0.999 ** t / (1 - 0.999 ** (t + 1))))
        ours.flush()
        dense, made_up = first - twin[0].item(), first - table[0].item()
        assert 1 < made_up / dense <= 1 + eps / smallest_root


@pytest.mark.parametrize("impl", ["kernel", "reference"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", CASES)
def test_making_up_changes_nothing(name, schedule, impl):
    """Flush in every step, in none or at random, settle, state dicts and reloaded state in between: the same table."""
    make, options = CASES[name]
    ops.set_impl(impl)
    results = []
    for how in ("never", "always", "random"):
        tables, groups = two_groups()
        optimizer = make(groups(options["lr"]), **options)
        chance = torch.Generator().manual_seed(2)

        def between(t):
            draw = torch.randint(8, (), generator=chance).item()
            if how == "always" or (how == "random" and draw == 0):
                optimizer.flush()
            elif how == "random" and draw == 1:
                settle(tables[0].data)
            elif how == "random" and draw == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        follow(optimizer, schedule, between, steps=60)
        optimizer.flush()
        results.append(torch.cat([table.detach() for table in tables]))
        assert (results[0] - results[-1]).abs().max() < 1e-10


@pytest.mark.parametrize("make, first, then", [
    (RowSGD, dict(momentum=0.9), dict(momentum=0.5)), (RowSGD, dict(momentum=0.9), dict(nesterov=True)),
    (RowSGD, dict(momentum=0.0), dict(momentum=0.9)), (RowSGD, dict(momentum=0.9), dict(momentum=0.0)),
    (RowAdam, dict(), dict(betas=(0.5, 0.9))), (RowAdam, dict(row_wise=True), dict(betas=(0.5, 0.9))),
    (RowAdam, dict(weight_decay=0.1), dict(eps=1e-9))], ids=str)
def test_options_of_a_group_change_between_steps(make, first, then):
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    options = {"lr": 0.05, **first}
    ours, theirs = make(groups(0.05), **options), dense_twin(make, twin_groups(0.05), options)

    def between(t):
        if t in (30, 60):
            for optimizer in (ours, theirs):
                for group in optimizer.param_groups:
                    group.update(then if t == 30 else {name: optimizer.defaults[name] for name in then})

    follow(ours, "cosine", between, twin=theirs)
    ours.flush()
    assert (tables[0] - twins[0]).abs().max() < 1e-6


def test_more_steps_than_are_remembered():
    """A small table remembers 1,024 steps; the step that finds no room makes up all rows first."""
    torch.manual_seed(0)
    table, twin = (torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float64)) for _ in range(2))
    ours, theirs = RowSGD([table], lr=0.01, momentum=0.99), torch.optim.SGD([twin], lr=0.01, momentum=0.99)
    for t in range(1100):
        table.grad = sparse(torch.tensor([0 if t else 1]), torch.randn(1, 1, dtype=torch.float64), 3)
        twin.grad = table.grad.to_dense()
        ours.step()
        theirs.step()
    ours.flush()
    torch.testing.assert_close(table, twin, rtol=1e-12, atol=1e-13)


# ---- a refused step changes nothing ----

def spoil_rows(params, optimizer):
    params[1].grad = sparse(torch.tensor([3, N]), torch.ones(2, WIDTH, dtype=torch.float64), N)
    return IndexError


def spoil_layout(params, optimizer):
    params[1].grad = torch.ones(N, WIDTH, dtype=torch.float64).to_sparse()
    return RuntimeError


def spoil_rate(params, optimizer):
    optimizer.param_groups[1].update(lr=2.0, weight_decay=0.5)
    return None if isinstance(optimizer, RowAdagrad) else ValueError


def spoil_option(params, optimizer):
    optimizer.param_groups[1]["lr"] = -1.0
    return ValueError


def spoil_state(params, optimizer):
    state = optimizer.state[params[1]]
    name = next(name for name in ("exp_avg", "sum", "last_step") if name in state)
    state[name] = state[name][:-1]
    return ValueError


@pytest.mark.parametrize("spoil", [spoil_rows, spoil_layout, spoil_rate, spoil_option, spoil_state])
@pytest.mark.parametrize("name", ["momentum-decay", "adagrad", "adam-decay"])
def test_a_refused_step_changes_nothing(name, spoil):
    make, options = CASES[name]
    (tables, groups) = two_groups()
    encoder = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = make([*groups(options["lr"]), {"params": [encoder]}], **options)
    encoder.grad = torch.randn(3, 4, dtype=torch.float64)
    for table in tables:
        table.grad = sparse(*random_grad(N, WIDTH, 6, torch.float64), N)
    optimizer.step()
    good_state, good_groups = copy.deepcopy(optimizer.state[tables[1]]), copy.deepcopy(optimizer.param_groups[1]["lr"])
    error = spoil(tables, optimizer)
    if error is None:
        return
    params = [*tables, encoder]
    before = [param.detach().clone() for param in params], [copy.deepcopy(dict(optimizer.state[param])) for param in params]
    with pytest.raises(error):
        optimizer.step()
    for param, old, state in zip(params, *before):
        assert torch.equal(param.detach(), old)
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in state.items())
    assert good_state.keys() == optimizer.state[tables[1]].keys() and good_groups > 0


@pytest.mark.parametrize("make", [RowSGD, RowAdagrad, RowAdam])
def test_a_refused_first_step_leaves_no_state(make):
    tables, groups = two_groups()
    optimizer = make(groups(0.1))
    tables[0].grad = sparse(*random_grad(N, WIDTH, 6, torch.float64), N)
    spoil_rows(tables, optimizer)
    with pytest.raises(IndexError):
        optimizer.step()
    assert not optimizer.state


# ---- options ----

def test_numbers_of_numpy_are_options():
    tables = []
    for number, count in ((float, int), (numpy.float64, numpy.int64)):
        table = torch.nn.Parameter(torch.ones(4, 2))
        for optimizer in (RowAdam([table], lr=number(0.1), betas=(number(0.8), number(0.99)), weight_decay=count(1)),
                          RowSGD([table], lr=count(1), momentum=number(0.5), nesterov=numpy.bool_(True)),
                          RowAdagrad([table], lr=number(0.1), row_wise=numpy.bool_(True))):
            table.grad = sparse(torch.tensor([1, 2]), torch.ones(2, 2), 4)
            optimizer.step()
        tables.append(table.detach())
    assert torch.equal(*tables)


def test_option_text():
    with pytest.raises(ValueError, match="row_adam_state: expected options among lr, beta1, beta2, eps, weight_decay, maximize, row_wise, "
                       "stochastic_rounding, state_dtype, got 'rate'"):
        ops.row_adam_state(torch.ones(2), True, "rate=1")
    for text in ("lr=x", "lr=", "lr=1e-3x", "lr", "lr=1,lr=1", "lr=1,,"):
        with pytest.raises(ValueError, match="row_adam_state: expected"):
            ops.row_adam_state(torch.ones(2), True, text)
    with pytest.raises(ValueError, match="row_sgd_state: expected option nesterov as true or false, got '1'"):
        ops.row_sgd_state(torch.ones(2), True, "nesterov=1")


# ---- tables that owe cannot be read by mistake ----

def owing(make=RowAdam, **options):
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(N, WIDTH))
    optimizer = make([table], lr=0.1, **({"momentum": 0.9} if make is RowSGD else {}), **options)
    for t in range(5):
        table.grad = sparse(torch.tensor([t, t + 1]), torch.randn(2, WIDTH), N)
        optimizer.step()
    return table, optimizer


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("alias", [lambda p: p, lambda p: p.data, lambda p: p.detach().t()[:1]], ids=["itself", "data", "view"])
def test_settle_is_flush(make, alias):
    (table, optimizer), (other, other_optimizer) = owing(make), owing(make)
    before, version = table.detach().clone(), table._version
    other_optimizer.flush()
    settle(alias(table))
    assert torch.equal(table, other) and not torch.equal(table, before) and table._version == version  # a waiting backward pass goes on
    settle(alias(table))
    optimizer.flush()
    assert torch.equal(table, other)
    settle(table)
    settle(torch.ones(3))
    ops.settle_(torch.empty(3, device="meta"))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("write", [lambda p: p.copy_(torch.ones_like(p)), lambda p: torch.nn.init.ones_(p), lambda p: p.mul_(0).add_(1)])
@pytest.mark.parametrize("then", ["flush", "settle", "state_dict", "step", "delete"])
def test_what_is_owed_does_not_move_values_that_were_written_since(make, write, then):
    """Early stopping loads the best table; a row that owes steps of another table owes them no more."""
    table, optimizer = owing(make)
    with torch.no_grad():
        write(table)
    if then == "step":  # row 0 had a gradient in the first step alone
        table.grad = sparse(torch.tensor([N - 1]), torch.zeros(1, WIDTH), N)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    else:
        {"flush": optimizer.flush, "settle": lambda: settle(table), "state_dict": optimizer.state_dict, "delete": optimizer.__del__}[then]()
    assert torch.equal(table, torch.ones_like(table))
    optimizer.flush()
    assert torch.equal(table, torch.ones_like(table))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
@pytest.mark.parametrize("turns", [[(0, 1)] * 6, [(0,), (1,), (0, 1), (1,), (0,), (0, 1)]], ids=["together", "in turns"])
def test_tables_that_are_views_of_one_tensor_owe_what_they_would_apart(make, turns):
    """They count their versions together: a step of one is no write to the other."""
    options = {"momentum": 0.9} if make is RowSGD else {}
    both = torch.randn(2 * N, WIDTH)
    apart = [torch.nn.Parameter(both[:N].clone()), torch.nn.Parameter(both[N:].clone())]
    views = [torch.nn.Parameter(both[:N]), torch.nn.Parameter(both[N:])]
    for tables in (views, apart):
        optimizer = make(tables, lr=0.1, weight_decay=0.1, **options)
        for t, turn in enumerate(turns):
            for i, table in enumerate(tables):
                table.grad = sparse(torch.tensor([t]), torch.ones(1, WIDTH), N) if i in turn else None
            optimizer.step()
        optimizer.flush()
    assert all(torch.equal(view, alone) for view, alone in zip(views, apart))


@pytest.mark.parametrize("make", [RowSGD, RowAdam])
def test_a_refused_step_drops_nothing(make):
    (table, optimizer), (other, other_optimizer) = owing(make), owing(make)
    for wrong in (torch.tensor([N]), torch.tensor([-1])):
        table.grad = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, WIDTH), (N, WIDTH))
        table.grad._indices().copy_(wrong)
        with pytest.raises(IndexError):
            optimizer.step()
    for parameter, each in ((table, optimizer), (other, other_optimizer)):
        parameter.grad = sparse(torch.tensor([2]), torch.ones(1, WIDTH), N)
        each.step()
        each.flush()
    assert torch.equal(table, other)


def test_moments_go_on_after_a_write():
    """The steps that are dropped move nothing; the moments are as old as they are."""
    table, optimizer = owing(RowAdam)
    want, other = owing(RowAdam)
    other.flush()
    with torch.no_grad():
        table.copy_(want)
    for parameter, each in ((table, optimizer), (want, other)):
        parameter.grad = sparse(torch.tensor([1, 3]), torch.ones(2, WIDTH), N)
        each.step()
        each.flush()
    torch.testing.assert_close(table, want)


def test_a_waiting_backward_pass_goes_on_with_the_rows_as_they_are_settled():
    table, optimizer = owing()
    table.grad = None
    loss = table.square().sum()
    settle(table)
    loss.backward()
    assert torch.equal(table.grad, 2 * table)
    optimizer.step()
    loss = table.square().sum()
    optimizer.flush()  # by the user's hand
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_of_one_storage_settle_together():
    both = torch.randn(2 * N, WIDTH)
    tables = [torch.nn.Parameter(both[:N]), torch.nn.Parameter(both[N:])]
    optimizer = RowAdam(tables, lr=0.1)
    for row in (1, 2):
        for table in tables:
            table.grad = sparse(torch.tensor([row]), torch.ones(1, WIDTH), N)
        optimizer.step()
    settle(both)
    before = both.clone()
    optimizer.flush()
    assert torch.equal(both, before)


def test_debts_end_with_their_state():
    table, optimizer = owing()
    before = table.detach().clone()
    saved = copy.deepcopy(optimizer.state_dict())
    assert not torch.equal(table, before)  # state_dict settles
    table.grad = sparse(torch.tensor([0]), torch.ones(1, WIDTH), N)
    optimizer.step()
    alive = dict(optimizer.state[table])
    before = table.detach().clone()
    optimizer.load_state_dict(saved)  # what the old state owed is not owed any more, though it is alive
    settle(table)
    assert torch.equal(table.detach(), before) and alive


def test_an_optimizer_that_goes_settles_its_tables():
    (table, optimizer), (other, other_optimizer) = owing(), owing()
    other_optimizer.flush()
    assert not torch.equal(table, other)
    del optimizer
    assert torch.equal(table, other)


def test_state_that_is_gone_is_owed_no_more():
    table, optimizer = owing()
    before = table.detach().clone()
    optimizer.state.clear()
    settle(table)
    assert torch.equal(table.detach(), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_owes_as_well(how):
    table, optimizer = owing()
    if how == "deepcopy":
        copied, copied_optimizer = copy.deepcopy((table, optimizer))
    else:
        buffer = io.BytesIO()
        torch.save((table, optimizer), buffer)
        buffer.seek(0)
        copied, copied_optimizer = torch.load(buffer, weights_only=False)
    settle(table)
    assert not torch.equal(copied, table)
    settle(copied)
    assert torch.equal(copied, table) and copied_optimizer.state


def test_settle_from_several_threads():
    (table, optimizer), (other, other_optimizer) = owing(), owing()
    other_optimizer.flush()
    threads = [threading.Thread(target=settle, args=(table,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(table, other) and optimizer.state


class Scores(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.weight = table

    def forward(self, input):
        settle(self.weight)
        return input @ self.weight.t()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["compile", "script"])
def test_settle_in_compiled_modules(how, grad):
    (table, optimizer), (other, other_optimizer) = owing(), owing()
    other_optimizer.flush()
    model = torch.compile(Scores(table), fullgraph=True) if how == "compile" else torch.jit.script(Scores(table))
    input = torch.randn(2, WIDTH)
    with torch.set_grad_enabled(grad):
        scores = model(input)
    assert torch.equal(table, other)
    torch.testing.assert_close(scores.detach(), input @ other.detach().t())
    before = table.detach().clone()
    optimizer.flush()
    assert torch.equal(table.detach(), before)


def test_settle_exports():
    table, optimizer = owing()
    input = torch.randn(2, WIDTH)
    optimizer.flush()
    expected = Scores(table)(input)
    exported = torch.export.export(Scores(table), (input,)).run_decompositions({})
    torch.testing.assert_close(exported.module()(input), expected)
