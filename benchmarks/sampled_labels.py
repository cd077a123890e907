"""Compares samplers on examples with several labels: precision of models trained by the sampled
softmax loss with several positives.

    python benchmarks/sampled_labels.py --delicious delicious.arff --runs out/delicious.jsonl
    # the shape of EURLex-4K
    python benchmarks/sampled_labels.py --generated --runs out/generated.jsonl

As in Chen et al. (2025), section 6.4, an example is the weighted sum of the embeddings of its
sparse features, and has a row of 128 numbers; the samples are drawn for each example. A tenth of
the training examples is for validation. All samplers have the estimator "sampled_softmax", that of
the paper. For each, the --finalists learning rates with the best P@5 in validation after
--search-epochs are trained for each number of --epochs. The best rate and number of epochs are
used, with --seeds initial weights and orders of examples. The table shows means and standard errors
on test examples. Finished runs are kept in --runs and not repeated.
"""

import argparse
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

import xsoftmax as xs
from common.extreme_data import SHAPES, delicious, float_rows, generated, split
from common.files import checksum
from common.methods import PAPER_SAMPLERS
from common.processes import interruptible
from common.records import add_json, plot, report, shown_rate, table
from common.runs import Runs, long_trainings

from examples.common.losses import SamplerOptions, build_sampler
from examples.common.report import mean_and_error

BATCH, WIDTH, SHAPE = 128, 128, "eurlex-4k-like"
INFORMATIVE = 0.1  # gives the full softmax about the P@1 that is published for EURLex-4K
METHODS = ("full", *PAPER_SAMPLERS)


@dataclass
class Problem:
    name: str
    x: dict[str, sp.csr_matrix]  # "train", "valid", "test": features [n, F]
    y: dict[str, sp.csr_matrix]  # labels [n, N]

    @property
    def classes(self) -> int:
        return self.y["train"].shape[1]


def load(args: argparse.Namespace) -> Problem:
    """Returns the data set, with a tenth of its training examples for validation."""
    if args.delicious:
        name, parts = "Delicious", split(*delicious(Path(args.delicious)), seed=0)
    else:
        shape = (max(10, int(size * args.scale)) for size in SHAPES[SHAPE][:4])
        name, parts = SHAPE, generated(*shape, *SHAPES[SHAPE][4:], seed=0, informative=INFORMATIVE)
    parts = {part: [float_rows(matrix) for matrix in found] for part, found in parts.items()}
    x, y = parts.pop("train")
    order = np.random.default_rng(0).permutation(x.shape[0])
    cut = x.shape[0] // 10
    parts |= {"valid": [x[order[:cut]], y[order[:cut]]], "train": [x[order[cut:]], y[order[cut:]]]}
    labelled = {part: np.diff(found[1].indptr) > 0 for part, found in parts.items()}
    return Problem(
        name, *({part: found[i][labelled[part]]
                 for part, found in parts.items()} for i in (0, 1)))


class Model(nn.Module):
    def __init__(self, problem: Problem, method: str, samples: int):
        super().__init__()
        features, classes = problem.x["train"].shape[1], problem.classes
        self.embedding = nn.EmbeddingBag(features, WIDTH, mode="sum", sparse=True)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        if method == "full":
            self.loss: xs.LinearLoss = xs.LinearCrossEntropyLoss(WIDTH, classes, bias=True)
            return
        counts = torch.from_numpy(np.asarray(problem.y["train"].sum(0)).ravel()).long()
        options = SamplerOptions(codewords=32, refresh_every=100)
        sampler = build_sampler(options, method, counts, WIDTH, samples, bias=True, private=True)
        self.loss = xs.SampledSoftmaxLoss(WIDTH, classes, sampler=sampler, bias=True,
                                          estimator="sampled_softmax")

    def forward(self, x: sp.csr_matrix) -> Tensor:
        return self.embedding(
            torch.from_numpy(x.indices).long(),
            torch.from_numpy(x.indptr[:-1]).long(), per_sample_weights=torch.from_numpy(x.data))


def padded(y: sp.csr_matrix) -> Tensor:
    """Returns the labels of each example, [n, most labels], padded with -100."""
    counts = np.diff(y.indptr)
    found = np.full((y.shape[0], counts.max()), -100, np.int64)
    found[np.arange(found.shape[1]) < counts[:, None]] = y.indices
    return torch.from_numpy(found)


