"""Compares MIDX with uniform sampling in plain PyTorch and with the tensor layout of its authors,
and its index with faiss.

    python benchmarks/midx.py [--threads 2] [--repeats 21] [--only step,structure,scale,refresh]
                              [--faiss-python PYTHON] [--json [FILE]]

Both sides sample inside the timed region. The naive rivals use uniform samples, the table as
nn.Embedding(sparse=True), one look-up, one matrix product (shared) or a batched one (private), and
masked cross entropy. The authors' layout stores the second codeword's weights as [Q, M, K] and the
rows as [Q, M, D], and samples with torch.multinomial. --faiss-python names an interpreter with
faiss, for the refresh.
"""

import argparse
import json
import math
import subprocess

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from output_layer import NaiveSampled, figure, make_batch, make_table
from common.records import run_benches
from common.timing import interleave

QUERIES, WIDTH, CLASSES, CODEWORDS = 700, 256, 1_000_000, 64


class AuthorsLayout(nn.Module):
    """Fast MIDX that builds all intermediate tensors, over the same index."""
    def __init__(self, table: Tensor, sampler: xs.samplers.MidxSampler) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        self.sampler = sampler
        self.sizes = sampler.start.diff()
        self.mass = sampler.mass.float()

    def forward(self, input: Tensor, target: Tensor, num_samples: int) -> Tensor:
        sampler, k = self.sampler, len(self.sampler.codewords1)
        with torch.no_grad():
            first, second = input @ sampler.codewords1.T, input @ sampler.codewords2.T
            weight = (second - second.amax(1, keepdim=True)).exp()
            log_p1 = (first + (weight @ self.mass.T).log()).log_softmax(1)
            k1 = torch.multinomial(log_p1.exp(), num_samples, replacement=True)
            joint = self.mass[k1] * weight[:, None, :]  # [Q, M, K]
            k2 = torch.multinomial(joint.view(-1, k), 1).view_as(k1)
            cell = k1 * k + k2
            ids = sampler.order[sampler.start[cell] +
                                (torch.rand(cell.shape) * self.sizes[cell]).long()]
            log_q = log_p1.gather(1, k1) + (joint.gather(2, k2[..., None]).squeeze(2) /
                                            joint.sum(2) / self.sizes[cell]).log()
        rows = self.embedding(torch.cat([target[:, None], ids], 1))  # [Q, 1 + M, D]
        scores = (rows * input[:, None, :]).sum(2)
        sampled = (scores[:, 1:] - log_q - math.log(num_samples)).masked_fill(
            ids == target[:, None], float("-inf"))
        return F.cross_entropy(torch.cat([scores[:, :1], sampled], 1),
                               torch.zeros(len(input), dtype=torch.int64))


def midx_loss(num_samples: int, shared: bool = False, head: int = 0) -> xs.SampledSoftmaxLoss:
    sampler = xs.samplers.MidxSampler(CLASSES, WIDTH, num_samples, codewords=CODEWORDS,
                                      shared=shared, refresh_every=0)
    loss = xs.SampledSoftmaxLoss(WIDTH, CLASSES, sampler=sampler, head_classes=head)
    loss.sampler.refresh(loss.linear.weight)
    return loss


class Steps:
    """Forward and backward passes on one batch, including sampling."""
    def __init__(self) -> None:
        self.input, self.target = make_batch(QUERIES, WIDTH, CLASSES)
        self.naive = NaiveSampled(make_table(CLASSES, WIDTH))

    def ours(self, loss: xs.SampledSoftmaxLoss):
        def step() -> None:
            self.input.grad = loss.linear.weight.grad = None
            loss(self.input, self.target).backward()

        return step

    def uniform(self, num_samples: int, shared: bool):
        rival = self.naive.shared if shared else self.naive.private
        log_count = torch.tensor(math.log(num_samples / CLASSES))

        def step() -> None:
            self.input.grad = self.naive.embedding.weight.grad = None
            ids = torch.randint(CLASSES, (num_samples,) if shared else (QUERIES, num_samples))
            rival(self.input, self.target, ids, log_count).backward()

        return step


def bench_step(args) -> list[dict]:
    """A training step"""
    steps = Steps()
    medians = interleave(
        {
            "xsoftmax": steps.ours(midx_loss(64, head=64)), "private 64": steps.uniform(
                64, shared=False), "shared 512": steps.uniform(512, shared=True)
        }, args.repeats)
    figures = [
        figure("head 64 + 64 private MIDX-rq, N 1M, D 256 / naive uniform private 64", medians,
               rival="private 64"),
        figure("the same / naive uniform shared 512", medians, rival="shared 512")
    ]
    medians = interleave(
        {"xsoftmax": steps.ours(midx_loss(20)), "private 20": steps.uniform(20, shared=False)},
        args.repeats)
    figures.append(
        figure("20 private MIDX-rq / naive uniform private 20", medians, rival="private 20"))
    medians = interleave(
        {
            "xsoftmax": steps.ours(midx_loss(512, shared=True)), "shared 512": steps.uniform(
                512, shared=True)
        }, args.repeats)
    return figures + [
        figure("512 shared from the MIDX mixture / naive uniform shared 512", medians,
               rival="shared 512")
    ]


