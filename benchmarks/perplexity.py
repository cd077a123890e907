"""Compares the perplexity of language models trained with different samplers and with the exact
loss.

    # each method with its best learning rate, long runs
    python benchmarks/perplexity.py table --data ptb --out out/ptb
    # the same for CANE and its rivals, 40 to 80 candidates; for CANE with routed candidates; for
    # learned codebooks; for numbers of codewords and samples
    python benchmarks/perplexity.py cane --data ptb --out out/ptb
    python benchmarks/perplexity.py routed --data ptb --out out/ptb
    python benchmarks/perplexity.py learnable --data ptb --out out/ptb
    python benchmarks/perplexity.py ablation --data ptb --out out/ptb

Each run is a run of examples/language_model/train.py with a checkpoint, so the same command
continues after an interruption, and finished runs are kept in --runs. Learning rates are selected
in the same way for all methods, by validation perplexity: long runs begin with the best rate of
short runs, and go on with lower or with higher ones as long as these are better; the best is used,
with --seeds seeds; the table shows means and standard errors. This takes hours. Runs share the
machine (--jobs), so their own times are not meaningful; the time of a step is measured separately,
on --threads threads, with interleaved methods (`--time`, on an otherwise idle machine); a step's
share of refreshing the sampler's index is added.
Options after `--` are passed to the example in all runs. Candidates: how many the subsets of the
words of the text have on average, which is less than --candidates where subsets have fewer words.
"""

import math
import re
import statistics

import xsoftmax as xs
from common.example_runs import ExampleRuns, choose, make_parser, parse
from common.methods import EXACT, MIDX, PAPER_SAMPLERS, RANKING, cane, private, sampled
from common.processes import interruptible
from common.records import plot, shown_rate

from examples.common.report import mean_and_error

# The samplers of the paper's table, with its loss and with "ranking"; candidates for defaults.
TABLE = {
    "exact": EXACT, "head 64 + 64 private midx": sampled("midx", "64", 64),
    "head 64 + 64 private midx, ranking": sampled("midx", "64", 64, *RANKING),
    "head 64 + 64 shared unigram + 20 private midx": sampled("unigram midx", "64 20", 64),
    "head 64 + 64 shared unigram + 20 private midx, ranking": sampled("unigram midx", "64 20", 64,
                                                                      *RANKING)
}
for sampler in reversed(PAPER_SAMPLERS):
    TABLE[f"20 private {sampler}"] = private(sampler, 20)
    TABLE[f"20 private {sampler}, ranking"] = private(sampler, 20, *RANKING)
for sampler in ("midx_pq", "midx"):  # as many codewords as in the paper's table
    TABLE[f"20 private {sampler}, 32 codewords, ranking"] = [
        *private(sampler, 20, *RANKING), "--codewords", "32"
    ]
TABLE["512 shared unigram, head 512"] = sampled("unigram", "512", 512)


def one_denominator(classes: int, noises: int) -> list[str]:
    return cane("head", classes - noises, "--noises", str(noises), "--noise", "unigram",
                "--noise-reduction", "log_of_mean")