def fit(problem: Problem, method: str, lr: float, epochs: int, seed: int,
        samples: int) -> dict[str, float]:
    """Returns precisions after one run, with a cosine learning rate schedule."""
    torch.manual_seed(seed)
    model = Model(problem, method, samples)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=lr)
    x, y = problem.x["train"], problem.y["train"]
    steps, total = 0, epochs * math.ceil(x.shape[0] / BATCH)
    for _ in range(epochs):
        model.train()
        for rows in np.array_split(torch.randperm(x.shape[0]).numpy(), total // epochs):
            optimizer.param_groups[0]["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * steps / total))
            optimizer.zero_grad(set_to_none=True)
            model.loss(model(x[rows]), padded(y[rows])).backward()
            optimizer.step()
            steps += 1
    optimizer.flush()
    valid = precisions(model, problem, "valid")
    # P@5, or of fewer labels the P@k of the largest k
    return {"valid": valid[max(valid)]} | precisions(model, problem, "test")


@torch.no_grad()
def precisions(model: Model, problem: Problem, part: str) -> dict[str, float]:
    model.eval()
    x, best = problem.x[part], min(5, problem.classes)
    found = torch.cat([
        model.loss.topk(model(x[begin:begin + 1000]), best)[1]
        for begin in range(0, x.shape[0], 1000)
    ])
    return {
        f"P@{k}": xs.metrics.precision_at_k(found, problem.y[part], k)
        for k in (1, 3, 5) if k <= best
    }


def choose_setting(train: Callable[[float, int], dict],
                   args: argparse.Namespace) -> tuple[float, int, list[float]]:
    """Returns the best learning rate and number of epochs in validation, and the rates that were
    trained for so many epochs."""
    found = {(lr, epochs): run["valid"]
             for epochs in sorted(set(args.epochs))
             for lr, run in long_trainings(args.lr, train, args.finalists, args.search_epochs,
                                           epochs).items()}
    lr, epochs = max(found, key=found.__getitem__)
    return lr, epochs, [rate for rate, count in found if count == epochs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--delicious", metavar="FILE")
    source.add_argument("--generated", action="store_true")
    parser.add_argument("--scale", type=float, default=1, help="of the generated set's sizes "
                        "(default: %(default)s)")
    parser.add_argument("--runs", type=Path, required=True, help="file of the finished runs")
    parser.add_argument("--samples", type=int, default=50, help="of each example (default: "
                        "%(default)s)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 20],
                        help="to choose from (default: %(default)s)")
    parser.add_argument("--search-epochs", type=int, default=5)
    parser.add_argument("--finalists", type=int, default=3, help="learning rates that are trained "
                        "to the end (default: %(default)s)")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03],
                        help="learning rates to choose from (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    problem = load(args)
    generated_from = f"{SHAPES[SHAPE]} x {args.scale:g}, {INFORMATIVE:g} informative"
    source = checksum(args.delicious) if args.delicious else generated_from
    runs = Runs(args.runs, [problem.name, source], args.threads)

    def train(method: str, lr: float, epochs: int, seed: int = 1) -> dict[str, float]:
        run = f"{method}, {args.samples} samples, lr {lr:g}, {epochs} epochs, seed {seed}"
        return runs.get(run) or runs.add(run, fit(problem, method, lr, epochs, seed, args.samples))

    rows, ratios, full = [], {}, None
    for method in args.only:
        lr, epochs, rates = choose_setting(partial(train, method), args)
        several = [train(method, lr, epochs, seed) for seed in range(1, 1 + args.seeds)]
        tested = {name: [run[name] for run in several] for name in several[0] if name != "valid"}
        full = tested if method == "full" else full
        ratio = {name: sum(tested[name]) / sum(full[name]) for name in tested} if full else {}
        ratios[method] = [(int(name[2:]), value) for name, value in ratio.items()]  # P@1, P@3, ...
        rows.append({"sampler": method, "learning rate": shown_rate(lr, rates), "epochs": epochs}
                    | {name: mean_and_error(values)
                       for name, values in tested.items()}
                    | {f"{name} / full": f"{value:.3f}"
                       for name, value in ratio.items()})
    sizes = {
        "data": problem.name, "training examples": f"{problem.x['train'].shape[0]:,}",
        "features": f"{problem.x['train'].shape[1]:,}", "labels": f"{problem.classes:,}"
    }
    report(args, __doc__, question="How precise are models of many labels trained with samples?",
           against="the exact softmax loss with several positives", threads=args.threads,
           tables=[table(rows), table([sizes])], runs=runs.about(),
           plot=plot("k", "P@k / that of the full softmax", ratios))


if __name__ == "__main__":
    interruptible(main)
