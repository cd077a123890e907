"""Measures the time of samplers against the number of classes: drawing, and reading the table.

    python benchmarks/sampling_time.py [--classes 10000 100000 1000000] [--samples 64]
                                       [--queries 700] [--threads 1] [--repeats 11] [--json [FILE]]

Each query of width 64 has its own samples. Exact: the scores of all classes, their softmax, and
torch.multinomial, for at most 2^30 scores. Tables are random, with clustered rows. Samplers of one
number of classes take turns, and exact follows them; times are medians. A refresh, which training
does every `refresh_every` steps, follows a change of all rows; its time is the median of three.
benchmarks/sampler_distance.py measures how far these proposals are from the softmax.
"""

import argparse
import statistics
import time

import torch

import xsoftmax as xs
from common.methods import PAPER_SAMPLERS
from common.processes import interruptible
from common.records import add_json, plot, report, table
from common.timing import interleave

from examples.common.losses import SamplerOptions, build_sampler

WIDTH = 64
MOST_EXACT = 1 << 30  # scores


def refresh_seconds(sampler: xs.samplers.AdaptiveSampler, weight: torch.Tensor) -> float:
    """Returns the median seconds of a refresh. Adds noise to `weight` before each."""
    sampler.refresh(weight)
    seconds = []
    for _ in range(3):
        weight += 0.01 * torch.randn_like(weight)
        begin = time.perf_counter()
        sampler.refresh(weight)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure(classes: int, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of a draw and of a refresh, by sampler."""
    torch.manual_seed(0)
    centres = torch.randn(100, WIDTH)
    weight = (centres[torch.randint(100, (classes,))] + 0.5 * torch.randn(classes, WIDTH)) / 8
    queries = torch.randn(args.queries, WIDTH)
    options = SamplerOptions(refresh_every=0)
    counts = 1e6 / torch.arange(1, classes + 1)
    samplers = {
        kind: build_sampler(options, kind, counts, WIDTH, args.samples, bias=False, private=True)
        for kind in PAPER_SAMPLERS
    }
    refreshes = {}
    for kind, sampler in samplers.items():
        if isinstance(sampler, xs.samplers.AdaptiveSampler):
            refreshes[kind] = refresh_seconds(sampler, weight)
    draws = {
        kind: lambda sampler=sampler: sampler.sample(queries)
        for kind, sampler in samplers.items()
    }
    exact = {}
    if classes * args.queries <= MOST_EXACT:
        exact["exact"] = lambda: torch.multinomial(
            (queries @ weight.T).softmax(1), args.samples, replacement=True)
    # `exact` does not take turns: after it has freed gigabytes, the others' allocations are slow.
    with torch.no_grad():
        return (interleave(draws, args.repeats, 2) | interleave(exact, args.repeats, 2), refreshes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--queries", type=int, default=700)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {classes: measure(classes, args) for classes in args.classes}
    names = [*PAPER_SAMPLERS, "exact"]
    rows = [{"sampler": name} | {
        f"{classes:,} classes": f"{1e3 * draws[name]:.2f} ms"
        for classes, (draws, _) in found.items() if name in draws
    } | {
        f"refresh, {classes:,}": f"{1e3 * refreshes[name]:.1f} ms"
        for classes, (_, refreshes) in found.items() if name in refreshes
    } for name in names]
    curves = {
        name: [(classes, 1e3 * draws[name])
               for classes, (draws, _) in found.items() if name in draws]
        for name in names
    }
    report(args, __doc__, question="What does a sample cost, by sampler and number of classes?",
           against="sampling from the softmax of all classes, torch.multinomial",
           tables=[table(rows, f"{args.queries} queries, {args.samples} samples each")],
           plot=plot("classes", "milliseconds of a draw", curves, log="xy"))


if __name__ == "__main__":
    interruptible(main)
