"""Optimizers in Python and C++ take the same steps and resume from each other, bit for bit."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from gradient_checks import seeded, sparse  # noqa: F401 (seeded: an autouse fixture)
from xsoftmax._core.options import option_text
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD

PROGRAM = Path(
    os.environ.get(
        "XSOFTMAX_OPTIM_EXCHANGE",
        Path(__file__).parents[3] / "build" / "package" / "tests" / "cpp" / "optim_exchange"))
pytestmark = pytest.mark.skipif(not PROGRAM.exists(),
                                reason="optim_exchange is not built: make exchange")

CASES = {
    "sgd": (RowSGD, dict(lr=0.1)), "nesterov": (RowSGD,
                                                dict(lr=0.1, momentum=0.9, nesterov=True,
                                                     weight_decay=1 / 3)),
    "adagrad": (RowAdagrad, dict(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1)),
    "adagrad-row": (RowAdagrad, dict(lr=0.1, row_wise=True,
                                     maximize=True)), "adam": (RowAdam,
                                                               dict(lr=0.1, weight_decay=1 / 3)),
    "adam-row": (RowAdam, dict(lr=0.1, weight_decay=1 / 3, row_wise=True, maximize=True)),
    "momentum-bfloat16": (RowSGD, dict(lr=0.1, momentum=0.9, state_dtype=torch.bfloat16)),
    "adagrad-bfloat16": (RowAdagrad, dict(lr=0.1, state_dtype=torch.bfloat16)),
    "adam-row-bfloat16": (RowAdam,
                          dict(lr=0.1, row_wise=True, stochastic_rounding=True,
                               state_dtype=torch.bfloat16))
}
DTYPES = {"adam-row-bfloat16": torch.bfloat16}  # dtypes of tables that are not float32


def steps(count, dtype):
    rows = [torch.randint(30, (4,)) for _ in range(count)]
    return rows, [torch.randn(4, 5, dtype=dtype) for _ in range(count)]


def take(optimizer, table, rows, values):
    for ids, grad in zip(rows, values):
        table.grad = sparse(ids, grad, 30)
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    return {"table": table.detach(), **saved[0]}


def take_in_cpp(folder, make, options, table, state, rows, values):
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    names = {**options, "beta1": beta1, "beta2": beta2} if make is RowAdam else options
    text = option_text(**{name: value for name, value in names.items() if name != "betas"})
    torch.save(
        {
            "optimizer": make.__name__, "options": text, "table": table, "state": state,
            "rows": rows, "values": values
        }, folder / "in")
    subprocess.run([PROGRAM, folder / "in", folder / "out"], check=True)
    return dict(torch.load(folder / "out", weights_only=False))  # a typed dict of C++


@pytest.mark.parametrize("first", ["Python", "C++"])
@pytest.mark.parametrize("name", CASES)
def test_python_and_cpp_resume_from_each_other(name, first, tmp_path):
    make, options = CASES[name]
    dtype = DTYPES.get(name, torch.float32)
    start, early, late = torch.randn(30, 5, dtype=dtype), steps(7, dtype), steps(6, dtype)
    table = torch.nn.Parameter(start.clone())
    optimizer = make([table], **options)
    expected_early = {key: value.clone() for key, value in take(optimizer, table, *early).items()}
    expected = take(optimizer, table, *late)
    if first == "C++":
        got = take_in_cpp(tmp_path, make, options, start.clone(), {}, *early)
        assert all(
            torch.equal(got[key], value)
            for key, value in expected_early.items() if key != "pending")
        table = torch.nn.Parameter(got.pop("table"))
        optimizer = make([table], **options)
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "state": {0: got}})
        got = take(optimizer, table, *late)
    else:
        saved = dict(expected_early)
        got = take_in_cpp(tmp_path, make, options, saved.pop("table"), saved, *late)
    assert got.keys() == expected.keys()
    assert all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype
        for key, value in expected.items() if key != "pending")
