"""Launches of a training step, as benchmarks/host_cost.py counts them on the emulator: a device waits for the host where there are many."""

import os
import sys
from pathlib import Path

import pytest
import torch

import xsoftmax as xs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from host_cost import count_launches, sampled_step


@pytest.mark.parametrize("make, most", [(lambda: xs.samplers.UniformSampler(100_000, 512), 20),
                                        (lambda: xs.samplers.LogUniformSampler(100_000, 20, shared=False), 16)])
def test_a_step_launches_little(make, most):
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    assert 10 < count_launches(sampled_step(make(), queries=64), "cpu", host_reads=True) <= most


def test_rows_that_are_no_longer_sorted_stop_the_kernel():
    """Rows of a loss are sorted, and are not sorted again; whoever writes to them hears of it."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    loss = xs.SampledSoftmaxLoss(8, 1000, sampler="uniform", num_samples=16)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(4, 8), torch.randint(1000, (4,))).backward()
    rows = loss.linear.weight.grad._indices()
    rows.copy_(rows.flip(1))
    with pytest.raises(RuntimeError, match="g.rows"):
        optimizer.step()
