"""The training loop, what interrupts it, and the checkpoints from which it goes on."""

import argparse
import math
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

import xsoftmax as xs

from .errors import Diverged, UsageError
from .losses import Loss, build_optimizer
from .ranks import Ranks

# What may differ between the run that wrote a checkpoint and the run that resumes it: the rest decides the weights.
FREE_ARGUMENTS = {"eval_minutes", "eval_epochs", "threads", "checkpoint", "resume", "output", "loss", "patience"}
BUDGET_ARGUMENTS = {"epochs", "max_minutes"}  # free, too, where the learning rate does not follow them


class Run:
    """
    One loss in training: weights, optimizer, position and figures, all of which a checkpoint holds. An example's run adds

        epoch_steps     how many steps an epoch has
        unit            what a step's targets are called, in the plural
        train_loss      the loss of this rank in the step that comes, and how many targets the whole batch has
        measure         what an evaluation finds, `valid_...`, for the curve
        measure_test    what the finished run is worth, `test_...`
        TEST            the names of these figures
        summary         the figures of a point of the curve, for the terminal
        OF_RANK         which entries of STATE differ between ranks

    Of several ranks each has a run, with its part of every batch; all of them take the same steps and find the same figures.
    """

    epoch_steps: int
    unit: str
    TEST: tuple[str, ...]
    STATE = ("steps", "targets", "train_seconds", "points", "test", "recent", "rng")
    OF_RANK: tuple[str, ...] = ("rng",)
    MODULES = ("encoder", "loss", "optimizer")

    def __init__(self, name: str, args: argparse.Namespace, encoder: nn.Module, loss: Loss):
        """encoder: its `embedding` holds the output layer's rows, but with --untied. Both were made after torch.manual_seed(args.seed)."""
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
        self.parameters = list(modules.parameters())  # the tied weight once
        self.optimizer = build_optimizer(args, self.parameters)

        self.steps = 0
        self.targets = 0
        self.train_seconds = 0.0
        self.points: list[dict] = []  # one an evaluation
        self.test: dict | None = None
        self.recent = [0.0, 0]  # summed loss and number of targets since the last evaluation
        self.ranks.seed(args.seed)
        self.rng = self.rng_state()

    @property
    def table(self) -> nn.Linear:
        """The parameters of the output layer: a row a class, or a row an edge of a tree of classes."""
        return self.loss.linear if isinstance(self.loss, xs.LinearLoss) else self.loss.edges

    def tie(self):
        """Makes the rows of the classes those of the embedding."""
        self.table.weight = self.encoder.embedding.weight

    def init_bias(self):
        if self.table.bias is not None:
            nn.init.zeros_(self.table.bias)

    def train_loss(self) -> tuple[Tensor, int]:
        raise NotImplementedError

    def measure(self, interrupt: "Interrupt") -> dict | None:
        """None when interrupted."""
        raise NotImplementedError

    def measure_test(self, interrupt: "Interrupt") -> dict | None:
        """None when interrupted."""
        raise NotImplementedError

    def summary(self, point: dict) -> str:
        raise NotImplementedError

    def rng_state(self) -> dict:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def set_rng_state(self, state: dict):
        torch.set_rng_state(state["cpu"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def state_dict(self) -> dict:
        state = {key: getattr(self, key) for key in self.STATE} | {key: getattr(self, key).state_dict() for key in self.MODULES}
        return self.ranks.together(state, self.OF_RANK)

    def load_state_dict(self, state: dict):
        state = self.ranks.apart(state)
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
        """The share of the budget that is spent: of steps, or of minutes."""
        spent = self.steps / (self.args.epochs * self.epoch_steps)
        return spent if self.args.max_minutes is None else max(spent, self.train_seconds / (60 * self.args.max_minutes))

    @property
    def finished(self) -> bool:
        return self.progress >= 1

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * (0.5 + 0.5 * math.cos(math.pi * self.progress) if self.args.schedule == "cosine" else 1.0)
        self.encoder.train()
        self.loss.train()
        loss, count = self.call(self.train_loss)
        loss = self.ranks.batch_mean(loss, count)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        xs.clip_grad_norm_(self.parameters, self.args.clip)
        self.optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged(f"the {self.name} loss is {value} after {self.steps} steps: try a smaller --lr than {self.args.lr}")
        self.recent = [self.recent[0] + value * count, self.recent[1] + count]
        self.steps += 1
        self.targets += count

    @torch.no_grad()
    def exactly(self, measure: Callable[["Interrupt"], dict | None], interrupt: "Interrupt") -> dict | None:
        """What measure finds in the finished weights, by the full softmax, whichever loss trains."""
        self.encoder.eval()
        self.loss.eval()
        self.optimizer.flush()  # an embedding with rows of its own may owe steps: the loss sees to its own table alone
        return measure(interrupt)

    def batches(self, count: int, what: str, interrupt: "Interrupt"):
        """The numbers below count, with a bar on a terminal; ends early when interrupted."""
        for i in tqdm(range(count), desc=f"{self.name}: {what}", disable=self.quiet, leave=False):
            interrupt.look()
            if interrupt.seen:
                return
            yield i

    @property
    def quiet(self) -> bool:
        """No bars."""
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
        self.recent = [0.0, 0]
        tqdm.write(
            f"{self.name}: step {self.steps:,}, epoch {point['epoch']:.3g}, {self.train_seconds / 60:.2f} min, "
            f"train loss {point['train_loss']:.3f}, {self.summary(point)}"
        )
        sys.stdout.flush()

    def train(self, interrupt: "Interrupt", save: Callable[[], None]):
        """Trains until the budget is spent or a key is pressed, and calls save() wherever a later run may go on."""
        self.set_rng_state(self.rng)
        if not self.finished:
            self.test = None  # resumed with a larger budget: the figures of its last weights are still to come
        eval_seconds = 60 * self.args.eval_minutes if self.args.eval_minutes else math.inf
        evaluated = self.points[-1]["train_seconds"] if self.points else 0.0
        steps = math.ceil(self.args.epochs * self.epoch_steps)
        bar = tqdm(total=steps, initial=self.steps, desc=self.name, unit="step", disable=self.quiet)
        interrupt.look()
        while not self.finished and not interrupt.seen:
            start = time.perf_counter()
            self.step()
            self.train_seconds += interrupt.look(time.perf_counter() - start)
            bar.update()
            if self.finished or self.steps % self.eval_steps == 0 or self.train_seconds - evaluated >= eval_seconds:
                evaluated = self.train_seconds
                self.rng = self.rng_state()
                self.evaluate(interrupt)
                save()
        bar.close()
        self.rng = self.rng_state()
        if self.finished and not interrupt.seen and (not self.points or self.points[-1]["step"] < self.steps):
            self.evaluate(interrupt)  # interrupted in its last evaluation, and resumed
        if self.finished and self.test is None and not interrupt.seen:
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
            **{key: self.test and self.test[key] for key in self.TEST},
        }


class Interrupt:
    """Turns the first Ctrl-C into a flag, read between steps, where everything can be saved; the second ends the program. All ranks look at the
    same times, and see what one of them has met."""

    def __init__(self, ranks: Ranks = Ranks()):  # noqa: B008 (nothing of it changes)
        self.ranks = ranks
        self.met = self.seen = False

    def look(self, seconds: float = 0.0) -> float:
        """Returns the mean of `seconds` over ranks: a budget of time ends on all of them at once."""
        met, seconds = self.ranks.mean(self.met, seconds)
        self.seen = met > 0
        return seconds

    def __enter__(self):
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, number, frame):
        self.met = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def save_checkpoint(path: Path, fingerprint: int, args: argparse.Namespace, states: dict[str, dict]):
    """Writes beside the old checkpoint and then takes its place: whenever the program ends, one of the two is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        torch.save({"arguments": plain(args), "fingerprint": fingerprint, "runs": states}, file)
        file.flush()
        os.fsync(file.fileno())  # or a machine that stops may keep the new name and lose what it names
    os.replace(partial, path)


def read_checkpoint(path: Path, option: str) -> tuple[dict, int, dict[str, dict]]:
    """Arguments, fingerprint of the data, and the states of the runs by the name of the loss. option: what named the file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint["arguments"], checkpoint["fingerprint"], checkpoint["runs"]
    except Exception as error:  # whatever torch.load meets in a file that is no checkpoint
        raise UsageError(f"{option}: {path} is not a checkpoint of this program ({error})") from error


