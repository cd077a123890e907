"""The exact cross entropy, compared with PyTorch in eager mode, under torch.compile and as a CUDA
graph, and with the fused losses of other libraries."""

from typing import Callable, Dict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from output_layer import precision

from .bench import Bench, Runs, training_step

OURS, NAIVE = "xsoftmax", "F.linear + F.cross_entropy"
COMPILED = f"{NAIVE}, torch.compile"


def naive_loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight), target)


def module_loss(module: type, weight: nn.Parameter) -> nn.Module:
    """Returns a loss of this type over a given table."""
    loss = module(weight.shape[1], weight.shape[0], device="meta")
    loss.linear.weight = weight
    return loss


def exact_losses(bench: Bench, weight: nn.Parameter, input: Tensor,
                 target: Tensor) -> Dict[str, Callable[[], Callable[[], Tensor]]]:
    """Returns a function per loss that creates it. It fails if the library is not installed."""
    def ours():
        loss = module_loss(xs.LinearCrossEntropyLoss, weight)
        return lambda: loss(input, target)

    def compiled():
        function = bench.compiled(naive_loss)
        return lambda: function(input, weight, target)

    def torch_module():
        loss = module_loss(nn.LinearCrossEntropyLoss, weight)
        return lambda: loss(input, target)

    def liger():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda: loss(weight, input, target)

    def cut():
        from cut_cross_entropy import linear_cross_entropy
        return lambda: linear_cross_entropy(input, weight, target)

    return {
        OURS: ours, NAIVE: lambda: lambda: naive_loss(input, weight, target), COMPILED: compiled,
        "nn.LinearCrossEntropyLoss": torch_module, "Liger": liger, "Cut Cross-Entropy": cut
    }


def measure(bench: Bench, classes: int, width: int, kind: str, aims: Dict[str, str]) -> None:
    """Measures one size. `kind` is "float32", "float32 + TF32" or "bfloat16"; `aims` are by
    rival."""
    with precision("high" if kind.endswith("TF32") else "highest"):
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        input, target = bench.batch(classes=classes, dtype=dtype, width=width)
        weight = nn.Parameter(bench.table(classes, width).to(dtype))
        title = f"exact loss, N {classes:,}, D {width}, Q {bench.queries:,}, {kind}"
        runs: Runs = {}
        for name, make in exact_losses(bench, weight, input, target).items():
            runs |= bench.attempt(name, lambda: training_step(make(), input, [weight]))
        seconds = bench.steps(runs, min(bench.repeats, 7))
        bench.ratios(f"{title}: forward + backward", seconds, OURS, aims)
        if kind == "bfloat16":
            plain = [name for name in (OURS, NAIVE, COMPILED) if name in seconds]
            bench.launches(title, runs, {name: seconds[name] for name in plain}, {OURS: "40"})
        bench.memory(f"{title}: memory", runs, seconds, {OURS: "512"})
        if bench.cuda and kind == "bfloat16":
            measure_graphs(
                bench, title,
                {name: runs[name]
                 for name in (OURS, NAIVE, COMPILED) if name in seconds})
        del runs, input, weight
    bench.release()


def measure_graphs(bench: Bench, title: str, runs: Runs) -> None:
    graphs: Runs = {}
    for name, run in runs.items():
        graphs |= bench.attempt(f"{name}, CUDA graph", lambda: bench.graphed(run))
    bench.ratios(f"{title}: forward + backward as CUDA graphs",
                 bench.steps(graphs, min(bench.repeats, 7)), f"{OURS}, CUDA graph")


def part_exact(bench: Bench) -> None:
    """Measures the size at which logits take gigabytes, in three precisions."""
    classes, width = bench.exact[0]
    measure(bench, classes, width, "bfloat16", {COMPILED: "1.0"})
    measure(bench, classes, width, "float32 + TF32", {COMPILED: "1.0"})
    measure(bench, classes, width, "float32", {})


def part_exact_wide(bench: Bench) -> None:
    """Measures the widths of language models."""
    for (classes, width), aim in zip(bench.exact[1:], ("1.0", "1.1")):
        measure(bench, classes, width, "bfloat16", {COMPILED: aim})
