"""Functions that run example programs, for the tests of examples."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


def run(train: ModuleType, *arguments) -> int:
    """Runs a program of the examples in this process; returns its exit code."""
    threads = torch.get_num_threads()
    try:
        return train.main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        return error.code
    finally:
        torch.set_num_threads(threads)


def run_file(program: ModuleType, folder: Path, *arguments) -> str:
    """Runs a program as a file in this folder; returns its output. It must succeed."""
    command = [sys.executable, program.__file__, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_ranks(program: ModuleType, folder: Path, *arguments, ranks: int = 2,
              status: int = 0) -> tuple[str, str]:
    """Runs a program with torchrun; returns its output and errors."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), program.__file__, *map(str, arguments)
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (result.returncode != 0) == (status != 0), result.stderr
    return result.stdout, result.stderr


def check_same_figures(one: Path, several: Path):
    """Checks that the output folders of one process and of several ranks agree up to rounding."""
    runs, others = (json.loads((folder / "history.json").read_text())["runs"]
                    for folder in (one, several))
    assert [run["loss"] for run in runs] == [run["loss"] for run in others]
    for run, other in zip(runs, others):
        assert run["steps"] == other["steps"] and len(run["points"]) == len(other["points"])
        for point, found in zip([*run["points"], run], [*other["points"], other]):
            for figure, value in point.items():
                if figure.startswith(("valid", "test", "train_loss", "targets", "tokens")):
                    assert found[figure] == pytest.approx(value, rel=1e-4), figure


def saved_run(checkpoint: Path) -> dict:
    """Returns the state of the only run of a checkpoint."""
    (state,) = torch.load(checkpoint, weights_only=True)["runs"].values()
    return state


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint with one run."""
    state = saved_run(checkpoint)
    tensors = {f"encoder.{k}": v
               for k, v in state["encoder"].items()
               } | {f"loss.{k}": v
                    for k, v in state["loss"].items()}
    return {k: v for k, v in tensors.items() if torch.is_tensor(v)}


def check_resume(train: ModuleType, arguments: list, folder: Path, monkeypatch):
    """Checks that a run that is interrupted at steps 3 and 50 and in its first evaluation, and each
    time resumed, ends with the same bits and the same evaluations.

    The run to compare with is saved at these steps, since saving applies pending updates and so
    changes rounding.
    """
    step = train.Run.step

    def saved_step(self):
        step(self)
        if self.steps in (3, 50):
            self.state_dict()

    monkeypatch.setattr(train.Run, "step", saved_step)
    assert run(train, *arguments, "--checkpoint", folder / "whole.pt") == 0

    def interrupted_step(self):
        step(self)
        if self.steps in (3, 50):
            signal.raise_signal(signal.SIGINT)

    measure, measured = train.Run.measure, []

    def interrupted_measure(self, interrupt):
        if not measured:
            signal.raise_signal(signal.SIGINT)
        measured.append(self.steps)
        return measure(self, interrupt)

    monkeypatch.setattr(train.Run, "step", interrupted_step)
    monkeypatch.setattr(train.Run, "measure", interrupted_measure)
    parts = [*arguments, "--checkpoint", folder / "parts.pt"]
    assert run(train, *parts) == 130
    assert saved_run(folder / "parts.pt")["steps"] == 3
    assert run(train, *parts, "--resume") == 130
    assert run(train, *parts, "--resume") == 130
    assert run(train, *parts, "--resume") == 0
    assert measured[0] == measured[1]
    found, expected = ([{
        figure: value
        for figure, value in point.items() if figure != "train_seconds"
    } for point in saved_run(folder / name)["points"]] for name in ("parts.pt", "whole.pt"))
    assert found == expected
    whole, resumed = weights(folder / "whole.pt"), weights(folder / "parts.pt")
    assert whole.keys() == resumed.keys()
    for key in whole:
        assert torch.equal(whole[key], resumed[key]), key