def bench_structure(args) -> list[dict]:
    """Compared with the authors' layout"""
    steps, loss = Steps(), midx_loss(20)
    authors = AuthorsLayout(steps.naive.embedding.weight.detach(), loss.sampler)

    def rival() -> None:
        steps.input.grad = authors.embedding.weight.grad = None
        authors(steps.input, steps.target, 20).backward()

    medians = interleave({"xsoftmax": steps.ours(loss), "authors' layout": rival}, args.repeats)
    return [
        figure("20 private MIDX-rq / the authors' layout in PyTorch", medians,
               rival="authors' layout")
    ]


def bench_scale(args) -> list[dict]:
    """From ten thousand to ten million classes"""
    runs = {}
    for classes in (10_000_000, 10_000):
        sampler, input = xs.samplers.MidxSampler(classes, 64, 100,
                                                 codewords=CODEWORDS), torch.randn(256, 64)
        sampler.refresh(make_table(classes, 64))
        runs[f"N {classes:,}"] = lambda sampler=sampler, input=input: sampler.sample(input)
    medians = interleave(runs, args.repeats)
    return [
        figure("sampling alone, 100 samples for 256 queries, K 64: N 10M / N 10k", medians,
               "N 10,000,000", "N 10,000")
    ]


FAISS = """
import sys, time, json
import numpy, faiss
n, d, bits, threads, repeats = map(int, sys.argv[1:])
faiss.omp_set_num_threads(threads)
x = numpy.random.default_rng(0).uniform(-0.05, 0.05, (n, d)).astype("float32")
sample = x[numpy.random.default_rng(1).permutation(n)[:256 << bits]]
times = []
for _ in range(repeats):
    start = time.perf_counter()
    rq = faiss.ResidualQuantizer(d, 2, bits)
    rq.cp.niter = 10
    rq.max_beam_size = 1
    rq.train_type = faiss.ResidualQuantizer.Train_default
    rq.train(sample)
    codes = rq.compute_codes(x)
    times.append(time.perf_counter() - start)
decoded = rq.decode(codes)
print(json.dumps({"seconds": sorted(times)[len(times) // 2],
                  "distortion": float(((x - decoded) ** 2).sum(1).mean())}))
"""


def bench_refresh(args) -> list[dict]:
    """Rebuilding the index"""
    width, rows = 128, 20_000
    table = make_table(CLASSES, width)
    sampler = xs.samplers.MidxSampler(CLASSES, width, codewords=CODEWORDS, iterations=10)
    touched = torch.randperm(CLASSES)[:rows]
    repeats = max(3, args.repeats // 4)

    def full():
        # from scratch, with K-means++, not from the existing codewords
        sampler.step.zero_()
        return sampler.refresh(table)

    stats = full()
    medians = interleave(
        {"full": full, "incremental": lambda: sampler.update(table, None, touched)}, repeats)
    figures = []
    if args.faiss_python:
        output = subprocess.run([
            args.faiss_python, "-c", FAISS,
            str(CLASSES),
            str(width),
            str(int(math.log2(CODEWORDS))),
            str(args.threads), "3"
        ], check=True, capture_output=True, text=True).stdout
        rival = json.loads(output)
        entry = figure(
            "full refresh, N 1M, D 128, K 64, 10 iterations / faiss-cpu residual "
            "quantizer", {"full": medians["full"], "faiss": rival["seconds"]}, "full", "faiss")
        entry["medians"] += f"; distortion {stats['distortion']:.4g} and {rival['distortion']:.4g}"
        figures.append(entry)
    return figures + [
        figure("incremental refresh of 20,000 rows / full", medians, "incremental", "full")
    ]


BENCHES = {
    "step": bench_step, "structure": bench_structure, "scale": bench_scale, "refresh": bench_refresh
}


def add_faiss(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faiss-python", help="an interpreter with faiss; without it that "
                        "figure is skipped")


if __name__ == "__main__":
    run_benches(
        __doc__, BENCHES, question="What do samples by the scores of the model (MIDX) cost?",
        against="PyTorch with uniform samples; the layout of MIDX's authors in PyTorch; the "
        "residual quantizer of faiss-cpu", extra=add_faiss)