def load_checkpoint(path: Path, fingerprint: int, args: argparse.Namespace, data: str) -> dict[str, dict]:
    """The states of the runs so far, by the name of the loss. data: what it is called in an error."""
    saved, trained_on, runs = read_checkpoint(path, "--resume")
    free = FREE_ARGUMENTS | (BUDGET_ARGUMENTS if args.schedule == "constant" else set())
    for key, value in plain(args).items():
        if key not in free and key in saved and saved[key] != value:  # an option that is younger than the checkpoint decides nothing
            option = key.replace("_", "-")
            raise UsageError(f"--resume: the checkpoint was written with --{option} {saved[key]}, and this run has {value}")
    if trained_on != fingerprint:
        raise UsageError(f"--resume: {data} is not what the checkpoint was trained on")
    return runs


def plain(args: argparse.Namespace) -> dict:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def history(args: argparse.Namespace, runs: list[Run], **data: dict) -> dict:
    """Every figure, with all that it takes to get it again."""
    processor = platform.processor() or platform.machine()
    return {
        "arguments": plain(args),
        **data,
        "machine": {"torch": torch.__version__, "threads": torch.get_num_threads(), "ranks": Ranks(getattr(args, "table", None)).size,
                    "processor": processor},
        "runs": [run.figures() for run in runs],
    }


def train_each(args: argparse.Namespace, make: Callable[[str], Run], fingerprint: int, data: str,
               write: Callable[[list[Run]], None]) -> tuple[list[Run], bool]:
    """
    Trains with each loss in turn, from the checkpoint where there is one.

    make: the run of a loss
    fingerprint: of the data: a checkpoint belongs to one
    data: what it is called in an error
    write: leaves the figures so far behind
    Returns: the runs, and whether they were interrupted.
    """
    args.output.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    ranks = Ranks(getattr(args, "table", None))
    ranks.same("--data", fingerprint)
    states = load_checkpoint(args.checkpoint, fingerprint, args, data) if args.resume else {}
    runs: list[Run] = []
    with Interrupt(ranks) as interrupt:
        for name in args.loss:
            run = make(name)
            if name in states:
                run.load_state_dict(states[name])
            runs.append(run)

            def save():
                states[name] = run.state_dict()
                if ranks.first:
                    if args.checkpoint:
                        save_checkpoint(args.checkpoint, fingerprint, args, states)
                    write(runs)

            run.train(interrupt, save)
            interrupt.look()
            if interrupt.seen:
                saved = f", --checkpoint {args.checkpoint} --resume goes on from here" if args.checkpoint else ""
                print(f"interrupted after {run.steps} steps of the {name} loss{saved}", flush=True)
                break
    return runs, interrupt.seen
