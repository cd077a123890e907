"""Measures the cost of adding classes, with bias, sampler and RowAdam state, compared with the same
by hand.

    python benchmarks/resize_classes.py --threads 1
    python benchmarks/resize_classes.py --threads 1 --only stream

`rows` adds 30,000 rows, one or 1,000 at a time, to a loss with 100,000 classes of width 64 that
RowAdam has trained. The time of all calls is divided by the number of rows, and includes all copies
of tables and all rebuilt layouts. By hand: torch.cat of table, bias and state into a new layer and
a new torch.optim.Adam; the median of calls that add one row.

`stream` alternates between adding one class and one training step (256 queries), compared with
steps only, in interleaved blocks. The difference includes the work that the table, the optimizer
and the sampler defer to the next step. Samplers do not refresh in these steps.

Times are CPU times of the process, which depend less on other programs; use one thread.
"""

import statistics
import time

import torch
from torch import nn

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

N, D, BATCH, ROWS = 100_000, 64, 256, 30_000
BLOCK = 25  # number of steps per block


def counts():
    return 1 / torch.arange(1, N + 1, dtype=torch.float64)


def streamed():
    return xs.samplers.StreamingCounts(N, half_life=1e6)


SAMPLERS = {
    "uniform": lambda: xs.samplers.UniformSampler(N, 512),
    "in_batch, streamed": lambda: xs.samplers.InBatchSampler(N, counts=streamed()),
    "log_uniform, distinct": lambda: xs.samplers.LogUniformSampler(N, 512),
    "unigram, distinct": lambda: xs.samplers.UnigramSampler(counts(), 512),
    "unigram, independent": lambda: xs.samplers.UnigramSampler(counts(), 512, distinct=False),
    "unigram, streamed": lambda: xs.samplers.UnigramSampler(streamed(), 512, refresh_every=0),
    "midx": lambda: xs.samplers.MidxSampler(N, D, 20, bias=True, refresh_every=0),
    "midx, distinct": lambda: xs.samplers.MidxSampler(N, D, 20, bias=True, distinct=True,
                                                      refresh_every=0),
    "lsh": lambda: xs.samplers.LshSampler(N, D, 20, bias=True, refresh_every=0),
    "sphere": lambda: xs.samplers.SphereSampler(N, D, 20, bias=True, refresh_every=0),
    "rff": lambda: xs.samplers.RffSampler(N, D, 20, bias=True, refresh_every=0),
}
LAID_OUT = ("midx, distinct",)  # rebuilt in each call


def step(loss, optimizer) -> None:
    loss(torch.randn(BATCH, D), torch.randint(loss.num_classes, (BATCH,))).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(sampler):
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, bias=True)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer)
    return loss, optimizer


def microseconds_a_row(make, at_a_time: int, rows: int) -> float:
    loss, optimizer = stepped(make())
    start = time.process_time()
    for _ in range(rows // at_a_time):
        loss.resize_classes(loss.num_classes + at_a_time)
    return 1e6 * (time.process_time() - start) / rows


def by_hand():
    """Returns a function that replaces a layer and its Adam by those with one more row."""
    made = {"linear": nn.Linear(D, N)}
    made["optimizer"] = torch.optim.Adam(made["linear"].parameters())
    for parameter in made["linear"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    made["optimizer"].step()

    def add() -> None:
        old, adam = made["linear"], made["optimizer"]
        linear = nn.Linear(D, old.out_features + 1, device="meta")
        for name, parameter in old.named_parameters():
            setattr(
                linear, name,
                nn.Parameter(torch.cat([parameter.detach(),
                                        torch.randn(1, *parameter.shape[1:])])))
        made["linear"], made["optimizer"] = linear, torch.optim.Adam(linear.parameters())
        for before, after in zip(old.parameters(), linear.parameters()):
            made["optimizer"].state[after] = {
                key: torch.cat([value, torch.zeros(1, *value.shape[1:])]) if value.dim() else value
                for key, value in adam.state[before].items()
            }

    return add


def bench_rows(args) -> list[dict]:
    """resize_classes alone"""
    figures = []
    for name, make in SAMPLERS.items():
        for at_a_time in (1, 1000):
            rows = args.slow_rows if at_a_time == 1 and name in LAID_OUT else ROWS
            runs = sorted(microseconds_a_row(make, at_a_time, rows) for _ in range(args.repeats))
            figures.append({
                "figure": f"{name}, {at_a_time:,} at a time: us per row",
                "value": runs[len(runs) // 2]
            })
    median = interleave({"by hand": by_hand()}, 5 * args.repeats,
                        clock=time.process_time)["by hand"]
    return [*figures, {"figure": "by hand, 1 at a time: us per row", "value": 1e6 * median}]


def bench_stream(args) -> list[dict]:
    """One new class before every step"""
    figures = []
    for name, make in SAMPLERS.items():
        loss, optimizer = stepped(make())

        def turns(grow: bool) -> float:
            start = time.process_time()
            for _ in range(BLOCK):
                if grow:
                    loss.resize_classes(loss.num_classes + 1)
                step(loss, optimizer)
            return 1e6 * (time.process_time() - start) / BLOCK

        turns(True), turns(False)  # the first new class reallocates the tables
        pairs = [(turns(True), turns(False)) for _ in range(4 * args.repeats)]
        figures += [{
            "figure": f"{name}: us per step with a new class",
            "value": statistics.median(pair[0] for pair in pairs)
        }, {
            "figure": f"{name}: us per step without",
            "value": statistics.median(pair[1] for pair in pairs)
        }, {
            "figure": f"{name}: us of the new class",
            "value": statistics.median(pair[0] - pair[1] for pair in pairs)
        }]
    return figures


if __name__ == "__main__":
    run_benches(
        __doc__, {"rows": bench_rows, "stream": bench_stream},
        question="What does a new class cost?",
        against="torch.cat of table, bias and the state of torch.optim.Adam",
        extra=lambda parser: parser.add_argument(
            "--slow-rows", type=int, default=100, help="number of rows to add one by one for "
            "samplers that are rebuilt in each call"))
