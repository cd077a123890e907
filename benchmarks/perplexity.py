"""Perplexity of language models trained with each sampler, beside the exact loss.

    python benchmarks/perplexity.py table --data ptb --out out/ptb        # each method at its best learning rate, long
    python benchmarks/perplexity.py curve --data ptb --out out/ptb        # perplexity against the time of a step, 20 to 2,000 classes

Every run is one of examples/language_model/train.py, with its checkpoint: stopped at any time, the same command goes on. Learning rates are
searched alike for all methods, on short runs, by validation perplexity. Long: hours. Runs share the machine (--jobs), so their own times
mean nothing; the time of a step is measured apart, on all threads, the methods taking turns (`--time`, wants a quiet machine). What follows `--`
are options of the example, for all runs.
"""

import argparse
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from timing import interleave, machine, print_table

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model"
LEARNING_RATES = (2e-3, 4e-3, 8e-3)


def sampled(sampler: str, samples: str, head: int = 0, *more: str) -> list[str]:
    return ["--loss", "sampled", "--sampler", *sampler.split(), "--samples", *samples.split(), "--head", str(head), *more]


EXACT = ["--loss", "exact"]
RANKING = ("--estimator", "ranking")

# 20 private draws each, as the paper's table of samplers has it, then what the defaults could be.
TABLE = {
    "exact": EXACT,
    "head 64 + 64 private midx": sampled("midx", "64", 64),
    "head 64 + 64 shared unigram + 20 private midx": sampled("unigram midx", "64 20", 64),
    "20 private midx": sampled("midx", "20"),
    "20 private midx, ranking": sampled("midx", "20", 0, *RANKING),
    "20 private midx_pq, ranking": sampled("midx_pq", "20", 0, *RANKING),
    "20 private unigram, ranking": sampled("unigram", "20", 0, "--private", *RANKING),
    "20 private uniform, ranking": sampled("uniform", "20", 0, "--private", *RANKING),
    "512 shared unigram, head 512": sampled("unigram", "512", 512),
}

SIZES = (20, 64, 200, 632, 2000)

