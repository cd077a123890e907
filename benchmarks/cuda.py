"""Everything there is to know of xsoftmax on a GPU, in one command of under nine minutes: correctness first, then the figures, as a table and JSON.

    python benchmarks/cuda.py [--output cuda.json] [--only tests,shared,...] [--minutes 9] [--device cuda] [--tiny]

Needs a CUDA build of torch and of xsoftmax. Each part runs in a process of its own, so that one that fails takes nothing else along: what failed, what
is not installed and what there was no time for are rows with the reason. `--device cpu --tiny` runs every part on small shapes, to try the program.

Times are medians, by CUDA events, of runs that take turns. A step is timed from an idle device on, with all that the host does for it; a kernel behind a
write of 1 GiB, which empties the cache and lets the host run ahead. Bytes are those that must move at least, against the peak of the device's memory.
Rivals: what a good PyTorch user writes (output_layer.py) with torch.optim.SparseAdam; the method of Partial FC; and, where they are installed,
torch.nn.LinearCrossEntropyLoss, Liger, Cut Cross-Entropy and FBGEMM's table-batched embeddings.
"""

import os
import sys

# torch looks for NVIDIA's package of the name cuda, which must not find this file, nor be hidden by it.
if __name__ != "__main__":
    raise ImportError("benchmarks/cuda.py is a program, and no package")
FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path) != FOLDER] + [FOLDER]

import argparse
import functools
import gc
import json
import math
import signal
import statistics
import subprocess
import time
import traceback
from pathlib import Path
from typing import Callable, Dict, List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from output_layer import NaiveSampled
from timing import print_table

ROOT = Path(__file__).resolve().parents[1]
HAS_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("xsoftmax::candidate_scores", "CUDA")
TEST_SECONDS = 220  # of the tests of the device: the rest is for figures
MARK = "cuda.py row: "  # before each row that a part's process hands over
FULL = dict(classes=1_000_000, many=100_000_000, exact_classes=131_072, width=256, queries=8192, shared=512, private=20, codewords=64, midx=64,
            index_width=128, tree_queries=256, repeats=15, flush=1 << 30)
TINY = dict(classes=3000, many=5000, exact_classes=1000, width=16, queries=32, shared=64, private=4, codewords=4, midx=6, index_width=8, tree_queries=16,
            repeats=2, flush=1 << 20)
PEAK = {"GH200": 4.0e12, "H200": 4.8e12, "H100": 3.35e12, "B200": 8e12, "A100": 2.0e12, "L40": 0.864e12}  # bytes a second, of data sheets

Runs = Dict[str, Callable[[], object]]


