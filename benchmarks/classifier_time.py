"""Measures how long classifiers of many classes take to train and to predict, as in Han et al.
(2018), Table 1.

    python benchmarks/classifiers.py --write-aloi-like aloi.txt
    python benchmarks/classifier_time.py --libsvm aloi.txt [--gaussians 1000 10000] [--threads 1]
                                         [--repeats 5] [--json [FILE]]

Only the last layer is trained, on the data of benchmarks/classifiers.py, in batches of 100 rows by
RowAdam. All methods are first trained for 500 steps, because a step of CANE is cheaper as long as
its beam does not find the target. Then they take turns: 100 steps each, which balance the edges of
a tree once, and predictions of 1,000 rows. PyTorch is nn.Linear, cross_entropy and fused Adam under
torch.compile, and predicts by argmax. The plot shows the Gaussians.
"""

import argparse
import itertools
from typing import Callable

import torch
from torch import nn

import xsoftmax as xs
from classifiers import BATCH, Problem, gaussians, libsvm, methods
from common.processes import interruptible
from common.records import add_json, plot, report, table
from common.timing import interleave

# The methods of Table 1, with balanced edges and with the paper's, and two others.
NAMES = ("softmax", "NCE-10", "BlackOut-10", *(f"CANE {candidates}v{10 - candidates}{edges}"
                                               for candidates in (1, 5, 9)
                                               for edges in ("", ", edges as in the paper")),
         "CANE 9v1, beam of 40", "hierarchical softmax")
REFERENCE = "PyTorch"
STEPS = 100


def compiled_pytorch(dim: int, classes: int) -> tuple[Callable, Callable, torch.optim.Optimizer]:
    """Returns a compiled loss, a compiled prediction and an optimizer of plain PyTorch."""
    torch.compiler.reset()
    linear = nn.Linear(dim, classes)
    loss = torch.compile(lambda x, y: nn.functional.cross_entropy(linear(x), y), dynamic=False)
    predict = torch.compile(lambda x: linear(x).argmax(1), dynamic=False)
    return loss, predict, torch.optim.Adam(linear.parameters(), lr=1e-2, fused=True)


def measure(problem: Problem, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of a step, and those of the prediction of a row, by method."""
    torch.manual_seed(0)
    x, y = problem.x["train"], problem.y["train"]
    dim, makers = x.shape[1], methods(problem)
    models: dict[str, tuple] = {REFERENCE: compiled_pytorch(dim, problem.classes)}
    for name in NAMES:
        loss = makers[name]()
        models[name] = (loss, loss.predict, xs.optim.RowAdam(loss.parameters(), lr=1e-2))

    def trainer(name: str) -> Callable[..., None]:
        loss, _, optimizer = models[name]
        batches = itertools.cycle(torch.randperm(len(y)).split(BATCH)[:max(1, len(y) // BATCH)])

        def train(steps: int = STEPS) -> None:
            for rows in itertools.islice(batches, steps):
                optimizer.zero_grad(set_to_none=True)
                loss(x[rows], y[rows]).backward()
                optimizer.step()

        return train

    trainers = {name: trainer(name) for name in models}
    for train in trainers.values():
        train(5 * STEPS)
    training = interleave(trainers, repeats, warmup=1)
    for name in NAMES:
        models[name][0].eval()
    test = problem.x["test"][:1000]
    with torch.no_grad():
        prediction = interleave(
            {
                name: lambda predict=predict: predict(test)
                for name, (_, predict, _) in models.items()
            }, 3 * repeats)
    return ({name: value / STEPS
             for name, value in training.items()},
            {name: value / len(test)
             for name, value in prediction.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libsvm", required=True, metavar="FILE")
    parser.add_argument("--gaussians", metavar="CLASSES", type=int, nargs="+",
                        default=[1000, 10_000])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tables, curves = [], {}
    problems = {"ALOI's shape": libsvm(args.libsvm)
                } | {f"{classes:,} Gaussians": gaussians(classes)
                     for classes in args.gaussians}
    for label, problem in problems.items():
        training, prediction = measure(problem, args.repeats)
        rows = [{
            "method": name, f"step, {label}": f"{1e3 * training[name]:.2f} ms",
            f"step / {REFERENCE}, {label}": f"{training[name] / training[REFERENCE]:.2f}",
            f"prediction, {label}": f"{1e6 * prediction[name]:.1f} us",
            f"prediction / {REFERENCE}, {label}": f"{prediction[name] / prediction[REFERENCE]:.2f}"
        } for name in training]
        tables.append(
            table(
                rows, f"{label}: {problem.classes:,} classes, D {problem.x['train'].shape[1]}; "
                f"training in batches of {BATCH} rows, prediction of a row in a batch of 1,000"))
        if label.endswith("Gaussians"):
            for name in training:
                curves.setdefault(name, []).append((problem.classes, 1e3 * training[name]))
    report(args, __doc__, question="How long do classifiers take to train and to predict?",
           against="plain PyTorch under torch.compile; NCE and BlackOut", threads=args.threads,
           tables=tables, plot=plot("classes", "ms of a step", curves, log="xy"))


if __name__ == "__main__":
    interruptible(main)
