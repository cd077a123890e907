"""Measures how long classifiers of many classes take to train and to predict, as in Han et al.
(2018), Table 1.

    python benchmarks/classifiers.py --write-aloi-like aloi.txt
    python benchmarks/classifier_time.py --libsvm aloi.txt [--gaussians 10000] [--threads 1]
                                         [--repeats 15] [--json [FILE]]

Only the last layer is trained, on the data of benchmarks/classifiers.py, in batches of 100 rows by
RowAdam. The methods take turns: ten steps each, then predictions for 1,000 rows, the classes with
the highest scores. PyTorch is nn.Linear, cross_entropy and fused Adam, under torch.compile; it
predicts by argmax.
"""

import argparse
import itertools
from typing import Callable

import torch
from torch import nn

import xsoftmax as xs
from classifiers import BATCH, Problem, gaussians, libsvm, methods
from common.records import add_json, plot, report, table
from common.timing import interleave

# Those of the paper's table, with its edges, which are never balanced, and with ours.
NAMES = ("NCE-10", "BlackOut-10", *(f"CANE {candidates}v{10 - candidates}{edges}"
                                    for candidates in (1, 5, 9)
                                    for edges in ("", ", edges as in the paper")),
         "CANE 9v1, beam of 40", "hierarchical softmax", "softmax")
STEPS = 10


def naive(dim: int, classes: int) -> tuple[Callable, Callable, torch.optim.Optimizer]:
    """Returns what plain PyTorch computes: the loss of rows and classes, the predicted classes; and
    its optimizer."""
    linear = nn.Linear(dim, classes)
    loss = torch.compile(lambda x, y: nn.functional.cross_entropy(linear(x), y))
    predict = torch.compile(lambda x: linear(x).argmax(1))
    return loss, predict, torch.optim.Adam(linear.parameters(), lr=1e-3, fused=True)


def measure(problem: Problem, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of a step, and of the prediction of a row, by method."""
    torch.manual_seed(0)
    dim, made = problem.x["train"].shape[1], methods(problem)
    found: dict[str, tuple] = {"PyTorch": naive(dim, problem.classes)}
    for name in NAMES:
        loss = made[name]()
        found[name] = (loss, loss.predict, xs.optim.RowAdam(loss.parameters(), lr=1e-3))
    x, y = problem.x["train"], problem.y["train"]
    test = problem.x["test"][:1000]

    def trainer(name: str) -> Callable[[], None]:
        loss, _, optimizer = found[name]
        batches = itertools.cycle(torch.randperm(len(y)).split(BATCH)[:len(y) // BATCH])

        def steps() -> None:
            for rows in itertools.islice(batches, STEPS):
                optimizer.zero_grad(set_to_none=True)
                loss(x[rows], y[rows]).backward()
                optimizer.step()

        return steps

    training = interleave({name: trainer(name) for name in found}, repeats)
    for loss, *_ in found.values():
        if isinstance(loss, nn.Module):
            loss.eval()
    with torch.no_grad():
        prediction = interleave(
            {
                name: lambda predict=predict: predict(test)
                for name, (_, predict, _) in found.items()
            }, repeats)
    return ({name: value / STEPS
             for name, value in training.items()},
            {name: value / len(test)
             for name, value in prediction.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libsvm", required=True, metavar="FILE")
    parser.add_argument("--gaussians", metavar="CLASSES", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tables, curves = [], {}
    for problem in (libsvm(args.libsvm), gaussians(args.gaussians)):
        training, prediction = measure(problem, args.repeats)
        size = f"{problem.classes:,} classes"
        rows = [{
            "method": name, f"step, {size}": f"{1e3 * training[name]:.2f} ms",
            f"step / softmax, {size}": f"{training[name] / training['softmax']:.2f}",
            f"prediction, {size}": f"{1e6 * prediction[name]:.1f} us",
            f"prediction / softmax, {size}": f"{prediction[name] / prediction['softmax']:.2f}"
        } for name in training]
        title = (f"{problem.name}: {size}, D {problem.x['train'].shape[1]}, "
                 f"batches of {BATCH} rows")
        tables.append(table(rows, title))
        curves |= {
            name: [*curves.get(name, []), (problem.classes, 1e3 * training[name])]
            for name in training
        }
    report(args, __doc__, question="How long do classifiers take to train and to predict?",
           against="the softmax over all classes, of the library and of PyTorch; NCE and BlackOut",
           threads=args.threads, tables=tables, plot=plot("classes", "ms of a step", curves,
                                                          log="xy"))


if __name__ == "__main__":
    main()
