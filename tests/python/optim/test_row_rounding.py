"""Stochastic rounding of 16-bit tables and optimizer state.

It is right on average where rounding to nearest loses every step, and its random numbers are
independent.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from gradient_checks import seeded, sparse  # noqa: F401 (seeded: an autouse fixture)
from xsoftmax.optim import RowAdagrad, RowAdam, RowSGD

N, D = 128, 64
HALF_ULP = 2.0**-8  # of a bfloat16 in [1, 2)
MAKES = {
    "sgd": (RowSGD, {}), "momentum": (RowSGD, dict(momentum=0.5, weight_decay=0.01)),
    "adagrad": (RowAdagrad, {}), "adagrad-row": (RowAdagrad, dict(row_wise=True)),
    "adam": (RowAdam, dict(weight_decay=0.01)), "adam-row": (RowAdam, dict(row_wise=True))
}


def steps(make, options, dtype, count, lr, every=1, flush=False):
    """Returns a table of ones after steps with gradients of -1, one per row in `every` steps."""
    table = torch.nn.Parameter(torch.ones(N, D, dtype=dtype))
    optimizer = make([table], lr=lr, **options)
    for t in range(count):
        rows = torch.arange(t % every, N, every)
        table.grad = sparse(rows, torch.full((len(rows), D), -1.0, dtype=dtype), N)
        optimizer.step()
        if flush:
            optimizer.flush()
    optimizer.flush()
    return table.detach()


def z_of_mean(values, expected):
    return ((values.double().mean() - expected) /
            (values.double().std() / math.sqrt(values.numel()))).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_tables_follow_their_float64_twin_on_average(name, dtype):
    """Steps too small for rounding to nearest add up without bias."""
    make, options = MAKES[name]
    lr = 1e-4 if dtype == torch.float16 else 1e-3
    exact = steps(make, options, torch.float64, 10, lr)
    got = steps(make, {**options, "stochastic_rounding": True}, dtype, 10, lr)
    # rounding to nearest loses the step
    assert torch.equal(steps(make, options, dtype, 1, 0.1 * lr), torch.ones(N, D, dtype=dtype))
    assert len(got.unique()) > 1 and abs(z_of_mean(got, exact[0, 0])) < 4


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam", "adam-row"])
def test_pending_updates_are_right_on_average(name, flush):
    """A row has a gradient in every eighth step and moves by momentum in the others.

    Each flush applies those small updates, which rounding to nearest would lose.
    """
    make, options = MAKES[name]
    exact = steps(make, options, torch.float64, 24, 1e-3, every=8, flush=flush)
    got = steps(make, {**options, "stochastic_rounding": True}, torch.bfloat16, 24, 1e-3, every=8,
                flush=flush)
    for first in range(8):
        assert abs(z_of_mean(got[first::8], exact[first, 0])) < 4
    if flush:
        assert abs(
            z_of_mean(
                steps(make, options, torch.bfloat16, 24, 1e-3, every=8, flush=flush) +
                torch.randn(N, D) * 1e-6, exact.mean())) > 10


def state_after(make, options, count, gradient, name, impl="kernel"):
    torch.ops.xsoftmax.set_impl(impl)
    table = torch.nn.Parameter(torch.zeros(N, D))
    optimizer = make([table], lr=0.0, **options)
    for _ in range(count):
        table.grad = sparse(torch.arange(N), torch.full((N, D), gradient), N)
        optimizer.step()
    return optimizer.state[table][name]


@pytest.mark.parametrize(
    "make, options, name, next_of",
    [(RowAdagrad, {}, "sum", lambda s: s + 1),
     (RowSGD, dict(momentum=0.99), "momentum_buffer", lambda s: 0.99 * s + 1),
     (RowAdam, dict(betas=(0.99, 0.999)), "exp_avg", lambda s: 0.99 * s + 0.01),
     (RowAdam, {}, "exp_avg_sq", lambda s: 0.999 * s + 0.001),
     (RowAdam, dict(row_wise=True, betas=(0.99, 0.999)), "exp_avg", lambda s: 0.99 * s + 0.01)],
    ids=["adagrad", "momentum", "adam-first", "adam-second", "adam-row"])
def test_bfloat16_state_keeps_growing_where_rounding_to_nearest_stops(make, options, name, next_of):
    """With gradients of 1 and rounding to nearest, Adagrad's sum would stop at 256 and moments
    would stop below their mean."""
    count, nearest, exact = 600, torch.zeros((), dtype=torch.bfloat16), 0.0
    for _ in range(count):
        nearest, exact = next_of(nearest.float()).bfloat16(), next_of(exact)
    state = state_after(make, {**options, "state_dtype": torch.bfloat16}, count, 1.0, name)
    assert state.dtype == torch.bfloat16 and abs(z_of_mean(state, exact)) < 4
    assert abs(nearest.item() / exact - 1) > (0.5 if make is RowAdagrad else
                                              0.02) > 10 * abs(state.double().mean() / exact - 1)
    if make is RowAdagrad:
        assert nearest == 256


@pytest.mark.parametrize("make, options", [(RowAdagrad, dict(row_wise=True)),
                                           (RowAdam, dict(row_wise=True))])
def test_row_wise_state_stays_in_float32(make, options):
    name = "sum" if make is RowAdagrad else "exp_avg_sq"
    state = state_after(make, {**options, "state_dtype": torch.bfloat16}, 3, 1.0, name)
    assert state.dtype == torch.float32 and state.shape == (N,)


@pytest.fixture(scope="module")
def roundings():
    """Returns [2, step, row, element]: whether the table and the state were rounded up in a step
    that moves them by half an ulp."""
    ups = torch.empty(2, 24, N, D)
    for t in range(len(ups[0])):
        table = torch.nn.Parameter(torch.ones(N, D, dtype=torch.bfloat16))
        optimizer = RowAdagrad([table], lr=math.sqrt(HALF_ULP * (1 + HALF_ULP)), eps=0.0,
                               initial_accumulator_value=1.0, stochastic_rounding=True,
                               state_dtype=torch.bfloat16)
        table.grad = sparse(torch.arange(N), torch.zeros(N, D, dtype=torch.bfloat16), N)
        optimizer.step()  # creates the state; a zero gradient changes nothing
        optimizer.state[table]["step"].fill_(t)
        table.grad = sparse(torch.arange(N),
                            torch.full((N, D), -math.sqrt(HALF_ULP), dtype=torch.bfloat16), N)
        optimizer.step()
        ups[0, t], ups[1, t] = (table.detach() != 1), (optimizer.state[table]["sum"] != 1)
    return ups


def test_every_step_row_and_element_rounds_up_equally_often(roundings):
    """A chi-square statistic for each of the steps, the rows and the elements, within 4.5 standard
    deviations."""
    for ups in roundings:
        share = ups.mean().item()
        assert 0.02 < share < 0.98
        for kept in range(3):
            counts = ups.sum([axis for axis in range(3) if axis != kept])
            trials = ups.numel() / len(counts)
            chi2 = ((counts - trials * share)**2 / (trials * share * (1 - share))).sum().item()
            freedom = len(counts) - 1
            assert abs(chi2 - freedom) < 4.5 * math.sqrt(2 * freedom)


def test_roundings_of_neighbours_are_independent(roundings):
    """Roundings of the table and of its state, and of steps, rows or elements 1, 2, 8 or 16 apart,
    are uncorrelated, within 4.5 standard deviations."""
    normal = (roundings - roundings.mean([1, 2, 3], keepdim=True)) / roundings.std([1, 2, 3],
                                                                                   keepdim=True)
    pairs = [(normal[0], normal[1])]
    for axis in (1, 2, 3):
        for lag in (1, 2, 8, 16):
            size = normal.shape[axis]
            pairs += [(normal.narrow(axis, 0, size - lag), normal.narrow(axis, lag, size - lag))]
    for a, b in pairs:
        assert abs((a * b).mean().item() * math.sqrt(a.numel())) < 4.5


@pytest.mark.parametrize("chance", [2.0**-12, 2.0**-6, 0.3, 1 - 2.0**-10])
def test_the_probability_of_rounding_up_is_the_distance(chance):
    table = torch.nn.Parameter(torch.ones(4096, D, dtype=torch.bfloat16))
    optimizer = RowSGD([table], lr=2 * HALF_ULP * chance, stochastic_rounding=True)
    table.grad = sparse(torch.arange(4096), torch.full((4096, D), -1.0, dtype=torch.bfloat16), 4096)
    optimizer.step()
    count, trials = int((table != 1).sum()), table.numel()
    assert abs(count - trials * chance) < 4.5 * math.sqrt(trials * chance * (1 - chance))


def test_infinity_and_nan_stay():
    for make, options in ((RowSGD, {}), (RowSGD, dict(momentum=0.5)), (RowAdam, {}),
                          (RowAdam, dict(row_wise=True))):
        table = torch.nn.Parameter(
            torch.tensor([[float("inf"), float("nan"), -0.0, 3.0e38]], dtype=torch.bfloat16))
        optimizer = make([table], lr=0.0, stochastic_rounding=True, state_dtype=torch.bfloat16,
                         **options)
        table.grad = sparse(torch.tensor([0]), torch.ones(1, 4, dtype=torch.bfloat16), 1)
        optimizer.step()
        assert table[0, 0] == float("inf") and table[0, 1].isnan() and table[0, 2] == 0 and table[
            0, 3].isfinite()


# ---- memory


def documented_bytes():
    """Yields (optimizer, table dtype, state dtype, bytes) for each cell of the table in
    docs/choose/precision.md."""
    lines = (Path(__file__).parents[3] / "docs/choose/precision.md").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("With 256 features")) + 4
    columns = [(table, state) for table in (torch.float32, torch.bfloat16)
               for state in (None, torch.bfloat16)]
    for line in lines[begin:begin + 6]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield from ((name.strip("`"), *column, int(cell.replace(",", "")))
                    for column, cell in zip(columns, cells))


@pytest.mark.parametrize("name, dtype, state_dtype, expected", list(documented_bytes()))
def test_bytes_per_class_are_as_documented(name, dtype, state_dtype, expected):
    """A documented figure counts the row and its state, without the 4 bytes of last_step."""
    table = torch.nn.Parameter(torch.zeros(5000, 256, dtype=dtype))
    make, _, options = name.partition("(")
    options = eval(f"dict({options.rstrip(')')})")  # written in the page
    optimizer = getattr(xs.optim, make)([table], state_dtype=state_dtype, **options)
    table.grad = sparse(torch.tensor([1]), torch.ones(1, 256, dtype=dtype), 5000)
    optimizer.step()
    state = {
        key: tensor
        for key, tensor in optimizer.state[table].items() if key not in ("step", "pending")
    }
    last_step = state.pop("last_step", torch.empty(0))
    assert (table.nbytes + sum(tensor.nbytes for tensor in state.values())) / 5000 == expected
    assert last_step.nbytes == (0 if make == "RowAdagrad" else 4 * 5000)


@pytest.mark.parametrize("make, options, begin",
                         [(RowAdam, dict(row_wise=True), 0.0), (RowAdam, dict(), 0.0),
                          (RowAdagrad, dict(initial_accumulator_value=0.5), 0.5),
                          (RowAdagrad, dict(initial_accumulator_value=0.5, row_wise=True), 0.5),
                          (RowSGD, dict(momentum=0.9), 0.0)], ids=str)
def test_added_and_reset_rows_start_with_fresh_state(make, options, begin):
    """resize_classes and reset_rows keep the bfloat16 and row-wise state of other rows."""
    loss = xs.SampledSoftmaxLoss(8, 20, sampler="uniform", num_samples=4)
    table = loss.linear.weight
    optimizer = make([table], lr=0.1, state_dtype=torch.bfloat16, **options)
    table.grad = sparse(torch.arange(20), torch.ones(20, 8), 20)
    optimizer.step()
    state = {
        name: tensor
        for name, tensor in optimizer.state[table].items() if name not in ("step", "pending")
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert any(tensor.dtype == torch.bfloat16
               for tensor in state.values()) or options.get("row_wise")
    loss.resize_classes(30)
    xs.optim.reset_rows(table, torch.tensor([3]), torch.zeros(1, 8))
    kept = torch.arange(20) != 3
    for name, tensor in state.items():
        assert len(tensor) == 30 and tensor.dtype == before[name].dtype and torch.equal(
            tensor[:20][kept], before[name][kept])
        fresh = torch.cat([tensor[20:], tensor[3:4]])
        assert fresh.eq(1 if name == "last_step" else begin).all()
    table.grad = sparse(torch.tensor([3, 25]), torch.ones(2, 8), 30)
    optimizer.step()


# ---- options


@pytest.mark.parametrize("make", [RowSGD, RowAdagrad, RowAdam])
def test_unsupported_state_dtypes_are_refused(make):
    table = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(
            ValueError, match=f"{make.__name__}: expected state_dtype float32 or "
            "bfloat16, got Half"):
        make([table], state_dtype=torch.float16)
    with pytest.raises(
            ValueError, match="expected option state_dtype as float32, float64, "
            "bfloat16 or float16, got 'int8'"):
        make([table], state_dtype=torch.int8)
    optimizer = make([table], state_dtype=torch.bfloat16,
                     **({"momentum": 0.9} if make is RowSGD else {}))
    table.grad = sparse(torch.tensor([1]), torch.ones(1, 2, dtype=torch.float64), 3)
    with pytest.raises(ValueError, match="expected no state_dtype for a table of Double, got "
                       "BFloat16"):
        optimizer.step()


def test_state_of_another_dtype_is_refused():
    ops, table, rows, values = torch.ops.xsoftmax, torch.ones(4, 3), torch.tensor([1]), torch.ones(
        1, 3)
    step, first, second, last_step, pending = ops.row_adam_state(
        table, True, "row_wise=true,state_dtype=bfloat16")
    for error, message, state in [
        (TypeError, "exp_avg_sq of dtype float32",
         [step, first, second.bfloat16(), last_step, pending]),
        (TypeError, "exp_avg_sq of dtype bfloat16",
         [step, first, torch.ones(4, 3), last_step, pending]),
        (TypeError, "exp_avg of dtype float32", [step,
                                                 first.half(), second, last_step, pending]),
        (ValueError, "exp_avg_sq with size 4", [step, first,
                                                torch.ones(5), last_step, pending])
    ]:
        with pytest.raises(error, match=message):
            ops.row_adam_step_([table], [rows], [values], state, ["lr=0.1"], [1])
    ops.row_adam_step_([table], [rows], [values], [step, first, second, last_step, pending],
                       ["lr=0.1"], [1])
    bias = torch.ones(4)
    for options in ("row_wise=true,state_dtype=bfloat16", "state_dtype=bfloat16", "row_wise=true",
                    ""):
        ops.row_adam_step_([bias], [rows], [torch.ones(1)], ops.row_adam_state(bias, True, options),
                           ["lr=0.1"], [1])


def test_checkpoints_from_before_these_options_load():
    table = torch.nn.Parameter(torch.ones(3, 2))
    table.grad = sparse(torch.tensor([1]), torch.ones(1, 2), 3)
    for make in (RowSGD, RowAdagrad, RowAdam):
        optimizer = make([table])
        optimizer.step()
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            for name in ("row_wise", "stochastic_rounding", "state_dtype"):
                group.pop(name, None)
        if "pending" in saved["state"][0]:
            # an older state has no entry for rounding
            saved["state"][0]["pending"] = saved["state"][0]["pending"][:-1]
        fresh = make([table])
        fresh.load_state_dict(saved)
        fresh.step()
        fresh.flush()
        assert fresh.param_groups[0]["stochastic_rounding"] is False and fresh.param_groups[0][
            "state_dtype"] is None


def test_a_classifier_learns_with_the_smallest_state(threads):
    """A bfloat16 table with row-wise state and stochastic rounding learns like a float32 table;
    with rounding to nearest it learns less."""
    threads(1)
    values = {}
    input, target, start = torch.randn(100, 16), torch.randint(50,
                                                               (100,)), torch.randn(50, 16) * 0.25
    for name, dtype, rounding in (("float32", torch.float32, False),
                                  ("stochastic", torch.bfloat16, True), ("nearest", torch.bfloat16,
                                                                         False)):
        table = torch.nn.Parameter(start.bfloat16().to(dtype))
        optimizer = RowAdagrad([table], lr=0.02, row_wise=True, initial_accumulator_value=1.0,
                               stochastic_rounding=rounding)
        for _ in range(100):
            loss = F.cross_entropy(input @ table.float().t(), target)
            table.grad = torch.autograd.grad(loss, table)[0].to_sparse(1)
            optimizer.step()
        values[name] = loss.item()
    assert values["float32"] < values["nearest"] and abs(
        values["stochastic"] - values["float32"]) < 0.25 * (values["nearest"] - values["float32"])
