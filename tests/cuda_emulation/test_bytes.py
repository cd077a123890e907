"""Bytes of global memory that kernels read and write, compared with the minimum.

As a program it prints the table:

    export PYTHONPATH=tests/cuda_emulation
    export XSOFTMAX_EMULATE_LIBRARY=$PWD/build/emulate/libxsoftmax_emulated.so
    python tests/cuda_emulation/test_bytes.py

The emulator counts sectors of 32 bytes, the unit that a GPU moves (emulator/traffic.h), in two
ways:

    memory   each sector once per launch that reads it and once per launch that writes it: the
             traffic between memory and an L2 that holds everything
    blocks   each sector once per block that reads it and once per block that writes it: the
             traffic between L2 and the multiprocessors

The minimum is a formula of the operator's shape, not of the kernel: every byte that the operator
needs or produces, once. In `blocks`, gathered data counts once per request. A random look-up counts
as one sector.

To add a kernel, add a function that returns a Case; those of small kernels are in step_bytes.py,
those of trees and of top-k in tree_bytes.py.
"""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

import step_bytes
import tree_bytes  # noqa: F401
import xsoftmax
import xsoftmax as xs
from byte_case import CASES, LIMIT, SECTOR, Case, case, ops

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from host_cost import sampled_step

# --------------------------------------------------------------------------------------------------
# gather-dot, backward


def rows_of(dtype=torch.float32, queries=128, width=20, dim=256, classes=20_000):
    """Queries with private candidates without repeats, so that a row read twice is the kernel's
    doing."""
    torch.manual_seed(0)
    ids = torch.randperm(classes)[:queries * width].view(queries, width)
    return torch.randn(queries, dim).to(dtype), torch.randn(classes, dim).to(dtype), ids


def private_scores(dtype):
    input, weight, ids = rows_of(dtype)
    row, pairs = input[0].nbytes, ids.numel()
    return Case(lambda: ops.candidate_scores(input, weight, None, ids, None), "pair_scores_kernel",
                memory=(len(input) + pairs) * row + pairs * (8 + 4), shape="Q 128, 20 private, D "
                f"256, {str(dtype)[6:]}")


@case
def private_scores_float32():
    return private_scores(torch.float32)


@case
def private_scores_bfloat16():
    return private_scores(torch.bfloat16)


@case
def ragged_scores():
    input, weight, ids = rows_of()
    offsets = torch.arange(len(input) + 1) * ids.size(1)
    row, pairs = input[0].nbytes, ids.numel()
    return Case(lambda: ops.ragged_scores(input, weight, None, ids.flatten(), offsets),
                "pair_scores_kernel",
                memory=(len(input) + pairs) * row + pairs * (8 + 4) + offsets.nbytes,
                shape="Q 128, 20 pairs each, D 256, float32")


def backward(dtype, mask):
    input, weight, ids = rows_of(dtype)
    grad = torch.randn(ids.shape)
    return input, ids, grad, lambda: ops.candidate_scores_backward(grad, input, weight, ids, None,
                                                                   mask)


@case
def private_input_grad():
    input, ids, grad, call = backward(torch.float32, [True, False, False])
    row, pairs = input[0].nbytes, ids.numel()
    return Case(call, "pair_input_grad_kernel", memory=(pairs + len(input)) * row + pairs * (8 + 4),
                shape="Q 128, 20 private, D 256, float32")


def private_row_gradient(dtype):
    input, ids, grad, call = backward(dtype, [False, True, False])
    row, pairs = input[0].nbytes, ids.numel()
    made = pairs * (row + 8 + 8 + 4)  # rows; per pair class, position and coefficient
    return Case(call, "row_gradient_kernel", memory=len(input) * row + made,
                blocks=pairs * row + made, shape=f"Q 128, 20 private, D 256, {str(dtype)[6:]}")


@case
def private_row_gradient_float32():
    return private_row_gradient(torch.float32)