# CANE, NCE and BlackOut with equal counts (Han et al., 2018, section 7.2). Routed candidates come
# from one layer of subsets with uniform noise, as in the paper. There is one noise in addition to
# the candidates, unless the name says otherwise.
ONE_NOISE = "CANE-60, the most frequent, unigram noise"
CANE = {"exact": EXACT, ONE_NOISE: cane("head", 60, "--noise", "unigram")}
for count in (40, 60, 80):
    CANE |= {
        f"CANE-{count}, routed": cane("routed", count),
        f"CANE-{count}, a third of them noises": one_denominator(count, count // 3),
        f"CANE-{count}, half of them noises": one_denominator(count, count // 2),
        f"NCE-{count}": sampled("unigram", str(count), 0, "--private", "--estimator", "nce"),
        f"BlackOut-{count}": sampled("unigram", str(count), 0, "--private", "--estimator",
                                     "blackout"),
    }
CANE_PLOT = ("exact", "CANE-60, routed", ONE_NOISE, "CANE-60, a third of them noises",
             "CANE-60, half of them noises", "NCE-60", "BlackOut-60")

# Show where routed candidates fail, and what helps: subsets, candidates, noise, the bias of the
# output layer, and edges that are balanced, for which the table must not be the embedding. Compare
# with candidates that are not routed.
ROUTED = {"exact": EXACT, "60 of 100 subsets": cane("routed", 60)} | {
    f"60 of {count} subsets": cane("routed", 60, "--subsets", str(count))
    for count in (3, 10, 30, 300)
} | {f"{count} of 100 subsets": cane("routed", count)
     for count in (20, 200)} | {
         "60 of 100 subsets, unigram bias": cane("routed", 60, "--unigram-bias"),
         "60 of 100 subsets, untied": cane("routed", 60, "--untied"),
         "60 of 100 subsets, unigram noise": cane("routed", 60, "--noise", "unigram"),
         "60 of 100 subsets, 20 noises": cane("routed", 60, "--noises", "20"),
     } | {
         f"60 of {count} subsets, 60 unigram noises in one denominator": cane(
             "routed", 60, "--subsets", str(count), "--noises", "60", "--noise", "unigram",
             "--noise-reduction", "log_of_mean")
         for count in (10, 100)
     } | {
         "60 most frequent": cane("head", 60),
         "60 most frequent, unigram noise": cane("head", 60, "--noise", "unigram"),
         "60 most frequent, midx noise": cane("head", 60, "--noise", "midx", *MIDX),
         "60 bigram, unigram noise": cane("bigram", 60, "--noise", "unigram"),
         "60 bigram, midx noise": cane("bigram", 60, "--noise", "midx", *MIDX),
         "60 midx, unigram noise": cane("midx", 60, "--noise", "unigram", *MIDX),
     }

# Learned codebooks, with 20 private samples (Chen et al., 2025, Table 5, Figure 3). A later option
# replaces MIDX's.
LEARNABLE = {"exact": EXACT} | {
    f"20 private {kind}{suffix}": [*sampled(kind, "20", 0, *RANKING), *more]
    for suffix, more in (("", ()), (", 8 codewords", ("--codewords", "8")))
    for kind in ("midx_pq", "midx_learnable_pq", "midx", "midx_learnable")
}

# Codewords, samples and refreshes (the same, Figures 3 and 7).
ABLATION = {"exact": EXACT} | {
    f"20 {kind}, {count} codewords": [*sampled(kind, "20", 0, *RANKING), "--codewords",
                                      str(count)]
    for kind in ("midx_pq", "midx")
    for count in (8, 16, 32, 64, 128)
} | {
    f"{count} {sampler}": private(sampler, count, *RANKING)
    for sampler in PAPER_SAMPLERS
    for count in (5, 10, 20, 50, 100)
} | {
    f"20 midx, refreshed every {steps} steps": [
        *sampled("midx", "20", 0, *RANKING), "--refresh-every",
        str(steps)
    ]
    for steps in (50, 200, 1000, 1328, 10_000)  # 1,328 is an epoch
} | {
    f"20 {sampler}, refreshed every 100 steps": private(sampler, 20, *RANKING, "--refresh-every",
                                                        "100")
    for sampler in ("lsh", "sphere", "rff")  # the others are refreshed every 500 steps
}


def table(example: ExampleRuns, methods: dict[str, list[str]]) -> tuple[list[dict], dict]:
    """Returns a row for each method, and a plot of the first seed's validation perplexity."""
    rows = []
    exact = None
    runs = example.long_runs(methods)
    seconds = example.step_times(methods) if example.args.time else {}
    whole = {name: several[0] for name, _, several in runs if "failed" not in several[0]}
    for name, lr, several in runs:
        failed = [run["failed"] for run in several if "failed" in run]
        if failed:
            rows.append({"method": name, "test": failed[0]})
            continue
        test = [run["test_perplexity"] for run in several]
        row = {
            "method": name, "learning rate": shown_rate(lr, example.args.rates),
            "valid": mean_and_error([example.cost(run) for run in several],
                                    1), "test": mean_and_error(test, 1)
        }
        exact = statistics.mean(test) if name == "exact" else exact
        if exact:
            row["test / exact"] = f"{statistics.mean(test) / exact:.3f}"
        if candidates := routed_candidates(example, methods[name]):
            row["candidates"] = f"{candidates:.0f}"
        if name in seconds:
            row["step"] = f"{1000 * seconds[name]:.0f} ms"
        rows.append(row)
    if example.args.comparison == "ablation":
        return rows, by_samples(example, whole)
    # All of them in one plot could not be told apart.
    if example.args.comparison == "cane":
        whole = {name: run for name, run in whole.items() if name in CANE_PLOT}
    elif example.args.comparison == "table":
        whole = {name: run for name, run in whole.items() if f"{name}, ranking" not in methods}
    return rows, by_progress(whole, seconds)


def routed_candidates(example: ExampleRuns, method: list[str]) -> float | None:
    """Returns how many candidates the subset of a word of the text has, on average over the text:
    at most --candidates, or fewer if the subset has fewer words. None for other methods."""
    args = example.program.parse_arguments([*example.common, *method])
    if args.loss != ["cane"] or args.candidates_from != "routed":
        return None
    counts = example.dataset.counts
    tree = xs.LabelTree.from_frequencies(counts.clamp(min=1), args.subsets)
    subset = tree.parent[tree.class_node]
    candidates = subset.bincount()[subset].clamp(max=args.candidates)
    return float((candidates * counts).sum() / counts.sum())


def by_progress(runs: dict[str, dict], seconds: dict[str, float]) -> dict:
    """Plots against time if the steps of all methods were timed, otherwise against epochs."""
    timed = runs.keys() <= seconds.keys()

    def at(name: str, point: dict) -> float:
        return point["step"] * seconds[name] / 60 if timed else point["epoch"]

    return plot(
        "minutes of training: steps x median time of a step" if timed else "epochs",
        "validation perplexity", {
            name: [(at(name, point), point["valid_perplexity"]) for point in run["points"]]
            for name, run in runs.items()
        }, "xy" if timed else "y")


def by_samples(example: ExampleRuns, runs: dict[str, dict]) -> dict:
    """Plots methods that are called by a number of samples and a sampler."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, run in runs.items():
        if found := re.fullmatch(r"(\d+) (\w+)", name):
            curves.setdefault(found[2], []).append((int(found[1]), example.cost(run)))
    return plot("samples of each query", "validation perplexity", curves, "xy")


TABLES = {
    "table": TABLE, "cane": CANE, "routed": ROUTED, "learnable": LEARNABLE, "ablation": ABLATION
}


def main() -> None:
    parser = make_parser(__doc__, "language_model", epochs=20, search_epochs=2)
    parser.add_argument("comparison", choices=TABLES)
    parser.add_argument("--time", action="store_true", help="also measure the time of a step, with "
                        "interleaved methods")
    args = parse(parser)
    methods = choose(parser, args, TABLES[args.comparison])
    example = ExampleRuns(
        "language_model", args, ["--min-count", "1", "--optimizer", "adam"],
        lambda run: run["points"][-1]["valid_perplexity"] if run["points"] else math.inf)
    rows, curves = table(example, methods)
    example.show(rows,
                 ["method", "learning rate", "candidates", "step", "valid", "test", "test / exact"],
                 curves)


if __name__ == "__main__":
    interruptible(main)
