"""Compares classifiers of given features with many classes: the exact softmax, CANE, rivals that
sample, hierarchical softmax, and Vowpal Wabbit's trees.

    # features written by examples/image_classes/features.py
    python benchmarks/classifiers.py --features features.pt --runs out/omniglot.jsonl
    # generated data: classes in clusters
    python benchmarks/classifiers.py --gaussians 10000 --runs out/gaussians.jsonl
    # the rarest label of each document
    python benchmarks/classifiers.py --delicious delicious.arff --runs out/delicious.jsonl
    # a file in the format of LIBSVM, such as ALOI, or one of its shape
    python benchmarks/classifiers.py --libsvm aloi.txt --runs out/aloi.jsonl
    python benchmarks/classifiers.py --write-aloi-like aloi.txt

As in Han et al. (2018), section 7.1, only the last layer is trained. For each method, the
--finalists learning rates with the best validation accuracy after --search-epochs are trained for
--epochs, and the best one is used, with --seeds different trees, initial weights and orders of
rows. The table shows means and standard errors. Coverage is the fraction of test targets among the
candidates of the beam. "Edges as in the paper" means that edges are never balanced
(BeamTreeLoss.balance). Finished runs are kept in --runs and not repeated. --vw-python names an
interpreter with vowpalwabbit and numpy, to train its methods on the same features, with --vw-epochs
passes. Their settings are learning rates and, for LOMTree, swap resistances; if they are more than
--finalists, the best after one pass are trained to the end (the paper's appendix D).
"""

import argparse
import json
import math
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

import numpy
import torch
from torch import Tensor

import xsoftmax as xs
from common.extreme_data import read_delicious
from common.files import checksum
from common.processes import interruptible
from common.records import add_json, plot, report, shown_rate, table
from common.runs import Runs, long_trainings

from examples.common.report import mean_and_error

BATCH = 100
WIDE = 40


@dataclass(frozen=True)
class Setting:
    """Holds what short runs select: a learning rate, and options of Vowpal Wabbit."""

    lr: float
    options: str = ""


@dataclass
class Problem:
    name: str
    classes: int
    x: dict[str, Tensor]  # for "train", "valid", "test": float32 [n, D]
    y: dict[str, Tensor]  # int64 [n]

    def means(self) -> Tensor:
        total = torch.zeros(self.classes,
                            self.x["train"].shape[1]).index_add_(0, self.y["train"],
                                                                 self.x["train"])
        return total / torch.bincount(self.y["train"],
                                      minlength=self.classes).clamp(min=1).unsqueeze(1)


