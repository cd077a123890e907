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
import sys

import torch

from study import EXACT, EXAMPLES, RANKING, Study, chosen, make_parser, parse, sampled
from timing import interleave, machine

EXAMPLE = EXAMPLES / "language_model"
LEARNING_RATES = (2e-3, 4e-3, 8e-3)

# 20 private draws each, as the paper's table of samplers has it, then what the defaults could be.
TABLE = {
    "exact": EXACT,
    "head 64 + 64 private midx": sampled("midx", "64", 64),
    "head 64 + 64 shared unigram + 20 private midx": sampled("unigram midx", "64 20", 64),
    "20 private midx": sampled("midx", "20"),
    "20 private midx, ranking": sampled("midx", "20", 0, *RANKING),
    "20 private midx_pq, ranking": sampled("midx_pq", "20", 0, *RANKING),
    "20 private lsh, ranking": sampled("lsh", "20", 0, *RANKING),
    "20 private sphere, ranking": sampled("sphere", "20", 0, *RANKING),
    "20 private rff, ranking": sampled("rff", "20", 0, *RANKING),
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


def table(study: Study, methods: dict[str, list[str]]) -> list[dict]:
    rows = []
    exact = None
    for name, lr, run in study.long_runs(methods, LEARNING_RATES):
        if "failed" in run:
            rows.append({"method": name, "test": run["failed"]})
            continue
        test = run["test_perplexity"]
        exact = test if name == "exact" else exact
        rows.append({"method": name, "learning rate": f"{lr:g}", "valid": f"{study.cost(run):.1f}",
                     "test": f"{test:.1f}" if test else "unfinished", "of exact": f"{test / exact:.3f}" if test and exact else ""})
    return rows


def curve(study: Study) -> list[dict]:
    args = study.args
    exact = [("exact", EXACT, lr, args.search_epochs) for lr in LEARNING_RATES]
    runs = exact + [(f"{name} {size}", method(size), args.lr, args.search_epochs) for name, method in CURVES.items() for size in args.sizes]
    found = study.map(runs)
    reference = min(found[: len(exact)], key=study.cost)
    times_file = args.out / "step_times.json"
    if args.time:
        times_file.write_text(json.dumps({"machine": machine(), "seconds": step_times(study, {run[0]: run[1] for run in runs})}, indent=1))
    times = json.loads(times_file.read_text())["seconds"] if times_file.is_file() else {}
    rows = []
    for (name, _, lr, _), run in zip(runs[len(exact) - 1 :], [reference] + found[len(exact) :]):
        seconds = times.get(name)
        rows.append({"method": name, "step": f"{1000 * seconds:.1f} ms" if seconds else "",
                     "valid": f"{study.cost(run):.1f}", "of exact": f"{study.cost(run) / study.cost(reference):.3f}",
                     "seconds": seconds, "ratio": study.cost(run) / study.cost(reference)})
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
    parser = make_parser(__doc__, "language_model", epochs=20, search_epochs=2)
    parser.add_argument("study", choices=["table", "curve"], help="curve: its runs have --search-epochs")
    parser.add_argument("--lr", type=float, default=4e-3, help="of a curve's run (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="classes scored (default: %(default)s)")
    parser.add_argument("--time", action="store_true", help="curve: measure the time of a step as well")
    parser.add_argument("--time-threads", type=int, default=2)
    args = parse(parser)
    study = Study(EXAMPLE, args, ["--min-count", "1", "--optimizer", "adam"], "test_perplexity",
                  lambda run: run["points"][-1]["valid_perplexity"] if run["points"] else math.inf)
    rows = table(study, chosen(parser, args, TABLE)) if args.study == "table" else curve(study)
    study.show(rows, ["method", "learning rate", "step", "valid", "test", "of exact"])


if __name__ == "__main__":
    main()
