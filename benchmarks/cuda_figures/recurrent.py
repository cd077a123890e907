"""Whole training steps of an LSTM of the size used for Penn Treebank: 2 layers of width 200, 10,000
words, tied embedding, gradient clipping, Adam."""

from typing import Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs

from .bench import Bench, Runs

PLAIN, EXACT, SAMPLED = "plain PyTorch", "exact", "512 + 512 shared"
DENSE = f"{SAMPLED}, dense gradient"


class Words(nn.Module):
    """Encodes words [T, B] as [T, B, width]."""
    def __init__(self, classes: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width, sparse=sparse)
        self.recurrent = nn.LSTM(width, width, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.recurrent(self.embedding(words))[0]


class Plain(nn.Module):
    """An output layer that scores all words with a Linear."""
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), target.flatten())


def output_layers(bench: Bench) -> Dict[str, Callable[[], nn.Module]]:
    classes, width, _, _ = bench.recurrent
    half = min(512, classes // 4)

    def sampled(**options: object) -> nn.Module:
        return xs.SampledSoftmaxLoss(width, classes, sampler="log_uniform", num_samples=half,
                                     head_classes=half, bias=True, **options)

    return {
        PLAIN: lambda: Plain(width, classes),
        EXACT: lambda: xs.LinearCrossEntropyLoss(width, classes, bias=True), SAMPLED: sampled,
        DENSE: lambda: sampled(sparse_grad=False)
    }


class Trainer:
    """A model with one output layer, its optimizers and a batch."""
    def __init__(self, bench: Bench, loss: nn.Module, sparse: bool, plain: bool) -> None:
        classes, width, batch, length = bench.recurrent
        self.encoder = Words(classes, width, sparse).to(bench.device)
        self.loss = loss.to(bench.device)
        self.loss.linear.weight = self.encoder.embedding.weight
        options = dict(fused=True, capturable=bench.cuda)
        table = list(self.loss.parameters())
        self.parameters = [*self.encoder.recurrent.parameters(), *table]
        adam = torch.optim.Adam(self.encoder.recurrent.parameters(), 1e-3, **options)
        rows = torch.optim.Adam(table, 1e-3, **options) if plain else xs.optim.RowAdam(table)
        self.optimizers = [adam, rows]
        shape = (length, batch)
        self.words, self.target = (torch.randint(classes, shape, device=bench.device)
                                   for _ in range(2))

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.loss(self.encoder(self.words), self.target).backward()
        xs.clip_grad_norm_(self.parameters, 0.5)
        for optimizer in self.optimizers:
            optimizer.step()

    def graphed(self) -> Callable[[], object]:
        """Returns the step made by xs.make_graphed_step, after its capture."""
        step = xs.make_graphed_step(self.loss, self.optimizers, self.encoder, max_norm=0.5)
        for _ in range(8):
            step(self.words, self.target)
        if step.num_graphs == 0:
            raise RuntimeError("the step was not captured")
        return lambda: step(self.words, self.target)


def part_recurrent(bench: Bench) -> None:
    classes, width, batch, length = bench.recurrent
    title = f"LSTM 2 x {width}, {classes:,} words, Q {batch * length}"
    runs: Runs = {}
    graphs: Runs = {}
    for name, make in output_layers(bench).items():

        def trainer(name: Optional[str] = name, make: Callable = make) -> Trainer:
            return Trainer(bench, make(), name == SAMPLED, name == PLAIN)

        runs |= bench.attempt(name, lambda: trainer().step)
        if bench.cuda:
            graphs |= bench.attempt(f"{name}, CUDA graph", lambda: trainer().graphed())
    seconds = bench.steps(runs, 2 * bench.repeats)
    report(bench, f"{title}: step", seconds, "", "0.8")
    bench.launches(title, runs, seconds)
    if bench.cuda:
        found = bench.steps(graphs, 2 * bench.repeats)
        report(bench, f"{title}: step as a CUDA graph", found, ", CUDA graph", None)


def report(bench: Bench, figure: str, seconds: Dict[str, float], form: str,
           aim: Optional[str]) -> None:
    bench.ratio(f"{figure}, sampled / exact", seconds, SAMPLED + form, EXACT + form, aim)
    bench.ratio(f"{figure}, sampled / plain PyTorch", seconds, SAMPLED + form, PLAIN + form)
    bench.ratio(f"{figure}, exact / plain PyTorch", seconds, EXACT + form, PLAIN + form)
