"""Learning rates that are tensors: steps equal those of numbers, schedulers write in place, and a
step is one operator call."""

import copy

import pytest
import torch

import xsoftmax as xs
from combinations import OPTIMIZERS
from gradient_checks import seeded, sparse  # noqa: F401 (seeded: a fixture of every test)

N, D, STEPS = 12, 5, 6
KINDS = {
    "float32": lambda lr: torch.tensor(lr, dtype=torch.float32),
    "float64": lambda lr: torch.tensor(lr, dtype=torch.float64),
    "bfloat16": lambda lr: torch.tensor(lr, dtype=torch.bfloat16),
    "of one element": lambda lr: torch.tensor([lr]),
}
each = pytest.mark.parametrize("name", OPTIMIZERS)


def params():
    made = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(N, D, generator=made)),
        torch.nn.Parameter(torch.randn(4, 3, generator=made)),
    ]


def give_gradients(table, dense, step):
    made = torch.Generator().manual_seed(step)
    table.grad = sparse(torch.randint(N, (4,), generator=made), torch.randn(4, D, generator=made),
                        N)
    dense.grad = torch.randn(4, 3, generator=made)


def train(name, lr, schedule=None, steps=STEPS, **options):
    table, dense = params()
    kind, others = OPTIMIZERS[name]
    optimizer = kind([table, dense], **{**others, "lr": lr}, **options)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        give_gradients(table, dense, step)
        optimizer.step()
        if scheduler:
            scheduler.step()
    optimizer.flush()
    return optimizer, [
        table.detach(),
        dense.detach(),
        *(tensor for state in optimizer.state.values() for tensor in state.values()),
    ]


def assert_same(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["kernel", "reference"])
def test_a_tensor_steps_as_its_number(name, kind, impl):
    rate = KINDS[kind](0.05)
    with xs.use_impl(impl):
        of_tensor, of_number = train(name, rate), train(name, float(rate))
    assert_same(of_tensor[1], of_number[1])
    assert of_tensor[0].param_groups[0]["lr"] is rate


@each
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["step", "cosine", "lambda"],
)
def test_schedulers_write_to_the_tensor(name, schedule):
    rate = torch.tensor(0.05, dtype=torch.float64)
    optimizer, of_tensor = train(name, rate, schedule)
    _, of_number = train(name, 0.05, schedule)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) != 0.05
    for a, b in zip(of_tensor, of_number):  # torch computes the next rate in the tensor's dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@each
def test_groups_of_tensors_and_numbers(name):
    """Each parameter group uses its own rate."""
    kind, others = OPTIMIZERS[name]
    results = []
    for rates in (
        (0.05, 0.02),
        (torch.tensor(0.05, dtype=torch.float64), 0.02),
        (0.05, torch.tensor(0.02, dtype=torch.float64)),
    ):
        table, dense = params()
        optimizer = kind(
            [{"params": [table], "lr": rates[0]}, {"params": [dense], "lr": rates[1]}],
            **{**others, "lr": 1.0},
        )
        for step in range(3):
            give_gradients(table, dense, step)
            optimizer.step()
        optimizer.flush()
        results.append([table.detach(), dense.detach()])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@each
