"""Whole steps of sampled losses, compared with the code of a good PyTorch user (output_layer.py),
the same under torch.compile, CUDA graphs of both, and the method of Partial FC."""

import copy
import functools
import math
from dataclasses import dataclass
from typing import Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from output_layer import NaiveSampled, precision

from .bench import Bench, Runs, training_step

OURS, NAIVE, COMPILED = "xsoftmax", "naive", "naive, torch.compile"
LAZY = f"{OURS}, lazy_gradient"
STEPS = (OURS, NAIVE, COMPILED)


@dataclass
class Case:
    """A number of samples in one precision, and the targets for its figures."""

    num_samples: int
    shared: bool
    kind: str  # float32, float32 + TF32, bfloat16
    step: Optional[str] = None  # ours / naive with SparseAdam
    graph: Optional[str] = None  # microseconds of our step as a CUDA graph
    launches: Optional[str] = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.kind == "bfloat16" else torch.float32

    def title(self, bench: Bench) -> str:
        draws = f"{self.num_samples} {'shared' if self.shared else 'private'}"
        return f"{draws}, N {bench.classes:,}, D {bench.width}, Q {bench.queries:,}, {self.kind}"


def our_loss(bench: Bench, num_samples: int, shared: bool, **options) -> xs.SampledSoftmaxLoss:
    return xs.SampledSoftmaxLoss(bench.width, bench.classes, sampler="uniform",
                                 num_samples=num_samples, shared=shared, device=bench.device,
                                 **options)


class PartialFC(nn.Module):
    """The method of Partial FC: a softmax over the classes of the batch and random others,
    `num_samples` in total. It samples by sorting a random number per class."""
    def __init__(self, table: Tensor, num_samples: int) -> None:
        super().__init__()
        self.weight, self.num_samples = nn.Parameter(table), num_samples

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            key = torch.rand(len(self.weight), device=target.device)
            key[target] = 2.0
            ids = key.topk(self.num_samples).indices.sort().values
            place = torch.searchsorted(ids, target)
        return F.cross_entropy(input @ F.embedding(ids, self.weight, sparse=True).T, place)


def compiled_naive(bench: Bench, naive: NaiveSampled) -> NaiveSampled:
    """Returns the rival over the same table, compiled except for its look-up, because the compiler
    does not support sparse gradients."""
    compiled = copy.copy(naive)
    compiled.shared_loss = bench.compiled(naive.shared_loss)
    compiled.private_loss = bench.compiled(naive.private_loss)
    return compiled


def naive_call(bench: Bench, case: Case, naive: NaiveSampled, input: Tensor,
               target: Tensor) -> Callable[[], Tensor]:
    """Returns a call of the rival, including sampling."""
    shape = (case.num_samples,) if case.shared else (bench.queries, case.num_samples)
    log_count = torch.tensor(math.log(case.num_samples / bench.classes), device=bench.device)
    rival = naive.shared if case.shared else naive.private
    return lambda: rival(input, target, torch.randint(bench.classes, shape, device=bench.device),
                         log_count)


def sampled_steps(bench: Bench, case: Case) -> Runs:
    """Returns whole steps of our loss and of the rivals, including sampling."""
    input, target = bench.batch(dtype=case.dtype)
    ours = our_loss(bench, case.num_samples, case.shared, dtype=case.dtype)
    naive = NaiveSampled(bench.table(bench.classes, bench.width).to(case.dtype))
    table = list(naive.parameters())
    call = naive_call(bench, case, naive, input, target)
    compiled = naive_call(bench, case, compiled_naive(bench, naive), input, target)

    def our_step(loss: xs.SampledSoftmaxLoss, optimizer: Optional[Callable] = xs.optim.RowAdam):
        parameters = list(loss.parameters())
        return training_step(lambda: loss(input, target), input, parameters, optimizer
                             and optimizer(parameters))

    runs = {
        OURS: our_step(ours), NAIVE: training_step(call, input, table,
                                                   torch.optim.SparseAdam(table)),
        COMPILED: training_step(compiled, input, table, torch.optim.SparseAdam(table)),
        f"{OURS}, no optimizer": our_step(ours, None),
        f"{NAIVE}, no optimizer": training_step(call, input, table),
        f"{COMPILED}, no optimizer": training_step(compiled, input, table)
    }
    if not case.shared:
        lazily = functools.partial(xs.optim.RowAdam, lazy_gradient=True)
        runs[LAZY] = our_step(our_loss(bench, case.num_samples, False, dtype=case.dtype), lazily)
    if bench.cuda:
        runs |= bench.attempt(
            f"{OURS}, CUDA graph", lambda: bench.graphed(
                our_step(our_loss(bench, case.num_samples, case.shared, dtype=case.dtype))))
        for name in (NAIVE, COMPILED):
            runs |= bench.attempt(
                f"{name}, CUDA graph",
                lambda: graphed_naive(bench, runs[f"{name}, no optimizer"], table,
                                      torch.optim.SparseAdam(table)))
    return runs


