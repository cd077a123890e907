"""Invariants of the row-wise optimizers.

They match the dense optimizer under schedules; flushing at any time changes nothing; a refused step
changes nothing.
"""

import copy
import math

import numpy
import pytest
import torch

from gradient_checks import random_grad, seeded, sparse  # noqa: F401 (seeded: an autouse fixture)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD, catch_up

ops = torch.ops.xsoftmax

N, WIDTH, STEPS = 20, 3, 120
SCHEDULES = {
    "constant": lambda t: 1.0, "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t / STEPS)),
    "step": lambda t: 0.1**(t // 40)
}
CASES = {
    "sgd": (RowSGD, dict(lr=0.05,
                         weight_decay=0.3)), "momentum": (RowSGD,
                                                          dict(lr=0.05, momentum=0.9,
                                                               dampening=0.3)),
    "momentum-decay": (RowSGD, dict(lr=0.05, momentum=0.9, weight_decay=0.3)),
    "nesterov-decay": (RowSGD, dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.3)),
    "momentum-1": (RowSGD, dict(lr=0.05, momentum=1.0,
                                weight_decay=0.1)), "adagrad": (RowAdagrad,
                                                                dict(lr=0.1, lr_decay=0.01)),
    "adagrad-row": (RowAdagrad, dict(lr=0.1, row_wise=True)), "adam": (RowAdam, dict(lr=0.05)),
    "adam-decay": (RowAdam, dict(lr=0.05, weight_decay=0.1)),
    "adam-strong-decay": (RowAdam, dict(lr=0.05, weight_decay=15.0)),
    "adam-beta1-0": (RowAdam, dict(lr=0.05,
                                   betas=(0.0, 0.9))), "adam-row": (RowAdam,
                                                                    dict(lr=0.05, row_wise=True)),
    "adam-row-decay": (RowAdam, dict(lr=0.05, row_wise=True, weight_decay=0.1, betas=(0.8, 0.99)))
}


class DecoupledSGD(torch.optim.SGD):
    """torch.optim.SGD with decoupled weight decay."""
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
    """Adagrad, or Adam if `betas` is given, with one second moment per row; in dense PyTorch."""
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
                param -= lr / (1 - beta1**t) * state["exp_avg"] / (
                    (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"])[:, None]


def dense_twin(ours, groups, options):
    """Returns the dense optimizer that the row optimizer `ours` must match."""
    if options.get("row_wise"):
        return RowWise(
            groups,
            **({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} if ours is RowAdam else {})
            | options)
    make = {RowSGD: DecoupledSGD, RowAdagrad: torch.optim.Adagrad, RowAdam: torch.optim.AdamW}[ours]
    return make(groups, **({"weight_decay": 0.0} if ours is RowAdam else {}) | options)


def two_groups(factor=0.3):
    """Returns two tables and a function that puts them in groups with different learning rates."""
    torch.manual_seed(0)
    tables = [torch.nn.Parameter(torch.randn(N, WIDTH, dtype=torch.float64)) for _ in range(2)]
    return tables, lambda lr: [{"params": tables[:1]}, {"params": tables[1:], "lr": factor * lr}]


def follow(optimizer, schedule, between=lambda t: None, twin=None, steps=STEPS):
    """Steps `optimizer`, and `twin` with the same gradients, under a schedule.

    Gradients are seeded and do not depend on the tables. Every row has one in the first step.
    `between` is called after each step.
    """
    generator = torch.Generator().manual_seed(1)
    rates = [group["lr"] for group in optimizer.param_groups]
    for t in range(steps):
        for i, (group, rate) in enumerate(zip(optimizer.param_groups, rates)):
            table, lr = group["params"][0], rate * SCHEDULES[schedule](t)
            rows = torch.arange(N) if t == 0 else torch.randint(N, (2,), generator=generator)
            table.grad = sparse(
                rows, torch.randn(len(rows), WIDTH, generator=generator, dtype=torch.float64), N)
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
def test_the_dense_optimizer_is_matched_under_schedules(name, schedule):
    make, options = CASES[name]
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    ours = make(groups(options["lr"]), **options)
    follow(ours, schedule, twin=dense_twin(make, twin_groups(options["lr"]), options))
    if make is not RowAdagrad and name != "adam-beta1-0":
        assert not torch.allclose(tables[0], twins[0], atol=1e-5)  # updates are pending
    ours.flush()
    for table, twin in zip(tables, twins):
        assert (table - twin).abs().max() < (1e-6 if make is RowAdam else 1e-12)


@pytest.mark.parametrize("row_wise", [False, True])
def test_adam_without_eps_equals_dense_adamw_up_to_rounding(row_wise):
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    options = dict(lr=0.05, eps=0.0, weight_decay=0.1) | (dict(row_wise=True) if row_wise else {})
    ours = RowAdam(groups(0.05), **options)
    follow(ours, "cosine", twin=dense_twin(RowAdam, twin_groups(0.05), options))
    ours.flush()
    assert (tables[0] - twins[0]).abs().max() < 1e-13 and tables[0].isfinite().all()


def test_adam_with_a_large_eps_stays_within_its_error_bound():
    """After one gradient, catching up moves a row further than dense AdamW would.

    The factor is at most 1 + eps / root, where root is the smallest root of the second moment.
    """
    eps, lr = 1e-2, 0.01
    for size in (1e-3, 1.0):
        table, twin = (torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float64)) for _ in range(2))
        ours, theirs = RowAdam([table], lr=lr, eps=eps), torch.optim.AdamW([twin], lr=lr, eps=eps,
                                                                           weight_decay=0.0)
        smallest_root, first = math.inf, None
        for t in range(60):
            rows = torch.tensor([0] if t == 0 else [1])
            table.grad = sparse(rows, torch.full((1, 1), size, dtype=torch.float64), 2)
            twin.grad = table.grad.to_dense()
            ours.step()
            theirs.step()
            first = twin[0].item() if t == 0 else first
            smallest_root = min(smallest_root,
                                size * math.sqrt(0.001 * 0.999**t / (1 - 0.999**(t + 1))))
        ours.flush()
        dense, caught_up = first - twin[0].item(), first - table[0].item()
        assert 1 < caught_up / dense <= 1 + eps / smallest_root


