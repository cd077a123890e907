"""Sampling with static samplers and with MIDX, the refresh of its index, and its training step."""

from typing import Callable, Optional

import torch

import xsoftmax as xs

from .bench import Bench, training_step


def report_draws(bench: Bench, figure: str, draw: Callable[[], object], aim: Optional[str] = None,
                 detail: str = "") -> None:
    """Reports the time of sampling, eager and as a CUDA graph."""
    for value in bench.kernels({figure: draw}).values():
        bench.row(figure, 1e6 * value, "us", aim, detail)
    if bench.cuda:
        graphs = bench.attempt(f"{figure}, as a CUDA graph", lambda: bench.graphed(draw))
        for name, value in bench.kernels(graphs).items():
            bench.row(name, 1e6 * value, "us", aim)


def part_draws(bench: Bench) -> None:
    many, samplers = bench.many, xs.samplers
    input = torch.zeros(bench.queries, 1, device=bench.device)
    target = torch.zeros(bench.queries, dtype=torch.int64, device=bench.device)

    def measure(name: str, sampler: samplers.Sampler, aim: Optional[str] = None) -> None:
        sampler = sampler.to(bench.device)
        report_draws(bench, f"N 100M: {name}", lambda: sampler.sample(input, target), aim)

    def private(sampler: type, classes: object) -> samplers.Sampler:
        return sampler(classes, bench.private, shared=False)

    measure("20 private uniform samples, Q 8,192", private(samplers.UniformSampler, many))
    measure("20 private log-uniform samples, Q 8,192", private(samplers.LogUniformSampler, many),
            "50")
    measure("512 uniform samples without replacement", samplers.UniformSampler(many, bench.shared),
            "40")
    ones = torch.ones(min(many, 1 << 24), device=bench.device)
    figure = "torch.multinomial: 512 samples without replacement of 16M, its maximum"
    for value in bench.kernels({figure: lambda: torch.multinomial(ones, bench.shared)}).values():
        bench.row(figure, 1e6 * value, "us")
    del ones
    zipf = 1 / torch.arange(1, many + 1, dtype=torch.float64)
    measure("512 Zipf samples without replacement", samplers.UnigramSampler(zipf, bench.shared),
            "60")
    measure("20 private Zipf samples, Q 8,192", private(samplers.UnigramSampler, zipf), "50")


def midx_loss(bench: Bench, num_samples: int) -> xs.SampledSoftmaxLoss:
    sampler = xs.samplers.MidxSampler(bench.classes, bench.width, num_samples,
                                      codewords=bench.codewords, refresh_every=0)
    loss = xs.SampledSoftmaxLoss(bench.width, bench.classes, sampler=sampler, device=bench.device)
    loss.to(bench.device).sampler.refresh(loss.linear.weight)
    return loss


def part_midx(bench: Bench) -> None:
    input, target = bench.batch()
    loss, queries = midx_loss(bench, bench.midx), input.detach()
    report_draws(bench, "MIDX, 64 private samples of 1M, D 256, Q 8,192: sampling",
                 lambda: loss.sampler.sample(queries, target), "110", "the host may take longer")
    sampler = xs.samplers.MidxSampler(bench.classes, bench.index_width, bench.midx,
                                      codewords=bench.codewords).to(bench.device)
    table = bench.table(bench.classes, bench.index_width)
    for value in bench.steps({"refresh": lambda: sampler.refresh(table)}, 5).values():
        bench.row("MIDX: refresh of 1M x 128, K 64", 1e3 * value, "ms", "8")


def part_midx_step(bench: Bench) -> None:
    input, target = bench.batch()
    loss = midx_loss(bench, bench.midx)
    exact = xs.LinearCrossEntropyLoss(bench.width, bench.classes, device=bench.device)
    runs = {
        "MIDX": training_step(lambda: loss(input, target), input, loss.parameters()),
        "exact": training_step(lambda: exact(input, target), input, exact.parameters())
    }
    title = "64 private MIDX samples, N 1M, D 256, Q 8,192"
    seconds = bench.steps(runs, min(bench.repeats, 5))
    bench.ratio(f"{title}: forward + backward / exact loss", seconds, "MIDX", "exact", "0.02")
    bench.launches(title, runs, {name: seconds[name] for name in ("MIDX",) if name in seconds})
