"""Compares output layers: xsoftmax with the code of a good PyTorch user, in one run on the same
work.

    python benchmarks/output_layer.py [--threads 2] [--repeats 21] [--only shared,private,...]
                                      [--json [FILE]]

The naive rival for sampled losses uses the table as nn.Embedding(sparse=True), one look-up, one
matrix product for shared samples or a batched product for private ones, masked cross entropy and
torch.optim.SparseAdam. The rival for the exact loss is F.linear + F.cross_entropy. "medium" is
torch.set_float32_matmul_precision("medium"), for both sides. Every rival uses samples of the same
sampler, drawn outside the timed region, except in the figures of whole steps, which sample inside
it.
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from common.records import run_benches
from common.timing import PeakMemory, interleave

MB = 1024 * 1024


class NaiveSampled(nn.Module):
    """Sampled softmax in plain PyTorch, with accidental hits masked and counts corrected."""
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)

    def shared(self, input: Tensor, target: Tensor, ids: Tensor, log_count: Tensor) -> Tensor:
        rows = self.embedding(torch.cat([ids, target]))
        return self.shared_loss(input, rows, target, ids, log_count)

    def private(self, input: Tensor, target: Tensor, ids: Tensor, log_count: Tensor) -> Tensor:
        rows = self.embedding(torch.cat([target[:, None], ids], 1))
        return self.private_loss(input, rows, target, ids, log_count)

    @staticmethod
    def shared_loss(input: Tensor, rows: Tensor, target: Tensor, ids: Tensor,
                    log_count: Tensor) -> Tensor:
        sampled = input @ rows[:ids.numel()].T - log_count
        sampled = sampled.masked_fill(ids == target[:, None], float("-inf"))
        true = (input * rows[ids.numel():]).sum(1, keepdim=True)
        return NaiveSampled._cross_entropy(true, sampled)

    @staticmethod
    def private_loss(input: Tensor, rows: Tensor, target: Tensor, ids: Tensor,
                     log_count: Tensor) -> Tensor:
        scores = torch.bmm(rows, input[:, :, None]).squeeze(2)
        sampled = (scores[:, 1:] - log_count).masked_fill(ids == target[:, None], float("-inf"))
        return NaiveSampled._cross_entropy(scores[:, :1], sampled)

    @staticmethod
    def _cross_entropy(true: Tensor, sampled: Tensor) -> Tensor:
        logits = torch.cat([true, sampled], 1)
        return F.cross_entropy(logits,
                               torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def make_batch(queries: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(queries, width, requires_grad=True), torch.randint(classes, (queries,))


def make_table(classes: int, width: int) -> Tensor:
    """Creates a table on huge pages, as the library's module does."""
    table = torch.empty(classes, width)
    torch.ops.xsoftmax.advise_huge_pages(table)
    return table.uniform_(-0.05, 0.05)


def zipf_sampler(classes: int, samples: int, shared: bool) -> xs.samplers.Sampler:
    return xs.samplers.UnigramSampler(1.0 / torch.arange(1, classes + 1, dtype=torch.float64),
                                      samples, power=0.75, shared=shared)


def call_with_proposal(loss: xs.SampledSoftmaxLoss, input: Tensor, target: Tensor,
                       proposal) -> Tensor:
    """Computes the loss from given samples, as the rival does."""
    return torch.ops.xsoftmax.sampled_softmax_loss(input, loss.linear.weight, None, target,
                                                   *xs.samplers.columns_of([proposal]))