@pytest.mark.parametrize("impl", ["kernel", "reference"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", CASES)
def test_flushing_at_any_time_changes_nothing(name, schedule, impl):
    """Flushing in every step, never or at random, catching up one table, and reloading the state
    lead to the same tables."""
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
                catch_up(tables[0].data)
            elif how == "random" and draw == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        follow(optimizer, schedule, between, steps=60)
        optimizer.flush()
        results.append(torch.cat([table.detach() for table in tables]))
        assert (results[0] - results[-1]).abs().max() < 1e-10


@pytest.mark.parametrize("make, first, then",
                         [(RowSGD, dict(momentum=0.9), dict(momentum=0.5)),
                          (RowSGD, dict(momentum=0.9), dict(nesterov=True)),
                          (RowSGD, dict(momentum=0.0), dict(momentum=0.9)),
                          (RowSGD, dict(momentum=0.9), dict(momentum=0.0)),
                          (RowAdam, dict(), dict(betas=(0.5, 0.9))),
                          (RowAdam, dict(row_wise=True), dict(betas=(0.5, 0.9))),
                          (RowAdam, dict(weight_decay=0.1), dict(eps=1e-9))], ids=str)
def test_options_of_a_group_may_change_between_steps(make, first, then):
    (tables, groups), (twins, twin_groups) = two_groups(), two_groups()
    options = {"lr": 0.05, **first}
    ours, theirs = make(groups(0.05), **options), dense_twin(make, twin_groups(0.05), options)

    def between(t):
        if t in (30, 60):
            for optimizer in (ours, theirs):
                for group in optimizer.param_groups:
                    group.update(then if t ==
                                 30 else {name: optimizer.defaults[name]
                                          for name in then})

    follow(ours, "cosine", between, twin=theirs)
    ours.flush()
    assert (tables[0] - twins[0]).abs().max() < 1e-6


def test_more_steps_than_the_history_holds():
    """The history of a small table holds 1,024 steps; a step that finds it full flushes first."""
    torch.manual_seed(0)
    table, twin = (torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float64)) for _ in range(2))
    ours, theirs = RowSGD([table], lr=0.01, momentum=0.99), torch.optim.SGD([twin], lr=0.01,
                                                                            momentum=0.99)
    for t in range(1100):
        table.grad = sparse(torch.tensor([0 if t else 1]), torch.randn(1, 1, dtype=torch.float64),
                            3)
        twin.grad = table.grad.to_dense()
        ours.step()
        theirs.step()
    ours.flush()
    torch.testing.assert_close(table, twin, rtol=1e-12, atol=1e-13)


