"""Row updates: kernels against the ATen composites."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradient_checks import DTYPES, TOLERANCE, opmath, random_grad, seeded  # noqa: F401 (seeded: a fixture of every test)

ops = torch.ops.xsoftmax

CASES = {
    "sgd": ("sgd", "lr=0.1"), "sgd-decay": ("sgd", "lr=0.1,weight_decay=0.5,maximize=true"),
    "momentum": ("sgd", "lr=0.1,momentum=0.9,dampening=0.2,maximize=true"),
    "nesterov-decay": ("sgd", "lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.5"),
    "adagrad": ("adagrad", "lr=0.1,eps=0.001"),
    "adagrad-decay": ("adagrad", "lr=0.1,weight_decay=0.1,lr_decay=0.1"), "adagrad-row": (
        "adagrad",
        "lr=0.1,weight_decay=0.1,row_wise=true,initial_accumulator_value=0.3,maximize=true"),
    "adam": ("adam",
             "lr=0.1,beta1=0.8,beta2=0.95,eps=0.001"), "adam-decay": ("adam",
                                                                      "lr=0.1,weight_decay=0.5"),
    "adam-row": ("adam", "lr=0.1,beta1=0.8,beta2=0.95,eps=0.001,row_wise=true"), "adam-row-decay": (
        "adam", "lr=0.1,weight_decay=0.5,row_wise=true,stochastic_rounding=true,maximize=true"),
    "momentum-low": (
        "sgd",
        "lr=0.1,momentum=0.9,weight_decay=0.5,state_dtype=bfloat16,stochastic_rounding=true"),
    "adagrad-low": ("adagrad", "lr=0.1,weight_decay=0.1,state_dtype=bfloat16"),
    "adam-low": ("adam",
                 "lr=0.1,eps=0.001,weight_decay=0.5,state_dtype=bfloat16,stochastic_rounding=true"),
    "adam-row-low": ("adam",
                     "lr=0.1,eps=0.001,row_wise=true,state_dtype=bfloat16,stochastic_rounding=true")
}


def options_of(name, dtype):
    """bfloat16 state is tested for all but float64 tables."""
    return CASES[name][1].replace(
        "state_dtype=bfloat16",
        "state_dtype=none" if dtype == torch.float64 else "state_dtype=bfloat16")


def assert_close(got, expected, name, tolerance):
    """Equal, except that stochastic rounding may turn on the last bit of a float32: at most one
    value in a hundred, each by one bfloat16."""
    assert got.dtype == expected.dtype
    if "stochastic_rounding" in CASES[name][1] or "bfloat16" in CASES[name][1]:
        assert torch.isclose(got, expected, **tolerance).logical_not().float().mean() <= 0.01
        tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(got, expected, **tolerance)


def op(kind, name):
    return getattr(ops, f"row_{kind}_{name}")


def step(name, param, state, rows, values):
    kind, options = CASES[name][0], options_of(name, param.dtype)
    op(kind, "step_")([param], [rows], [values], state, [options], [1])


def trained(name, param, steps=6):
    """State of `param` after a few steps; its last rows have pending updates."""
    kind, options = CASES[name][0], options_of(name, param.dtype)
    state = op(kind, "state")(param, True, options)
    for _ in range(steps):
        rows = torch.randint(param.shape[0], (5,))
        step(name, param, state, rows, torch.randn(5, *param.shape[1:]).to(param.dtype))
    return state


@pytest.mark.parametrize("kind", ["duplicates", "padded", "unique"])
@pytest.mark.parametrize("width", [0, 1, 17])  # 0 is a bias, [N]
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_against_reference(name, dtype, width, kind):
    n = 40
    param = torch.randn(n, *([width] if width else [])).to(dtype)
    state = trained(name, param)
    rows, values = random_grad(n, width, dtype=dtype, kind=kind)
    results = {}
    for impl in ("reference", "kernel"):
        ops.set_impl(impl)
        mine, tensors = param.clone(), [tensor.clone() for tensor in state]
        step(name, mine, tensors, rows, values)
        stepped = mine.clone()
        op(CASES[name][0], "flush_")(mine, tensors)
        results[impl] = [stepped, mine, *tensors]
    for expected, got in zip(results["reference"], results["kernel"]):
        assert_close(got, expected, name, TOLERANCE[dtype])
    untouched = torch.ones(n, dtype=torch.bool)
    untouched[rows] = False
    stepped = results["kernel"][0]
    assert untouched.any() and torch.equal(stepped[untouched], param[untouched])
    assert not torch.equal(stepped, param)


@pytest.mark.parametrize("width, dtype", [(0, torch.float32), (1, torch.bfloat16),
                                          (4, torch.float32), (33, torch.bfloat16),
                                          (264, torch.bfloat16), (300, torch.float32),
                                          (2051, torch.float32)], ids=str)
@pytest.mark.parametrize("name", [
    "momentum", "adagrad", "adagrad-row", "adam", "adam-row", "adagrad-low", "adam-low",
    "adam-row-low"
])
def test_rows_repeated_many_times(name, dtype, width):
    """A row that is most of a gradient and ends in the middle or at its end; rows of several warps,
    and longer than a block."""
    n, kind = 7, CASES[name][0]
    param = torch.randn(n, *([width] if width else [])).to(dtype)
    state = trained(name, param)
    rows = torch.cat([torch.full((1200,), 3),
                      torch.tensor([2, 1, 2]),
                      torch.full((70,), 6)])[torch.randperm(1273)]
    values = torch.randn(len(rows), *param.shape[1:]).mul(0.1).to(dtype)
    results = {}
    for impl in ("reference", "kernel"):
        ops.set_impl(impl)
        mine, tensors = param.clone(), [tensor.clone() for tensor in state]
        for _ in range(2):
            step(name, mine, tensors, rows, values)
        results[impl] = [mine, *tensors, ops.row_norm(rows, values)]
    tolerance = dict(rtol=2e-4, atol=2e-5) if dtype == torch.float32 else TOLERANCE[dtype]
    for expected, got in zip(results["reference"], results["kernel"]):
        assert_close(got, expected, name, tolerance)
    ops.set_impl("kernel")
    again, tensors = param.clone(), [tensor.clone() for tensor in state]
    for _ in range(2):
        # as a CUDA graph replays it: the same arguments for the next step
        op(kind, "rows_")(again, tensors, rows, values, CASES[name][1])
    assert all(torch.equal(a, b) for a, b in zip(results["kernel"], [again, *tensors]))


@pytest.mark.parametrize("options", ["lr=1e-3", "lr=1e-3,momentum=0.5,weight_decay=0.1"])
@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 1.0),
                                          (torch.float16, 1e-6)], ids=str)
def test_stochastic_rounding(dtype, scale, options):
    """Steps too small for a 16-bit number move it on average, to a neighbouring value; kernels and
    composites agree."""
    n, width, results = 64, 40, []
    start = torch.rand(n, width).add(1.0).mul(scale).to(dtype)
    rows, values = torch.arange(n), torch.full((n, width), -0.3 * scale).to(dtype)
    for impl in ("kernel", "reference"):
        ops.set_impl(impl)
        param = start.clone()
        state = ops.row_sgd_state(param, True, options)
        for _ in range(20):
            ops.row_sgd_step_([param], [rows], [values], state,
                              [options + ",stochastic_rounding=true"], [1])
        results.append(param)
    torch.testing.assert_close(*results, rtol=0.01, atol=1e-6 * scale)
    exact = start.double()
    state = ops.row_sgd_state(exact, True, options)
    for _ in range(20):
        ops.row_sgd_step_([exact], [rows], [values.double()], state, [options], [1])
    moved, expected = (results[0].double() - start.double()).mean(), (exact - start.double()).mean()
    assert 0.8 < moved / expected < 1.2
    nearest = start.clone()
    state = ops.row_sgd_state(nearest, True, options)
    ops.row_sgd_step_([nearest], [rows], [values], state, [options], [1])
    if options == "lr=1e-3":
        assert torch.equal(nearest, start) and torch.equal(*results)
    special = torch.tensor([[float("inf"), float("nan"), -0.0, 0.0]], dtype=dtype)
    state = ops.row_sgd_state(special, True, options)
    ops.row_sgd_step_([special], [rows[:1]], [torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=dtype)],
                      state, ["lr=0,stochastic_rounding=true"], [1])
    assert special[0, 0] == float("inf") and special[0, 1].isnan() and special[0, 2:].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_kernels_of_other_instruction_sets(isa):
    levels = ["default", "avx2", "avx512"]
    if levels.index(isa) >= levels.index(ops.cpu_capability()):
        pytest.skip("is what this process runs, or more than the CPU has")
    files = [__file__, str(Path(__file__).parents[1] / "optim/test_clip_grad.py")]
    result = subprocess.run([
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k",
        "(test_kernel_against_reference or test_row_norm) and duplicates"
    ], env={**os.environ, "XSOFTMAX_CPU": isa}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("name", CASES)
def test_threads_bit_for_bit(name, threads):
    param, (rows, values) = torch.randn(3000, 65), random_grad(3000, 65, 5000)
    state, results = trained(name, param), []
    for count in (1, 2, 4):
        threads(count)
        mine, tensors = param.clone(), [tensor.clone() for tensor in state]
        step(name, mine, tensors, rows, values)
        op(CASES[name][0], "flush_")(mine, tensors)
        results.append([mine, *tensors, ops.row_norm(rows, values)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_strided_parameters():
    """Column slices, transposed tables and strided biases are updated in place, and nothing outside
    them."""
    for make in (lambda t: t[:, 3:8], lambda t: t[:12, :5].t()[:5], lambda t: t[:, 2]):
        table = torch.randn(12, 12)
        expected, view = make(table.clone()).contiguous(), make(table)
        before = table.clone()
        for param in (expected, view):
            torch.manual_seed(1)
            trained("adam", param)
        torch.testing.assert_close(view, expected)
        make(before).copy_(view)
        assert torch.equal(before, table)


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    kind, options = CASES[name]
    param, bias, (rows, values) = torch.randn(9, 4), torch.randn(3), random_grad(9, 4, 5)
    state, dense = trained(name, param), op(kind, "state")(bias, False, options)
    torch.library.opcheck(op(kind, "state").default, (param, True, options))
    torch.library.opcheck(
        op(kind, "step_").default,
        ([param, bias], [rows, None], [values, torch.randn(3)], [*state, *dense], [options], [2]))
    torch.library.opcheck(op(kind, "rows_").default, (param, state, rows, values, options))
    torch.library.opcheck(op(kind, "flush_").default, (param, state))
    torch.library.opcheck(ops.catch_up_.default, (param,))
    torch.library.opcheck(ops.row_norm.default, (rows, values, 2.0))


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam-decay", "adam-row-decay"])
def test_late_steps_kernel_against_reference(name, changed):
    """Rows untouched since long before the last catch-up, at step counts beyond float32, with the
    same options as before or with others, which brings moments up to date."""
    late, n, results = 20_000_001, 40, []
    for impl in ("kernel", "reference"):
        ops.set_impl(impl)
        torch.manual_seed(1)
        param = torch.randn(n, 3, dtype=torch.float64)
        state = op(CASES[name][0], "state")(param, True, CASES[name][1])
        for tensor in state[1:-2]:
            tensor.uniform_()
        last_step, pending = state[-2:]
        pending[0] = late - 30
        state[0].fill_(late - 30)
        last_step.random_(late - 100, late - 30)
        past = [0.9, 0.999, 1e-8] if CASES[name][0] == "adam" else [0.9, 0.0, 0.0]
        pending[1:4] = torch.tensor([0.8 if changed else 0.9, *past[1:]], dtype=torch.float64)
        for _ in range(30):
            step(name, param, state, torch.arange(2), torch.ones(2, 3, dtype=torch.float64))
        assert state[0] == late and last_step[:2].eq(late).all() and last_step[2:].ge(
            late - 30).all() == changed
        op(CASES[name][0], "flush_")(param, state)
        results.append([param, *state])
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
