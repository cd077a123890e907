"""Runs an example many times with different options: the common part of perplexity.py and
recommend.py."""

import argparse
import importlib
import json
import math
import shlex
import shutil
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

import xsoftmax as xs
from common import ROOT
from common.methods import EXACT
from common.processes import run_program
from common.records import add_json, commit, report, shown_words, table
from common.runs import Runs
from common.timing import interleave, share

from examples.common.errors import DIVERGED

LEARNING_RATES = (2e-3, 4e-3, 8e-3, 16e-3)


def last_line(log: Path) -> str:
    return (log.read_text().strip().splitlines() or [""])[-1]


def upkeep(run: Any) -> float:
    """Returns a step's share of the seconds of refreshing samplers and balancing trees."""
    seconds = 0.0
    for part in run.loss.modules():
        if isinstance(part, xs.samplers.AdaptiveSampler):
            linear = run.loss.linear
            refresh = partial(part.refresh, linear.weight.detach(), linear.bias)
            seconds += share(refresh, run.args.refresh_every)
        elif isinstance(part, xs.BeamTreeLoss):
            seconds += share(part.balance, part.balance_every)
    return seconds


class ExampleRuns:
    """Runs the train.py of an example with checkpoints, so that the same command continues after an
    interruption.

    Args:
        example: its name.
        args: the result of make_parser.
        common: options of all runs.
        cost: computes from a run's metrics the value to minimise over learning rates.
    """
    def __init__(self, example: str, args: argparse.Namespace, common: list[str],
                 cost: Callable[[dict], float]):
        self.example, self.args = example, args
        # A run is found again by the name of its data and by what is in it.
        self.options = [
            "--data",
            str(Path(args.data).absolute()), "--schedule", "cosine", *common, *args.options
        ]
        self.common = ["--threads", str(args.threads), *self.options]
        self.program = importlib.import_module(f"examples.{example}.train")
        self.cost = lambda run: math.inf if "failed" in run else cost(run)
        self.dataset = self.program.load_data(self.program.parse_arguments(self.common))
        options = [*shown_words(self.options), f"{self.dataset.fingerprint:08x}"]
        self.runs = Runs(args.runs or args.out / "runs.jsonl", options, args.threads)
        self.stopped = threading.Event()

    def train(self, name: str, method: list[str], lr: float, epochs: float, seed: int = 1) -> dict:
        """Returns the metrics of one run, after running or resuming it if necessary."""
        options = [*method, "--lr", f"{lr:g}", "--epochs", f"{epochs:g}", "--seed", str(seed)]
        found = self.runs.get(shlex.join(options))
        if found is not None:
            return found
        key = zlib.crc32(shlex.join([*self.runs.options, *options]).encode())
        folder = self.args.out / f"{name.replace(',', '').replace(' ', '-')}-lr{lr:g}-{key:08x}"
        checkpoint, log = folder / "checkpoint.pt", folder / "log.txt"
        command = [
            sys.executable,
            str(ROOT / "examples" / self.example / "train.py"), *self.common, *options, "--output",
            str(folder), "--checkpoint",
            str(checkpoint), *(["--resume"] if checkpoint.is_file() else [])
        ]
        folder.mkdir(parents=True, exist_ok=True)
        code_version = commit()
        if self.stopped.is_set():
            raise KeyboardInterrupt
        with open(log, "a") as file:
            code = run_program(command, stdout=file, stderr=file)
        if code == DIVERGED:
            found = {"failed": last_line(log)}
        elif code != 0:
            raise SystemExit(f"{shlex.join(command)}: exit {code}, see {log}: {last_line(log)}")
        else:
            found = json.loads((folder / "history.json").read_text())["runs"][0]
        self.runs.add(shlex.join(options), found, code_version)
        shutil.rmtree(folder)  # tens of megabytes that are no longer needed
        return found

    def map(self, runs: list[tuple]) -> list[dict]:
        return self.in_threads(lambda run: self.train(*run), runs)

    def in_threads(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Returns the results of --jobs threads. After Ctrl-C, which only the main thread notices,
        the others start no further training."""
        with ThreadPoolExecutor(self.args.jobs) as pool:
            try:
                return list(pool.map(work, items))
            except KeyboardInterrupt:
                self.stopped.set()
                raise

    def long_runs(self, methods: dict[str, list[str]]) -> list[tuple[str, float, list[dict]]]:
        """Returns for each method its name, its best learning rate, and the metrics of the long
        runs with that rate, one for each seed.

        The best rate of a short run is often too high for a long one, and sometimes too low. So the
        first long run has the best rate of the short ones. Lower rates follow as long as they are
        not worse, or, if the next lower one is worse, higher ones. The selection uses the first
        seed.
        """
        best = self.best_runs(methods, self.args.rates)
        others = [(name, seed) for seed in range(2, 1 + self.args.seeds) for name in methods]
        runs = self.map([(name, methods[name], best[name][0], self.args.epochs, seed)
                         for name, seed in others])
        return [(name, lr,
                 [run, *(found for (known, _), found in zip(others, runs) if known == name)])
                for name, (lr, run) in best.items()]

    def best_runs(self, methods: dict[str, list[str]],
                  rates: Sequence[float]) -> dict[str, tuple[float, dict]]:
        """Returns the best learning rate of each method, and its long run with the first seed."""
        if len(rates) == 1:
            runs = self.map([(name, method, rates[0], self.args.epochs)
                             for name, method in methods.items()])
            return {name: (rates[0], run) for name, run in zip(methods, runs)}
        grid = [(name, method, lr, self.args.search_epochs) for name, method in methods.items()
                for lr in rates]
        costs = {(name, lr): self.cost(run) for (name, _, lr, _), run in zip(grid, self.map(grid))}

        def search(name: str) -> tuple[float, dict]:
            runs: dict[float, dict] = {}

            def cost(lr: float) -> float:
                if lr not in runs:
                    runs[lr] = self.train(name, methods[name], lr, self.args.epochs)
                return self.cost(runs[lr])

            order = sorted(rates)
            at = order.index(min(rates, key=lambda lr: costs[name, lr]))
            for step in (-1, 1):
                while 0 <= at + step < len(order) and cost(order[at]) >= cost(order[at + step]):
                    at += step
            return order[at], runs[order[at]]

        return dict(zip(methods, self.in_threads(search, methods)))

    def step_times(self, methods: dict[str, list[str]]) -> dict[str, float]:
        """Returns the median seconds of a training step, including the encoder and a step's share
        of refreshing the sampler's index or balancing the tree, with all methods interleaved. The
        machine has to be idle otherwise.
        """
        torch.set_num_threads(self.args.threads)
        runs = {}
        for name, method in methods.items():
            args = self.program.parse_arguments([*self.common, *method])
            runs[name] = self.program.Run(args.loss[0], self.dataset, args)
        medians = interleave({name: run.step for name, run in runs.items()}, repeats=31, warmup=6)
        return {name: medians[name] + upkeep(run) for name, run in runs.items()}

    def show(self, rows: list[dict], columns: list[str], curves: dict) -> None:
        """Reports the rows, without columns that no row has, and the plot of `curves`."""
        report(
            self.args, self.args.about, question="How close do sampled losses come to the "
            "exact loss?", against="the exact loss", threads=self.args.threads, tables=[
                table(rows, f"{Path(self.args.data).name}: {self.dataset.sizes}",
                      columns=[column for column in columns if any(column in row for row in rows)])
            ], rows=rows, runs=self.runs.about(), plot=curves)


def make_parser(description: str, example: str, epochs: int,
                search_epochs: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help=f"as in examples/{example}/train.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs; kept "
                        "between calls")
    parser.add_argument(
        "--runs", type=Path, help="file of the finished runs, which are not repeated "
        "(default: runs.jsonl in --out)")
    parser.add_argument("--epochs", type=float, default=epochs, help="epochs of long runs "
                        "(default: %(default)s)")
    parser.add_argument("--search-epochs", type=float, default=search_epochs,
                        help="epochs of short runs (default: %(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=LEARNING_RATES, help="learning rates to search "
        "(default: %(default)s); a single rate: no search")
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of long runs of each method, with its "
        "best learning rate (default: %(default)s)")
    parser.add_argument("--only", nargs="+", help="methods, in addition to the exact "
                        "loss")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time "
                        "(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default: "
                        "%(default)s)")
    add_json(parser)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the arguments; those after `--` become `options`."""
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.options, args.about = argv[end + 1:], parser.description
    if args.seeds < 1:
        parser.error(f"--seeds: expected at least 1, got {args.seeds}")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def choose(parser: argparse.ArgumentParser, args: argparse.Namespace,
           methods: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns the methods of --only, after the exact loss, with which they are compared."""
    unknown = set(args.only or []) - set(methods)
    if unknown:
        parser.error(f"--only: expected methods of {sorted(methods)}, got {sorted(unknown)}")
    return {
        name: method
        for name, method in methods.items() if method == EXACT or not args.only or name in args.only
    }
