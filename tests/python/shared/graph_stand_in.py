"""A stand-in on the CPU for a device with CUDA graphs.

A replay runs the captured step with the host's numbers at capture time, and what it writes to the
host is lost, as on a device.
"""

import pytest
import torch

from xsoftmax.samplers.static import SCALARS
from xsoftmax.tools import graphed_step

HOST_BUFFERS = ("steps", "step", "recent", "layer", *SCALARS)


class StandIn:
    """Records the order of calls. A capture runs only the host's part of a step, a replay only the
    device's."""

    log = []

    def __init__(self, device):
        pass

    @staticmethod
    def suits(device):
        return True

    def pool(self):
        return object()

    def run(self, function):
        self.log.append("eager")
        return function()

    def capture(self, function, pool, generators):
        self.log.append("capture")
        step = function.func.__self__
        at_capture = [number.clone() for number in on_host(step)]
        before = [tensor.clone() for tensor in on_device(step)]
        state = torch.get_rng_state()
        function()
        torch.set_rng_state(state)
        write(on_device(step), before)

        def replay():
            self.log.append("replay")
            now = [number.clone() for number in on_host(step)]
            write(on_host(step), at_capture)
            function()
            write(on_host(step), now)

        return replay


def on_host(step):
    """Tensors of the modules that stay on the CPU wherever the modules are."""
    return [
        getattr(module, name) for module in step._modules
        for name in HOST_BUFFERS if name in module._buffers
    ]


def on_device(step):
    host = {id(number) for number in on_host(step)}
    tensors = [
        tensor for module in step._modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    tensors += [
        tensor for optimizer in step._optimizers for state in optimizer.state.values()
        for tensor in state.values()
    ]
    return [tensor for tensor in tensors if id(tensor) not in host]


def write(tensors, values):
    """Writes without a change of version counters, as a graph does."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(graphed_step, "_Cuda", StandIn)
    monkeypatch.setattr(StandIn, "log", [])
    return StandIn.log
