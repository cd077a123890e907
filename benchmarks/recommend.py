"""Compares the rankings of recommenders trained with different samplers and with the full softmax.

    python benchmarks/recommend.py --data amazon_beauty/Beauty.txt --out out/beauty
    python benchmarks/recommend.py --data gowalla --out out/gowalla -- --unordered --eval-epochs 5

Each run is a run of examples/recommend/train.py with a checkpoint, so the same command continues
after an interruption, and finished runs are kept in --runs. Learning rates are selected in the same
way for all methods, by validation NDCG@10: long runs begin with the best rate of short runs, and go
on with lower or with higher ones as long as these are better; the best is used, at its best epoch,
with --seeds seeds; the table shows means and standard errors. This takes hours. Runs share the
machine (--jobs), so their times are not meaningful. Options after `--` are passed to the example in
all runs.
"""

import statistics

from common.example_runs import ExampleRuns, choose, make_parser, parse
from common.methods import EXACT, PAPER_SAMPLERS, RANKING, private, sampled
from common.processes import interruptible
from common.records import plot, shown_rate

from examples.common.report import mean_and_error
from examples.recommend.train import FIGURES

METHODS = {
    "full": EXACT,
    **{f"64 private {sampler}": private(sampler, 64)
       for sampler in PAPER_SAMPLERS},
    **{
        f"64 private {sampler}, ranking": private(sampler, 64, *RANKING)
        for sampler in ("uniform", "unigram", "midx")
    },
    "512 shared uniform": sampled("uniform", "512"),
    "512 shared unigram": sampled("unigram", "512"),
}


def table(example: ExampleRuns, methods: dict[str, list[str]]) -> tuple[list[dict], dict]:
    """Returns a row for each method, and a plot of the first seed's validation NDCG@10."""
    rows, curves, full = [], {}, {}
    for name, lr, several in example.long_runs(methods):
        failed = [run["failed"] for run in several if "failed" in run]
        if failed:
            rows.append({"method": name, "NDCG@10": failed[0]})
            continue
        found = {figure: [run[f"test_{figure}"] for run in several] for figure in FIGURES}
        mean = {figure: statistics.mean(values) for figure, values in found.items()}
        full = mean if name == "full" else full
        curves[name] = [(point["epoch"], point["valid_NDCG@10"]) for point in several[0]["points"]]
        rows.append({
            "method": name, "learning rate": shown_rate(lr, example.args.rates),
            "best epoch": f"{statistics.mean(run['best_epoch'] for run in several):.3g}"
        }
                    | {figure: mean_and_error(values)
                       for figure, values in found.items()}
                    | {
                        f"{figure} / full": f"{value / full[figure]:.3f}"
                        for figure, value in mean.items() if full.get(figure)
                    })
    return rows, plot("epochs", "validation NDCG@10", curves)


def main() -> None:
    parser = make_parser(__doc__, "recommend", epochs=40, search_epochs=10)
    args = parse(parser)
    example = ExampleRuns(
        "recommend", args, [], lambda run: -max(point["valid_NDCG@10"] for point in run["points"])
        if run["points"] else 0.0)
    rows, curves = table(example, choose(parser, args, METHODS))
    example.show(rows, [
        "method", "learning rate", "best epoch", *FIGURES, *(f"{figure} / full"
                                                             for figure in FIGURES)
    ], curves)


if __name__ == "__main__":
    interruptible(main)