def gaussians(classes: int, dim: int = 64, clusters: int = 100, seed: int = 0) -> Problem:
    """Generates classes around cluster centres, and rows around class centres: per class 10 for
    training, 1 for validation, 2 for test."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim,
                          generator=random)[torch.randint(clusters, (classes,), generator=random)]
    centres = centres + 0.5 * torch.randn(classes, dim, generator=random)
    x, y = {}, {}
    for split, count in (("train", 10), ("valid", 1), ("test", 2)):
        y[split] = torch.arange(classes).repeat(count)[torch.randperm(classes * count,
                                                                      generator=random)]
        x[split] = centres[y[split]] + 0.9 * torch.randn(len(y[split]), dim, generator=random)
    return Problem(f"{classes:,} Gaussians in {clusters} clusters, D {dim}, seed {seed}", classes,
                   x, y)


def delicious(path: str, seed: int = 0) -> Problem:
    """Uses the rarest label of each document as its class; documents without labels are skipped. A
    tenth is for validation, a fifth for test."""
    documents = [found for found in read_delicious(Path(path)) if max(found, default=0) >= 500]
    labels = [[i - 500 for i in found if i >= 500] for found in documents]
    rows = [row for row, found in enumerate(documents) for i in found if i < 500]
    columns = [i for found in documents for i in found if i < 500]
    counts = torch.bincount(torch.tensor([label for found in labels for label in found]))
    rarest = torch.tensor(
        [min(found, key=lambda label: (int(counts[label]), label)) for found in labels])
    known, target = rarest.unique(return_inverse=True)
    features = torch.zeros(len(documents), 500)
    features[rows, columns] = 1.0
    features /= features.norm(dim=1, keepdim=True).clamp(min=1e-12)
    n = len(documents)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    parts = {
        "valid": order[:n // 10], "test": order[n // 10:n * 3 // 10], "train": order[n * 3 // 10:]
    }
    return Problem(f"Delicious, the rarest label, split with seed {seed}", len(known),
                   {k: features[v]
                    for k, v in parts.items()}, {k: target[v]
                                                 for k, v in parts.items()})


def write_aloi_like(path: Path, classes: int = 1000, views: int = 108, seed: int = 0) -> None:
    """Writes rows of the shape of ALOI: histograms of 128 colours of objects, each seen in many
    views, which move along two directions of the object's own."""
    random = numpy.random.default_rng(seed)
    with open(path, "w") as file:
        for label in random.permutation(classes):
            base = random.dirichlet(numpy.full(128, 0.1))
            ways = 0.4 * random.standard_normal((2, 128)) * base**0.5
            rows = base + random.standard_normal((views, 2)) @ ways
            rows = numpy.clip(rows + 0.045 * random.standard_normal(rows.shape), 0, None)
            for row in rows:
                used = row.nonzero()[0]
                file.write(f"{label} " + " ".join(f"{i + 1}:{row[i]:.5g}" for i in used) + "\n")


