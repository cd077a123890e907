"""What the tests of the examples share."""

import contextlib
import importlib
import signal
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def modules(folder: Path):
    """An example's modules, under their own names."""
    names = [path.stem for path in folder.glob("*.py")]
    sys.path.insert(0, str(folder))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)


def run(example: dict, *arguments) -> int:
    """The exit code of the example's program."""
    threads = torch.get_num_threads()
    try:
        return example["train"].main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        return error.code
    finally:
        torch.set_num_threads(threads)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of the one run."""
    (state,) = torch.load(checkpoint, weights_only=True)["runs"].values()
    tensors = {f"encoder.{k}": v for k, v in state["encoder"].items()} | {f"loss.{k}": v for k, v in state["loss"].items()}
    return {k: v for k, v in tensors.items() if torch.is_tensor(v)}


def check_resume(example: dict, arguments: list, folder: Path, monkeypatch):
    """A run that is interrupted at its steps 3 and 50 and resumed ends with the very weights of one that was not."""
    assert run(example, *arguments, "--checkpoint", folder / "whole.pt") == 0

    cls = example["train"].Run
    step = cls.step

    def interrupted_step(self):
        step(self)
        if self.steps in (3, 50):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cls, "step", interrupted_step)
    parts = [*arguments, "--checkpoint", folder / "parts.pt"]
    assert run(example, *parts) == 130
    (state,) = torch.load(folder / "parts.pt", weights_only=True)["runs"].values()
    assert state["steps"] == 3
    assert run(example, *parts, "--resume") == 130
    assert run(example, *parts, "--resume") == 0
    whole, resumed = weights(folder / "whole.pt"), weights(folder / "parts.pt")
    assert whole.keys() == resumed.keys()
    for key in whole:
        assert torch.equal(whole[key], resumed[key]), key
