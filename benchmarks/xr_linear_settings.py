"""Compares settings of XR-Linear: number of trees T, branching B, random trees, settings of each
layer, and a ranker after a matcher.

    python benchmarks/xr_linear_settings.py [--delicious FILE] [--gowalla FOLDER] [--novels FILE]
                                            [--seeds 3] [--threads 2] [--json [FILE]]

T trees are averaged. B is the largest number of children; clusters have up to 100 labels. A random
tree has the shape of the tree with B = 32. In an unbalanced tree the sizes of clusters follow the
data. By layer: the last layer uses TFN + MAN negatives and combiner "last", the others TFN and
"multiply" (Yu et al., 2022, section 3). Ranker: a second model of another tree is trained with the
20 best labels of the first one as additional negatives, and scores these labels for the test
examples (X-Transformer's composition, with a linear matcher). The beam is 10. Means over seeds,
with standard errors; times are medians, and those of training exclude the label vectors.

The tables correspond to Table 6 of that paper, on other data sets.
"""

import argparse
import re
import statistics
import time
from pathlib import Path

import torch

import xsoftmax as xs
from common import extreme_data
from common.processes import interruptible
from common.records import add_json, plot, report, table

from examples.common.report import mean_and_error

RANKS, SHORTLIST = (1, 3, 5), 20


class Dataset:
    def __init__(self, parts: dict) -> None:
        (self.X,
         self.Y), (self.queries,
                   self.truth) = (tuple(extreme_data.float_rows(matrix) for matrix in parts[part])
                                  for part in ("train", "test"))
        self.vectors = xs.label_vectors.pifa(self.X, self.Y)

    def tree(self, arity: int, generator: torch.Generator, vectors=None) -> xs.LabelTree:
        return xs.LabelTree.from_vectors(self.vectors if vectors is None else vectors, arity,
                                         max_leaf_size=100, generator=generator)

    def unbalanced_tree(self, arity: int, generator: torch.Generator) -> xs.LabelTree:
        return xs.LabelTree.from_vectors(self.vectors, arity, max_leaf_size=100, balanced=False,
                                         generator=generator)

    def random_tree(self, arity: int, generator: torch.Generator) -> xs.LabelTree:
        return self.tree(arity, generator,
                         torch.randn(self.Y.shape[1], 8, generator=generator).numpy())


def trees(data: Dataset, seed: int, count: int, arity: int, make=Dataset.tree):
    """Returns seconds of training and of prediction, and predictions averaged over trees."""
    models, begin = [], time.perf_counter()
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * seed + number)
        models.append(
            xs.XRLinear.train(data.X, data.Y, tree=make(data, arity, generator),
                              generator=generator))
    trained = time.perf_counter()
    found = [model.predict(data.queries, 20) for model in models]
    found = found[0] if count == 1 else xs.combine_predictions(found, "average", 20)
    return trained - begin, time.perf_counter() - trained, found


def by_layer(data: Dataset, seed: int):
    generator = torch.Generator().manual_seed(100 * seed)
    begin = time.perf_counter()
    tree = data.tree(32, generator)
    model = xs.XRLinear.train(data.X, data.Y, tree=tree,
                              negatives=["tfn"] * (tree.depth - 1) + ["tfn+man"],
                              generator=generator)
    trained = time.perf_counter()
    found = model.predict(data.queries, 20, combiner=["multiply"] * (tree.depth - 1) + ["last"])
    return trained - begin, time.perf_counter() - trained, found


def ranker(data: Dataset, seed: int):
    generator = torch.Generator().manual_seed(100 * seed)
    begin = time.perf_counter()
    matcher = xs.XRLinear.train(data.X, data.Y, tree=data.tree(32, generator), generator=generator)
    model = xs.XRLinear.train(data.X, data.Y, tree=data.tree(32, generator), negatives="tfn+user",
                              user_negatives=matcher.predict(data.X,
                                                             SHORTLIST), generator=generator)
    trained = time.perf_counter()
    shortlist = matcher.predict(data.queries, SHORTLIST)
    found = model.predict(data.queries, 20, only=shortlist, combiner="last")
    return trained - begin, time.perf_counter() - trained, found