# ---- a refused step changes nothing ----


def wrong_rows(params, optimizer):
    params[1].grad = sparse(torch.tensor([3, N]), torch.ones(2, WIDTH, dtype=torch.float64), N)
    return IndexError


def wrong_layout(params, optimizer):
    params[1].grad = torch.ones(N, WIDTH, dtype=torch.float64).to_sparse()
    return RuntimeError


def wrong_rate(params, optimizer):
    optimizer.param_groups[1].update(lr=2.0, weight_decay=0.5)
    return None if isinstance(optimizer, RowAdagrad) else ValueError


def wrong_option(params, optimizer):
    optimizer.param_groups[1]["lr"] = -1.0
    return ValueError


def wrong_state(params, optimizer):
    state = optimizer.state[params[1]]
    name = next(name for name in ("exp_avg", "sum", "last_step") if name in state)
    state[name] = state[name][:-1]
    return ValueError


@pytest.mark.parametrize("break_step",
                         [wrong_rows, wrong_layout, wrong_rate, wrong_option, wrong_state])
@pytest.mark.parametrize("name", ["momentum-decay", "adagrad", "adam-decay"])
def test_a_refused_step_changes_nothing(name, break_step):
    make, options = CASES[name]
    (tables, groups) = two_groups()
    encoder = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    optimizer = make([*groups(options["lr"]), {"params": [encoder]}], **options)
    encoder.grad = torch.randn(3, 4, dtype=torch.float64)
    for table in tables:
        table.grad = sparse(*random_grad(N, WIDTH, 6, torch.float64), N)
    optimizer.step()
    good_state, good_groups = copy.deepcopy(optimizer.state[tables[1]]), copy.deepcopy(
        optimizer.param_groups[1]["lr"])
    error = break_step(tables, optimizer)
    if error is None:
        return
    params = [*tables, encoder]
    before = [param.detach().clone() for param in params
              ], [copy.deepcopy(dict(optimizer.state[param])) for param in params]
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
    wrong_rows(tables, optimizer)
    with pytest.raises(IndexError):
        optimizer.step()
    assert not optimizer.state


# ---- options ----


def test_options_may_be_numpy_scalars():
    tables = []
    for number, count in ((float, int), (numpy.float64, numpy.int64)):
        table = torch.nn.Parameter(torch.ones(4, 2))
        for optimizer in (RowAdam([table], lr=number(0.1), betas=(number(0.8), number(0.99)),
                                  weight_decay=count(1)),
                          RowSGD([table], lr=count(1), momentum=number(0.5),
                                 nesterov=numpy.bool_(True)),
                          RowAdagrad([table], lr=number(0.1), row_wise=numpy.bool_(True))):
            table.grad = sparse(torch.tensor([1, 2]), torch.ones(2, 2), 4)
            optimizer.step()
        tables.append(table.detach())
    assert torch.equal(*tables)


def test_a_malformed_option_text_is_refused():
    with pytest.raises(
            ValueError, match="row_adam_state: expected options among lr, beta1, beta2, "
            "eps, weight_decay, maximize, row_wise, "
            "stochastic_rounding, state_dtype, got 'rate'"):
        ops.row_adam_state(torch.ones(2), True, "rate=1")
    for text in ("lr=x", "lr=", "lr=1e-3x", "lr", "lr=1,lr=1", "lr=1,,"):
        with pytest.raises(ValueError, match="row_adam_state: expected"):
            ops.row_adam_state(torch.ones(2), True, text)
    with pytest.raises(ValueError, match="row_sgd_state: expected option nesterov as true or "
                       "false, got '1'"):
        ops.row_sgd_state(torch.ones(2), True, "nesterov=1")
