"""Fixtures shared by the tests of the emulator."""

import os

import pytest
import torch


@pytest.fixture
def on_a_device():
    """Runs the CUDA kernels on CPU tensors, whose values the library then does not read."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    torch.ops.cuda_emulator.let_host_read(False)
    yield
    torch.ops.cuda_emulator.let_host_read(True)
