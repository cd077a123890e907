"""Takes steps of every combination, and of the matcher, with tensors that FakeTensorMode says are on "cuda", and says what went wrong as JSON, by combination.

A process of its own (test_device_consistency.py):  python device_consistency.py LIBRARY

LIBRARY: tests/cpp/cuda_stand_in.cpp. An operator that mixes devices fails under FakeTensorMode, and so does a step that reads a value on the host.
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

import xsoftmax as xs  # noqa: E402
from combinations import COMBINATIONS, D, N, Q  # noqa: E402

ON_HOST = ("steps", "step", "layer")  # buffers that modules keep there

torch.autograd.set_multithreading_enabled(False)  # no thread of a device that is not there


def moved(loss, mode):
    """The loss with its tensors on "cuda", but for what stays on the host."""
    def fake(tensor):
        return FakeTensor(mode, torch.empty_like(tensor.detach(), device="meta"), torch.device("cuda:0"))

    for module in loss.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else torch.nn.Parameter(fake(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer, static_shapes=True) if name in ON_HOST else fake(buffer)
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


def main():
    found = {}
    for reduction in ("mean", "sum", "none"):
        try:
            run_matcher(reduction)
        except Exception as error:
            found[f"HierarchicalMatcher, {reduction}"] = f"{type(error).__name__}: {error}"[:500]
    for name, made in COMBINATIONS.items():
        try:
            run(made)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"combinations": len(COMBINATIONS), "found": found}))


if __name__ == "__main__":
    main()