def test_saved_and_copied(name):
    """A checkpoint holds the tensor, and training continues from it."""
    rate = torch.tensor(0.05)
    whole = train(name, rate, steps=4)[1]
    optimizer, _ = train(name, rate, steps=2)
    table, dense = optimizer.param_groups[0]["params"]
    kind, others = OPTIMIZERS[name]
    resumed = kind([table, dense], **{**others, "lr": 0.7})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (torch.equal(resumed.param_groups[0]["lr"], rate)
            and resumed.param_groups[0]["lr"] is not rate)
    for step in (2, 3):
        give_gradients(table, dense, step)
        resumed.step()
    resumed.flush()
    torch.testing.assert_close([table.detach(), dense.detach()], whole[:2], rtol=1e-6,
                               atol=1e-6)  # the flush before saving rounds


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_refused_rates(name):
    """Wrong rates raise at construction, or in a step, which then changes nothing."""
    kind, others = OPTIMIZERS[name]
    table, dense = params()
    who = kind.__name__
    for error, message, lr in (
        (
            TypeError,
            "lr as a number or a floating tensor, got a tensor of dtype int64",
            torch.tensor(1),
        ),
        (ValueError, r"lr as a tensor of one element, got shape \[2\]", torch.ones(2)),
        (ValueError, "lr as a finite number of at least 0, got -1", torch.tensor(-1.0)),
        (ValueError, "lr as a finite number of at least 0, got nan", torch.tensor(float("nan"))),
    ):
        with pytest.raises(error, match=f"^{who}: expected {message}"):
            kind([table, dense], **{**others, "lr": lr})
    rate = torch.tensor(0.05)
    optimizer = kind([table, dense], **{**others, "lr": rate})
    give_gradients(table, dense, 0)
    optimizer.step()
    before = [
        tensor.clone() for tensor in (
            table,
            dense,
            *(value for state in optimizer.state.values() for value in state.values()),
        )
    ]
    for error, message, change in (
        (ValueError, "lr as a finite number of at least 0, got -2", lambda: rate.fill_(-2)),
        (
            ValueError,
            r"lr as a tensor of one element",
            lambda: optimizer.param_groups[0].update(lr=torch.ones(3)),
        ),
        (TypeError, "lr of dtype", lambda: optimizer.param_groups[0].update(lr=torch.tensor(1))),
        (
            TypeError,
            "lr on the CPU or on param's device cpu, got it on meta",
            lambda: optimizer.param_groups[0].update(lr=torch.tensor(1.0, device="meta")),
        ),
    ):
        change()
        with pytest.raises(error, match=message):
            optimizer.step()
    after = [
        table,
        dense,
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    assert_same(before, [tensor.detach() for tensor in after])


def calls_of(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return [
        event.name for event in profile.events() if event.name.startswith(("aten::", "xsoftmax::"))
    ]


@pytest.mark.parametrize("rate", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_calls_of_a_step(name, rate):
    """One `_step_` call for all tables, and one `_rows_` call for each."""
    kind, others = OPTIMIZERS[name]
    (first, _), (second, _) = params(), params()
    optimizer = kind([first, second], **{**others, "lr": rate})
    for step in range(2):
        give_gradients(first, params()[1], step)
        give_gradients(second, params()[1], step + 7)
        calls = calls_of(optimizer.step)
    op = f"xsoftmax::{optimizer._op}"
    assert calls == [op + "_step_", op + "_rows_", op + "_rows_"]


def test_sparse_gradients_of_the_operator():
    """Uncoalesced gradients, other dimensions or layouts, together with rows, and in place of other
    arguments."""
    table, values, rows = torch.ones(N, D), torch.randn(3, D), torch.tensor([2, 5, 2])
    gradient = sparse(rows, values, N)
    results = []
    for given in ((rows, values), (None, gradient), (None, gradient.coalesce())):
        mine, state = table.clone(), torch.ops.xsoftmax.row_adam_state(table, True, "lr=0.1")
        torch.ops.xsoftmax.row_adam_step_([mine], [given[0]], [given[1]], state, ["lr=0.1"], [1])
        results.append(mine)
    assert_same(results[:1], results[1:2])
    torch.testing.assert_close(results[2], results[0])
    state, before = torch.ops.xsoftmax.row_adam_state(table, True, "lr=0.1"), table.clone()
    for error, message, arguments in (
        (
            RuntimeError,
            "sparse COO in dimension 0 alone, got 2 sparse dimensions",
            ([table], [None], [torch.ones(N, D).to_sparse()]),
        ),
        (
            TypeError,
            "expected a dense values|expected dense|dense",
            ([table], [None], [torch.ones(N, D).to_sparse_csr()]),
        ),
        (
            RuntimeError,
            "1 or 2 dimensions for a sparse gradient",
            ([torch.ones(2, 2, 2)], [None], [torch.ones(2, 2, 2).to_sparse(1)]),
        ),
        (ValueError, "dense param", ([gradient], [None], [values])),
        ((TypeError, ValueError), "dense|strided", ([table], [rows], [gradient])),
    ):
        with pytest.raises(error, match=message):
            torch.ops.xsoftmax.row_adam_step_(*arguments, state, ["lr=0.1"], [1])
    assert_same([table], [before])
