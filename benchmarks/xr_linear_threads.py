"""Measures how the training of XR-Linear scales with threads, and simulates more threads than this
machine has.

    python benchmarks/xr_linear_threads.py [--gowalla FOLDER] [--threads 1 2] [--repeats 5]
                                           [--scale 1] [--json [FILE]]

Training consists of label vectors (PIFA), tree and layers. Numbers of threads take turns; times are
medians. The generated set has 60,000 examples, 60,000 features and 30,000 labels, times --scale.

The simulation assigns the measured task times of a run on one thread to 1 to 64 threads, in the
same order: an idle thread takes the next task. Time outside tasks is counted as serial, although
part of it is parallel. Label vectors and trees are extrapolated by Amdahl's law from the times on
one thread and on the largest measured number of threads. The simulation ignores that threads share
caches and memory bandwidth: compare it with the measured times.
"""

import argparse
import heapq
import statistics
import time
from pathlib import Path
from typing import Iterator

import numpy as np
import torch

import xsoftmax as xs
from common import extreme_data
from common.processes import interruptible
from common.records import add_json, plot, report, table

SIMULATED = (1, 2, 4, 8, 15, 32, 64)


class Recorder:
    """Wraps an operator whose last result lists its tasks, and records that list."""
    def __init__(self, name: str) -> None:
        self.name, self.op, self.tasks = name, getattr(torch.ops.xsoftmax, name), []

    def __call__(self, *args):
        result = self.op(*args)
        self.tasks.append(result[-1])
        return result

    def __enter__(self) -> "Recorder":
        setattr(torch.ops.xsoftmax, self.name, self)
        return self

    def __exit__(self, *_) -> None:
        setattr(torch.ops.xsoftmax, self.name, self.op)


def generated(scale: float) -> tuple:
    train, test, features, labels = (round(scale * size)
                                     for size in (60_000, 10_000, 60_000, 30_000))
    parts = extreme_data.generated(train, test, features, labels, 3, 100, seed=0)
    return (*parts["train"], parts["test"][0])


def gowalla(folder: Path) -> tuple:
    parts = extreme_data.split(*extreme_data.gowalla(folder), seed=0)
    return (*parts["train"], parts["test"][0])


def train(X, Y) -> tuple[dict[str, float], xs.XRLinear, Recorder]:
    """Returns the seconds of each step of training."""
    def steps() -> Iterator[float]:
        yield time.perf_counter()
        vectors = xs.label_vectors.pifa(X, Y)
        yield time.perf_counter()
        tree = xs.LabelTree.from_vectors(vectors, 16, max_leaf_size=100, generator=generator)
        yield time.perf_counter()
        with recorder:
            models.append(xs.XRLinear.train(X, Y, tree=tree, generator=generator))
        yield time.perf_counter()

    generator, recorder = torch.Generator().manual_seed(0), Recorder("linear_layers_train")
    models: list[xs.XRLinear] = []
    seconds = np.diff(list(steps())).tolist()
    return dict(zip(("label vectors", "tree", "layers"), seconds)) | {"training": sum(seconds)
                                                                      }, models[0], recorder


def simulate(seconds: list[float], threads: int) -> float:
    """Returns when the last task ends, if each thread without work takes the next one."""
    free = [0.0] * threads
    for task in seconds:
        heapq.heapreplace(free, free[0] + task)
    return max(free)


def amdahl(one: float, measured: float, measured_threads: int, threads: int) -> float:
    """Extrapolates the seconds on `threads` threads by Amdahl's law from two measured times."""
    serial = max(0.0, (measured - one / measured_threads) / (1 - 1 / measured_threads))
    return serial + (one - serial) / threads


def simulate_layers(seconds: float, calls: list[torch.Tensor], threads: int) -> float:
    """Returns the seconds of training layers on `threads` threads, from a run on one: its seconds
    and the tasks of each call of the operator."""
    pools = [tasks[:, 3].tolist() for tasks in calls]
    outside = seconds - sum(map(sum, pools))
    return outside + sum(simulate(pool, threads) for pool in pools)


