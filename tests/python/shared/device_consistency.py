"""Runs losses with fake tensors on "cuda" and prints errors by combination as JSON.

test_device_consistency.py starts it as a separate process:

    python device_consistency.py LIBRARY WAY [SHARD SHARDS]

LIBRARY: the library of tests/cpp/cuda_stand_in.cpp.
WAY: "eager": steps of every combination and of the matcher; "compile" and "export": torch.compile
    and torch.export of every sampler and loss; "graphs": whether mode="reduce-overhead" of
    torch.compile can make CUDA graphs of them; "values": every operator, whose composite must give
    the results of the CPU on tensors of elsewhere.py.

A module is moved by its own `.to()`, so tensors that it keeps on the CPU stay there. FakeTensorMode
raises an error if an operator mixes devices (except for CPU scalars) or a step reads a value on the
host.
"""

import ctypes
import functools
import importlib.util
import json
import sys
import types
import unittest.mock
from operator import getitem
from pathlib import Path

# Loaded before torch looks for CUDA.
ctypes.CDLL(
    Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so",
    ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402
from functorch.compile import make_boxed_func  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.fx.experimental import proxy_tensor  # noqa: E402

import elsewhere  # noqa: E402
import op_samples  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "devices"))
import test_cuda_device as cuda  # noqa: E402
import xsoftmax as xs  # noqa: E402
from combinations import COMBINATIONS, D, N, Q  # noqa: E402
from traced_losses import TRACED, Predictions  # noqa: E402

torch.autograd.set_multithreading_enabled(False)  # no thread for the fake device


def moved(loss, mode):
    """Returns the loss after `.to("cuda")` with fake tensors.

    Parameters are created again, since torch cannot replace them by fake ones.
    """
    parameters = dict(loss.named_parameters())
    for module in loss.modules():
        module._parameters = dict.fromkeys(module._parameters)
        module._buffers = {
            name: buffer if buffer is None else mode.from_tensor(buffer, static_shapes=True)
            for name, buffer in module._buffers.items()
        }
    with mode:
        loss.to("cuda")
    for name, parameter in parameters.items():
        path, _, own = name.rpartition(".")
        fake = FakeTensor(mode, torch.empty_like(parameter.detach(), device="meta"),
                          torch.device("cuda:0"))
        loss.get_submodule(path)._parameters[own] = torch.nn.Parameter(fake)
    return loss


def run(made):
    mode = FakeTensorMode()
    loss = moved(made.make(torch.float32), mode)
    if hasattr(loss, "balance_every"):
        loss.balance_every = 0  # its counter is read on the host, and a fake tensor has no value
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
        assert all(parameter.grad.is_cuda
                   for parameter in loss.parameters() if parameter.grad is not None)
        loss.eval()
        with torch.no_grad():
            results = [
                loss(input, target), *loss.topk(input, 2),
                loss.predict(input),
                loss.log_prob(input)
            ]
        assert all(result.is_cuda for result in results), "a prediction that is not on the device"
        optimizer.flush()
        saved = optimizer.state_dict()
        saved["state"] = {
            key: {
                name: torch.zeros(tensor.shape, dtype=tensor.dtype)
                for name, tensor in state.items()
            }
            for key, state in saved["state"].items()
        }
        optimizer.load_state_dict(saved)  # as from a checkpoint of the CPU
        assert all(tensor.is_cuda for state in optimizer.state.values()
                   for tensor in state.values()), "state that is not on the device"
        optimizer.step()


def run_matcher(reduction):
    mode = FakeTensorMode()
    matcher = xs.HierarchicalMatcher(D, xs.LabelTree.random(N, 3), beam=2, reduction=reduction)
    moved(matcher, mode)
    del matcher.layer
    # read on the host, and a fake tensor has no value
    matcher.layer = types.SimpleNamespace(item=lambda: 2)
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
            assert all(
                result.is_cuda
                for result in matcher.topk(input, 2)), "a prediction that is not on the device"


def on_device(call, exporting=False):
    """Returns a loss on the fake device, and the mode of its tensors."""
    mode = FakeTensorMode()
    loss = moved(call.make(), mode)
    for module in loss.modules():
        if hasattr(module, "balance_every"):
            module.balance_every = 0
        if isinstance(module, xs.HierarchicalMatcher) and not exporting:
            del module.layer  # read on the host; a fake tensor has no value
            module.layer = types.SimpleNamespace(item=lambda depth=module.tree.depth: depth)
    return loss, mode


def layout(tensor):
    if tensor.layout == torch.strided:
        return tensor.dtype, tuple(tensor.shape), tensor.stride()
    return tensor.dtype, tuple(tensor.shape), tensor.sparse_dim(), tensor.dense_dim()


def step_of(call, loss, inputs, backend):
    """Returns {name: tensor} of the loss and the gradients of a compiled step."""
    torch._dynamo.reset()
    run = loss
    if backend is not None:
        run = torch.compile(loss, backend=backend, fullgraph=call.fullgraph)
    value = run(*inputs)
    value.sum().backward()
    grads = {
        name: parameter.grad
        for name, parameter in loss.named_parameters() if parameter.grad is not None
    }
    return {"loss": value, "input": inputs[0].grad} | grads


