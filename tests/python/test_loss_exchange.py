"""Losses, samplers and optimizers of Python and of C++: the same draws, losses, gradients and steps, bit for bit; each goes on from the other's
state, whose names are the same."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from combinations import COMBINATIONS, D, N
from xsoftmax._options import option_text

PROGRAM = Path(os.environ.get("XSOFTMAX_LOSS_EXCHANGE", Path(__file__).parents[2] / "build" / "package" / "tests" / "cpp" / "loss_exchange"))
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the program tests/cpp/loss_exchange is not built: `make test` builds it")
STEPS = 3


def described(spec):
    """A sampler, its options as text."""
    if spec is None:
        return None
    spec = spec | {"options": option_text(**spec["options"])}
    if "stream" in spec:
        spec["stream"] = option_text(**spec["stream"])
    if "parts" in spec:
        spec["parts"] = [described(part) for part in spec["parts"]]
    if "sampler" in spec:
        spec["sampler"] = described(spec["sampler"])
    return spec


def optimizer_text(made, loss):
    optimizer = made.make_optimizer(loss)
    return type(optimizer).__name__, optimizer._text(optimizer.param_groups[0])


def task(made, loss, state, first):
    options = dict(made.options)
    if options.get("log_z") == "learned":
        options["log_z"], options["learn_log_z"] = 0.0, True
    batches = [made.batch(torch.float32, seed) for seed in range(first, first + STEPS)]
    optimizer, text = optimizer_text(made, loss)
    return {"loss": made.loss, "num_classes": N, "dim": D, "sampler": described(made.sampler), "candidates": described(made.candidates),
            "options": option_text(**options), "tensors": made.tensors | (made.tree or {}), "optimizer": optimizer, "optimizer_options": text, "state": state,
            "input": torch.stack([input for input, _ in batches]), "target": torch.stack([target for _, target in batches])}


def clones(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def train(made, loss, first):
    """What the program returns."""
    out = {"state." + name: tensor for name, tensor in clones(loss.state_dict()).items()}
    optimizer = made.make_optimizer(loss)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = made.call(loss, *made.batch(torch.float32, first + step), torch.Generator().manual_seed(step))
        value.sum().backward()
        out[f"loss.{step}"] = value.detach()
        out |= {f"gradient.{step}.{name}": parameter.grad.to_dense().clone() for name, parameter in loss.named_parameters()
                if parameter.grad is not None}
        optimizer.step()
    optimizer.flush()
    return out | {"end." + name: tensor for name, tensor in clones(loss.state_dict()).items()}


def state_of(results, at):
    return {name.removeprefix(at): tensor for name, tensor in results.items() if name.startswith(at)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(three steps in Python, the same in C++, three more in C++ from Python's state), by combination."""
    folder = tmp_path_factory.mktemp("exchange")
    python, tasks = {}, []
    for name, made in COMBINATIONS.items():
        loss = made.make(torch.float32)
        start = clones(loss.state_dict())
        python[name] = train(made, loss, 0)
        tasks += [task(made, loss, start, 0), task(made, loss, state_of(python[name], "end."), STEPS)]
    torch.save(tasks, folder / "in")
    subprocess.run([PROGRAM, folder / "in", folder / "out"], check=True)
    found = torch.load(folder / "out", weights_only=False)  # it names the type of the dict
    runs = [{} for _ in tasks]
    for key, tensor in found.items():
        number, _, name = key.partition(".")
        runs[int(number)][name] = tensor
    return {name: (python[name], *runs[2 * i:2 * i + 2]) for i, name in enumerate(COMBINATIONS)}


def assert_same_bits(got, want):
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        if not name.startswith("state."):  # tables begin at random
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_both_languages_take_the_same_steps(results, name):
    python, cpp, later = results[name]
    assert_same_bits(cpp, python)
    loss = COMBINATIONS[name].make(torch.float32, seed=9)
    loss.load_state_dict(state_of(cpp, "end."), strict=True)
    assert_same_bits(later, train(COMBINATIONS[name], loss, STEPS))
