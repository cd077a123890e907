"""Measures the host time of a training step, and counts its operator calls, on shapes with almost nothing to compute.

    python benchmarks/host_cost.py [--threads 1] [--repeats 201] [--only calls,time] [--json [FILE]]

A step is the forward pass, the backward pass, the optimizer's step and the clearing of gradients. Q 4, N 1,000, D 8: on such shapes
a step is host time alone. Calls are those of operators of ATen and of xsoftmax that torch.profiler counts on the CPU. The rival is
nn.Linear + nn.CrossEntropyLoss + SGD on the same shapes, eager.
"""

from typing import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import xsoftmax as xs
from records import run_benches
from timing import interleave

CLASSES, WIDTH, QUERIES = 1000, 8, 4
Step = Callable[[], object]


def exact_step() -> Step:
    linear, criterion = nn.Linear(WIDTH, CLASSES, bias=False), nn.CrossEntropyLoss()
    return step_of(lambda input, target: criterion(linear(input), target), torch.optim.SGD(linear.parameters(), lr=1e-3))


def sampled_step(sampler: xs.samplers.Sampler, head: int = 0) -> Step:
    loss = xs.SampledSoftmaxLoss(WIDTH, CLASSES, sampler=sampler, head_classes=head)
    return step_of(loss, xs.optim.RowAdam(loss.parameters(), lr=1e-3))


def step_of(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    input, target = torch.randn(QUERIES, WIDTH, requires_grad=True), torch.randint(CLASSES, (QUERIES,))

    def step() -> None:
        loss(input, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        input.grad = None

    return step


def make_steps() -> dict[str, Step]:
    samplers = xs.samplers

    def uniform() -> xs.samplers.Sampler:
        return samplers.UniformSampler(CLASSES, 16)

    def midx(draws: int) -> xs.samplers.Sampler:
        return samplers.MidxSampler(CLASSES, WIDTH, draws)

    return {"Linear + CrossEntropyLoss + SGD": exact_step(),
            "16 uniform, shared": sampled_step(uniform()),
            "head 8 + 16 uniform, shared": sampled_step(uniform(), head=8),
            "16 MIDX": sampled_step(midx(16)),
            "head 8 + union of 16 uniform and 8 MIDX": sampled_step(samplers.UnionSampler(uniform(), midx(8)), head=8)}


def count_calls(step: Step) -> int:
    for _ in range(5):  # refreshes, first states of optimizers
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.name.startswith(("aten::", "xsoftmax::")) for event in profiled.events())


def bench_calls(args) -> list[dict]:
    """Calls of operators in a step"""
    return [{"figure": name, "value": count_calls(step)} for name, step in make_steps().items()]


def bench_time(args) -> list[dict]:
    """Time of a step, over that of Linear + CrossEntropyLoss + SGD"""
    steps = make_steps()
    medians = interleave(steps, args.repeats, warmup=20)
    rival = next(iter(medians.values()))
    return [{"figure": name, "value": round(seconds / rival, 3), "medians": f"{1e6 * seconds:.0f} us"} for name, seconds in medians.items()]


BENCHES = {"calls": bench_calls, "time": bench_time}


if __name__ == "__main__":
    run_benches(__doc__, BENCHES, question="What does a training step cost the host?",
                against=f"nn.Linear + nn.CrossEntropyLoss + SGD, torch {torch.__version__}", defaults={"threads": 1, "repeats": 201})
