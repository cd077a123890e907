"""Measures tables in files: a training step compared with the same step in memory, and the state of
the file after the process is killed.

    python benchmarks/mapped_table.py --folder /somewhere/with/40/GB --classes 120000000
    python benchmarks/mapped_table.py --only kill

"step" is sampled softmax of 700 queries of width 64 with 512 samples and RowSGD. Targets are
log-uniform over all classes. It is compared with the same step over a tenth of the
classes in memory, in interleaved turns of 50 steps; each figure is a ratio of median turns. With
"by falling frequency", classes are sorted as in a vocabulary and samples are log-uniform. With "in
any order", classes are scattered over the table and samples are uniform, so most pages of a step
have never been read. Steps are counted from a table that was never read. With "next targets",
tables.prefetch is called for them before each step. The file is created for the benchmark and then
removed.

"kill" runs a process that creates a table, trains it with RowAdagrad, and flushes and reads it in
turn, until it is killed at a random time. After reopening, each file must either report that it is
incomplete, or table and state must be bit-identical to the result of that number of steps.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

import xsoftmax as xs
from common.records import run_benches
from xsoftmax.tables.mapped_tables import as_linear

D, QUERIES, DRAWS, TURN = 64, 700, 512, 50
KILLED_CLASSES, STEPS_A_FLUSH = 20_000, 5


def zipf(classes: int) -> torch.Tensor:
    ids = torch.exp(
        torch.rand(QUERIES, dtype=torch.float64) *
        torch.tensor(classes + 1, dtype=torch.float64).log()).long() - 1
    return ids.clamp_(0, classes - 1)


def scattered(ids: torch.Tensor, classes: int) -> torch.Tensor:
    """Maps classes to other positions, one to one."""
    stride = next(n for n in range(int(classes * 0.618), classes)
                  if torch.gcd(torch.tensor(n), torch.tensor(classes)) == 1)
    return ids * stride % classes


class Training:
    """Trains a loss over a table."""
    def __init__(self, weight: nn.Parameter, any_order: bool):
        self.weight, self.any_order, self.classes = weight, any_order, len(weight)
        sampler = xs.samplers.LogUniformSampler(self.classes, DRAWS)
        if any_order:
            sampler = xs.samplers.UniformSampler(self.classes, DRAWS)
        self.loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler=sampler)
        self.optimizer = xs.optim.RowSGD([weight], lr=0.1)
        self.target = self.draw()

    def draw(self) -> torch.Tensor:
        ids = zipf(self.classes)
        return scattered(ids, self.classes) if self.any_order else ids

    def turn(self, ahead: bool = False) -> float:
        """Returns the seconds of TURN steps, without those to create the data."""
        total = 0.0
        for _ in range(TURN):
            target, self.target = self.target, self.draw()
            queries = torch.randn(QUERIES, D)
            start = time.perf_counter()
            if ahead:
                xs.tables.prefetch(self.weight, self.target)
            self.optimizer.zero_grad()
            self.loss(queries, target).backward()
            self.optimizer.step()
            total += time.perf_counter() - start
        return total


def bench_step(args) -> list[dict]:
    """A step over a table in a file / in memory"""
    figures = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "classes.safetensors")
        start = time.perf_counter()
        weight = xs.tables.mapped(path, args.classes, D)
        seconds, size = time.perf_counter() - start, os.path.getsize(path) / 1e9
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        figures.append({
            "figure": f"creating {size:.1f} GB ({memory:.1f} GB of memory): GB/s",
            "value": size / seconds
        })
        small = nn.Parameter(torch.empty(args.classes // 10, D))
        with torch.no_grad():
            as_linear(small)
        for any_order in (False, True):
            mapped, plain, order = Training(weight, any_order), Training(
                small, any_order), "in any order" if any_order else "by falling frequency"
            plain.turn()
            done = 0
            for name, until in [("first steps", 2 * TURN),
                                *[(f"after {steps:,} steps", steps + args.repeats * TURN)
                                  for steps in args.steps]]:
                while done < until - args.repeats * TURN:
                    mapped.turn(ahead=True)
                    done += TURN
                times = {"mapped": [], "mapped, next targets": [], "memory": []}
                for _ in range(max(1, (until - done) // (2 * TURN))):
                    times["mapped"].append(mapped.turn())
                    times["mapped, next targets"].append(mapped.turn(ahead=True))
                    times["memory"].append(plain.turn())
                    done += 2 * TURN
                medians = {key: statistics.median(values) / TURN for key, values in times.items()}
                text = ", ".join(f"{key} {1e3 * value:.2f} ms" for key, value in medians.items())
                for key in ("mapped", "mapped, next targets"):
                    figures.append({
                        "figure": f"{order}, {name}: {key} / memory",
                        "value": medians[key] / medians["memory"], "medians": text, "seconds": times
                    })
            start = time.perf_counter()
            xs.tables.flush(weight)
            figures.append({"figure": f"{order}: flush: s", "value": time.perf_counter() - start})
            del mapped, plain
    return figures


def killed_step(loss, optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    loss(torch.randn(128, D), torch.randint(KILLED_CLASSES, (128,))).backward()
    optimizer.step()


def killed_training(weight):
    loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="log_uniform",
                                             num_samples=128)
    return loss, xs.optim.RowAdagrad([weight], lr=0.1)


def run_until_killed(path: str) -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    torch.manual_seed(0)
    weight = xs.tables.mapped(path, KILLED_CLASSES, D, progress=False)
    loss, optimizer = killed_training(weight)
    step = 0
    while True:
        for step in range(step, step + STEPS_A_FLUSH):
            killed_step(loss, optimizer, step)
        step += 1
        start = time.perf_counter()
        xs.tables.flush(weight)
        while time.perf_counter() - start < 0.05:  # a phase that only reads, such as validation
            loss.topk(torch.randn(8, D), 3)


class Replay:
    """Computes table and state after a number of steps, in memory."""
    def __init__(self):
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.empty(KILLED_CLASSES, D))
        with torch.no_grad():
            as_linear(self.weight)
        self.loss, self.optimizer = killed_training(self.weight)
        self.done = 0

    def to(self, steps: int):
        for self.done in range(self.done, steps):
            killed_step(self.loss, self.optimizer, self.done)
        self.done = steps
        return self.weight, self.optimizer.state[self.weight].get("sum") if steps else None


def reopened(path: str) -> str:
    """Returns the state of the file. Raises an error if it claims to be complete but is not."""
    if not os.path.exists(path):
        return "not started"
    try:
        weight = xs.tables.open(path)
        state = [torch.tensor(0), None]
        if os.path.exists(path + ".row_adagrad"):
            state = torch.ops.xsoftmax.row_adagrad_state(weight, True, "lr=0.1")
    except RuntimeError as error:
        if "is not whole" not in str(error):
            raise
        return "not finished" if "creation" in str(error) else "being written to"
    expected, sums = Replay().to(int(state[0]))
    if not torch.equal(weight, expected) or (sums is not None and not torch.equal(state[1], sums)):
        raise AssertionError(f"{path} claims to be complete, and is not")
    return "complete, without a step" if sums is None else "complete"


def bench_kill(args) -> list[dict]:
    """Files of killed processes"""
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.kills):
            path = os.path.join(folder, f"{number}.safetensors")
            process = subprocess.Popen([sys.executable, __file__, "--until-killed", path],
                                       stdout=subprocess.PIPE)
            process.stdout.readline()
            time.sleep(random.Random(number).uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
            process.wait()
            outcome = reopened(path)
            found[outcome] = found.get(outcome, 0) + 1
    text = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(found.items()))
    return [{
        "figure": f"kill -9, reopened: complete, or reported as incomplete, of {args.kills}",
        "value": sum(found.values()), "medians": text
    }]


def options(parser) -> None:
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--classes", type=int, default=120_000_000)
    parser.add_argument("--steps", type=lambda text: [int(part) for part in text.split(",")],
                        default=[2000, 10_000], help="numbers of steps after which to measure")
    parser.add_argument("--kills", type=int, default=50)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--until-killed"]:
        run_until_killed(sys.argv[2])
    run_benches(__doc__, {"step": bench_step, "kill": bench_kill}, question="What does a table "
                "cost that is larger "
                "than memory?", against="the same loss over a tenth of the classes in memory",
                extra=options)
