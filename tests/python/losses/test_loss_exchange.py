"""Losses, samplers and optimizers of Python and C++ give the same draws, losses, gradients and
steps, bit for bit; each continues from the other's state, under the same names."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import xsoftmax as xs
from combinations import COMBINATIONS, D, N
from xsoftmax._core.options import option_text

PROGRAM = Path(
    os.environ.get(
        "XSOFTMAX_LOSS_EXCHANGE",
        Path(__file__).parents[3] / "build" / "package" / "tests" / "cpp" / "loss_exchange"))
pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason="the program tests/cpp/loss_exchange "
    "is not built: `make test` builds it")
STEPS = 3


def described(spec):
    """A sampler with its options as text."""
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
    return {
        "loss": made.loss, "num_classes": N, "dim": D, "sampler": described(made.sampler),
        "candidates": described(made.candidates), "options": option_text(**options),
        "tensors": made.tensors | (made.tree or {}), "optimizer": optimizer,
        "optimizer_options": text, "state": state,
        "input": torch.stack([input for input, _ in batches
                              ]), "target": torch.stack([target for _, target in batches])
    }


def clones(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def train(made, loss, first):
    """Returns what the C++ program returns."""
    out = {"state." + name: tensor for name, tensor in clones(loss.state_dict()).items()}
    optimizer = made.make_optimizer(loss)
    for step in range(STEPS):
        optimizer.zero_grad()
        value = made.call(loss, *made.batch(torch.float32, first + step),
                          torch.Generator().manual_seed(step))
        value.sum().backward()
        out[f"loss.{step}"] = value.detach()
        out |= {
            f"gradient.{step}.{name}": parameter.grad.to_dense().clone()
            for name, parameter in loss.named_parameters() if parameter.grad is not None
        }
        optimizer.step()
    optimizer.flush()
    return out | {"end." + name: tensor for name, tensor in clones(loss.state_dict()).items()}


def state_of(results, at):
    return {
        name.removeprefix(at): tensor
        for name, tensor in results.items() if name.startswith(at)
    }


def run_in_cpp(tasks, folder):
    """Returns the results of the C++ program for each task."""
    torch.save(tasks, folder / "in")
    subprocess.run([PROGRAM, folder / "in", folder / "out"], check=True)
    runs = [{} for _ in tasks]
    # tells C++ the type of the dict
    for key, tensor in torch.load(folder / "out", weights_only=False).items():
        number, _, name = key.partition(".")
        runs[int(number)][name] = tensor
    return runs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three steps in Python, the same in C++, and three more in C++ from Python's state, for each
    combination."""
    folder = tmp_path_factory.mktemp("exchange")
    python, tasks = {}, []
    for name, made in COMBINATIONS.items():
        loss = made.make(torch.float32)
        start = clones(loss.state_dict())
        python[name] = train(made, loss, 0)
        tasks += [
            task(made, loss, start, 0),
            task(made, loss, state_of(python[name], "end."), STEPS)
        ]
    runs = run_in_cpp(tasks, folder)
    return {name: (python[name], *runs[2 * i:2 * i + 2]) for i, name in enumerate(COMBINATIONS)}


