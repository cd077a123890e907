"""Single kernels: scores of private candidates and their gradients, row optimizers."""

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs

from .bench import Bench


def part_gathers(bench: Bench) -> None:
    """Measures the scores of 20 private candidates per query, almost all of them distinct."""
    for dtype in (torch.float32, torch.bfloat16):
        input = bench.batch(dtype=dtype)[0].detach()
        weight = bench.table(bench.classes, bench.width).to(dtype)
        shape = (bench.queries, bench.private)
        ids = torch.randint(bench.classes, shape, device=bench.device)
        pairs, row = ids.numel(), input[0].nbytes

        def forward() -> Tensor:
            return torch.ops.xsoftmax.candidate_scores(input, weight, None, ids, None)

        grad = torch.randn_like(forward())

        def backward(*mask: bool) -> Callable[[], object]:
            operator = torch.ops.xsoftmax.candidate_scores_backward
            return lambda: operator(grad, input, weight, ids, None, list(mask))

        least = (pairs + bench.queries) * row  # bytes of rows; ids and scores are added below
        cases = {
            "gather-dot, 20 private": (forward, 12, "70"),
            "its backward pass, input": (backward(True, False, False), 12, "70"),
            "its backward pass, rows, including the sort of ids": (backward(False, True,
                                                                            False), 20, "55")
        }
        seconds = bench.kernels({name: run for name, (run, _, _) in cases.items()})
        for name, value in seconds.items():
            _, more, aim = cases[name]
            bench.share(f"{name}, {str(dtype)[6:]}", value, least + more * pairs, aim)


def part_optimizers(bench: Bench) -> None:
    """Measures optimizer steps with the gradient of a batch with 20 private samples."""
    count, row = bench.queries * (bench.private + 1), 4 * bench.width
    ids = torch.randint(bench.classes, (1, count), device=bench.device)
    values = torch.randn(count, bench.width, device=bench.device)
    grad = torch.sparse_coo_tensor(ids, values, (bench.classes, bench.width),
                                   check_invariants=False)
    grouped = grad.coalesce()
    rows = grouped._nnz()
    # Optimizer, options, and the rows read or written per row of the gradient.
    made = {
        "RowAdam": (xs.optim.RowAdam, {}, 7), "RowAdagrad": (xs.optim.RowAdagrad, {}, 5),
        "RowSGD": (xs.optim.RowSGD, {}, 3),
        "RowAdagrad, row-wise": (xs.optim.RowAdagrad, dict(row_wise=True), 3),
        "SparseAdam": (torch.optim.SparseAdam, {}, 7)
    }

    def stepping(make: type, options: dict, gradient: Tensor) -> Callable[[], None]:
        parameter = nn.Parameter(bench.table(bench.classes, bench.width))
        optimizer = make([parameter], lr=1e-3, **options)

        def step() -> None:
            parameter.grad = gradient
            optimizer.step()

        return step

    def times(gradient: Tensor) -> dict:
        return bench.kernels(
            {name: stepping(make, options, gradient)
             for name, (make, options, _) in made.items()})

    bench.ratio("RowAdam / SparseAdam, gradient as the backward pass returns it", times(grad),
                "RowAdam", "SparseAdam", "0.15")
    alone = times(grouped)
    bench.ratio("RowAdam / SparseAdam, gradient coalesced", alone, "RowAdam", "SparseAdam")
    for name, value in alone.items():
        bench.share(f"{name}, gradient coalesced", value, rows * row * made[name][2],
                    "70" if name == "RowAdam" else None)
    bench.release()
    look_up(bench, ids[0])


def look_up(bench: Bench, ids: Tensor) -> None:
    """Measures look-up, backward pass and optimizer, compared with FBGEMM, which fuses the last
    two."""
    upstream = torch.randn(len(ids), bench.width, device=bench.device)
    weight = nn.Parameter(bench.table(bench.classes, bench.width))
    optimizer = xs.optim.RowAdagrad([weight], row_wise=True)

    def ours() -> None:
        weight.grad = None
        F.embedding(ids, weight, sparse=True).backward(upstream)
        optimizer.step()

    def fbgemm() -> Callable[[], None]:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        table = (bench.classes, bench.width, EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
        module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [table], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, pooling_mode=PoolingMode.NONE,
            device=bench.device)
        offsets = torch.arange(len(ids) + 1, device=bench.device)
        return lambda: module(ids, offsets).backward(upstream)

    name = "nn.functional.embedding + RowAdagrad"
    seconds = bench.steps({name: ours} | bench.attempt("FBGEMM TBE", fbgemm))
    bench.ratio("look-up, backward, row-wise Adagrad / FBGEMM TBE", seconds, name, "FBGEMM TBE")
