"""Kernel launches per training step, counted by benchmarks/host_cost.py on the emulator: with many
launches, a device waits for the host."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xsoftmax as xs

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from host_cost import count_launches, sampled_step


@pytest.mark.parametrize(
    "make, queries, most",
    [(lambda: xs.samplers.UniformSampler(100_000, 512), 64, 20),
     (lambda: xs.samplers.LogUniformSampler(100_000, 20, shared=False), 64, 16),
     (lambda: xs.samplers.LogUniformSampler(100_000, 20, shared=False), 800, 24)])
def test_a_step_launches_little(make, queries, most):
    """The sort of more than 9,216 ids takes 10 launches more than that of few. 512 shared samples
    and 8,192 queries stay below that."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    assert 10 < count_launches(sampled_step(make(), queries=queries), "cpu") <= most


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("shared", [True, False])
def test_a_loss_that_looks_at_no_target_is_the_same(shared, ignore_index, reduction):
    """Target values of a device are not read: the kernels leave out ignored queries, whose input is
    not a number."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    sampler = xs.samplers.UniformSampler(100, 16) if shared else xs.samplers.LogUniformSampler(
        100, 5, shared=False)
    loss = xs.SampledSoftmaxLoss(8, 100, sampler=sampler, reduction=reduction,
                                 ignore_index=ignore_index)
    input, target = torch.randn(6, 8), torch.tensor([5, ignore_index, 99, 5, ignore_index, 16])
    input[1] = float("nan")

    def run(host_reads: bool) -> list[torch.Tensor]:
        queries = input.clone().requires_grad_()
        loss.zero_grad()
        torch.manual_seed(0)
        torch.ops.cuda_emulator.let_host_read(host_reads)
        try:
            value = loss(queries, target)
            (3 * value.sum()).backward()
        finally:
            torch.ops.cuda_emulator.let_host_read(True)
        return [value.detach(), queries.grad, loss.linear.weight.grad.to_dense()]

    for blind, seeing in zip(run(False), run(True)):
        assert seeing.isfinite().all() and seeing.abs().sum() > 0
        torch.testing.assert_close(blind, seeing)


class ScoreGradients(TorchDispatchMode):
    """Collects the gradients of scores that are multiplied with the table."""
    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.xsoftmax.candidate_scores_backward.default:
            self.found.append(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_products_of_bfloat16_read_16_bytes_at_a_time(fused):
    """Those of the forward and the backward pass, in one step or with scores outside of it."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    options = {} if fused else {"logit_scale": 2.0}
    loss = xs.SampledSoftmaxLoss(64, 1000, sampler=xs.samplers.UniformSampler(1000, 51),
                                 dtype=torch.bfloat16, **options)
    torch.ops.cuda_emulator.let_host_read(False)
    before = torch.ops.cuda_emulator.unaligned_matrices()
    try:
        input = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
        loss(input, torch.randint(1000, (16,))).backward()
    finally:
        torch.ops.cuda_emulator.let_host_read(True)
    assert torch.ops.cuda_emulator.unaligned_matrices() == before
    assert input.grad.abs().sum() > 0


@pytest.mark.parametrize("private", [0, 20])
def test_products_with_shared_candidates_read_16_bytes_at_a_time(private):
    """If rows are not aligned to 16 bytes, products of bfloat16 and TF32 do not use the fast
    kernels of a device."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    parts = [xs.samplers.UniformSampler(1000, 51)
             ] + ([xs.samplers.LogUniformSampler(1000, private, shared=False)] if private else [])
    sampler = xs.samplers.UnionSampler(*parts) if private else parts[0]
    loss = xs.SampledSoftmaxLoss(64, 1000, sampler=sampler)
    torch.ops.cuda_emulator.let_host_read(False)
    try:
        with ScoreGradients() as gradients:
            loss(torch.randn(16, 64, requires_grad=True), torch.randint(1000, (16,))).backward()
    finally:
        torch.ops.cuda_emulator.let_host_read(True)
    [gradient] = gradients.found
    assert gradient.shape == (16, 1 + private + 51)
    shared = gradient[:, 1 + private:]
    assert shared.stride(0) * shared.element_size() % 16 == 0 and shared.data_ptr() % 16 == 0


def test_compiles_for_any_batch_size():
    """The device path is traced with symbolic sizes."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    for sampler in (xs.samplers.UniformSampler(100, 16),
                    xs.samplers.LogUniformSampler(100, 5, shared=False)):
        loss = xs.SampledSoftmaxLoss(8, 100, sampler=sampler, sparse_grad=False)
        torch.ops.cuda_emulator.let_host_read(False)
        try:
            compiled = torch.compile(loss, backend="aot_eager", dynamic=True, fullgraph=True)
            for queries in (6, 9):
                input, target = torch.randn(queries, 8,
                                            requires_grad=True), torch.randint(100, (queries,))
                target[1] = -100
                compiled(input, target).backward()
                assert input.grad.isfinite().all() and (
                    input.grad[1] == 0).all() and input.grad[0].abs().sum() > 0
        finally:
            torch.ops.cuda_emulator.let_host_read(True)


def test_rows_that_are_no_longer_sorted_stop_the_kernel():
    """Rows of a loss are sorted and not sorted again; a kernel asserts if someone writes to
    them."""
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    loss = xs.SampledSoftmaxLoss(8, 1000, sampler="uniform", num_samples=16)
    optimizer = xs.optim.RowAdam(loss.parameters())
    loss(torch.randn(4, 8), torch.randint(1000, (4,))).backward()
    rows = loss.linear.weight.grad._indices()
    rows.copy_(rows.flip(1))
    with pytest.raises(RuntimeError, match="g.rows"):
        optimizer.step()
