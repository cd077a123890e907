"""Measures the host time of a training step, and counts its operator calls, on shapes with almost
nothing to compute.

    python benchmarks/host_cost.py [--threads 1] [--repeats 201] [--only calls,time,launches]
                                   [--json [FILE]]

A step consists of the forward pass, the backward pass, the optimizer's step and zero_grad(). With Q
= 4, N = 1,000 and D = 8 a step takes only host time. Calls are those of ATen and xsoftmax operators
that torch.profiler counts on the CPU. The rival is nn.Linear + nn.CrossEntropyLoss + SGD on the
same shapes, in eager mode.

With CUDA, launches are counted at Q = 8,192 and N = 1,000,000: the kernels, copies and fills of
torch.profiler. Without a device they are counted at Q = 1,024: the library's kernels on the
emulator of tests/cuda_emulation, if XSOFTMAX_EMULATE_LIBRARY names it, the kernels and fills that
CUB would launch to sort, which are as many as at Q = 8,192, and the calls of ATen operators that
compute something, each of which may launch several kernels. As on a device, the library then reads
no values of tensors.
"""

import os
from typing import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

CLASSES, WIDTH, QUERIES = 1000, 8, 4
Step = Callable[[], object]


def exact_step() -> Step:
    linear, criterion = nn.Linear(WIDTH, CLASSES, bias=False), nn.CrossEntropyLoss()
    return step_of(lambda input, target: criterion(linear(input), target),
                   torch.optim.SGD(linear.parameters(), lr=1e-3))


def sampled_step(sampler: xs.samplers.Sampler, head: int = 0, queries: int = QUERIES) -> Step:
    loss = xs.SampledSoftmaxLoss(WIDTH, sampler.num_classes, sampler=sampler, head_classes=head)
    return step_of(loss, xs.optim.RowAdam(loss.parameters(), lr=1e-3), queries)


def step_of(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
            optimizer: torch.optim.Optimizer, queries: int = QUERIES) -> Step:
    input, target = torch.randn(queries, WIDTH,
                                requires_grad=True), torch.randint(CLASSES, (queries,))

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

    return {
        "Linear + CrossEntropyLoss + SGD": exact_step(),
        "16 uniform, shared": sampled_step(uniform()),
        "head 8 + 16 uniform, shared": sampled_step(uniform(), head=8),
        "16 MIDX": sampled_step(midx(16)), "head 8 + union of 16 uniform and 8 MIDX": sampled_step(
            samplers.UnionSampler(uniform(), midx(8)), head=8)
    }


def count_calls(step: Step) -> int:
    for _ in range(5):  # includes refreshes and the creation of optimizer state
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.name.startswith(("aten::", "xsoftmax::")) for event in profiled.events())


def bench_calls(args) -> list[dict]:
    """Operator calls per step"""
    return [{"figure": name, "value": count_calls(step)} for name, step in make_steps().items()]


def bench_time(args) -> list[dict]:
    """Time of a step / Linear + CrossEntropyLoss + SGD"""
    steps = make_steps()
    medians = interleave(steps, args.repeats, warmup=20)
    rival = next(iter(medians.values()))
    return [{
        "figure": name, "value": round(seconds / rival, 3), "medians": f"{1e6 * seconds:.0f} "
        "us"
    } for name, seconds in medians.items()]


# ATen operators that launch no kernels: they read or create tensor metadata, or allocate memory.
NO_LAUNCH = {
    f"aten::{name}"
    for name in ("_indices", "_sparse_coo_tensor_unsafe",
                 "_sparse_coo_tensor_with_dims_and_tensors", "_values", "alias", "as_strided",
                 "conj", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand",
                 "expand_as", "flatten", "is_pinned", "narrow", "new_empty", "permute", "reshape",
                 "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "set_", "slice",
                 "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "view_as")
}


def count_launches(step: Step, device: str) -> int:
    """Counts the launches of one step, on a device or on the emulator. On the emulator the library
    is also prevented from reading values of CPU tensors."""
    for _ in range(3):
        step()
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA
                   for event in profiled.events())
    emulator = torch.ops.cuda_emulator
    launched, let_host_read = emulator.launched, emulator.let_host_read
    before = sum(numbers[0] for numbers in launched().values())
    let_host_read(False)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
    finally:
        let_host_read(True)
    kernels = sum(numbers[0] for numbers in launched().values()) - before

    def is_aten(event) -> bool:
        return event.name.startswith("aten::")

    def is_within(event) -> bool:
        parent = event.cpu_parent
        return parent is not None and (is_aten(parent) or is_within(parent))

    def launches(event) -> bool:  # a cast to the current dtype calls no other operator
        return is_aten(event) and event.name not in NO_LAUNCH and (event.name != "aten::to" or any(
            map(is_aten, event.cpu_children)))

    return kernels + sum(launches(event) and not is_within(event) for event in profiled.events())


def bench_launches(args) -> list[dict]:
    """Launches per step on CUDA"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if "XSOFTMAX_EMULATE_LIBRARY" not in os.environ:
            print("launches: not counted, since there is neither a CUDA device nor "
                  "XSOFTMAX_EMULATE_LIBRARY")
            return []
        torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
        torch.ops.cuda_emulator.take_over()
    with torch.device(device):
        queries, classes = 8192 if device == "cuda" else 1024, 1_000_000
        steps = {
            "512 uniform, shared": sampled_step(xs.samplers.UniformSampler(classes, 512),
                                                queries=queries),
            "20 log-uniform, private": sampled_step(
                xs.samplers.LogUniformSampler(classes, 20, shared=False), queries=queries)
        }
        return [{"figure": name, "value": count_launches(step, device)}
                for name, step in steps.items()]


BENCHES = {"calls": bench_calls, "time": bench_time, "launches": bench_launches}

if __name__ == "__main__":
    run_benches(__doc__, BENCHES, question="What does a training step cost the host?",
                against=f"nn.Linear + nn.CrossEntropyLoss + SGD, torch {torch.__version__}",
                defaults={"threads": 1, "repeats": 201})
