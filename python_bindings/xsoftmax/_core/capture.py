"""CUDA graph capture."""

from typing import Any, Callable, Sequence

import torch
from torch import Tensor


class Cuda:
    """Captures and runs steps on a device. Tests replace it with a fake."""
    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.side = torch.cuda.Stream()

    @staticmethod
    def suits(device: torch.device) -> bool:
        return device.type == "cuda"

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        """Runs a step eagerly on the capture stream, as warm-up for later captures requires."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                value = function()
            current.wait_stream(self.side)
            value.record_stream(current)
        return value

    def capture(self, function: Callable[[], None], pool: Any,
                generators: Sequence[torch.Generator]) -> Callable[[], None]:
        """Captures `function`, which does not run, and returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=pool, stream=self.side):
            function()
        return graph.replay