class Bench:
    """Sizes and times of one process, which hands over each row when it is found."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.cuda, self.tiny = torch.device(device), device.startswith("cuda"), tiny
        self.__dict__.update(TINY if tiny else FULL)

    # ---- rows

    def row(self, figure: str, value: Optional[float] = None, unit: str = "", aim: Optional[str] = None, detail: str = "") -> None:
        print(MARK + json.dumps({"figure": figure, "value": value, "unit": unit, "aim": aim, "detail": detail}), flush=True)

    def ratio(self, figure: str, seconds: Dict[str, float], ours: str, rival: str, aim: Optional[str] = None) -> None:
        detail = ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in seconds.items())
        if ours in seconds and rival in seconds:
            self.row(figure, seconds[ours] / seconds[rival], "", aim, detail)
        else:
            self.row(figure, None, "", aim, "not measured: " + ", ".join({ours, rival} - set(seconds)) + " failed. " + detail)

    def share(self, figure: str, seconds: float, bytes_: float, aim: Optional[str] = None) -> None:
        """What of the memory's peak a run reaches."""
        rate = bytes_ / seconds
        self.row(figure, 100 * rate / self.peak(), "% of peak", aim, f"{1e6 * seconds:.4g} us, {rate / 1e9:.4g} GB/s")

    @functools.lru_cache  # noqa: B019 (there is one)
    def peak(self) -> float:
        name = torch.cuda.get_device_name() if self.cuda else ""
        return next((rate for part, rate in PEAK.items() if part in name), None) or self.copy_rate()

    def copy_rate(self) -> float:
        """Bytes a second of a large copy: what a kernel can reach, and the peak of a device that is not listed."""
        source = torch.empty(self.flush // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.kernels({"copy": lambda: target.copy_(source)})["copy"]

    # ---- times

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _median(self, runs: Runs, before: Callable[[], None], repeats: int) -> Dict[str, float]:
        """Median seconds of each, in turns. A run that fails is left out, with a row that says why."""
        working = {}
        for name, run in runs.items():
            try:
                run(), run()
                self.synchronize()
                working[name] = run
            except Exception as error:
                self.synchronize()  # raises where the device is lost: nothing after it would mean anything
                self.row(f"(run of {name})", detail=reason(error))
        seconds: Dict[str, List[float]] = {name: [] for name in working}
        gc.collect()
        for repeat in range(repeats + 1):
            for name, run in working.items():
                before()
                if self.cuda:
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    run()
                    end.record()
                    end.synchronize()
                    elapsed = start.elapsed_time(end) / 1e3
                else:
                    begin = time.perf_counter()
                    run()
                    elapsed = time.perf_counter() - begin
                if repeat > 0:
                    seconds[name].append(elapsed)
        return {name: statistics.median(values) for name, values in seconds.items()}

    def steps(self, runs: Runs, repeats: Optional[int] = None) -> Dict[str, float]:
        return self._median(runs, self.synchronize, repeats or self.repeats)

    def kernels(self, runs: Runs) -> Dict[str, float]:
        flushed = torch.empty(self.flush, dtype=torch.uint8, device=self.device)

        def before() -> None:
            self.synchronize()
            flushed.zero_()
        return self._median(runs, before, self.repeats)

    def peak_memory(self, run: Callable[[], object]) -> Optional[float]:
        """MB that a run takes beside what is there."""
        if not self.cuda:
            return None
        run()
        gc.collect()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def memory(self, figure: str, name: str, run: Callable[[], object]) -> None:
        """A row of it, or of why there is none."""
        try:
            if (value := self.peak_memory(run)) is not None:
                self.row(f"{figure}, {name}", value, "MB")
        except Exception as error:
            self.synchronize()  # raises where the device is lost
            self.row(f"({figure}, {name})", detail=reason(error))

    def graphed(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step captured in a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except Exception:  # the generator may not know that the capture has ended
            torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
            raise

        def replay(step=step) -> None:  # the step is held, for its tables, states and inputs lie where the graph reads them
            graph.replay()
        return replay

    # ---- data

    def batch(self, queries: Optional[int] = None, classes: Optional[int] = None, dtype=torch.float32):
        queries, classes = queries or self.queries, classes or self.classes
        return (torch.randn(queries, self.width, device=self.device, dtype=dtype, requires_grad=True),
                torch.randint(classes, (queries,), device=self.device))

    def table(self, classes: int, width: int) -> Tensor:
        return torch.empty(classes, width, device=self.device).uniform_(-0.05, 0.05)


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def training_step(call: Callable[[], Tensor], input: Tensor, parameters, optimizer=None) -> Callable[[], None]:
    parameters = list(parameters)

    def step() -> None:
        input.grad = None
        for parameter in parameters:
            parameter.grad = None
        call().backward()
        if optimizer is not None:
            optimizer.step()
    return step


# ------------------------------------------------------------------------------------------------------------------ sampled losses

def our_loss(bench: Bench, num_samples: int, shared: bool, **options) -> xs.SampledSoftmaxLoss:
    return xs.SampledSoftmaxLoss(bench.width, bench.classes, sampler="uniform", num_samples=num_samples, shared=shared, device=bench.device, **options)


class PartialFC(nn.Module):
    """Sampled by the method of Partial FC: the batch's classes and random others, in all `num_samples`, with a softmax over those. It draws by sorting a
    random number for every class."""

    def __init__(self, table: Tensor, num_samples: int) -> None:
        super().__init__()
        self.weight, self.num_samples = nn.Parameter(table), num_samples

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            key = torch.rand(len(self.weight), device=target.device)
            key[target] = 2.0
            ids = key.topk(self.num_samples).indices.sort().values
            place = torch.searchsorted(ids, target)
        return F.cross_entropy(input @ F.embedding(ids, self.weight, sparse=True).T, place)


def sampled_steps(bench: Bench, num_samples: int, shared: bool) -> Runs:
    """Whole steps of ours and of the naive rival, draws included."""
    input, target = bench.batch()
    ours = our_loss(bench, num_samples, shared)
    naive = NaiveSampled(bench.table(bench.classes, bench.width))
    log_count = torch.tensor(math.log(num_samples / bench.classes), device=bench.device)
    shape = (num_samples,) if shared else (bench.queries, num_samples)
    rival = naive.shared if shared else naive.private

    def naive_loss() -> Tensor:
        return rival(input, target, torch.randint(bench.classes, shape, device=bench.device), log_count)

    runs = {"xsoftmax": training_step(lambda: ours(input, target), input, ours.parameters(), xs.optim.RowAdam(ours.parameters())),
            "naive": training_step(naive_loss, input, naive.parameters(), torch.optim.SparseAdam(naive.parameters())),
            "xsoftmax, no optimizer": training_step(lambda: ours(input, target), input, ours.parameters()),
            "naive, no optimizer": training_step(naive_loss, input, naive.parameters())}
    return runs


def captured_step(bench: Bench, num_samples: int, shared: bool, eager: Dict[str, float]) -> None:
    """Ours as a CUDA graph, beside the naive one of the eager steps."""
    def make() -> Callable[[], None]:
        (input, target), loss = bench.batch(), our_loss(bench, num_samples, shared)
        return bench.graphed(training_step(lambda: loss(input, target), input, loss.parameters(), xs.optim.RowAdam(loss.parameters())))
    if bench.cuda:
        name = "xsoftmax, as a CUDA graph"
        bench.ratio(f"the same step, {name} / naive with SparseAdam", {**bench.steps(attempt(bench, name, make)),
                                                                       **{key: value for key, value in eager.items() if key == "naive"}},
                    name, "naive")


def attempt(bench: Bench, name: str, make: Callable[[], Callable[[], object]]) -> Runs:
    """The run that `make` returns, or a row that says why there is none."""
    try:
        return {name: make()}
    except Exception as error:
        bench.row(f"(run of {name})", detail=reason(error))
        return {}


def part_shared(bench: Bench) -> None:
    runs = sampled_steps(bench, bench.shared, shared=True)
    input, target = bench.batch()
    partial = PartialFC(bench.table(bench.classes, bench.width), min(bench.classes, bench.queries + bench.shared))
    runs["Partial FC"] = training_step(lambda: partial(input, target), input, partial.parameters(), torch.optim.SparseAdam(partial.parameters()))
    seconds = bench.steps(runs)
    bench.ratio("512 shared, N 1M, D 256, Q 8,192: step / naive with SparseAdam", seconds, "xsoftmax", "naive", "0.35")
    bench.ratio("the same without optimizers", seconds, "xsoftmax, no optimizer", "naive, no optimizer")
    bench.ratio("the same step / Partial FC", seconds, "xsoftmax", "Partial FC")
    for name in ("xsoftmax", "naive"):
        if name in seconds:
            bench.memory("the same: memory of a step beside table and state", name, runs[name])
    captured_step(bench, bench.shared, True, seconds)


def part_private(bench: Bench) -> None:
    seconds = bench.steps(sampled_steps(bench, bench.private, shared=False))
    bench.ratio("20 private, N 1M, D 256, Q 8,192: step / naive with SparseAdam", seconds, "xsoftmax", "naive", "0.2")
    bench.ratio("the same without optimizers", seconds, "xsoftmax, no optimizer", "naive, no optimizer")
    captured_step(bench, bench.private, False, seconds)


def part_gathers(bench: Bench) -> None:
    """The kernels of scores alone, 20 private candidates a query, hardly a class twice."""
    for dtype in (torch.float32, torch.bfloat16):
        input, _ = bench.batch(dtype=dtype)
        input = input.detach()
        weight = bench.table(bench.classes, bench.width).to(dtype)
        ids = torch.randint(bench.classes, (bench.queries, bench.private), device=bench.device)
        pairs, row = ids.numel(), input[0].nbytes
        scores = torch.ops.xsoftmax.candidate_scores(input, weight, None, ids, None)
        grad = torch.randn_like(scores)

        def backward(*mask: bool):
            return lambda: torch.ops.xsoftmax.candidate_scores_backward(grad, input, weight, ids, None, list(mask))
        seconds = bench.kernels({"forward": lambda: torch.ops.xsoftmax.candidate_scores(input, weight, None, ids, None),
                                 "input": backward(True, False, False), "rows": backward(False, True, False)})
        name = str(dtype)[6:]
        bytes_ = {"forward": (pairs + bench.queries) * row + 12 * pairs, "input": (pairs + bench.queries) * row + 12 * pairs,
                  "rows": (pairs + bench.queries) * row + 20 * pairs}
        figures = {"forward": "gather-dot, 20 private", "input": "its backward, input", "rows": "its backward, rows, with the sort of ids"}
        for key, figure in figures.items():
            if key in seconds:
                bench.share(f"{figure}, {name}", seconds[key], bytes_[key], "70" if key != "rows" else None)


# --------------------------------------------------------------------------------------------------------------------------- draws

def part_draws(bench: Bench) -> None:
    many, input = bench.many, torch.zeros(bench.queries, 1, device=bench.device)
    target = torch.zeros(bench.queries, dtype=torch.int64, device=bench.device)

    def measure(name: str, sampler: xs.samplers.Sampler, aim: Optional[str] = None) -> None:
        sampler = sampler.to(bench.device)
        runs = {name: lambda: sampler.sample(input, target)}
        for value in bench.kernels(runs).values():
            bench.row(f"N 100M: {name}", 1e6 * value, "us", aim)
        if bench.cuda:
            for value in bench.kernels(attempt(bench, f"{name}, as a CUDA graph", lambda: bench.graphed(runs[name]))).values():
                bench.row(f"N 100M: {name}, as a CUDA graph", 1e6 * value, "us", aim)

    measure("20 private uniform draws, Q 8,192", xs.samplers.UniformSampler(many, bench.private, shared=False))
    measure("20 private log-uniform draws, Q 8,192", xs.samplers.LogUniformSampler(many, bench.private, shared=False))
    measure("512 distinct uniform draws", xs.samplers.UniformSampler(many, bench.shared), "50")
    ones = torch.ones(min(many, 1 << 24), device=bench.device)
    for value in bench.kernels({"multinomial": lambda: torch.multinomial(ones, bench.shared)}).values():
        bench.row("torch.multinomial: 512 distinct draws of 16M, the most it takes", 1e6 * value, "us")
    del ones
    zipf = 1 / torch.arange(1, many + 1, dtype=torch.float64)
    measure("512 distinct Zipf draws", xs.samplers.UnigramSampler(zipf, bench.shared), "50")
    measure("20 private Zipf draws, Q 8,192", xs.samplers.UnigramSampler(zipf, bench.private, shared=False))


# ---------------------------------------------------------------------------------------------------------------------- optimizers

def part_optimizers(bench: Bench) -> None:
    """Steps over a table with the gradient of a batch with 20 private draws."""
    count, row = bench.queries * (bench.private + 1), 4 * bench.width
    ids = torch.randint(bench.classes, (1, count), device=bench.device)
    grad = torch.sparse_coo_tensor(ids, torch.randn(count, bench.width, device=bench.device), (bench.classes, bench.width), check_invariants=False)
    grouped = grad.coalesce()
    rows = grouped._nnz()
    made = {"RowAdam": (xs.optim.RowAdam, {}, 7), "RowAdagrad": (xs.optim.RowAdagrad, {}, 5), "RowSGD": (xs.optim.RowSGD, {}, 3),
            "RowAdagrad, row-wise": (xs.optim.RowAdagrad, dict(row_wise=True), 3), "SparseAdam": (torch.optim.SparseAdam, {}, 7)}

    def stepping(make, options, gradient):
        parameter = nn.Parameter(bench.table(bench.classes, bench.width))
        optimizer = make([parameter], lr=1e-3, **options)

        def step() -> None:
            parameter.grad = gradient
            optimizer.step()
        return step

    seconds = bench.kernels({name: stepping(make, options, grad) for name, (make, options, _) in made.items()})
    bench.ratio("RowAdam / SparseAdam, gradient as backward leaves it", seconds, "RowAdam", "SparseAdam", "0.33")
    alone = bench.kernels({name: stepping(make, options, grouped) for name, (make, options, _) in made.items()})
    bench.ratio("the same, gradient coalesced", alone, "RowAdam", "SparseAdam")
    for name, value in alone.items():
        bench.share(f"{name}, gradient coalesced", value, rows * row * made[name][2], "50" if name == "RowAdam" else None)
    embedded(bench, ids[0])


def embedded(bench: Bench, ids: Tensor) -> None:
    """Look-up, backward and optimizer, beside FBGEMM, which fuses the last two."""
    upstream = torch.randn(len(ids), bench.width, device=bench.device)
    weight = nn.Parameter(bench.table(bench.classes, bench.width))
    optimizer = xs.optim.RowAdagrad([weight], row_wise=True)

    def ours() -> None:
        weight.grad = None
        F.embedding(ids, weight, sparse=True).backward(upstream)
        optimizer.step()

    def fbgemm() -> Callable[[], None]:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
        table = SplitTableBatchedEmbeddingBagsCodegen([(bench.classes, bench.width, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
                                                      optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, pooling_mode=PoolingMode.NONE,
                                                      device=bench.device)
        offsets = torch.arange(len(ids) + 1, device=bench.device)
        return lambda: table(ids, offsets).backward(upstream)

    runs = {"nn.functional.embedding + RowAdagrad": ours} | attempt(bench, "FBGEMM TBE", fbgemm)
    bench.ratio("look-up, backward, row-wise Adagrad / FBGEMM TBE", bench.steps(runs), "nn.functional.embedding + RowAdagrad", "FBGEMM TBE")


# ---------------------------------------------------------------------------------------------------------------------------- MIDX

def midx_loss(bench: Bench, num_samples: int) -> xs.SampledSoftmaxLoss:
    sampler = xs.samplers.MidxSampler(bench.classes, bench.width, num_samples, codewords=bench.codewords, refresh_every=0)
    loss = xs.SampledSoftmaxLoss(bench.width, bench.classes, sampler=sampler, device=bench.device).to(bench.device)
    loss.sampler.refresh(loss.linear.weight)
    return loss


def part_midx(bench: Bench) -> None:
    input, target = bench.batch()
    loss = midx_loss(bench, bench.midx)
    queries = input.detach()
    def draw() -> None:
        loss.sampler.sample(queries, target)
    figure = "MIDX, 64 private of 1M, D 256, Q 8,192: draw"
    for value in bench.kernels({figure: draw}).values():
        bench.row(figure, 1e6 * value, "us", "200", "eager: the host may take longer")
    if bench.cuda:
        for name, value in bench.kernels(attempt(bench, f"{figure}, as a CUDA graph", lambda: bench.graphed(draw))).items():
            bench.row(name, 1e6 * value, "us", "200")
    sampler = xs.samplers.MidxSampler(bench.classes, bench.index_width, bench.midx, codewords=bench.codewords).to(bench.device)
    table = bench.table(bench.classes, bench.index_width)
    for name, value in bench.steps({"refresh": lambda: sampler.refresh(table)}, 5).items():
        bench.row("MIDX: refresh of 1M x 128, K 64", 1e3 * value, "ms", "20", name)


def part_midx_step(bench: Bench) -> None:
    input, target = bench.batch()
    loss, exact = midx_loss(bench, bench.midx), xs.LinearCrossEntropyLoss(bench.width, bench.classes, device=bench.device)
    seconds = bench.steps({"MIDX": training_step(lambda: loss(input, target), input, loss.parameters()),
                           "exact": training_step(lambda: exact(input, target), input, exact.parameters())}, min(bench.repeats, 5))
    bench.ratio("64 private of MIDX, forward + backward / exact loss, N 1M, D 256, Q 8,192", seconds, "MIDX", "exact", "0.02")


# ---------------------------------------------------------------------------------------------------------------------------- trees

def part_trees(bench: Bench) -> None:
    input, target = bench.batch(bench.tree_queries)
    tree = xs.LabelTree.random(bench.classes, 10)
    beam = xs.BeamTreeLoss(bench.width, tree, num_candidates=5, num_noises=5).to(bench.device)
    nce = our_loss(bench, 10, False, estimator="nce")
    reached = beam.predict(input.detach())  # its dearest case: the target is among the candidates
    seconds = bench.steps({"beam tree": training_step(lambda: beam(input, reached), input, beam.parameters(), xs.optim.RowAdam(beam.parameters())),
                           "NCE-10": training_step(lambda: nce(input, target), input, nce.parameters(), xs.optim.RowAdam(nce.parameters()))})
    bench.ratio("beam tree, 5 candidates + 5 noises, step N 1M, Q 256 / NCE-10", seconds, "beam tree", "NCE-10", "3")
    table = bench.table(bench.classes, bench.width)
    with torch.no_grad():
        seconds = bench.steps({"beam search": lambda: beam.topk(input, 5), "matmul + topk": lambda: (input @ table.T).topk(5)})
    bench.ratio("top-5 by beam search, N 1M, Q 256 / matmul + topk", seconds, "beam search", "matmul + topk")
    del beam
    hierarchical = xs.HierarchicalSoftmaxLoss(bench.width, tree).to(bench.device)
    exact = xs.LinearCrossEntropyLoss(bench.width, bench.classes, device=bench.device)
    seconds = bench.steps({"hierarchical": training_step(lambda: hierarchical(input, target), input, hierarchical.parameters()),
                           "exact": training_step(lambda: exact(input, target), input, exact.parameters())})
    bench.ratio("hierarchical softmax, b 10, N 1M, Q 256, forward + backward / exact loss", seconds, "hierarchical", "exact")


# ---------------------------------------------------------------------------------------------------------------------- exact losses

def exact_rivals(weight: Tensor, input: Tensor, target: Tensor) -> Dict[str, Callable[[], Callable[[], Tensor]]]:
    """By name what makes the call of a loss. A rival that is not installed fails when it is made."""
    def torch_module():
        loss = nn.LinearCrossEntropyLoss(weight.shape[1], weight.shape[0], device="meta")
        loss.linear.weight = weight
        return lambda: loss(input, target)

    def liger():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda: loss(weight, input, target)

    def cut():
        from cut_cross_entropy import linear_cross_entropy
        return lambda: linear_cross_entropy(input, weight, target)

    def ours():
        loss = xs.LinearCrossEntropyLoss(weight.shape[1], weight.shape[0], device="meta")
        loss.linear.weight = weight
        return lambda: loss(input, target)

    return {"xsoftmax": ours, "F.linear + F.cross_entropy": lambda: lambda: F.cross_entropy(F.linear(input, weight), target),
            "nn.LinearCrossEntropyLoss": torch_module, "Liger": liger, "Cut Cross-Entropy": cut}


def part_exact(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        input, target = bench.batch(classes=bench.exact_classes, dtype=dtype)
        weight = nn.Parameter(bench.table(bench.exact_classes, bench.width).to(dtype))
        runs: Runs = {}
        for name, make in exact_rivals(weight, input, target).items():
            runs |= attempt(bench, f"{name}, {str(dtype)[6:]}", lambda: training_step(make(), input, [weight]))
        seconds = bench.steps(runs, min(bench.repeats, 7))
        ours = f"xsoftmax, {str(dtype)[6:]}"
        for name in seconds:
            if name != ours:
                bench.ratio(f"exact loss, N 131k, D 256, Q 8,192, forward + backward / {name}", {key: seconds[key] for key in (ours, name)
                                                                                                  if key in seconds}, ours, name)
            bench.memory("exact loss: memory of forward + backward", name, runs[name])


# ----------------------------------------------------------------------------------------------------------------------------- tests

def part_tests(bench: Bench) -> None:
    """Kernels against composites and CPU, no step that waits, CUDA graphs, the same bits twice; draws against the CPU's."""
    begin = time.perf_counter()
    for file in ("test_cuda_device.py", "test_device_draws.py"):
        run_tests(bench, file, TEST_SECONDS - (time.perf_counter() - begin))


def run_tests(bench: Bench, file: str, seconds: float) -> None:
    """A row of how it ended, or of how far it came in the time, and a row for each test that failed."""
    # -rfE names those that failed at the end; -v each as it ends, should there be no end.
    arguments = ["-v", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-rfE", "-x" if bench.tiny else "--maxfail=50"]
    if bench.tiny and file == "test_cuda_device.py":
        arguments += ["-k", "composites"]
    environment = dict(os.environ, XSOFTMAX_TEST_DEVICE=str(bench.device), PYTHONUNBUFFERED="1")
    command = [sys.executable, "-m", "pytest", *arguments, file]
    begin, status = time.perf_counter(), None
    try:
        done = subprocess.run(command, cwd=ROOT / "tests" / "python", env=environment, capture_output=True, text=True, timeout=max(seconds, 1))
        status, output, errors = float(done.returncode), done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:  # whose output is bytes
        output, errors = ((part or b"").decode(errors="replace") for part in (stopped.stdout, stopped.stderr))
    lines = output.strip().splitlines()
    took = f"{time.perf_counter() - begin:.0f} s"
    if status is None:
        passed = sum(" PASSED" in line for line in lines)
        bench.row(f"tests of the device, {file}", None, "", "0", f"stopped after {took}, {passed} had passed, "
                  f"the last was: {lines[-1] if lines else 'none'}"[:300])
    else:
        end = lines[-1] if lines else errors[-300:]
        ran = " passed" in end or " failed" in end or " error" in end
        bench.row(f"tests of the device, {file}", status if ran else None, "exit status", "0", f"{end}; {took}" if ran else f"no test ran: {end}")
    failed_tests = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or [line for line in lines if " FAILED" in line or " ERROR" in line]
    for line in failed_tests:
        bench.row("(test)", detail=line[:300])


def part_device(bench: Bench) -> None:
    bench.row("a large copy", bench.copy_rate() / 1e9, "GB/s", detail=f"peak taken as {bench.peak() / 1e9:.0f} GB/s")


PARTS = {"device": part_device, "tests": part_tests, "shared": part_shared, "private": part_private, "gathers": part_gathers, "optimizers": part_optimizers,
         "draws": part_draws, "midx": part_midx, "midx_step": part_midx_step, "trees": part_trees, "exact": part_exact}


# ----------------------------------------------------------------------------------------------------------------------------- main

def run_part(name: str, args: argparse.Namespace) -> None:
    """In the part's own process."""
    bench = Bench(args.device, args.tiny)
    torch.manual_seed(0)
    try:
        PARTS[name](bench)
    except BaseException as error:
        traceback.print_exc()
        bench.row(f"(part {name})", detail=reason(error))
    sys.stdout.flush()
    os._exit(0)  # a device that is lost may hang on the way out


def process_of(name: str, args: argparse.Namespace, seconds: float) -> List[dict]:
    """The rows that the part finds, those before it failed too."""
    if seconds < 5:
        return [failed(name, "no time was left for it")]
    seconds = min(seconds, 240 if name == "tests" else 120)
    command = [sys.executable, os.path.abspath(__file__), "--part", name, "--device", args.device, *(["--tiny"] if args.tiny else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=seconds)
        ended = [] if process.returncode == 0 else [failed(name, f"ended with {process.returncode}: {errors[-200:]}")]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what the part has started too
        output, errors = process.communicate()
        ended = [failed(name, f"stopped after {seconds:.0f} s")]
    sys.stderr.write(errors[-2000:])
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)] + ended


def failed(part: str, why: str) -> dict:
    return {"figure": f"(part {part})", "value": None, "unit": "", "aim": None, "detail": why}


def no_device(name: str) -> str:
    """Why nothing can run on a device of this name; "" where it can."""
    try:
        torch.empty(1, device=name)
    except Exception as error:  # of many kinds: no such device, no driver, torch built without CUDA
        return f"no device {name}: {reason(error)}"
    if name.startswith("cuda") and not HAS_KERNELS:
        return "this xsoftmax was built without CUDA kernels: CMAKE_ARGS=-DXSOFTMAX_CUDA=ON pip install --no-build-isolation ."
    return ""


def about(args: argparse.Namespace) -> dict:
    cuda = args.device.startswith("cuda") and torch.cuda.is_available()
    return {"device": torch.cuda.get_device_name() if cuda else args.device, "torch": torch.__version__, "cuda": torch.version.cuda,
            "small shapes": args.tiny, "CUDA kernels": HAS_KERNELS, "xsoftmax": getattr(xs, "__version__", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes; with --device cpu a trial of the program")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: %(default)s")
    parser.add_argument("--minutes", type=float, default=8.5, help="parts begin as long as time is left (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON goes here; else it is printed after the table")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args)
    names = args.only.split(",")
    for name in names:
        if name not in PARTS:
            parser.error(f"--only: expected names out of {', '.join(PARTS)}, got {name!r}")
    if not args.minutes >= 0:
        parser.error(f"--minutes: expected at least 0, got {args.minutes}")
    if args.output:
        try:
            args.output.touch()  # minutes would be lost if it could not be written in the end
        except OSError as error:
            parser.error(f"--output: expected a file that can be written, got {args.output}: {error.strerror}")
    begin, rows, found, missing = time.monotonic(), [], about(args), no_device(args.device)
    print(", ".join(f"{key} {value}" for key, value in found.items()) + "\n", flush=True)
    for name in names:
        left = 60 * args.minutes - (time.monotonic() - begin)
        rows += [{"part": name, **row} for row in ([failed(name, missing)] if missing else process_of(name, args, left))]
        if args.output:  # what is known so far
            args.output.write_text(json.dumps({"about": found, "rows": rows}, indent=1))
    texts = [{**row, "value": "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}".strip(), "aim": row["aim"] or ""} for row in rows]
    print_table(texts, ["part", "figure", "value", "aim", "detail"])
    if not args.output:
        print("\n" + json.dumps({"about": found, "rows": rows}))
    if all(row["value"] is None for row in rows):
        sys.exit("cuda.py: nothing was measured: " + rows[0]["detail"])


if __name__ == "__main__":
    main()
