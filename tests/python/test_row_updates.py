"""The update of rows: kernels against the ATen composites."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradient_checks import DTYPES, TOLERANCE, opmath, random_grad, seeded  # noqa: F401 (seeded: a fixture of every test)

ops = torch.ops.xsoftmax


def sgd_call(momentum, decay, nesterov):
    def call(param, rows, values):
        n, dtype = param.shape[0], param.dtype
        generator = torch.Generator().manual_seed(1)
        state = {}
        if momentum:
            state["momentum_buffer"] = torch.randn(param.shape, generator=generator, dtype=opmath(dtype))
            state["last_step"] = torch.randint(0, 9, (n,), generator=generator, dtype=torch.int32)
        if decay:
            state["last_decay"] = -torch.rand(n, generator=generator, dtype=torch.float64)
        ops.row_sgd_(param, rows, values, state.get("momentum_buffer"), state.get("last_step"), state.get("last_decay"), step=9,
                     lr=0.1, momentum=momentum, dampening=0.0 if nesterov else 0.2, nesterov=nesterov, maximize=not nesterov,
                     decay=-1.5)
        return [param, *state.values()]
    return call


def adagrad_call(row_wise, weight_decay):
    def call(param, rows, values):
        shape = param.shape[:1] if row_wise else param.shape
        total = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=opmath(param.dtype))
        ops.row_adagrad_(param, rows, values, total, lr=0.1, weight_decay=weight_decay, eps=1e-3)
        return [param, total]
    return call


def adam_call(decay):
    def call(param, rows, values):
        n, dtype = param.shape[0], opmath(param.dtype)
        generator = torch.Generator().manual_seed(1)
        first = torch.randn(param.shape, generator=generator, dtype=dtype)
        second = torch.rand(param.shape, generator=generator, dtype=dtype)
        counts = torch.randint(1, 9, (n,), generator=generator, dtype=torch.int32)
        marks = -torch.rand(n, generator=generator, dtype=torch.float64) if decay else None
        ops.row_adam_(param, rows, values, first, second, counts, marks, step=9, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, decay=-1.5)
        return [param, first, second, counts] + ([marks] if decay else [])
    return call


CALLS = {"sgd": sgd_call(0.0, False, False), "sgd-decay": sgd_call(0.0, True, False), "momentum": sgd_call(0.9, False, False),
         "momentum-decay": sgd_call(0.9, True, False), "nesterov-decay": sgd_call(0.9, True, True),
         "adagrad": adagrad_call(False, 0.0), "adagrad-decay": adagrad_call(False, 0.1), "adagrad-row": adagrad_call(True, 0.1),
         "adam": adam_call(False), "adam-decay": adam_call(True)}


@pytest.mark.parametrize("kind", ["duplicates", "padded", "unique"])
@pytest.mark.parametrize("width", [0, 1, 3, 17, 64])  # 0: a bias, [N]
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_kernel_against_reference(name, dtype, width, kind):
    n = 40
    param = torch.randn(n, *([width] if width else [])).to(dtype)
    rows, values = random_grad(n, width, dtype=dtype, kind=kind)
    results = {}
    for impl in ("reference", "kernel"):
        ops.set_impl(impl)
        results[impl] = CALLS[name](param.clone(), rows, values)
    for expected, got in zip(results["reference"], results["kernel"]):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    untouched = torch.ones(n, dtype=torch.bool)
    untouched[rows] = False
    assert untouched.any() and torch.equal(results["kernel"][0][untouched], param[untouched])
    assert not torch.equal(results["kernel"][0], param)


@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_kernels_of_other_instruction_sets(isa):
    levels = ["default", "avx2", "avx512"]
    if levels.index(isa) >= levels.index(ops.cpu_capability()):
        pytest.skip("is what this process runs, or more than the CPU has")
    files = [__file__, str(Path(__file__).with_name("test_clip_grad.py"))]
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k",
                             "(test_kernel_against_reference or test_row_norm) and duplicates"],
                            env={**os.environ, "XSOFTMAX_CPU": isa}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("name", CALLS)
def test_threads_bit_for_bit(name):
    param, (rows, values) = torch.randn(3000, 65), random_grad(3000, 65, 5000)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(CALLS[name](param.clone(), rows, values) + [ops.row_norm(rows, values)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_strided_parameters():
    """Slices of columns, transposed tables and strided biases are updated in place, and nothing beside them."""
    for make in (lambda t: t[:, 3:8], lambda t: t[:12, :5].t()[:5], lambda t: t[:, 2]):
        table = torch.randn(12, 12)
        expected, view = make(table.clone()).contiguous(), make(table)
        before = table.clone()
        rows = torch.tensor([4, 1, 4])
        values = torch.randn(3, *view.shape[1:])
        CALLS["adam"](expected, rows, values)
        CALLS["adam"](view, rows, values)
        torch.testing.assert_close(view, expected)
        make(before).copy_(view)
        assert torch.equal(before, table)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    param, (rows, values) = torch.randn(9, 4), random_grad(9, 4, 5)
    state = dict(first=torch.rand(9, 4), second=torch.rand(9, 4), counts=torch.ones(9, dtype=torch.int32),
                 marks=torch.zeros(9, dtype=torch.float64))
    if name.startswith("adam"):
        args = (param, rows, values, state["first"], state["second"], state["counts"], state["marks"] if "decay" in name else None)
        torch.library.opcheck(ops.row_adam_.default, args, dict(step=3, lr=0.1, decay=-0.1))
        torch.library.opcheck(ops.row_adam_flush_.default, (param, *args[3:]), dict(step=3, lr=0.1, decay=-0.1))
        torch.library.opcheck(ops.row_decay_.default, (param, state["marks"], -0.2))
    elif name.startswith("adagrad"):
        torch.library.opcheck(ops.row_adagrad_.default, (param, rows, values, state["first"]), dict(lr=0.1))
        torch.library.opcheck(ops.row_norm.default, (rows, values, 2.0))
    else:
        buffer = (state["first"], state["counts"]) if "sgd" not in name else (None, None)
        args = (param, rows, values, *buffer, state["marks"] if "decay" in name else None)
        torch.library.opcheck(ops.row_sgd_.default, args, dict(step=3, lr=0.1, momentum=0.9, decay=-0.1))
        args = (param, state["first"], state["counts"])
        torch.library.opcheck(ops.row_sgd_flush_.default, args, dict(step=4, lr=0.1, momentum=0.9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [0, 1, 17])
@pytest.mark.parametrize("step", [9, 500, 3_000_000])
def test_adam_flush_kernel_against_reference(step, width, dtype):
    n, results = 40, []
    for impl in ("reference", "kernel"):
        ops.set_impl(impl)
        generator = torch.Generator().manual_seed(1)
        shape = (n, width) if width else (n,)
        param, first, second = (torch.rand(shape, generator=generator, dtype=opmath(dtype)) for _ in range(3))
        last, marks = torch.randint(1, step + 1, (n,), generator=generator, dtype=torch.int32), torch.zeros(n, dtype=torch.float64)
        last[:9], param = torch.arange(1, 10), param.to(dtype)
        ops.row_adam_flush_(param, first, second, last, marks, step=step, lr=0.1, eps=1e-3, decay=-0.3)
        assert last.eq(step).all() and marks.eq(-0.3).all()
        results.append((param, first, second))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