def assert_same_bits(got, want):
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        if not name.startswith("state."):  # tables are initialised at random
            torch.testing.assert_close(got[name], value, rtol=0, atol=0,
                                       msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_both_languages_take_the_same_steps(results, name):
    python, cpp, later = results[name]
    assert_same_bits(cpp, python)
    loss = COMBINATIONS[name].make(torch.float32, seed=9)
    loss.load_state_dict(state_of(cpp, "end."), strict=True)
    assert_same_bits(later, train(COMBINATIONS[name], loss, STEPS))


TOWERS = {
    "cosine, memory, uniform negatives": dict(num_items=N, similarity="cosine", temperature=0.2,
                                              memory=7, dim=D, memory_warmup=1),
    "trained temperature, hard negatives, forgetting": dict(num_items=N, temperature=0.5,
                                                            learned=True,
                                                            counts=dict(num_ids=N,
                                                                        half_life=30.0), hard=True),
    "ranking, open ids, hard negatives": dict(estimator="ranking",
                                              counts=dict(num_ids=None,
                                                          buckets=64), hard=True, reduction="none"),
    "uncorrected": dict(num_items=N, counts=None, remove_accidental_hits=False, reduction="sum",
                        memory=20, dim=D),
}


def tower_steps(hard, first):
    made = torch.Generator().manual_seed(first)
    for _ in range(STEPS):
        ids, shape = torch.randint(N, (6,), generator=made), (6, 2) if hard else (4,)
        yield [
            torch.randn(6, D, generator=made),
            torch.randn(6, D, generator=made), ids,
            torch.randn(*shape, D, generator=made),
            torch.randint(N, shape, generator=made),
            torch.rand(6, generator=made)
        ]


def train_towers(loss, steps, learned):
    """Returns what the C++ program returns."""
    out = {"state." + name: tensor for name, tensor in clones(loss.state_dict()).items()}
    for step, (query, item, ids, vectors, more, weight) in enumerate(steps):
        trained = {
            name: tensor.clone().requires_grad_()
            for name, tensor in dict(query=query, item=item, negatives=vectors).items()
        }
        loss.zero_grad()
        value = loss(trained["query"], trained["item"], ids, (trained["negatives"], more), weight)
        value.sum().backward()
        trained |= dict(loss.named_parameters())
        out[f"loss.{step}"] = value.detach()
        out |= {f"gradient.{step}.{name}": tensor.grad.clone() for name, tensor in trained.items()}
        if learned:
            with torch.no_grad():
                loss.temperature.sub_(loss.temperature.grad, alpha=0.01)
    return out | {"end." + name: tensor for name, tensor in clones(loss.state_dict()).items()}


@pytest.mark.parametrize("name", TOWERS)
def test_two_towers_take_the_same_steps(name, tmp_path):
    options = dict(TOWERS[name])
    hard, learned, counts = options.pop("hard", False), options.pop("learned", False), options.pop(
        "counts", dict(num_ids=N))
    stream = {} if counts is None else dict(counts)

    def make():
        chosen = options | dict(temperature=torch.nn.Parameter(torch.tensor(
            options["temperature"]))) if learned else options
        return xs.TwoTowerLoss(
            **chosen, counts=False if counts is None else xs.samplers.StreamingCounts(**stream))

    loss = make()
    start = clones(loss.state_dict())
    python = train_towers(loss, tower_steps(hard, 0), learned)
    spec = {
        "loss": "TwoTowerLoss", "options": option_text(**options),
        "counts": None if counts is None else option_text(**stream), "learned": learned
    }
    cpp, later = run_in_cpp([
        spec | {"state": start, "steps": list(tower_steps(hard, 0))},
        spec | {"state": state_of(python, "end."), "steps": list(tower_steps(hard, STEPS))}
    ], tmp_path)
    assert_same_bits(cpp, python)
    other = make()
    other.load_state_dict(state_of(cpp, "end."))
    assert_same_bits(later, train_towers(other, tower_steps(hard, STEPS), learned))


MATCHERS = {
    "squared hinge": dict(sparse_grad=True),
    "logistic, prototypes, no bias": dict(loss="logistic", beam=2, bias=False, reduction="sum",
                                          sparse_grad=True, prototypes=True),
    "prototypes, dense gradients": dict(beam=3, reduction="none", sparse_grad=False,
                                        prototypes=True),
}


def matcher_batches():
    made = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, 6, D, generator=made), torch.randint(-1, N, (STEPS, 6, 3),
                                                                   generator=made)


def train_matcher(matcher, prototypes):
    """Returns what the C++ program returns."""
    out = {"state." + name: tensor for name, tensor in clones(matcher.state_dict()).items()}
    inputs, targets = matcher_batches()
    count, more = 0, True
    while more:
        if prototypes:
            matcher.init_from_prototypes(inputs[0].clone(), targets[0])
        optimizer = xs.optim.RowAdam(matcher.parameters(), lr=0.1)
        for input, target in zip(inputs, targets):
            optimizer.zero_grad()
            value = matcher(input.clone(), target)
            value.sum().backward()
            out[f"loss.{count}"] = value.detach()
            out |= {
                f"gradient.{count}.{name}": parameter.grad.to_dense().clone()
                for name, parameter in matcher.named_parameters()
            }
            optimizer.step()
            count += 1
        optimizer.flush()
        more = matcher.next_layer()
    out["topk.scores"], out["topk.labels"] = matcher.topk(inputs[0].clone(), 5, exclude=targets[0])
    out["predicted"] = matcher.predict(inputs[0].clone())
    return out | {"end." + name: tensor for name, tensor in clones(matcher.state_dict()).items()}


@pytest.mark.parametrize("name", MATCHERS)
def test_matchers_take_the_same_steps(name, tmp_path):
    options = dict(MATCHERS[name])
    prototypes = options.pop("prototypes", False)
    tree = xs.LabelTree.random(N, 3, generator=torch.Generator().manual_seed(0))
    matcher = xs.HierarchicalMatcher(D, tree, **options)
    start = clones(matcher.state_dict())
    python = train_matcher(matcher, prototypes)
    inputs, targets = matcher_batches()
    spec = {
        "loss": "HierarchicalMatcher", "dim": D, "options": option_text(**options),
        "prototypes": prototypes, "optimizer": "RowAdam", "optimizer_options": option_text(lr=0.1),
        "tensors": dict(parent=tree.parent,
                        node_class=tree.node_class), "input": inputs, "target": targets
    }
    cpp, later = run_in_cpp([spec | {"state": start}, spec | {"state": state_of(python, "end.")}],
                            tmp_path)
    assert_same_bits(cpp, python)
    other = xs.HierarchicalMatcher(D, tree, **options)
    other.load_state_dict(state_of(cpp, "end."))
    assert_same_bits(later, train_matcher(other, prototypes))