def graphed_naive(bench: Bench, forward_backward: Callable[[], None], table: list,
                  optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns the rival's step with its forward and backward pass as a CUDA graph. SparseAdam
    synchronises with the device, so it cannot be captured."""
    replay = bench.graphed(forward_backward)
    grads = [parameter.grad for parameter in table]

    def step() -> None:
        replay()
        for parameter, grad in zip(table, grads):
            parameter.grad = grad
        optimizer.step()

    return step


def measure(bench: Bench, case: Case, more: Optional[Runs] = None) -> Dict[str, float]:
    with precision("high" if case.kind.endswith("TF32") else "highest"):
        title = case.title(bench)
        runs = sampled_steps(bench, case) | (more or {})
        seconds = bench.steps(runs)
        bench.ratio(f"{title}: step / naive with SparseAdam", seconds, OURS, NAIVE, case.step)
        for name, rival in ((OURS, COMPILED), (COMPILED, NAIVE)):
            bench.ratio(f"{title}: step of {name} / {rival}", seconds, name, rival)
        if LAZY in seconds:
            bench.ratio(f"{title}: step with lazy_gradient / ours", seconds, LAZY, OURS)
        bench.ratio(f"{title}: without optimizers", seconds, f"{OURS}, no optimizer",
                    f"{NAIVE}, no optimizer")
        bench.launches(title, runs, {name: seconds[name]
                                     for name in STEPS if name in seconds},
                       {OURS: case.launches} if case.launches else None)
        if bench.cuda:
            report_graphs(bench, case, seconds)
        bench.memory(f"{title}: memory of a step in addition to table and state", runs,
                     [name for name in (OURS, NAIVE) if name in seconds])
    return seconds


def report_graphs(bench: Bench, case: Case, seconds: Dict[str, float]) -> None:
    title, ours = case.title(bench), f"{OURS}, CUDA graph"
    if ours in seconds:
        bench.row(f"{title}: step as a CUDA graph", 1e6 * seconds[ours], "us", case.graph)
    bench.ratio(f"{title}: step as a CUDA graph / naive, eager", seconds, ours, NAIVE)
    for name in (NAIVE, COMPILED):
        bench.ratio(f"{title}: step as a CUDA graph / {name}, CUDA graph and SparseAdam", seconds,
                    ours, f"{name}, CUDA graph")


def part_shared(bench: Bench) -> None:
    input, target = bench.batch()
    num_samples = min(bench.classes, bench.queries + bench.shared)
    partial = PartialFC(bench.table(bench.classes, bench.width), num_samples)
    optimizer = torch.optim.SparseAdam(partial.parameters())
    other = {
        "Partial FC": training_step(lambda: partial(input, target), input, partial.parameters(),
                                    optimizer)
    }
    case = Case(bench.shared, True, "float32", launches="20")
    seconds = measure(bench, case, other)
    bench.ratio(f"{case.title(bench)}: step / Partial FC", seconds, OURS, "Partial FC")
    del other, partial, optimizer
    bench.release()
    measure(bench, Case(bench.shared, True, "float32 + TF32", step="0.35", graph="120"))
    bench.release()
    measure(bench, Case(bench.shared, True, "bfloat16"))


def part_private(bench: Bench) -> None:
    measure(bench, Case(bench.private, False, "float32", "0.25", graph="550", launches="16"))
    bench.release()
    measure(bench, Case(bench.private_many, False, "bfloat16", "0.2"))