def predictions_of(call, loss, inputs, backend):
    """Returns the predictions of a compiled model."""
    loss.eval()
    run = functools.partial(call.predict, loss)
    if backend is not None:
        run = torch.compile(run, backend=backend, fullgraph=call.fullgraph)
    with torch.no_grad():
        return dict(enumerate(run(*inputs)))


def traced(call, backend):
    """Traces a step and predictions; results must have the layout of the CPU."""
    loss, mode = on_device(call)
    on_cpu = call.make()
    for run in (step_of, predictions_of)[:1 + (call.predict is not None)]:
        with mode:
            found = run(call, loss, call.inputs("cuda"), backend)
        assert all(result.is_cuda
                   for result in found.values()), "a result that is not on the device"
        expected = run(call, on_cpu, call.inputs("cpu"), None)
        differing = {
            name: (layout(found[name]), layout(result))
            for name, result in expected.items() if layout(found[name]) != layout(result)
        }  # AOTAutograd adds gradients of 0
        assert not differing, f"layouts differ from the CPU: {differing}"


def compiled(call):
    traced(call, "eager")  # other backends would run the compiled code on the device


def exported(call):
    loss, mode = on_device(call, exporting=True)
    with mode:
        inputs = call.inputs("cuda")
        if call.exports:
            torch.export.export(loss, inputs, strict=False)
        if call.predict is not None:
            with torch.no_grad():
                torch.export.export(Predictions(call, loss).eval(), inputs, strict=False)


# ---- torch.compile(mode="reduce-overhead"): CUDA graphs


def graphed(call):
    """Checks that the graphs of a step and of predictions meet the requirements of CUDA graphs."""
    found = []

    def check(graph, inputs):
        found.extend(faults_of(graph, torch._guards.TracingContext.get().fw_metadata))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=check, bw_compiler=check, inference_compiler=check)
    with unittest.mock.patch.object(proxy_tensor, "snapshot_fake", snapshot):
        traced(call, backend)
    assert not found, "; ".join(sorted(set(found)))


def snapshot(tensor, include_real=False, take=proxy_tensor.snapshot_fake):
    """Skips sparse tensors, which a build without CUDA cannot copy on a device."""
    return tensor if tensor.is_sparse else take(tensor, include_real)


def runs_between_graphs(operator):
    is_operator = isinstance(operator, torch._ops.OpOverload)
    return is_operator and torch.Tag.cudagraph_unsafe in operator.tags


def faults_of(graph, metadata):
    """Yields reasons why a graph cannot be a CUDA graph or would be replayed wrongly."""
    for node in graph.graph.nodes:
        wrapped = node.target is torch.ops.higher_order.auto_functionalized_v2
        operator = node.args[0] if wrapped else node.target
        if node.meta.get("unbacked_bindings"):
            yield f"{operator}: a size that depends on values"
        if node.op != "call_function" or operator is getitem or runs_between_graphs(operator):
            continue
        if operator is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            continue  # writes the result of an in-place operator to a buffer
        values = [part.meta.get("val") for part in (node, *node.all_input_nodes)]
        if any(tensor.is_cpu for tensor in cuda.tensors_in(values)):
            yield f"{operator}: a tensor on the CPU"
    if not set(metadata.mutated_inp_runtime_indices) <= set(metadata.static_input_indices):
        yield "an input that is written to"


# Replaces the storage of tables without the dispatcher; allocates memory that the device can read.
OF_MEMORY = {"streaming_resize_", "pinned_table"}
# The composite of a search reads every cell for any budget.
OF_WHAT_IS_READ = {"search_budget", "search_topk"}


def compare_values(name):
    """Compares results and arguments of an operator with those on the CPU."""
    operator, on_cpu, away = getattr(torch.ops.xsoftmax,
                                     name), op_samples.samples()[name], elsewhere.moved(
                                         op_samples.samples()[name])
    with torch.no_grad():
        torch.manual_seed(0)  # for operators that draw without a generator
        expected = operator(*on_cpu)
        torch.manual_seed(0)
        with elsewhere.Device():
            found = operator(*away)
    cuda.assert_close(elsewhere.returned([found, away]), elsewhere.returned([expected, on_cpu]),
                      1e-4)


def jobs(way):
    """Returns {name: function} of all checks."""
    if way == "eager":
        matchers = {
            f"HierarchicalMatcher, {reduction}": lambda reduction=reduction: run_matcher(reduction)
            for reduction in ("mean", "sum", "none")
        }
        return matchers | {name: lambda made=made: run(made) for name, made in COMBINATIONS.items()}
    if way == "values":
        return {
            name: lambda name=name: compare_values(name)
            for name in cuda.NAMES
            if name not in cuda.BY_ANOTHER_GENERATOR | OF_MEMORY | OF_WHAT_IS_READ
        }
    trace = {"compile": compiled, "export": exported, "graphs": graphed}[way]
    return {name: lambda call=call: trace(call) for name, call in TRACED.items()}


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
