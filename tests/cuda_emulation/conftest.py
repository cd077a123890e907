"""What tests of the emulator share."""

import os

import pytest
import torch


@pytest.fixture
def on_a_device():
    """Runs the CUDA kernels on tensors of the CPU, at whose values the library does not look."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    torch.ops.cuda_emulator.let_host_read(False)
    yield
    torch.ops.cuda_emulator.let_host_read(True)