# Divide the precision of each setting by that of this one in the plot.
DEFAULT = "T = 1, B = 16 (default)"
SETTINGS = {
    "T = 1, B = 32": lambda data, seed: trees(data, seed, 1, 32),
    DEFAULT: lambda data, seed: trees(data, seed, 1, 16),
    "T = 1, B = 8": lambda data, seed: trees(data, seed, 1, 8),
    "T = 1, B = 2": lambda data, seed: trees(data, seed, 1, 2),
    "T = 3, B = 32": lambda data, seed: trees(data, seed, 3, 32),
    "T = 3, B = 8": lambda data, seed: trees(data, seed, 3, 8),
    "T = 3, B = 2": lambda data, seed: trees(data, seed, 3, 2),
    "T = 1, B = 16, unbalanced": lambda data, seed: trees(data, seed, 1, 16, Dataset.unbalanced_tree
                                                          ),
    "T = 1, B = 32, random tree": lambda data, seed: trees(data, seed, 1, 32, Dataset.random_tree),
    "T = 1, B = 32, by layer": by_layer,
    "matcher, then ranker": ranker,
}


def measure(args: argparse.Namespace, name: str, data: Dataset) -> list[dict]:
    rows: list[dict] = []
    for setting, run in SETTINGS.items():
        runs = []
        for seed in range(args.seeds):
            train_seconds, predict_seconds, found = run(data, seed)
            runs.append({"training": train_seconds, "prediction": predict_seconds} | {
                f"{what}@{k}": 100 * metric(found, data.truth, k)
                for what, metric in (("P", xs.metrics.precision_at_k),
                                     ("R", xs.metrics.recall_at_k))
                for k in RANKS
            })
        rows.append({"set": name, "setting": setting, "runs": runs})
    return rows


def texts(row: dict) -> dict:
    row_texts = {"set": row["set"], "setting": row["setting"]}
    for figure in row["runs"][0]:
        values = [run[figure] for run in row["runs"]]
        if "@" in figure:
            row_texts[figure] = mean_and_error(values, 2)
        else:
            row_texts[f"{figure}, s"] = f"{statistics.median(values):.2f}"
    return row_texts


def by_children(rows: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """Returns P@5 divided by that of the default for each number of children, by set and number of
    trees."""
    precision = {(row["set"], row["setting"]): statistics.mean(run["P@5"] for run in row["runs"])
                 for row in rows}
    curves: dict[str, list[tuple[float, float]]] = {}
    for (name, setting), value in precision.items():
        if found := re.fullmatch(r"T = (\d+), B = (\d+)( \(default\))?", setting):
            curves.setdefault(f"{name}, T = {found[1]}", []).append(
                (int(found[2]), value / precision[name, DEFAULT]))
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("delicious", "gowalla", "novels"):
        parser.add_argument(f"--{name}", type=Path, help="the file or folder of this set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    readers = {
        name: reader
        for name, reader in (("delicious", extreme_data.delicious),
                             ("gowalla", extreme_data.gowalla), ("novels", extreme_data.novels))
        if getattr(args, name)
    }
    if not readers:
        parser.error("expected at least one of --delicious, --gowalla and --novels, got none")
    rows = []
    for name, reader in readers.items():
        rows += measure(args, name, Dataset(extreme_data.split(*reader(getattr(args, name)),
                                                               seed=0)))
    report(
        args, __doc__, question="Which settings of XR-Linear improve precision?",
        against="the default: one tree of 16 children per node", figures=rows, tables=[
            table([texts(row) for row in rows if row["set"] == name], name) for name in readers
        ], plot=plot("children of a node, at most", "P@5 / that of the default", by_children(rows),
                     "x"))


if __name__ == "__main__":
    interruptible(main)