# How to score so many classes a query, the target left out.
CURVES = {
    "shared uniform": lambda m: sampled("uniform", str(m)),
    "shared unigram": lambda m: sampled("unigram", str(m)),
    "head + shared unigram": lambda m: sampled("unigram", str(m - m // 2), m // 2),
    "private midx": lambda m: sampled("midx", str(m)),
    "private midx, ranking": lambda m: sampled("midx", str(m), 0, *RANKING),
    "head + private midx": lambda m: sampled("midx", str(m - m // 2), m // 2),
    "head + private midx, ranking": lambda m: sampled("midx", str(m - m // 2), m // 2, *RANKING),
    "head + shared unigram + private midx": lambda m: sampled("unigram midx", f"{m * 2 // 5} {m - m * 4 // 5}", m * 2 // 5),
}


class Study:
    """Runs of the example that differ in a few options."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.common = ["--data", args.data, "--min-count", "1", "--optimizer", "adam", "--schedule", "cosine", "--threads", str(args.threads)]
        self.common += args.options

    def train(self, name: str, method: list[str], lr: float, epochs: int) -> dict:
        """The figures of one run, made or finished or merely read."""
        folder = self.args.out / f"{name.replace(',', '').replace(' ', '-')}-lr{lr:g}-epochs{epochs}"
        checkpoint = folder / "checkpoint.pt"
        history = folder / "history.json"
        if not (history.is_file() and self.finished(history)):
            command = [sys.executable, str(EXAMPLE / "train.py"), *self.common, *method, "--lr", str(lr), "--epochs", str(epochs),
                       "--output", str(folder), "--checkpoint", str(checkpoint), *(["--resume"] if checkpoint.is_file() else [])]
            if not self.args.read_only:
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / "log.txt", "a") as log:
                    code = subprocess.run(command, stdout=log, stderr=log).returncode
                if code == 2:  # a loss that is no number any more, and other ends that a learning rate can come to
                    return {"failed": (folder / "log.txt").read_text().strip().splitlines()[-1]}
                if code != 0:
                    raise SystemExit(f"{' '.join(command)}: exit {code}, see {folder / 'log.txt'}")
            elif not history.is_file():
                return {"failed": "not run"}
        checkpoint.unlink(missing_ok=True)  # finished: tens of megabytes that nobody reads again
        (folder / "model.pt").unlink(missing_ok=True)
        return json.loads(history.read_text())["runs"][0]

    @staticmethod
    def finished(history: Path) -> bool:
        return json.loads(history.read_text())["runs"][0]["test_perplexity"] is not None

    def map(self, runs: list[tuple]) -> list[dict]:
        with ThreadPoolExecutor(self.args.jobs) as pool:
            return list(pool.map(lambda run: self.train(*run), runs))


def valid(run: dict) -> float:
    return run["points"][-1]["valid_perplexity"] if "points" in run else math.inf


def table(study: Study, methods: dict[str, list[str]]) -> list[dict]:
    args = study.args
    grid = [(name, method, lr, args.search_epochs) for name, method in methods.items() for lr in LEARNING_RATES]
    found = study.map(grid)
    best = {}
    for (name, _, lr, _), run in zip(grid, found):
        if name not in best or valid(run) < best[name][0]:
            best[name] = (valid(run), lr)
    runs = study.map([(name, method, best[name][1], args.epochs) for name, method in methods.items()])
    rows = []
    for (name, _), run in zip(methods.items(), runs):
        if "failed" in run:
            rows.append({"method": name, "test": run["failed"]})
            continue
        rows.append({"method": name, "learning rate": f"{best[name][1]:g}", "valid": f"{valid(run):.1f}",
                     "test": f"{run['test_perplexity']:.1f}" if run["test_perplexity"] else "unfinished",
                     "of exact": f"{run['test_perplexity'] / runs[0]['test_perplexity']:.3f}"
                     if run["test_perplexity"] and runs[0].get("test_perplexity") else ""})
    return rows


def curve(study: Study) -> list[dict]:
    args = study.args
    exact = [("exact", EXACT, lr, args.search_epochs) for lr in LEARNING_RATES]
    runs = exact + [(f"{name} {size}", method(size), args.lr, args.search_epochs) for name, method in CURVES.items() for size in args.sizes]
    found = study.map(runs)
    reference = min((run for run in found[: len(exact)]), key=valid)
    times_file = args.out / "step_times.json"
    if args.time:
        times_file.write_text(json.dumps({"machine": machine(), "seconds": step_times(study, {run[0]: run[1] for run in runs})}, indent=1))
    times = json.loads(times_file.read_text())["seconds"] if times_file.is_file() else {}
    rows = []
    for (name, _, lr, _), run in zip(runs[len(exact) - 1 :], [reference] + found[len(exact) :]):
        seconds = times.get(name)
        rows.append({"method": name, "step": f"{1000 * seconds:.1f} ms" if seconds else "",
                     "valid": f"{valid(run):.1f}", "of exact": f"{valid(run) / valid(reference):.3f}",
                     "seconds": seconds, "ratio": valid(run) / valid(reference)})
    plot(rows, args)
    return rows


def step_times(study: Study, methods: dict[str, list[str]]) -> dict[str, float]:
    """Median time of a training step, the encoder's part in it, all methods in turn."""
    sys.path.insert(0, str(EXAMPLE))
    import data
    import train

    steps = {}
    for name, method in methods.items():
        args = train.parse_arguments([*study.common, *method, "--lr", str(study.args.lr)])
        torch.set_num_threads(study.args.time_threads)
        corpus = data.load_corpus(args.data, args.min_count, args.max_tokens) if not steps else corpus
        steps[name] = train.Run(args.loss[0], corpus, args).step
    return interleave(steps, repeats=31, warmup=6)


def plot(rows: list[dict], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    timed = all(row["seconds"] for row in rows)
    for name in CURVES:
        points = [(row["seconds"] * 1000 if timed else size, row["ratio"])
                  for row, size in ((row, size) for size in args.sizes for row in rows if row["method"] == f"{name} {size}")
                  if math.isfinite(row["ratio"])]
        axes.plot(*zip(*points), marker="o", markersize=4, label=name) if points else None
    axes.axhline(1.0, color="black", linewidth=0.8)
    if timed:
        axes.axvline(rows[0]["seconds"] * 1000, color="black", linewidth=0.8, linestyle=":", label="a step of the exact loss")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("time of a training step, ms" if timed else "classes scored a query")
    axes.set_ylabel("validation perplexity / that of the exact loss")
    axes.set_yticks([1, 1.05, 1.1, 1.2, 1.5, 2], ["1", "1.05", "1.1", "1.2", "1.5", "2"], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(args.out / "curve.png", dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["table", "curve"])
    parser.add_argument("--data", required=True, help="as of examples/language_model/train.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder a run; kept between calls")
    parser.add_argument("--epochs", type=int, default=20, help="of the table's runs (default: %(default)s)")
    parser.add_argument("--search-epochs", type=int, default=2, help="of a learning rate's trial, and of a curve's run (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="of a curve's run (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="classes scored (default: %(default)s)")
    parser.add_argument("--only", nargs="+", help="methods of the table, beside the exact loss")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each (default: %(default)s)")
    parser.add_argument("--time", action="store_true", help="curve: measure the time of a step as well")
    parser.add_argument("--time-threads", type=int, default=2)
    parser.add_argument("--read-only", action="store_true", help="start nothing: show what is there")
    parser.add_argument("--json", action="store_true")
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.options = argv[end + 1 :]
    args.out.mkdir(parents=True, exist_ok=True)
    study = Study(args)
    if args.study == "table":
        unknown = set(args.only or []) - set(TABLE)
        if unknown:
            parser.error(f"--only: expected methods of {sorted(TABLE)}, got {sorted(unknown)}")
        rows = table(study, {name: method for name, method in TABLE.items() if name == "exact" or not args.only or name in args.only})
    else:
        rows = curve(study)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    else:
        print_table(rows, [column for column in ("method", "learning rate", "step", "valid", "test", "of exact") if any(column in row for row in rows)])


if __name__ == "__main__":
    main()
