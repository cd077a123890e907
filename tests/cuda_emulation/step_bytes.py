"""Bytes of the small kernels of a training step, for test_bytes.py."""

import torch

import xsoftmax as xs
from byte_case import SECTOR, Case, case, ops

# Kernels of a step that have no case, and why.
EXEMPT = {
    "advance_kernel": "a few numbers per step, in one block",
    "clear_pending_kernel": "a few numbers, when an optimizer is flushed",
    "chunk_sums_kernel": "only ids that occur more than 32 times: a thirty-second of their rows",
    "join_chunks_kernel": "only ids that cross a chunk of 32: at most a sixteenth of the rows",
    "half_scale_kernel": "the gradients of the losses and the class weights, in one block",
    "radix_sort_pairs": "CUB's",
}


@case
def counted_draws():
    queries, samples = 512, 64
    sampler = xs.samplers.UniformSampler(1_000_000, samples, shared=False)
    input, target = torch.zeros(queries, 1), torch.arange(queries)
    draws = queries * samples
    return Case(lambda: sampler.sample(input, target), "counted_draws_kernel",
                memory=draws * (8 + 4) + queries * (8 + 4),
                shape="512 x 64 private of 1M, and targets")


@case
def ranked_draws():
    sampler = xs.samplers.UniformSampler(1_000_000, 256)
    input, target = torch.zeros(4, 1), torch.arange(4)
    return Case(lambda: sampler.sample(input, target), "rank_ids_kernel", memory=256 * (8 + 8),
                shape="256 shared")


def terms_of(pairs: int, width: int = 16):
    """Returns a call that sorts ids and gathers their coefficients."""
    torch.manual_seed(0)
    ids = torch.randint(100_000, (pairs // width, width))
    grad = torch.randn(ids.shape)
    return lambda: ops.row_terms(grad, ids, None, 100_000)


@case
def sorted_few_ids():
    return Case(terms_of(9_216), "sort_ids_kernel", memory=9_216 * (8 + 4 + 4),
                shape="9,216 ids of 100,000")


@case
def copied_ids():
    return Case(terms_of(32_768), "take_ids_kernel", memory=32_768 * (8 + 4 + 4),
                shape="32,768 ids")


@case
def row_terms():
    pairs = 16_384
    sorted_pairs, results = pairs * (4 + 4), pairs * (8 + 4 + 4)
    return Case(terms_of(pairs), "row_terms_kernel", memory=sorted_pairs + pairs * 4 + results,
                blocks=sorted_pairs + pairs * SECTOR + results, shape="16,384 pairs")


@case
def mean_shares():
    target = torch.arange(4096)
    return Case(lambda: ops.mean_shares(target, -100, torch.float32), "mean_shares_kernel",
                memory=4096 * (8 + 4), blocks=4096 * (8 + 4), shape="4,096 queries")


@case
def scaled_loss_gradients():
    queries, dim = 128, 256
    input, grad_input = torch.randn(2, queries, dim)
    grad, target = torch.tensor(0.5), torch.arange(queries)
    return Case(
        lambda: ops.scale_loss_gradients(grad, target, -100, grad_input, input.new_empty(
            0, 8), input), "scale_loss_gradients_kernel", memory=4 * input.nbytes + queries * 8,
        shape="Q 128, D 256, float32, and the queries")


@case
def flushed_rows():
    """All rows of a table have pending updates."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1024, 256))
    optimizer = xs.optim.RowAdam([param])
    for rows in (1024, 1):
        param.grad = torch.sparse_coo_tensor(
            torch.arange(rows)[None], torch.randn(rows, 256), param.shape, check_invariants=False)
        optimizer.step()
    return Case(optimizer.flush, "catch_up_kernel", memory=1023 * (4 * 1024 + 4),
                shape="1,023 rows, D 256, float32")


@case
def exact_losses():
    torch.manual_seed(0)
    queries, classes = 128, 4096
    input, weight = torch.randn(queries, 16), torch.randn(classes, 16)
    target = torch.randint(classes, (queries,))
    return Case(
        lambda: ops.linear_cross_entropy_forward(input, weight, None, target, None, "", False),
        "loss_kernel", memory=queries * (classes * 4 + 8 + 3 * 4), shape="Q 128, N 4,096, float32")


@case
def norm_of_rows():
    torch.manual_seed(0)
    rows, values = torch.randperm(20_000)[:1024], torch.randn(1024, 256)
    return Case(lambda: ops.row_norm(rows, values, 2.0), "norm_kernel",
                memory=values.nbytes + 1024 * (4 + 4), shape="1,024 rows, D 256, float32")


@case
def midx_codes():
    """Products with all codewords are read, and rows; codes and errors are written. The terms of
    the second codewords depend on the first one."""
    torch.manual_seed(0)
    rows, codewords = torch.randn(4096, 64), torch.randn(2, 64, 32)
    moved = 4096 * (2 * 64 * 4 + 64 * 4 + 4 + 4)
    return Case(lambda: ops.midx_encode(rows, *codewords), "encode_kernel", memory=moved,
                blocks=moved + 4096 * 64 * 4, shape="4,096 rows, D 64, K 64")
