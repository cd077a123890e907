"""Measures training steps of an embedding table of hashed n-grams, with row optimizers and with
torch.optim.

    python benchmarks/embedding_table.py [--rows 1000000 10000000 100000000] [--folder FOLDER]
                                         [--threads 2] [--repeats 21] [--json [FILE]]

A batch is 4,096 positions of a text of words with Zipf frequencies. Its ids are hashes of the last
two and the last three words: 8,192 ids of a table [N, 64]. A step looks the rows up, computes the
gradient of a product, and updates the table; `nn.Embedding(..., sparse=True)` throughout, except
for AdamW, whose gradient is dense. FBGEMM's table batched embedding is a rival where the package
fbgemm-gpu-cpu is installed: row-wise Adagrad, in its backward pass. Each step has other words.
Prefetched: the step begins with `xs.tables.prefetch`. Bytes are those of table and state, by their
tensors. Times are medians. Tables of one N take turns in three groups, one after another: row-wise
Adagrad with and without prefetching, whose times show how a step grows with N; beside the rivals,
whose dense steps empty the cache; and, with --folder, in a file there, which takes the memory that
the others have freed.
"""

import argparse
import copy
import importlib.util
import statistics
import tempfile
from typing import Callable

import torch
from torch import Tensor, nn

import xsoftmax as xs
from common.records import add_json, figures_table, report, table
from common.timing import turns

WIDTH, POSITIONS, WORDS = 64, 4096, 50_000
ADAGRAD = "RowAdagrad, row-wise, bfloat16"
BESIDE = f"{ADAGRAD}, beside the next"
RIVALS = ("torch SparseAdam, float32", "torch AdamW, fused, float32",
          "FBGEMM row-wise Adagrad, float16", "FBGEMM row-wise Adagrad, float32")


def hashed(words: Tensor, order: int, rows: int) -> Tensor:
    """Returns ids in [0, rows) of the n-grams that end at each word of a text that is a circle."""
    total = torch.zeros_like(words)
    for back in range(order):
        total = (total ^ words.roll(back) + 1) * 0x9E3779B97F4A7C1 + order
    return (total ^ total >> 29) % rows


def batch(rows: int) -> Tensor:
    words = torch.exp(torch.rand(POSITIONS, dtype=torch.float64) * torch.tensor(WORDS).log())
    return torch.cat([hashed(words.long() - 1, order, rows) for order in (2, 3)])


class Training:
    def __init__(self, weight: nn.Parameter, make: Callable[[list[nn.Parameter]],
                                                            torch.optim.Optimizer], sparse: bool):
        self.embedding = nn.Embedding(*weight.shape, sparse=sparse, _weight=weight)
        self.optimizer = make([self.embedding.weight])
        self.rows, self.batches = len(weight), [batch(len(weight)) for _ in range(64)]
        self.steps, self.prefetch = 0, False

    def prefetching(self) -> "Training":
        """Returns a training of the same table that prefetches the rows of a batch."""
        other = copy.copy(self)
        other.prefetch, other.batches = True, [batch(self.rows) for _ in self.batches]
        return other

    def step(self) -> None:
        ids = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        if self.prefetch:
            xs.tables.prefetch(self.embedding.weight, ids)
        found = self.embedding(ids)
        found.backward(torch.full_like(found, 0.1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bytes_per_row(self) -> float:
        states = [
            value for state in self.optimizer.state.values()
            for value in state.values() if isinstance(value, Tensor)
        ]
        return sum(t.numel() * t.element_size()
                   for t in (self.embedding.weight, *states)) / self.rows


class FbgemmTraining:
    """FBGEMM's table, whose backward pass updates it."""
    def __init__(self, rows: int, precision: str):
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice, EmbeddingLocation, OptimType, SplitTableBatchedEmbeddingBagsCodegen)
        spec = rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU
        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [spec], optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01,
            weights_precision=SparseType(precision), pooling_mode=PoolingMode.SUM,
            stochastic_rounding=precision == "fp16")
        self.rows, self.batches = rows, [batch(rows) for _ in range(64)]
        self.offsets, self.steps = torch.arange(2 * POSITIONS + 1), 0

    def step(self) -> None:
        ids = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        found = self.table(ids, self.offsets)  # bags of one id
        found.backward(torch.full_like(found, 0.1))

    def bytes_per_row(self) -> float:
        tensors = [*self.table.parameters(), *self.table.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors) / self.rows


