"""Compares IdTable with torchrec's managed collision module and simpler methods (look-ups and
insertions), and a training step with IdTable with one whose ids are rows already.

    python benchmarks/id_table.py [--rival-python PYTHON] [--ids 10000000] [--threads 1]
                                  [--rounds 3] [--only table,step] [--json [FILE]]

--rival-python is an interpreter with torchrec. Each run over a table is a separate process
(id_table_side.py), with the libraries in turn; results are medians over --rounds. torchrec assigns
rows at intervals: here every 2^20 ids, and, as its cheapest setting, only once.

A step looks up and embeds 4,096 ids (width 64, row-sparse gradients), which are also each other's
targets for SampledSoftmaxLoss (512 shared uniform samples), with RowAdam. The ids have a Zipf
distribution over a million ids. Some of them are new, and because the table is full, as many
others are evicted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

SIDE = Path(__file__).parent / "id_table_side.py"
CAPACITY, WIDTH, BATCH, STEPS = 1_000_000, 64, 4096, 100
ROWS = ("insert into an empty table", "insert into a full table", "count ids that have a row",
        "look up", "look up, 4,096 ids per call")


def run(python: str, side: str, args: argparse.Namespace, *options: str) -> dict:
    command = [
        python,
        str(SIDE), side, "--ids",
        str(args.ids), "--threads",
        str(args.threads), *options
    ]
    found = subprocess.run(command, capture_output=True, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    if found.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {found.returncode}\n{found.stderr[-2000:]}")
    return json.loads(found.stdout.strip().splitlines()[-1])


def bench_table(args: argparse.Namespace) -> list[dict]:
    """Look-ups and insertions"""
    sides = {name: (sys.executable, name) for name in ("xsoftmax", "searchsorted", "dict")}
    if args.rival_python:
        sides |= {
            "torchrec": (args.rival_python, "torchrec"),
            "torchrec, once": (args.rival_python, "torchrec", "--interval", str(args.ids))
        }
    runs: dict[str, list[dict]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, (python, side, *options) in sides.items():
            runs[name].append(run(python, side, args, *options))
    median = {
        name: {row: statistics.median(one[row] for one in found)
               for row in found[0]}
        for name, found in runs.items()
    }
    assert all(set(found) <= set(ROWS) for found in median.values()), median
    figures = [{"figure": f"{name}: {row}, ns per id", "value": median[name][row]} for row in ROWS
               for name in sides if row in median[name]]
    rivals = [name for name in sides if name.startswith("torchrec")]
    ratios = {
        f"{row}, time per id: {rival} / xsoftmax": median[rival][row] / median["xsoftmax"][row]
        for row in ROWS
        for rival in rivals if row in median[rival]
    }
    return figures + [{"figure": figure, "value": value} for figure, value in ratios.items()]


class Step:
    """A model and its batches of raw ids. If `ids` is None, the batches are rows."""
    def __init__(self, new: float, static: bool):
        torch.manual_seed(0)
        self.loss = xs.SampledSoftmaxLoss(WIDTH, CAPACITY, sampler="uniform", num_samples=512)
        self.embedding = torch.nn.Embedding(CAPACITY, WIDTH, sparse=True)
        self.optimizer = xs.optim.RowAdam([*self.loss.parameters(), *self.embedding.parameters()])
        distribution = 1 / torch.arange(1, CAPACITY, dtype=torch.float64)
        draw = xs.samplers.UnigramSampler(distribution, STEPS * BATCH, power=1.0,
                                          distinct=False).sample(torch.zeros(1, 1))[0].ids
        self.ids = None
        if not static:
            self.ids = xs.IdTable(CAPACITY).attach(self.loss, self.embedding)
            names = torch.randint(-2**63, 2**63 - 1, (CAPACITY - 1,))
            for part in names.split(BATCH):
                self.ids(part)
            draw = names[draw]
            fresh = torch.rand(draw.shape) < new
            draw[fresh] = torch.randint(-2**63, 2**63 - 1, (int(fresh.sum()),))
        self.batches, self.turn = draw.view(STEPS, BATCH), 0

    def __call__(self) -> None:
        raw = self.batches[self.turn % STEPS]
        self.turn += 1
        rows = raw if self.ids is None else self.ids(raw)
        self.optimizer.zero_grad()
        self.loss(self.embedding(rows), rows.roll(-1)).backward()
        self.optimizer.step()


def bench_step(args: argparse.Namespace) -> list[dict]:
    """A training step"""
    figures = []
    for new in args.new:
        steps = {"IdTable": Step(new, False), "static ids": Step(new, True)}
        median = interleave(steps, STEPS - 10, warmup=10)
        figures += [{
            "figure": f"{100 * new:g} % new ids: step with {name}, ms", "value": 1e3 * value
        } for name, value in median.items()]
        figures.append({
            "figure": f"{100 * new:g} % new ids: step with IdTable / static ids",
            "value": median["IdTable"] / median["static ids"]
        })
    return figures


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rival-python", help="an interpreter with torchrec")
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="number of processes per library")
    parser.add_argument("--new", type=float, nargs="*", default=[0.03], help="fractions of new ids "
                        "in the steps")


if __name__ == "__main__":
    run_benches(
        __doc__, {"table": bench_table, "step": bench_step}, question="What do rows for "
        "raw ids cost?", against="torchrec's MCHManagedCollisionModule; a sorted tensor under "
        "torch.searchsorted; a dictionary of Python", extra=options)
