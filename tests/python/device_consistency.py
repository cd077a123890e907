"""Drives losses with tensors that FakeTensorMode says are on "cuda", and prints what went wrong as JSON, by combination.

A process of its own (test_device_consistency.py):  python device_consistency.py LIBRARY WAY [SHARD SHARDS]

LIBRARY: tests/cpp/cuda_stand_in.cpp. WAY: "eager", steps of every combination and of the matcher; "compile" and
"export", torch.compile and torch.export of every sampler and loss; "values", every operator, whose composite gives on
tensors elsewhere (elsewhere.py) what the operator gives on the CPU. A module goes to the device by its own `.to()`, so
that what it keeps on the CPU stays there. An operator that mixes devices fails under FakeTensorMode (but for scalars on
the CPU), and so does a step that reads a value on the host.
"""

import ctypes
import importlib.util
import json
import sys
import types
from pathlib import Path

# Before torch has asked for its CUDA.
ctypes.CDLL(Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so", ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

import elsewhere  # noqa: E402
import op_samples  # noqa: E402
import test_cuda_device as cuda  # noqa: E402
import xsoftmax as xs  # noqa: E402
from combinations import COMBINATIONS, D, N, Q  # noqa: E402

torch.autograd.set_multithreading_enabled(False)  # no thread of a device that is not there


def moved(loss, mode):
    """Returns the loss after `.to("cuda")`, its tensors being fake. Parameters, which torch cannot swap for fake ones,
    are made anew."""
    parameters = dict(loss.named_parameters())
    for module in loss.modules():
        module._parameters = dict.fromkeys(module._parameters)
        module._buffers = {name: buffer if buffer is None else mode.from_tensor(buffer, static_shapes=True) for name, buffer in module._buffers.items()}
    with mode:
        loss.to("cuda")
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        fake = FakeTensor(mode, torch.empty_like(parameter.detach(), device="meta"), torch.device("cuda:0"))
        loss.get_submodule(path)._parameters[own] = torch.nn.Parameter(fake)
    return loss


def run(made):
    mode = FakeTensorMode()
    loss = moved(made.make(torch.float32), mode)
    if hasattr(loss, "balance_every"):
        loss.balance_every = 0  # its counter is a number of the host, which no fake tensor tells
    with mode:
        optimizer = made.make_optimizer(loss)
        for step in range(2):
            input = torch.randn(Q, D, device="cuda", requires_grad=True)
            target = torch.randint(0, N, (Q,), device="cuda")
            optimizer.zero_grad()
            value = made.call(loss, input, target, None)
            value.sum().backward()
            optimizer.step()
            assert value.is_cuda and input.grad.is_cuda, "a result that is not on the device"
        assert all(parameter.grad.is_cuda for parameter in loss.parameters() if parameter.grad is not None)
        loss.eval()
        with torch.no_grad():
            results = [loss(input, target), *loss.topk(input, 2), loss.predict(input), loss.log_prob(input)]
        assert all(result.is_cuda for result in results), "a prediction that is not on the device"
        optimizer.flush()
        saved = optimizer.state_dict()
        saved["state"] = {key: {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
                          for key, state in saved["state"].items()}
        optimizer.load_state_dict(saved)  # of a checkpoint that was made on the CPU
        assert all(tensor.is_cuda for state in optimizer.state.values() for tensor in state.values()), "state that is not on the device"
        optimizer.step()


def run_matcher(reduction):
    mode = FakeTensorMode()
    matcher = xs.HierarchicalMatcher(D, xs.LabelTree.random(N, 3), beam=2, reduction=reduction)
    moved(matcher, mode)
    del matcher.layer
    matcher.layer = types.SimpleNamespace(item=lambda: 2)  # a number of the host, which no fake tensor tells
    with mode:
        optimizer = xs.optim.RowAdam(matcher.parameters(), lr=0.1)
        for step in range(2):
            input = torch.randn(Q, D, device="cuda", requires_grad=True)
            optimizer.zero_grad()
            value = matcher(input, torch.randint(-1, N, (Q, 4), device="cuda"))
            value.sum().backward()
            optimizer.step()
            assert value.is_cuda and input.grad.is_cuda, "a result that is not on the device"
        matcher.layer.item = lambda: matcher.tree.depth
        matcher.eval()
        with torch.no_grad():
            assert all(result.is_cuda for result in matcher.topk(input, 2)), "a prediction that is not on the device"


def run_traced(made, trace):
    mode = FakeTensorMode()
    loss = moved(made.make(torch.float32), mode)
    if hasattr(loss, "balance_every"):
        loss.balance_every = 0
    with mode:
        trace(loss, torch.randn(Q, D, device="cuda", requires_grad=True), torch.randint(0, N, (Q,), device="cuda"))


def compiled(loss, input, target):
    torch._dynamo.reset()
    # No other backend: they run what they make on a device.
    value = torch.compile(loss, backend="eager", fullgraph=True)(input, target)
    value.sum().backward()
    assert value.is_cuda and input.grad.is_cuda, "a result that is not on the device"


def exported(loss, input, target):
    torch.export.export(loss, (input, target), strict=False)


def each_part():
    """Returns the first combination of every sampler, and of every loss: name -> combination."""
    first = {}
    for name, made in COMBINATIONS.items():
        first.setdefault(json.dumps([made.loss, made.sampler, made.candidates] if made.loss == "SampledSoftmaxLoss" else [made.loss], default=str), name)
    return {name: COMBINATIONS[name] for name in first.values()}


# Gives tables other memory by a call that no dispatcher sees.
OF_MEMORY = {"streaming_resize_"}


def compare_values(name):
    """Holds results and arguments of an operator against those of the CPU."""
    operator, on_cpu, away = getattr(torch.ops.xsoftmax, name), op_samples.samples()[name], elsewhere.moved(op_samples.samples()[name])
    with torch.no_grad():
        torch.manual_seed(0)  # of operators that draw without a generator
        expected = operator(*on_cpu)
        torch.manual_seed(0)
        with elsewhere.Device():
            found = operator(*away)
    cuda.assert_close(elsewhere.returned([found, away]), elsewhere.returned([expected, on_cpu]), 1e-4)


def jobs(way):
    """Returns name -> function for each thing to do."""
    if way == "eager":
        matchers = {f"HierarchicalMatcher, {reduction}": lambda reduction=reduction: run_matcher(reduction) for reduction in ("mean", "sum", "none")}
        return matchers | {name: lambda made=made: run(made) for name, made in COMBINATIONS.items()}
    if way == "values":
        return {name: lambda name=name: compare_values(name) for name in cuda.NAMES if name not in cuda.BY_ANOTHER_GENERATOR | OF_MEMORY}
    trace = {"compile": compiled, "export": exported}[way]
    return {name: lambda made=made: run_traced(made, trace) for name, made in each_part().items()}


def main(way, shard=0, shards=1):
    found, chosen = {}, list(jobs(way).items())[shard::shards]
    for name, job in chosen:
        try:
            job()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"jobs": len(chosen), "found": found}))


if __name__ == "__main__":
    main(sys.argv[2], *map(int, sys.argv[3:]))
