"""Measures time and memory of a training step that replaces nn.Linear + nn.CrossEntropyLoss, for
tables of increasing size.

    python benchmarks/training_step.py [--classes 10000 100000 1000000] [--queries 700]
                                       [--width 256] [--threads 2] [--json [FILE]]

A step consists of forward pass, backward pass and optimizer: Adam over the whole table for the
exact losses, RowAdam for the sampled one (512 log-uniform classes shared by the batch). No layer
has a bias. Layers are measured one after another, because all of them with their optimizers do not
fit into the memory of many machines. Memory is the peak of a step in addition to table and
optimizer state: logits, their gradient, the gradient of the table.
"""

import argparse
import os

import torch
from torch import Tensor, nn

import xsoftmax as xs
from common.records import add_json, report, table
from common.timing import PeakMemory, interleave


class Plain(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes, bias=False)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.criterion(self.linear(input), target)


LAYERS = {
    "nn.Linear + CrossEntropyLoss": Plain,
    "xs.LinearCrossEntropyLoss": xs.LinearCrossEntropyLoss,
    "xs.SampledSoftmaxLoss": lambda width, classes: xs.SampledSoftmaxLoss(
        width, classes, sampler="log_uniform", num_samples=512),
}


def fits(layer: str, queries: int, width: int, classes: int) -> bool:
    """Returns whether a step fits into memory: table, gradient, Adam's two moments, and for the
    plain layer four times the logits."""
    needed = 4 * classes * (4 * width + 4 * queries * (LAYERS[layer] is Plain))
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(layer: str, queries: int, width: int, classes: int, repeats: int) -> dict:
    if not fits(layer, queries, width, classes):
        return {"layer": layer, "classes": classes, "seconds": None, "bytes": None}
    loss = LAYERS[layer](width, classes)
    sampled = isinstance(loss, xs.SampledSoftmaxLoss)
    optimizer = xs.optim.RowAdam(loss.parameters()) if sampled else torch.optim.Adam(
        loss.parameters(), fused=True)
    input = torch.randn(queries, width, requires_grad=True)

    def step() -> None:
        input.grad = None
        optimizer.zero_grad()
        loss(input, torch.randint(classes, (queries,))).backward()
        optimizer.step()

    step()  # creates the optimizer state
    optimizer.zero_grad()
    with PeakMemory() as memory:
        step()
    return {
        "layer": layer, "classes": classes,
        "seconds": interleave({layer: step}, repeats, warmup=1)[layer], "bytes": memory.bytes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=700)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    figures = [
        measure(layer, args.queries, args.width, classes, args.repeats) for classes in args.classes
        for layer in LAYERS
    ]
    rows = []
    for layer in LAYERS:
        row = {"a training step": layer}
        for figure in figures:
            if figure["layer"] == layer:
                row[f"{figure['classes']:,} classes"] = "does not fit" if figure[
                    "seconds"] is None else (
                        f"{figure['seconds'] * 1e3:,.1f} ms, {figure['bytes'] / 2**20:,.0f} MB")
        rows.append(row)
    report(args, __doc__, question="What does a training step cost?", against="nn.Linear + "
           "nn.CrossEntropyLoss "
           "with a fused "
           "torch.optim.Adam", tables=[table(rows)], figures=figures)


if __name__ == "__main__":
    main()
