"""Calls of the CUDA runtime that depend on what other threads or streams do."""

import pytest
import torch

import xsoftmax as xs

pytestmark = pytest.mark.usefixtures("on_a_device")
emulator = torch.ops.cuda_emulator


def test_a_pinned_table_that_dies_in_a_capture_is_freed_later():
    """To wait for the device, or to free memory of the host, would end the capture."""
    before = emulator.host_allocations()
    like = torch.empty(0)
    table = torch.ops.xsoftmax.pinned_table(like, [8, 4])
    assert emulator.host_allocations() == before + 1
    emulator.set_capturing(True)
    try:
        del table
        assert emulator.host_allocations() == before + 1
    finally:
        emulator.set_capturing(False)  # an error if the capture was broken
    del like
    torch.ops.xsoftmax.pinned_table(torch.empty(0), [0])
    assert emulator.host_allocations() == before


def test_widths_do_not_lower_each_others_limit_of_shared_memory():
    """Another thread may launch between the call that sets the limit and its own launch. The
    emulator does not accept a lower limit."""
    for private in (100, 60):
        sampler = xs.samplers.LogUniformSampler(1000, private, shared=False)
        loss = xs.SampledSoftmaxLoss(256, 1000, sampler=sampler)
        loss(torch.randn(2, 256, requires_grad=True), torch.randint(1000, (2,))).backward()
        assert loss.linear.weight.grad.to_dense().isfinite().all()


@pytest.mark.parametrize("count", [1, 31, 1000, 5000, 9_216, 9_217])
@pytest.mark.parametrize("classes", [2, 300, 70_000, 1 << 33])
def test_ids_are_sorted_in_their_order(count, classes):
    """By one block up to 9,216 ids. Coefficients are those of the positions of the sorted ids."""
    if count > 1000 and classes == 300:
        pytest.skip("one size of each kind")
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(classes, (count, 1), generator=generator)
    grad = torch.arange(1.0, count + 1)[:, None]
    rows, sources, coefficients = torch.ops.xsoftmax.row_terms(grad, ids, None, classes)
    expected, order = ids[:, 0].sort(stable=True)
    assert rows.equal(expected) and sources.long().equal(order)
    assert coefficients.equal(grad[order, 0])