def in_memory(rows: int, dtype: torch.dtype) -> nn.Parameter:
    return xs.tables.in_memory(rows, WIDTH, dtype, init=lambda table: table.fill_(0.01))


def adagrad(weight: nn.Parameter) -> Training:
    return Training(
        weight, lambda p: xs.optim.RowAdagrad(p, lr=0.01, row_wise=True, stochastic_rounding=True),
        True)


def by_size(rows: int) -> dict[str, Training]:
    made = adagrad(in_memory(rows, torch.bfloat16))
    return {ADAGRAD: made, f"{ADAGRAD}, prefetched": made.prefetching()}


def beside_rivals(rows: int) -> dict[str, Training | FbgemmTraining]:
    """Returns the trainings that fit in about 20 GB together."""
    short, full = torch.bfloat16, torch.float32
    optim, made = xs.optim, {}
    if rows <= 20_000_000:
        made[BESIDE] = adagrad(in_memory(rows, short))
    if importlib.util.find_spec("fbgemm_gpu") is not None and rows <= 20_000_000:
        made["FBGEMM row-wise Adagrad, float16"] = FbgemmTraining(rows, "fp16")
        made["FBGEMM row-wise Adagrad, float32"] = FbgemmTraining(rows, "fp32")
    if rows <= 20_000_000:
        made["RowAdam, row-wise, bfloat16"] = Training(
            in_memory(rows, short), lambda p: optim.RowAdam(p, lr=1e-3, row_wise=True, state_dtype=
                                                            short, stochastic_rounding=True), True)
    if rows <= 1_000_000:
        made["RowAdam, float32"] = Training(in_memory(rows, full),
                                            lambda p: optim.RowAdam(p, lr=1e-3), True)
        made["torch SparseAdam, float32"] = Training(in_memory(rows, full),
                                                     lambda p: torch.optim.SparseAdam(p, lr=1e-3),
                                                     True)
        made["torch AdamW, fused, float32"] = Training(
            in_memory(rows, full), lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), False)
    return made


def in_file(rows: int, folder: str) -> dict[str, Training]:
    weight = xs.tables.mapped(f"{folder}/{rows}.safetensors", rows, WIDTH, torch.bfloat16,
                              init=None, progress=False)
    return {f"{ADAGRAD}, in a file": adagrad(weight)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--folder", help="for a table in a file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, figures, medians = [], [], {}
    for count in args.rows:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            groups = [by_size, beside_rivals
                      ] + ([lambda rows, place=folder: in_file(rows, place)] if args.folder else [])
            for make in groups:
                made = make(count)
                seconds = turns({name: one.step for name, one in made.items()}, args.repeats, 5)
                for name, values in seconds.items():
                    medians[count, name] = statistics.median(values)
                    rows.append({
                        "rows": f"{count:,}", "table and optimizer": name,
                        "step": f"{1e3 * medians[count, name]:.2f} ms",
                        "bytes per row": f"{made[name].bytes_per_row():.0f}"
                    })
                made.clear()
    smallest, largest = min(args.rows), max(args.rows)
    for (count, name), value in medians.items():
        if count == smallest and name.startswith("Row"):
            for other in RIVALS if name.startswith("RowAdam") or name == BESIDE else ():
                if (count, other) in medians:
                    figures.append({
                        "figure": f"{count:,} rows: {name} / {other}",
                        "value": value / medians[count, other]
                    })
            if count < largest and (largest, name) in medians:
                figures.append({
                    "figure": f"{name}: {largest:,} rows / {smallest:,}",
                    "value": medians[largest, name] / value
                })
    report(args, __doc__,
           question="What does a step cost over an embedding table of 100,000,000 rows?",
           against="torch.optim.SparseAdam, fused AdamW and FBGEMM",
           tables=[table(rows, columns=list(rows[0])),
                   figures_table(figures)], figures=figures)


if __name__ == "__main__":
    main()