def libsvm(path: str, seed: int = 0) -> Problem:
    """Uses a tenth of the rows for test, as in the paper, and a tenth of the others for
    validation."""
    features, labels, classes = xs.datasets.read_libsvm(path)
    if (labels.indptr[1:] - labels.indptr[:-1] != 1).any():
        raise SystemExit(f"{path}: expected one class in each row")
    x = torch.from_numpy(features.toarray()).float()
    x /= x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    y, n = torch.from_numpy(labels.indices).long(), len(x)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    test, valid, train = order.split([n // 10, n * 9 // 100, n - n // 10 - n * 9 // 100])
    parts = {"train": train, "valid": valid, "test": test}
    return Problem(
        Path(path).name, len(classes), {k: x[v]
                                        for k, v in parts.items()},
        {k: y[v]
         for k, v in parts.items()})


def from_file(path: str) -> Problem:
    found = torch.load(path, weights_only=True)
    # The rows come class by class; Vowpal Wabbit reads them in the order given.
    order = torch.randperm(len(found["train"]["y"]), generator=torch.Generator().manual_seed(0))
    found["train"] = {key: tensor[order] for key, tensor in found["train"].items()}
    scale = found["train"]["x"].norm(dim=1).mean()  # norms of about 1, as in the other problems
    classes = 1 + max(int(part["y"].max()) for part in found.values())
    return Problem(
        Path(path).name, classes, {k: part["x"] / scale
                                   for k, part in found.items()},
        {k: part["y"]
         for k, part in found.items()})


def methods(problem: Problem, seed: int = 0) -> dict[str, Callable[[], torch.nn.Module]]:
    dim, classes = problem.x["train"].shape[1], problem.classes
    counts = torch.bincount(problem.y["train"], minlength=classes).clamp(min=1)

    def tree() -> xs.LabelTree:
        return xs.LabelTree.from_vectors(problem.means(), 10,
                                         generator=torch.Generator().manual_seed(seed))

    def rival(estimator: str) -> xs.SampledSoftmaxLoss:
        sampler = "uniform" if estimator == "complementary_sum" else xs.samplers.UnigramSampler(
            counts, 10, power=1.0, shared=False)
        return xs.SampledSoftmaxLoss(dim, classes, sampler=sampler, estimator=estimator, bias=True,
                                     num_samples=10 if sampler == "uniform" else None)

    found = {"softmax": lambda: xs.LinearCrossEntropyLoss(dim, classes, bias=True)}
    for candidates in (1, 5, 9):
        for name, every in (("", None), (", edges as in the paper", 0)):
            method = f"CANE {candidates}v{10 - candidates}{name}"
            found[method] = lambda c=candidates, every=every: xs.BeamTreeLoss(
                dim, tree(), num_candidates=c, num_noises=10 - c, balance_every=every, bias=True)
    found[f"CANE 9v1, beam of {WIDE}"] = lambda: xs.BeamTreeLoss(dim, tree(), num_candidates=9,
                                                                 num_noises=1, beam=WIDE, bias=True)
    for label in ("NCE", "BlackOut", "negative sampling", "one-vs-each", "complementary sum"):
        estimator = label.lower().replace(" ", "_").replace("-", "_")
        found[f"{label}-10"] = lambda estimator=estimator: rival(estimator)
    found["hierarchical softmax"] = lambda: xs.HierarchicalSoftmaxLoss(dim, tree(), bias=True)
    return found


def fit(problem: Problem, make: Callable[[], torch.nn.Module], lr: float, epochs: int,
        seed: int = 0, optimizer_name: str = "row_adam") -> dict:
    """Returns the results of one run, by RowAdam with a cosine learning rate schedule, or by SGD
    with a constant rate."""
    torch.manual_seed(seed)
    loss = make()
    if isinstance(loss, xs.SampledSoftmaxLoss):
        # All sampled losses start at a uniform distribution, so that NCE has log Z = 0.
        torch.nn.init.zeros_(loss.linear.weight)
        torch.nn.init.constant_(loss.linear.bias, -math.log(problem.classes))
    constant = optimizer_name == "sgd"
    optimizer = (torch.optim.SGD if constant else xs.optim.RowAdam)(loss.parameters(), lr=lr)
    x, y, steps, seconds, curve = problem.x["train"], problem.y["train"], 0, 0.0, []
    total = epochs * (len(y) // BATCH)
    for _ in range(epochs):
        loss.train()
        start = time.perf_counter()
        for batch in torch.randperm(len(y)).split(BATCH)[:len(y) // BATCH]:
            share = 1.0 if constant else 0.5 + 0.5 * math.cos(math.pi * steps / total)
            optimizer.param_groups[0]["lr"] = lr * share
            optimizer.zero_grad(set_to_none=True)
            loss(x[batch], y[batch]).backward()
            optimizer.step()
            steps += 1
        seconds += time.perf_counter() - start
        curve.append(accuracy(loss, problem, "valid")[0])
    top1, top5, test_seconds = accuracy(loss, problem, "test")
    figures = {
        "valid": curve[-1], "test": top1, "top5": top5, "train_seconds": seconds,
        "test_seconds": test_seconds, "curve": curve
    }
    if isinstance(loss, xs.BeamTreeLoss):
        figures["coverage"] = xs.metrics.coverage(loss.candidates(problem.x["test"]),
                                                  problem.y["test"])
    return figures


@torch.no_grad()
def accuracy(loss: torch.nn.Module, problem: Problem, split: str) -> tuple[float, float, float]:
    """Returns top-1 accuracy, top-5 accuracy, and the seconds to find the best classes."""
    loss.eval()
    start = time.perf_counter()
    best = torch.cat([loss.predict(part) for part in problem.x[split].split(1000)])
    seconds = time.perf_counter() - start
    five = torch.cat(
        [loss.topk(part, min(5, problem.classes))[1] for part in problem.x[split].split(1000)])
    target = problem.y[split]
    return (best == target).double().mean().item(), (
        five == target.unsqueeze(1)).any(1).double().mean().item(), seconds


# The authors of LOMTree chose from these swap resistances, and from 1 to 64 times as many nodes as
# classes. Vowpal Wabbit 9 has no option for the nodes: there are as many as classes, less one.
VOWPAL: dict[str, Callable[[int], list[str]]] = {
    "VW recall tree": lambda classes: [f"--recall_tree {classes}"], "VW LOMTree": lambda classes:
    [f"--log_multi {classes} --swap_resistance {swaps}" for swaps in (4, 16, 64, 256)],
    "VW filter tree": lambda classes: [f"--ect {classes}"]
}
VOWPAL_PROGRAM = """
import json, sys, time, numpy
from vowpalwabbit import Workspace, __version__
path, options, lr, epochs = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
found = numpy.load(path)
vw = Workspace(f"{options} --quiet -l {lr} --power_t 0.25 --loss_function logistic -b 22",
               enable_logging=False)
def lines(split):
    for row, label in zip(found[split + "_x"], found[split + "_y"].tolist()):
        used = row.nonzero()[0]
        pairs = zip(used.tolist(), row[used].tolist())
        yield f"{label + 1} | " + " ".join(f"{i}:{v:.4g}" for i, v in pairs)
text = {split: list(lines(split)) for split in ("train", "valid", "test")}
def accuracy(split):
    labels = found[split + "_y"].tolist()
    hits = sum(vw.predict(line) == label + 1 for line, label in zip(text[split], labels))
    return hits / len(text[split])
start = time.perf_counter()
for _ in range(epochs):
    for line in text["train"]:
        vw.learn(line)
seconds = time.perf_counter() - start
valid = accuracy("valid")
start = time.perf_counter()
test = accuracy("test")
print(json.dumps({"valid": valid, "test": test, "train_seconds": seconds,
                  "test_seconds": time.perf_counter() - start, "version": __version__}))
"""


def vowpal(problem: Problem, python: str, options: str, lr: float, epochs: int) -> dict:
    parts = {
        f"{split}_{part}": tensor.numpy()
        for split in problem.x
        for part, tensor in (("x", problem.x[split]), ("y", problem.y[split]))
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problem.npz"
        numpy.savez(file, **parts)
        command = [python, "-c", VOWPAL_PROGRAM, str(file), options, str(lr), str(epochs)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:1] + command[3:])}: exit "
                         f"{done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


class Trainings:
    """The trainings of a problem; finished ones are kept in args.runs."""
    def __init__(self, problem: Problem, args: argparse.Namespace) -> None:
        self.problem, self.args = problem, args
        file = args.delicious or args.libsvm or args.features
        self.runs = Runs(args.runs, [problem.name, *([checksum(file)] if file else [])],
                         args.threads)
        rivals = [
            name for name in VOWPAL
            if args.vw_python or any(run.startswith(name) for run in self.runs.lines)
        ]
        self.methods = [*methods(problem), *rivals]

    def train(self, name: str, setting: Setting, epochs: int, seed: int = 0) -> dict:
        words = [name, f"lr {setting.lr:g}", f"{epochs} epochs", f"seed {seed}", setting.options]
        if self.args.optimizer == "sgd" and name not in VOWPAL:
            words.append("SGD")
        run = ", ".join(filter(None, words))
        found = self.runs.get(run)
        if found is None:
            if name not in VOWPAL:
                found = fit(self.problem,
                            methods(self.problem, seed)[name], setting.lr, epochs, seed,
                            self.args.optimizer)
            elif self.args.vw_python:
                found = vowpal(self.problem, self.args.vw_python, setting.options, setting.lr,
                               epochs)
            else:
                raise SystemExit(f"{run} is not in {self.args.runs}: expected --vw-python")
            self.runs.add(run, found)
        return found

    def best(self, name: str) -> dict:
        """Returns the row of a method with its best setting."""
        args = self.args
        settings = [Setting(lr) for lr in args.lr]
        search, epochs, seeds = args.search_epochs, args.epochs, args.seeds
        if name in VOWPAL:
            settings = [
                Setting(lr, options) for options in VOWPAL[name](self.problem.classes)
                for lr in args.vw_lr
            ]
            search, epochs, seeds = 1, args.vw_epochs, 1
        found = long_trainings(settings, partial(self.train, name), args.finalists, search, epochs)
        best = next(iter(found))
        several = [self.train(name, best, epochs, seed) for seed in range(seeds)]
        figures = {
            part: [run[part] for run in several]
            for part in ("test", "top5", "coverage") if part in found[best]
        }
        return {"method": name, "learning rate": shown_rate(best.lr, {one.lr
                                                                      for one in found})
                } | found[best] | figures


def percent(row: dict, part: str) -> str:
    shares = row.get(part)
    return mean_and_error([100 * share for share in shares], decimals=2) if shares else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--features", metavar="FILE")
    source.add_argument("--gaussians", metavar="CLASSES", type=int)
    source.add_argument("--delicious", metavar="FILE")
    source.add_argument("--libsvm", metavar="FILE")
    source.add_argument("--write-aloi-like", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=Path, help="file of the finished runs")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--search-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1],
                        help="learning rates to choose from (default: %(default)s)")
    parser.add_argument(
        "--finalists", type=int, default=2, help="number of learning rates that are trained "
        "for --epochs (default: "
        "%(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of long runs of each method, except "
        "Vowpal Wabbit's (default: "
        "%(default)s)")
    parser.add_argument("--optimizer", choices=["row_adam", "sgd"], default="row_adam",
                        help="sgd: with a constant rate (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="METHOD")
    parser.add_argument("--vw-python")
    parser.add_argument("--vw-lr", type=float, nargs="+", default=[0.1, 0.5, 2.0])
    parser.add_argument("--vw-epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    add_json(parser)
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds: expected at least 1, got {args.seeds}")
    if args.runs is None and not args.write_aloi_like:
        parser.error("--runs: expected a file for the finished runs")
    return args


def load_problem(args: argparse.Namespace) -> Problem:
    if args.gaussians:
        return gaussians(args.gaussians)
    if args.delicious:
        return delicious(args.delicious)
    return libsvm(args.libsvm) if args.libsvm else from_file(args.features)


def main() -> None:
    args = parse_arguments()
    if args.write_aloi_like:
        return write_aloi_like(args.write_aloi_like)
    torch.set_num_threads(args.threads)
    problem = load_problem(args)
    trainings = Trainings(problem, args)
    if unknown := set(args.only or []) - set(trainings.methods):
        raise SystemExit(f"--only: expected some of {', '.join(trainings.methods)}, got "
                         f"{', '.join(sorted(unknown))}")
    rows = [trainings.best(name) for name in args.only or trainings.methods]
    texts = [
        row | {
            "accuracy %": percent(row, "test"), "top-5 %": percent(row, "top5"),
            "coverage %": percent(row, "coverage")
        } for row in rows
    ]
    sizes = ", ".join(f"{len(problem.y[split]):,} rows to {verb}"
                      for split, verb in (("train", "train"), ("valid", "validate"), ("test",
                                                                                      "test")))
    title = f"{problem.name}: {problem.classes:,} classes, D {problem.x['train'].shape[1]}, {sizes}"
    curves = {row["method"]: list(enumerate(row["curve"], 1)) for row in rows if "curve" in row}
    versions = ", ".join(sorted({row["version"] for row in rows if "version" in row}))
    report(
        args, __doc__, question="How good are classifiers whose cost does not grow with the "
        "number of classes?",
        against="the softmax over all classes; NCE and BlackOut; trees of Vowpal Wabbit" +
        (f" {versions}" if versions else ""), tables=[
            table(texts, title, ["method", "learning rate", "accuracy %", "top-5 %", "coverage %"])
        ], problem=problem.name, rows=rows, runs=trainings.runs.about(),
        **({"plot": plot("epoch", "validation accuracy", curves)} if curves else {}))


if __name__ == "__main__":
    interruptible(main)