@contextmanager
def precision(name: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def figure(name: str, medians: dict[str, float], ours: str = "xsoftmax",
           rival: str = "naive") -> dict:
    """Returns the ratio of our median to that of the rival."""
    text = ", ".join(f"{key} {value * 1e3:.3g} ms" for key, value in medians.items())
    return {
        "figure": name, "value": medians[ours] / medians[rival], "medians": text, "seconds": medians
    }


class SampledPair:
    """The rival and our loss on one batch and one proposal."""
    def __init__(self, queries: int, width: int, classes: int, samples: int, shared: bool,
                 dtype: torch.dtype = torch.float32) -> None:
        input, self.target = make_batch(queries, width, classes)
        self.input = input.detach().to(dtype).requires_grad_()
        self.sampler = zipf_sampler(classes, samples, shared)
        self.naive = NaiveSampled(make_table(classes, width).to(dtype))
        self.ours = xs.SampledSoftmaxLoss(width, classes, sampler=self.sampler, dtype=dtype)
        self.proposal = self.sampler.sample(self.input.detach(), self.target)[0]
        self.rival = self.naive.shared if shared else self.naive.private

    def naive_step(self) -> None:
        self.input.grad = self.naive.embedding.weight.grad = None
        self.rival(self.input, self.target, self.proposal.ids, self.proposal.log_count).backward()

    def our_step(self) -> None:
        self.input.grad = self.ours.linear.weight.grad = None
        call_with_proposal(self.ours, self.input, self.target, self.proposal).backward()


def bench_shared(args) -> list[dict]:
    """512 samples shared by the batch"""
    samples = 512
    pair = SampledPair(700, 256, 1_000_000, samples, shared=True)
    figures = []
    for name in ("highest", "medium"):
        with precision(name):
            medians = interleave({"naive": pair.naive_step, "xsoftmax": pair.our_step},
                                 args.repeats)
        figures.append(
            figure(f"512 shared, N 1M, D 256, {name}: forward + backward / naive", medians))

    input, target, naive, ours = pair.input, pair.target, pair.naive, pair.ours
    naive_optimizer = torch.optim.SparseAdam(naive.parameters(), lr=1e-3)
    our_optimizer = xs.optim.RowAdam(ours.parameters(), lr=1e-3)

    def naive_step():
        input.grad = None
        naive_optimizer.zero_grad()
        drawn = pair.sampler.sample(input.detach(), target)[0]
        naive.shared(input, target, drawn.ids, drawn.log_count).backward()
        naive_optimizer.step()

    def our_step():
        input.grad = None
        our_optimizer.zero_grad()
        ours(input, target).backward()
        our_optimizer.step()

    rows = ours.linear.weight.detach()[pair.proposal.ids]
    scores = input.detach() @ rows.T

    def products():
        return input.detach() @ rows.T, scores @ rows, scores.T @ input.detach()

    for name in ("highest", "medium"):
        with precision(name):
            medians = interleave({"naive": naive_step, "xsoftmax": our_step, "products": products},
                                 args.repeats)
        figures.append(
            figure(
                f"512 shared, N 1M, D 256, {name}: whole step, RowAdam / naive with "
                "SparseAdam", medians))
        figures.append(
            figure("the same step / its three matrix products alone", medians, rival="products"))
    del naive, ours, pair, naive_optimizer, our_optimizer
    half = SampledPair(700, 256, 1_000_000, samples, shared=True, dtype=torch.bfloat16)
    medians = interleave({"naive": half.naive_step, "xsoftmax": half.our_step}, args.repeats)
    return figures + [
        figure("512 shared, N 1M, D 256, bfloat16: forward + backward / naive", medians)
    ]


def bench_private(args) -> list[dict]:
    """20 samples per query"""
    pair = SampledPair(700, 256, 1_000_000, 20, shared=False)
    medians = interleave({"naive": pair.naive_step, "xsoftmax": pair.our_step}, args.repeats)
    return [figure("20 private, N 1M, D 256: forward + backward / naive", medians)]


def bench_scale(args) -> list[dict]:
    """The same step at ten thousand and at ten million classes, with RowAdam and with the smallest
    table and state."""
    return [
        *scale_figures(args, "RowAdam", xs.optim.RowAdam, torch.float32), *scale_figures(
            args, "row-wise RowAdagrad, bfloat16 table",
            partial(xs.optim.RowAdagrad, row_wise=True, stochastic_rounding=True), torch.bfloat16)
    ]


def scale_figures(args, name: str, make, dtype: torch.dtype) -> list[dict]:
    queries, width, samples = 700, 64, 512
    steps, peaks = {}, []
    # the large one first, so that it cannot reuse freed memory
    for classes in (10_000_000, 10_000):
        input, _ = make_batch(queries, width, classes)
        input = input.detach().to(dtype).requires_grad_()
        loss = xs.SampledSoftmaxLoss(width, classes,
                                     sampler=zipf_sampler(classes, samples,
                                                          shared=True), dtype=dtype)
        optimizer = make(loss.parameters(), lr=1e-3)

        def step(loss=loss, optimizer=optimizer, input=input):
            # new rows in each step, as in training
            target = torch.randint(loss.num_classes, (queries,))
            input.grad = None
            optimizer.zero_grad()
            loss(input, target).backward()
            optimizer.step()

        steps[f"N {classes:,}"] = step
        # from the first step on, to include memory that a step keeps for the next one
        with PeakMemory() as memory:
            for _ in range(3):
                step()
        state = sum(tensor.nbytes for tensor in optimizer.state[loss.linear.weight].values()
                    if torch.is_tensor(tensor))
        peaks.append((memory.bytes - state) / MB)
    medians = interleave(steps, args.repeats)
    return [
        figure(f"512 shared, D 64, whole step with {name}: N 10M / N 10k", medians, "N 10,000,000",
               "N 10,000"), {
                   "figure": "the same at N 10M: peak MB in addition to table and optimizer state",
                   "value": peaks[0]
               }
    ]


def exact_runs(input: Tensor, table: Tensor, target: Tensor):
    weight = nn.Parameter(table)
    loss = xs.LinearCrossEntropyLoss(table.shape[1], table.shape[0], device="meta")
    loss.linear.weight = weight

    def rival():
        input.grad = weight.grad = None
        F.cross_entropy(F.linear(input, weight), target).backward()

    def ours():
        input.grad = weight.grad = None
        loss(input, target).backward()

    return rival, ours


def bench_exact(args) -> list[dict]:
    """The exact loss"""
    figures = []
    for queries, width, classes in ((700, 256, 116_000), (700, 200, 10_000)):
        input, target = make_batch(queries, width, classes)
        rival, ours = exact_runs(input, make_table(classes, width), target)
        for name in ("highest", "medium"):
            with precision(name):
                medians = interleave({"naive": rival, "xsoftmax": ours}, max(5, args.repeats // 2))
            figures.append(
                figure(
                    f"exact, Q {queries}, D {width}, N {classes:,}, float32, {name} "
                    "/ F.linear + F.cross_entropy", medians))
        if classes == 116_000:
            rival()  # frees the rival's logits before ours are measured
            ours()
            input.grad = None
            with PeakMemory() as memory:
                ours()
            # The gradient of the table existed before and is recomputed. The logits are too large
            # for the allocator to keep between calls.
            figures.append({
                "figure": "the same shape: peak MB in addition to gradients",
                "value": memory.bytes / MB
            })
            half = input.detach().bfloat16().requires_grad_()
            low_rival, low = exact_runs(half, make_table(classes, width).bfloat16(), target)
            medians = interleave({"float32": ours, "bfloat16": low, "naive bfloat16": low_rival},
                                 max(5, args.repeats // 4))
            figures.append(
                figure("the same shape: bfloat16 / float32", medians, "bfloat16", "float32"))
            figures.append(
                figure("the same shape: bfloat16 / F.linear + F.cross_entropy in bfloat16", medians,
                       "bfloat16", "naive bfloat16"))
    return figures


BENCHES = {
    "shared": bench_shared, "private": bench_private, "scale": bench_scale, "exact": bench_exact
}

if __name__ == "__main__":
    run_benches(
        __doc__, BENCHES, question="What does the output layer cost, compared with plain PyTorch?",
        against="PyTorch: F.linear + F.cross_entropy; nn.Embedding(sparse=True), batched "
        "products and SparseAdam")