@case
def private_row_gradient_bfloat16():
    return private_row_gradient(torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# losses


def sampled_loss(dtype, kernel="warp_queries_kernel", width=20):
    input, weight, ids = rows_of(dtype, width=width)
    queries, width = ids.shape
    target, options = torch.arange(
        queries) + 10_000, "estimator=sampled_softmax,remove_accidental_hits=true"
    count = torch.zeros(ids.shape)
    sets = [ids, None, count, None, torch.zeros(queries)]
    row, pairs = input[0].nbytes, queries * (width + 1)
    # gradient of the input; row ids and gradients of scores; losses
    made = queries * input.size(1) * 4 + pairs * (8 + 4) + queries * 4
    # rows and queries; ids and counts; targets and their counts
    read = (pairs + queries) * row + queries * width * (8 + 4) + queries * (8 + 4)
    return Case(
        lambda: ops.linear_candidate_loss_forward(input, weight, None, target, sets, [0, 0],
                                                  options, [True, True]), kernel,
        memory=read + made, shape=f"Q 128, {width} private, D 256, {str(dtype)[6:]}, with "
        "its gradients")


@case
def sampled_softmax_float32():
    return sampled_loss(torch.float32)


@case
def sampled_softmax_of_many():
    return sampled_loss(torch.float32, "block_queries_kernel", width=64)


@case
def sampled_softmax_bfloat16():
    return sampled_loss(torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# optimizers


def optimizer_step(make, state, dtype=torch.float32, numbers=0):
    """A step on 1,024 distinct random rows of a table. `state`: state elements per element of the
    parameter; `numbers`: state numbers per row."""
    torch.manual_seed(0)
    rows, dim = 1024, 256
    param = torch.nn.Parameter(torch.randn(20_000, dim).to(dtype))
    optimizer = make([param])
    param.grad = torch.sparse_coo_tensor(
        torch.randperm(len(param))[None, :rows],
        torch.randn(rows, dim).to(dtype), param.shape, check_invariants=False)
    optimizer.step()
    row = dim * param.element_size()
    return Case(optimizer.step, "row_update_kernel",
                memory=rows * (3 * row + 2 * state * dim * 4 + 2 * numbers * SECTOR + 16),
                shape=f"1,024 rows, D 256, {str(dtype)[6:]}")


@case
def row_sgd():
    return optimizer_step(lambda params: xsoftmax.optim.RowSGD(params, lr=0.1), 0)


@case
def row_sgd_momentum():
    return optimizer_step(lambda params: xsoftmax.optim.RowSGD(params, lr=0.1, momentum=0.9), 1,
                          numbers=1)


@case
def row_adagrad():
    return optimizer_step(lambda params: xsoftmax.optim.RowAdagrad(params, lr=0.1), 1)


@case
def row_adagrad_row_wise():
    return optimizer_step(lambda params: xsoftmax.optim.RowAdagrad(params, lr=0.1, row_wise=True),
                          0, numbers=1)


@case
def row_adam():
    return optimizer_step(lambda params: xsoftmax.optim.RowAdam(params, lr=0.1), 2, numbers=1)


@case
def row_adam_bfloat16():
    return optimizer_step(lambda params: xsoftmax.optim.RowAdam(params, lr=0.1), 2, torch.bfloat16,
                          numbers=1)


@case
def row_adam_of_terms():
    """A gradient kept as terms: rows of 64 queries, each with 16 of 1,024 terms."""
    torch.manual_seed(0)
    rows, dim, queries = 1024, 256, 64
    param, options = torch.randn(20_000, dim), "lr=0.1,beta1=0.9,beta2=0.999,eps=1e-8"
    state = ops.row_adam_state(param, True, options)
    grad, ids = torch.randn(queries, 16), torch.randperm(len(param))[:rows].view(queries, 16)
    terms, input, row = ops.row_terms(grad, ids, None, len(param)), torch.randn(queries,
                                                                                dim), dim * 4
    written = rows * (2 * row + 4 * row + 2 * SECTOR + 16)
    return Case(lambda: ops.row_adam_terms_(param, state, *terms, input, options),
                "row_update_kernel", memory=written + queries * row, blocks=written + rows * row,
                shape="1,024 terms of 64 queries, D 256, float32")


# --------------------------------------------------------------------------------------------------
# exact loss


def exact_gradients(dtype):
    """Replaces the products of 128 queries with 4,096 classes by their gradients: each product is
    read and its gradient written."""
    torch.manual_seed(0)
    queries, classes, dim = 128, 4096, 16
    input, weight = torch.randn(queries, dim).to(dtype), torch.randn(classes, dim).to(dtype)
    grad, target = torch.full((queries,), 1 / queries), torch.randint(classes, (queries,))
    return Case(
        lambda: ops.linear_cross_entropy_with_gradients(grad, input, weight, None, target, None, "",
                                                        [True, True, False]), "slope_kernel",
        memory=queries * classes * (4 + input.element_size()), shape="Q 128, N 4,096, "
        f"{str(dtype)[6:]}")


@case
def exact_gradients_float32():
    return exact_gradients(torch.float32)


@case
def exact_gradients_bfloat16():
    return exact_gradients(torch.bfloat16)


# --------------------------------------------------------------------------------------------------
# draws

DRAWS = dict(num_queries=512, num_samples=64)
DRAWN = "512 x 64 private"
WRITTEN = 8 * 512 * 64


def seed():
    return torch.tensor(7)


@case
def uniform_draws():
    return Case(lambda: ops.uniform_sample(seed(), 0, 1_000_000, distinct=False, **DRAWS),
                "draw_kernel", memory=WRITTEN, shape=f"{DRAWN} of 1M")


@case
def uniform_distinct_draws():
    return Case(lambda: ops.uniform_sample(seed(), 0, 1_000_000, distinct=True, **DRAWS),
                "draw_kernel", memory=WRITTEN, shape=f"{DRAWN} of 1M")


@case
def log_uniform_counts():
    ids = torch.randint(1_000_000, (400, 20))
    return Case(lambda: ops.log_uniform_log_count(ids, 0, 1_000_000, 0.5),
                "log_uniform_count_kernel", memory=ids.numel() * (8 + 4), shape="400 x 20 ids")


@case
def log_uniform_draws():
    return Case(lambda: ops.log_uniform_sample(seed(), 0, 1_000_000, **DRAWS), "draw_kernel",
                memory=WRITTEN, shape=f"{DRAWN} of 1M")


@case
def alias_draws():
    classes = 1_000_000
    bins = ops.alias_table(1 / torch.arange(1, classes + 1, dtype=torch.float64))
    draws = 512 * 64
    # Expected number of distinct 32-byte sectors that the draws touch, with 16 bytes per entry:
    # draws are uniform over the bins.
    sectors = classes * 16 / SECTOR * (1 - math.exp(-draws / (classes * 16 / SECTOR)))
    return Case(lambda: ops.alias_sample(seed(), bins, **DRAWS, tail=[]), "draw_kernel",
                memory=WRITTEN + SECTOR * sectors, blocks=WRITTEN + SECTOR * draws,
                shape=f"{DRAWN} of 1M, Zipf")


@case
def midx_private_draws():
    torch.manual_seed(0)
    queries, samples, classes, dim, codewords = 128, 64, 20_000, 32, 64
    options = (f"num_samples={samples},codewords={codewords},bias=false,iterations=1,"
               "train_points=2000,distinct=false")
    *tables, step = ops.midx_index("Sampler", classes, dim, torch.empty(0, dtype=torch.int64),
                                   options)
    ops.midx_refresh_(torch.randn(classes, dim), None, step, tables, options)
    input, index = torch.randn(queries, dim), [*tables, step]
    [cell] = [table for table in tables if table.dtype == torch.int32 and table.shape == (classes,)]
    [place] = [
        table.argsort()
        for table in tables if table.dtype == torch.int64 and table.shape == (classes,)
    ]

    def draw():
        return ops.midx_sample(seed(), input, None, index, options)

    ids = draw()[0]
    cells, query = cell[ids].long(), torch.arange(queries)[:, None].expand(ids.shape)
    first, second = cells // codewords, cells % codewords

    def sectors(numbers):  # numbers of 8 bytes, requested once per query
        return SECTOR * torch.stack([query, numbers * 8 // SECTOR]).flatten(1).unique(dim=1).size(1)

    def sectors_of_all(numbers):
        return SECTOR * (numbers * 8 // SECTOR).unique().numel()

    # Per query: the shares of the first codewords, e^score of the second, log Z; for the drawn ones
    # the scores, and the weight of the first codeword. To find a second codeword, masses are read
    # up to it. A draw reads the bounds of a cell, and a class.
    distribution = queries * 8 * (2 * codewords +
                                  1) + 2 * sectors(first) + sectors(second) + ids.numel() * (8 + 4)
    masses = torch.zeros(queries, codewords,
                         dtype=torch.int64).scatter_reduce(1, first, (second + 1) * 8, "amax")
    return Case(
        draw, "midx_private_kernel", memory=distribution + sectors_of_all(place[ids]) +
        sectors_of_all(cells) + int(masses.amax(0).sum()),
        blocks=distribution + sectors(place[ids]) + sectors(cells) + int(masses.sum()),
        shape=f"{queries} x {samples} private of {classes:,}, K {codewords}", limit=1.4,
        why="a warp searches 64 masses at a time, here a whole row, which is "
        "traffic between L2 and the multiprocessors; memory is read once")


@case
def systematic_draws():
    classes, samples = 1_000_000, 512
    weights = 1 / torch.arange(1, classes + 1, dtype=torch.float64)
    order, cumulative = ops.systematic_table(weights)
    return Case(
        lambda: ops.systematic_sample(seed(), weights, order, cumulative, None, samples, []),
        "shared_set_kernel", memory=samples * (8 + 2 * SECTOR), shape="512 shared of 1M, Zipf",
        limit=4, why="a class is found by a binary search, each step of which reads a sector; "
        "its latency matters, not its bytes")


# --------------------------------------------------------------------------------------------------
# search


def search(queries, kernel, memory, shape, classes=4096, dim=64):
    torch.manual_seed(0)
    input, weight = torch.randn(queries, dim), torch.randn(classes, dim)
    index = ops.search_index(weight, None, torch.zeros(classes, dtype=torch.int32), 1)
    return Case(lambda: ops.search_topk(input, weight, None, index, 10, ""), kernel, memory,
                shape=f"{shape}, {classes:,} rows, D {dim}, float32")


@case
def search_rounding():
    """Rows and their 16-bit copies; two bounds per row."""
    return search(16, "round_rows_kernel", memory=4096 * (64 * (4 + 2) + 2 * 4),
                  shape="products of 16 queries")


@case
def search_cells():
    """Codes, and the ids of a few classes: the first cells are enough."""
    return search(1, "first_cells_kernel", memory=4096 * 256, shape="1 query", dim=256)


# --------------------------------------------------------------------------------------------------
# measure


@pytest.fixture(scope="module", autouse=True)
def emulator():
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()


def measure(made: Case) -> dict:
    """Returns the bytes, and their ratio to the minimum."""
    emulator = torch.ops.cuda_emulator
    emulator.forget()
    emulator.count_bytes(True)
    try:
        made.call()
    finally:
        emulator.count_bytes(False)
    wanted = made.kernel.split(", ")
    found = {
        name: numbers
        for name, numbers in emulator.launched().items() if name.partition("<")[0] in wanted
    }
    assert {name.partition("<")[0]
            for name in found
            } == set(wanted), f"expected launches of {made.kernel}, got {list(emulator.launched())}"
    *_, block_read, block_written, read, written = (sum(numbers)
                                                    for numbers in zip(*found.values()))
    blocks = made.memory if made.blocks is None else made.blocks
    return {
        "kernel": made.kernel, "shape": made.shape, "memory": read + written, "least": made.memory,
        "memory / least": (read + written) / made.memory,
        "blocks / least": (block_read + block_written) / blocks
    }


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_near_the_least_possible(name):
    made = CASES[name]()
    found = measure(made)
    worst = max(found["memory / least"], found["blocks / least"])
    wrong = "less than the least possible: the formula, or the counter, is wrong"
    assert found["memory / least"] > 0.95, wrong
    assert worst <= made.limit, found
    has_reason = made.limit == LIMIT or made.why and worst > LIMIT
    assert has_reason, "the reason for a higher limit is gone"


def exact_step():
    loss = xs.LinearCrossEntropyLoss(8, 64, bias=False, dtype=torch.float16)
    loss(torch.randn(4, 8, dtype=torch.float16, requires_grad=True), torch.arange(4)).backward()
    with torch.no_grad():
        loss(torch.randn(4, 8, dtype=torch.float16), torch.arange(4))


def lazy_step():
    loss = xs.SampledSoftmaxLoss(8, 1000,
                                 sampler=xs.samplers.LogUniformSampler(1000, 20, shared=False))
    optimizer = xs.optim.RowAdam(loss.parameters(), lazy_gradient=True)
    loss(torch.randn(4, 8, requires_grad=True), torch.arange(4)).backward()
    optimizer.step()


@pytest.mark.parametrize("make_step", [
    lambda: sampled_step(xs.samplers.UniformSampler(1000, 16)),
    lambda: sampled_step(xs.samplers.LogUniformSampler(1000, 20, shared=False)), lambda: lazy_step,
    lambda: exact_step
], ids=["shared", "private", "lazy", "exact"])
def test_the_kernels_of_a_step_have_cases(make_step):
    step = make_step()
    torch.ops.cuda_emulator.forget()
    torch.ops.cuda_emulator.let_host_read(False)
    try:
        step()
    finally:
        torch.ops.cuda_emulator.let_host_read(True)
    launched = {name.partition("<")[0] for name in torch.ops.cuda_emulator.launched()}
    known = {name for make in CASES.values() for name in make().kernel.split(", ")}
    assert len(launched) > 1 and launched <= known | set(step_bytes.EXEMPT)


def main():
    torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
    torch.ops.cuda_emulator.take_over()
    print("| kernel | case | shape | memory, MB | memory / minimum | blocks / minimum "
          "|\n|---|---|---|---|---|---|")
    reasons = []
    for name, make in CASES.items():
        made = make()
        found = measure(made)
        reasons += [f"- {name.replace('_', ' ')}: {made.why}"] if made.why else []
        print(f"| {made.kernel} | {name.replace('_', ' ')} | {made.shape} | "
              f"{found['memory'] / 1e6:.3g} | {found['memory / least']:.3f} | "
              f"{found['blocks / least']:.3f} |")
    if reasons:
        print(f"\nThese move more than {LIMIT} times the minimum:\n", *reasons, sep="\n")


if __name__ == "__main__":
    main()
