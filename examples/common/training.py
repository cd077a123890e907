"""The training loop, its interruption by the user, and checkpoints to resume from."""

import argparse
import math
import os
import platform
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

import xsoftmax as xs

from .arguments import plain
from .errors import Diverged, UsageError
from .losses import Loss, build_optimizer
from .ranks import Ranks

# Arguments that may differ between the run that wrote a checkpoint and the run that resumes it. All
# others influence the weights.
FREE_ARGUMENTS = {
    "eval_minutes", "eval_epochs", "threads", "checkpoint", "resume", "output", "loss", "patience"
}
# These may differ too, unless the learning rate depends on them.
BUDGET_ARGUMENTS = {"epochs", "max_minutes"}


class Run:
    """Training with one loss: weights, optimizer, position and metrics, all of which a checkpoint
    holds.

    The run of an example adds:

        epoch_steps   the number of steps per epoch
        unit          the plural name of a step's targets
        train_loss    returns the loss of this rank in the next step, and the number of targets in
                      the whole batch
        measure       returns the metrics of an evaluation, `valid_...`, for the curve
        measure_test  returns the metrics of the finished run, `test_...`
        TEST          the names of the metrics of measure_test
        summary       formats the metrics of a point of the curve for the terminal
        OF_RANK       the entries of STATE that differ between ranks

    With several ranks, each rank has a run with its part of every batch. All ranks take the same
    steps and compute the same metrics.
    """

    epoch_steps: int
    unit: str
    TEST: tuple[str, ...]
    STATE = ("steps", "targets", "train_seconds", "points", "test", "recent", "due", "rng")
    OF_RANK: tuple[str, ...] = ("rng", "recent")
    MODULES = ("encoder", "loss", "optimizer")

    def __init__(self, name: str, args: argparse.Namespace, encoder: nn.Module, loss: Loss):
        """Takes an encoder and a loss created after torch.manual_seed(args.seed). The weight of
        `encoder.embedding` is also that of the output layer, unless --untied is given."""
        self.name = name
        self.args = args
        self.device = torch.device(args.device)
        self.encoder = encoder.to(self.device)
        self.loss = loss.to(self.device)
        if not args.untied:
            self.tie()
        self.init_bias()
        self.ranks = Ranks(getattr(args, "table", None))
        self.call = self.ranks.data_parallel(self.encoder, self.loss)
        modules = nn.ModuleList([self.encoder, self.loss])
        self.parameters = list(modules.parameters())  # contains a tied weight only once
        self.optimizer = self.build_optimizer()

        self.steps = 0
        self.targets = 0
        self.train_seconds = 0.0
        self.points: list[dict] = []  # one per evaluation
        self.due = False  # whether an evaluation has begun, and not ended
        self.test: dict | None = None
        self.recent = [0.0, 0]  # sum of losses and number of targets since the last evaluation
        self.unread: list[tuple[Tensor, int]] = []  # losses of the last steps and their targets
        self.ranks.seed(args.seed)
        self.rng = self.rng_state()

    @property
    def table(self) -> nn.Linear:
        """The parameters of the output layer: one row per class, or one row per edge of a class
        tree."""
        return self.loss.linear if isinstance(self.loss, xs.LinearLoss) else self.loss.edges

    def build_optimizer(self) -> Any:
        return build_optimizer(self.args, self.parameters)

    def tie(self):
        """Uses the embedding's weight as the weight of the output layer."""
        self.table.weight = self.encoder.embedding.weight

    def init_bias(self):
        if self.table.bias is not None:
            nn.init.zeros_(self.table.bias)

    def train_loss(self) -> tuple[Tensor, int]:
        raise NotImplementedError

    def measure(self, interrupt: "Interrupt") -> dict | None:
        """Returns None if interrupted."""
        raise NotImplementedError

    def measure_test(self, interrupt: "Interrupt") -> dict | None:
        """Returns None if interrupted."""
        raise NotImplementedError

    def summary(self, point: dict) -> str:
        raise NotImplementedError

    def rng_state(self) -> dict:
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        }

    def set_rng_state(self, state: dict):
        torch.set_rng_state(state["cpu"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def state_dict(self) -> dict:
        state = {key: getattr(self, key)
                 for key in self.STATE
                 } | {key: getattr(self, key).state_dict()
                      for key in self.MODULES}
        return self.ranks.gather_state(state, self.OF_RANK)

    def load_state_dict(self, state: dict):
        state = self.ranks.scatter_state(state)
        for key in self.STATE:
            setattr(self, key, state[key])
        for key in self.MODULES:
            getattr(self, key).load_state_dict(state[key])

    @property
    def epochs(self) -> float:
        return self.steps / self.epoch_steps

    @property
    def eval_steps(self) -> int:
        return max(1, round(self.epoch_steps * self.args.eval_epochs))

    @property
    def progress(self) -> float:
        """The fraction of the budget, in steps or minutes, that is spent."""
        spent = self.steps / (self.args.epochs * self.epoch_steps)
        return spent if self.args.max_minutes is None else max(
            spent, self.train_seconds / (60 * self.args.max_minutes))

    @property
    def finished(self) -> bool:
        return self.progress >= 1

    @property
    def learning_rate(self) -> float:
        return self.args.lr * (0.5 + 0.5 * math.cos(math.pi * self.progress)
                               if self.args.schedule == "cosine" else 1.0)

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.encoder.train()
        self.loss.train()
        loss, count = self.call(self.train_loss)
        loss = self.ranks.batch_mean(loss, count)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        xs.clip_grad_norm_(self.parameters, self.args.clip)
        self.optimizer.step()
        self.unread.append((loss.detach(), count))
        self.steps += 1
        self.targets += count
        # Each reading lets the host wait for the GPU.
        if self.device.type == "cpu" or len(self.unread) == 20:
            self.read_losses()

    def read_losses(self):
        """Adds the losses of the last steps to `recent`."""
        for step, (loss, count) in enumerate(self.unread, self.steps - len(self.unread) + 1):
            value = loss.item()
            if not math.isfinite(value):
                raise Diverged(f"the {self.name} loss is {value} after {step} steps: try a "
                               f"smaller --lr than {self.args.lr}")
            self.recent = [self.recent[0] + value * count, self.recent[1] + count]
        self.unread = []

    @torch.no_grad()
    def exactly(self, measure: Callable[["Interrupt"], dict | None],
                interrupt: "Interrupt") -> dict | None:
        """Evaluates the current weights with the full softmax, whichever loss is trained."""
        self.encoder.eval()
        self.loss.eval()
        # apply pending updates of an untied embedding; the loss flushes only its own table
        self.optimizer.flush()
        return measure(interrupt)

    def batches(self, count: int, what: str, interrupt: "Interrupt"):
        """Yields 0 .. count - 1 with a progress bar on a terminal; stops early if interrupted."""
        for i in tqdm(range(count), desc=f"{self.name}: {what}", disable=self.quiet, leave=False):
            interrupt.poll()
            if interrupt.stopped:
                return
            yield i

    @property
    def quiet(self) -> bool:
        """Whether to hide progress bars."""
        return not (self.ranks.first and sys.stderr.isatty())

    def evaluate(self, interrupt: "Interrupt"):
        figures = self.exactly(self.measure, interrupt)
        if figures is None:
            return
        point = {
            "step": self.steps,
            "epoch": self.epochs,
            self.unit: self.targets,
            "train_seconds": self.train_seconds,
            "train_loss": self.ranks.mean(self.recent[0] / max(self.recent[1], 1))[0],
            **figures,
        }
        self.points.append(point)
        self.recent, self.due = [0.0, 0], False
        tqdm.write(f"{self.name}: step {self.steps:,}, epoch {point['epoch']:.3g}, "
                   f"{self.train_seconds / 60:.2f} min, "
                   f"train loss {point['train_loss']:.3f}, {self.summary(point)}")
        sys.stdout.flush()

    def train(self, interrupt: "Interrupt", save: Callable[[], None], is_turn: bool = False):
        """Trains until the budget is spent or the user interrupts; with is_turn, at most until the
        next evaluation. Calls save() at each point from which a later run can resume."""
        self.set_rng_state(self.rng)
        if not self.finished:
            # resumed with a larger budget, so the final weights are not evaluated yet
            self.test = None
        interrupt.poll()
        if self.due and not interrupt.stopped:
            self.evaluate(interrupt)  # a previous run was interrupted in it
        eval_seconds = 60 * self.args.eval_minutes if self.args.eval_minutes else math.inf
        evaluated = self.points[-1]["train_seconds"] if self.points else 0.0
        steps = math.ceil(self.args.epochs * self.epoch_steps)
        bar = tqdm(total=steps, initial=self.steps, desc=self.name, unit="step", disable=self.quiet)
        while not self.finished and not interrupt.stopped:
            start = time.perf_counter()
            self.step()
            self.train_seconds += interrupt.poll(time.perf_counter() - start)
            bar.update()
            is_time = self.train_seconds - evaluated >= eval_seconds
            if self.finished or self.steps % self.eval_steps == 0 or is_time:
                start = time.perf_counter()
                self.read_losses()
                self.train_seconds += interrupt.poll(time.perf_counter() - start)
                evaluated = self.train_seconds
                self.rng, self.due = self.rng_state(), True
                self.evaluate(interrupt)
                if is_turn:
                    break
                save()
        bar.close()
        self.read_losses()
        self.rng = self.rng_state()
        if self.finished and not interrupt.stopped and (not self.points
                                                        or self.points[-1]["step"] < self.steps):
            self.evaluate(interrupt)  # resumed with a smaller budget
        if self.finished and self.test is None and not interrupt.stopped:
            self.test = self.exactly(self.measure_test, interrupt)
        save()

    def figures(self) -> dict:
        return {
            "loss": self.name,
            "steps": self.steps,
            "epochs": self.epochs,
            self.unit: self.targets,
            "train_seconds": self.train_seconds,
            "points": self.points,
            **{key: self.test and self.test[key]
               for key in self.TEST},
        }


class Interrupt:
    """Turns the first Ctrl-C into a flag that is read between steps, when everything can be saved;
    the second Ctrl-C ends the program. All ranks call poll() together, and stop if one of them was
    interrupted."""
    def __init__(self, ranks: Ranks = Ranks()):  # noqa: B008 (it is never modified)
        self.ranks = ranks
        self.requested = self.stopped = False

    def poll(self, seconds: float = 0.0) -> float:
        """Updates `seen`, and returns the mean of `seconds` over ranks, so that a time budget ends
        on all ranks at once."""
        requested, seconds = self.ranks.mean(self.requested, seconds)
        self.stopped = requested > 0
        return seconds

    def __enter__(self):
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, number, frame):
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def save_checkpoint(path: Path, fingerprint: int, args: argparse.Namespace, states: dict[str,
                                                                                         dict]):
    """Writes a new file and then renames it over the old checkpoint: whenever the program ends, one
    of the two is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save({"arguments": plain(args), "fingerprint": fingerprint, "runs": states}, file)
        file.flush()
        # otherwise a power failure may keep the new name but lose the contents
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_checkpoint(path: Path, option: str) -> tuple[dict, int, dict[str, dict]]:
    """Returns arguments, fingerprint of the data, and the states of the runs by the name of the
    loss. `option` is the command-line option that named the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint["arguments"], checkpoint["fingerprint"], checkpoint["runs"]
    except Exception as error:  # torch.load raises many types for other files
        raise UsageError(
            f"{option}: {path} is not a checkpoint of this program ({type(error).__name__}: "
            f"{error})") from error


def load_checkpoint(path: Path, fingerprint: int, args: argparse.Namespace,
                    data: str) -> dict[str, dict]:
    """Returns the states of the previous runs, by the name of the loss. `data` names the data in
    errors."""
    saved, trained_on, runs = read_checkpoint(path, "--resume")
    free = FREE_ARGUMENTS | (BUDGET_ARGUMENTS if args.schedule == "constant" else set())
    for key, value in plain(args).items():
        # skip options that did not exist yet when the checkpoint was written
        if key not in free and key in saved and saved[key] != value:
            option = key.replace("_", "-")
            raise UsageError(f"--resume: the checkpoint was written with --{option} {saved[key]}, "
                             f"and this run has {value}")
    if trained_on != fingerprint:
        raise UsageError(f"--resume: {data} is not what the checkpoint was trained on")
    return runs


def load_run(path: Path, program: ModuleType, device: str = "cpu") -> tuple[Any, Any]:
    """Returns the run of a checkpoint that `program`, a train.py, wrote, and its data. Of several
    losses it is the last."""
    arguments, fingerprint, runs = read_checkpoint(path, "--checkpoint")
    # options that did not exist when the checkpoint was written get their defaults
    saved = argparse.Namespace(**vars(program.parse_arguments([])) | arguments)
    saved.device = device
    if getattr(saved, "table", None) is not None:
        raise UsageError(f"--checkpoint: expected one of a single process, got {path} of several")
    data = program.load_data(saved)
    if fingerprint != data.fingerprint:
        raise UsageError(f"--checkpoint: {data.name} is not what {path} was trained on")
    name = list(runs)[-1]
    run = program.Run(name, data, saved)
    run.load_state_dict(runs[name])
    return run, data


def history(args: argparse.Namespace, runs: list[Run], **data: dict) -> dict:
    """Returns all metrics, with everything that is needed to reproduce them."""
    processor = platform.processor() or platform.machine()
    return {
        "arguments": plain(args),
        **data,
        "machine": {
            "torch": torch.__version__, "threads": torch.get_num_threads(),
            "ranks": Ranks(getattr(args, "table", None)).size, "processor": processor
        },
        "runs": [run.figures() for run in runs],
    }


def train_each(args: argparse.Namespace, make: Callable[[str], Run], fingerprint: int, data: str,
               write: Callable[[list[Run]],
                               None], takes_turns: bool = False) -> tuple[list[Run], bool]:
    """Trains with each loss in turn, and resumes from the checkpoint if requested.

    Args:
        make: creates the run of a loss.
        fingerprint: of the data, to which a checkpoint is bound.
        data: the name of the data in errors.
        write: writes the metrics so far to files.
        takes_turns: change to the next loss after each evaluation, so that a machine that becomes
            slower slows all of them. All models are then in memory at once.

    Returns:
        The runs, and whether they were interrupted.
    """
    args.output.mkdir(parents=True, exist_ok=True)  # fails before the training instead of after it
    ranks = Ranks(getattr(args, "table", None))
    ranks.same("--data", fingerprint)
    states = load_checkpoint(args.checkpoint, fingerprint, args, data) if args.resume else {}
    runs: list[Run] = []
    with Interrupt(ranks) as interrupt:

        def train(run: Run, is_turn: bool):
            def save():
                states[run.name] = run.state_dict()
                if ranks.first:
                    if args.checkpoint:
                        save_checkpoint(args.checkpoint, fingerprint, args, states)
                    write(runs)

            run.train(interrupt, save, is_turn)
            interrupt.poll()
            if interrupt.stopped:
                saved = (f", --checkpoint {args.checkpoint} --resume goes on from here"
                         if args.checkpoint else "")
                print(f"interrupted after {run.steps} steps of the {run.name} loss{saved}",
                      flush=True)

        for name in args.loss:
            run = make(name)
            if name in states:
                run.load_state_dict(states[name])
            runs.append(run)
            if not takes_turns:
                train(run, False)
            if interrupt.stopped:
                break
        while not interrupt.stopped and (left := [
                run for run in runs if run.test is None or not run.finished
        ]):
            for run in left:
                train(run, True)
                if interrupt.stopped:
                    break
        if ranks.first:
            write(runs)
    return runs, interrupt.stopped
