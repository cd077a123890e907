"""Certified search on a GPU or the emulator equals float64 scores of all classes; moved indices.

On a device, search reads cells for few queries or with `max_cells`; for many queries it multiplies
all rows, rounded to 16 bits. Without a device, the CPU kernel is tested.
"""

import copy
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import xsoftmax as xs
from test_retrieval import expected, made, problem

ops = torch.ops.xsoftmax
DEVICE = torch.device(
    os.environ.get("XSOFTMAX_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))
CUDA = DEVICE.type == "cuda"


def searched(query, weight, bias, k, options="", codewords=3):
    """Searches on the device without a synchronization; returns results on the CPU."""
    query, weight, bias = (None if tensor is None else tensor.to(DEVICE)
                           for tensor in (query, weight, bias))
    index = made(weight, bias, codewords)
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = ops.search_topk(query, weight, bias, index, k, options)
    finally:
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16],
                         ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("Q, N, k, options", [(1, 900, 10, ""), (4, 900, 1, ""), (31, 900, 10, ""),
                                              (300, 130, 3, ""), (31, 901, 10, "max_cells=100"),
                                              (0, 900, 3, ""), (4, 900, 0, "")])
def test_certified_search_equals_scoring_all_classes(dtype, bias, Q, N, k, options):
    """Classes and their order are equal, ties included; queries with NaN, infinity or only zeros do
    not affect others."""
    query, weight, biases = problem(Q, 19, N, dtype, bias)
    weight[N // 2:N // 2 + 50] = weight[:50]  # ties
    if bias:
        biases[N // 2:N // 2 + 50] = biases[:50]
    undefined = torch.zeros(Q, dtype=torch.bool)
    if Q > 3:
        query[0, 3], query[1, 18], query[2] = float("nan"), float("-inf"), 0
        undefined[:2] = True
    scores, ids, cells, certified = searched(query, weight, biases, k, options)
    want, want_ids = expected(query, weight, biases, k)
    assert torch.equal(ids[~undefined], want_ids[~undefined]) and torch.equal(
        ids[undefined],
        torch.arange(k).expand(int(undefined.sum()), k))
    assert scores[undefined].isnan().all() and scores.dtype == (torch.float64 if dtype
                                                                == torch.float64 else torch.float32)
    torch.testing.assert_close(scores[~undefined].double(), want[~undefined],
                               rtol=1e-6 if scores.dtype == torch.float32 else 1e-13, atol=1e-13)
    assert torch.equal(certified, ~undefined |
                       (k == 0)) and (cells[undefined] == 0).all() and (cells <= 9).all()


@pytest.mark.parametrize("Q", [3, 14])
@pytest.mark.parametrize("k", [7, 700])
def test_more_candidates_than_a_list_of_the_kernel_holds(Q, k):
    """Thousands of ties or rising scores fill the lists, which are reduced during the search."""
    equal = torch.ones(2500, 3)
    rising = torch.linspace(1, 2, 2500).unsqueeze(1).expand(2500, 3)
    for weight in (equal, rising, rising.flip(0)):
        query = torch.rand(Q, 3) + 0.5
        _, ids, _, certified = searched(query, weight, None, k)
        assert torch.equal(ids, expected(query, weight, None, k)[1]) and certified.all()


@pytest.mark.parametrize("Q", [5, 40])
def test_vectors_of_very_different_lengths(Q):
    """Bounds neither overflow nor underflow, also those of 16-bit products."""
    query, weight, bias = problem(Q, 16, 800)
    query = query * torch.logspace(-30, 30, Q).unsqueeze(1)
    weight = weight * torch.logspace(-6, 2, 800).unsqueeze(1)
    for factor in (1e-12, 1.0, 1e12):
        _, ids, _, certified = searched(query, weight, bias * factor, 5)
        assert torch.equal(ids, expected(query, weight, bias * factor, 5)[1]) and certified.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_differ_less_than_rounding_errors_are_ordered(dtype):
    """16-bit and float32 products cannot order these scores."""
    torch.manual_seed(0)
    weight = torch.randn(1, 40).to(dtype).repeat(700, 1)
    places = torch.randperm(700)
    weight[:, 0] = (1 + places / 512).to(dtype)
    query = torch.randn(25, 40).to(dtype)
    query[:, 0] = 2.0**-20
    _, ids, _, certified = searched(query, weight, None, 9)
    assert torch.equal(ids, expected(query, weight, None, 9)[1]) and certified.all()


@pytest.mark.parametrize("limit", [1, 3, 9, 27])
def test_max_cells_is_respected(limit):
    """Only the best classes are certified, and more cells find more of them."""
    query, weight, bias = problem(60, 16, 4000, clusters=50)
    want = expected(query, weight, bias, 10)[1]
    _, ids, cells, certified = searched(query, weight, bias, 10, f"max_cells={limit}", codewords=5)
    assert (cells >= 1).all() and (cells <= limit).all() and torch.equal(
        ids[certified], want[certified])
    share = (ids.unsqueeze(2) == want.unsqueeze(1)).any(2).double().mean()
    assert share >= {1: 0.3, 3: 0.7, 9: 0.95, 27: 1}[limit]
    assert limit > 1 or not certified.all()


def test_more_cells_are_read_if_one_holds_fewer_than_k_classes():
    query, weight, _ = problem(5, 8, 2000, bias=False)
    _, ids, cells, _ = searched(query, weight, None, 1500, "max_cells=1", codewords=4)
    assert (cells > 1).all() and all(row.unique().numel() == 1500 for row in ids)


def test_distant_cells_are_not_read():
    query, weight, _ = problem(6, 16, 6000, bias=False, clusters=50)
    _, _, cells, certified = searched(query, weight, None, 5, codewords=6)
    assert certified.all() and cells.double().mean() < 0.7 * 36


def test_search_of_a_loss_on_a_device():
    loss = xs.SampledSoftmaxLoss(4, 300, sampler="uniform", num_samples=20, bias=True).to(DEVICE)
    query, like = torch.randn(2, 20, 4, device=DEVICE), torch.randn(260, 4, device=DEVICE)
    want = loss.eval().topk(query, 6)[1]
    assert torch.equal(loss.search(query, 6).ids, want)
    loss.search_index(like)
    near = loss.search(query, 6, recall=0.9)
    assert near.cells_read.shape == (2, 20) and (near.ids == want).double().mean() > 0.5
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(loss.search(query, 6).ids, want)


def test_moving_a_loss_moves_its_index():
    """If the table changed meanwhile, the index is rebuilt."""
    loss = xs.LinearCrossEntropyLoss(4, 200, bias=True)
    query = torch.randn(260, 4)
    index = loss.search_index(query)
    budget = index.budget(5, 0.9)
    with torch.no_grad():
        loss.linear.weight.data = loss.linear.weight.data.clone()
    assert loss.to(DEVICE).search(query[:20].to(DEVICE), 5).certified.all()
    moved = xs._core.hooks.search_indices[loss]
    assert all(
        torch.equal(one.to(DEVICE), other) for one, other in zip(index.tensors, moved.tensors))
    assert moved.weight.data_ptr() == loss.linear.weight.data_ptr() and moved.budget(
        5, 0.9) == budget and index.weight.device.type == "cpu"
    for change in (lambda old: old.mul_(2),
                   lambda old: None):  # a change before the move, and during it
        loss = xs.LinearCrossEntropyLoss(4, 200)
        index = loss.search_index()
        with torch.no_grad():
            change(loss.linear.weight)
            loss.linear.weight.data = -loss.linear.weight.data
        found = loss.to(DEVICE).search(query[:20].to(DEVICE), 5)
        assert torch.equal(found.ids.cpu(),
                           expected(query[:20],
                                    loss.linear.weight.detach().cpu(), None, 5)[1])


def test_search_index_to_moves_all_its_tensors():
    """A moved index searches a copy of the table."""
    _, weight, bias = problem(1, 4, 300)
    index = xs.SearchIndex(weight, bias)
    query = torch.randn(260, 4)
    index.calibrate(query)
    there = index.to("meta")
    assert all(tensor.is_meta for tensor in (*there.tensors, there.weight, there.bias,
                                             there._queries)) and there.num_cells == index.num_cells
    found = index.to(DEVICE).search(query.to(DEVICE), 4, None, None)
    assert torch.equal(found.ids.cpu(), index.search(query, 4, None, None).ids)
    assert not any(tensor.is_meta
                   for tensor in (*index.tensors, index.weight, copy.copy(index)._queries))


def test_search_can_be_traced_with_fake_cuda_tensors():
    with FakeTensorMode():
        query, weight, bias = (torch.empty(shape, device="cuda")
                               for shape in ((6, 5), (200, 5), (200,)))
        index = ops.midx_search_index(weight, bias, None, None, 2, torch.tensor(0))
        found = ops.search_topk(query, weight, bias, index, 3, "")
        assert all(tensor.device.type == "cuda"
                   for tensor in (*index, *found,
                                  ops.search_budget(query, weight, bias, index, 3, 0.9)))
        assert [tuple(tensor.shape) for tensor in found] == [(6, 3), (6, 3), (6,), (6,)]
        with pytest.raises(Exception, match="cuda.*cpu|cpu.*cuda"):
            ops.search_topk(query, weight, bias,
                            [torch.empty_like(tensor, device="cpu") for tensor in index], 3, "")