def measure(args: argparse.Namespace, name: str, *matrices) -> tuple[dict, list]:
    """Returns the median seconds of each step by number of threads, and the runs on one thread:
    seconds of training layers, and tasks."""
    X, Y, queries = map(extreme_data.float_rows, matrices)
    runs: dict[int, list[dict[str, float]]] = {threads: [] for threads in args.threads}
    single: list[tuple[float, list[torch.Tensor]]] = []
    for round_ in range(args.repeats + 1):
        for threads in args.threads:
            torch.set_num_threads(threads)
            seconds, model, recorder = train(X, Y)
            begin = time.perf_counter()
            model.predict(queries)
            seconds["prediction"] = time.perf_counter() - begin
            if round_ > 0:  # the first round is a warm-up
                runs[threads].append(seconds)
                if threads == 1:
                    single.append((seconds["layers"], recorder.tasks))
    return {
        threads: {step: statistics.median(run[step] for run in each)
                  for step in each[0]}
        for threads, each in runs.items()
    }, single


def simulate_training(medians: dict, single: list) -> dict[int, float]:
    """Returns the seconds of training by number of threads."""
    one, most = medians[1], max(medians)
    return {
        threads: statistics.median(simulate_layers(*run, threads) for run in single) + sum(
            amdahl(one[step], medians[most][step], most, threads)
            for step in ("label vectors", "tree"))
        for threads in SIMULATED
    }


def tables_of(name: str, medians: dict, single: list,
              simulated: dict[int, float]) -> tuple[list[dict], ...]:
    """Returns the rows of the three tables."""
    one = medians[1]
    middle = sorted(single, key=lambda run: run[0])[len(single) // 2]
    tasks = torch.cat(middle[1])
    times = [{
        "set": name, "step": step,
        **{f"{threads} threads, s": f"{medians[threads][step]:.3f}"
           for threads in medians}, **{
            f"1 / {threads} threads": f"{one[step] / medians[threads][step]:.2f}"
            for threads in medians if threads > 1
        }
    } for step in one]
    schedule = [{
        "set": name, "threads": threads, "training, simulated, s": f"{seconds:.3f}",
        "1 thread / simulated": f"{simulated[1] / seconds:.2f}",
        "measured, s": f"{medians[threads]['training']:.3f}" if threads in medians else ""
    } for threads, seconds in simulated.items()]
    levels = []
    for level in tasks[:, 0].unique():
        seconds = tasks[tasks[:, 0] == level, 3]
        levels.append({
            "set": name, "level": int(level) + 1, "tasks": len(seconds),
            "seconds of one thread": f"{float(seconds.sum()):.3f}",
            "longest task, s": f"{float(seconds.max()):.3f}"
        })
    return times, schedule, levels


def curves_of(name: str, medians: dict,
              simulated: dict[int, float]) -> dict[str, list[tuple[float, float]]]:
    """Returns by number of threads how many times as fast as on one thread the training is."""
    return {
        f"{name}, simulated": [(threads, simulated[1] / seconds)
                               for threads, seconds in simulated.items()],
        f"{name}, measured": [(threads, medians[1]["training"] / steps["training"])
                              for threads, steps in medians.items()]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gowalla", type=Path, help="the folder of train.txt and test.txt")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="1 and others")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1, help="of the generated set's sizes")
    add_json(parser)
    args = parser.parse_args()
    if 1 not in args.threads or max(args.threads) == 1:
        parser.error(f"--threads: expected 1 and others, got {args.threads}")
    sets = {"generated": lambda: generated(args.scale)
            } | ({"Gowalla": lambda: gowalla(args.gowalla)} if args.gowalla else {})
    measured = {name: measure(args, name, *make()) for name, make in sets.items()}
    simulated = {name: simulate_training(*results) for name, results in measured.items()}
    found = [tables_of(name, *results, simulated[name]) for name, results in measured.items()]
    titles = ("Training and prediction", "Training on more threads, simulated", "Time by level")
    report(
        args, __doc__, question="How does the training of XR-Linear scale with threads?",
        against="one thread", threads=max(args.threads),
        tables=[table(sum((one[i] for one in found), []), title) for i, title in enumerate(titles)],
        medians={name: medians
                 for name, (medians, _) in measured.items()}, plot=plot(
                     "threads", "times as fast as one thread", {
                         label: points
                         for name, (medians, _) in measured.items()
                         for label, points in curves_of(name, medians, simulated[name]).items()
                     }, "xy"))


if __name__ == "__main__":
    interruptible(main)
