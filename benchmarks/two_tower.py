"""Compares a step of two towers, queries against the items of the batch: xs.TwoTowerLoss and the
same by hand in PyTorch (a matrix product, the log frequencies, a mask, cross entropy).

    python benchmarks/two_tower.py [--queries 4096] [--width 64] [--items 100000] [--threads 2]
                                   [--repeats 21] [--json [FILE]]

A step computes the loss of given vectors and their gradients; the towers, whose cost is the same
for both sides, are left out. The hand-written loss keeps an exact count of each item and counts the
batch, as ours does. Steps are interleaved; times are medians, ratios are medians of the ratios of
turns. Memory is the peak that a step adds to the process, the minimum of five steps, with each side
in its own process.
"""

import argparse
import multiprocessing
import statistics

import torch
import torch.nn.functional as F

import xsoftmax as xs
from common.records import add_json, figures_table, report
from common.timing import PeakMemory, turns


class ByHand:
    """A typical implementation of the loss of a two-tower model."""
    def __init__(self, items: int):
        self.count, self.total = torch.zeros(items), 0

    def __call__(self, query, item, item_id):
        self.count.index_add_(0, item_id, torch.ones(len(item_id)))
        self.total += len(item_id)
        logits = query @ item.T - (self.count[item_id] / self.total).log()
        hits = item_id.unsqueeze(0) == item_id.unsqueeze(1)
        hits.fill_diagonal_(False)
        return F.cross_entropy(logits.masked_fill(hits, float("-inf")), torch.arange(len(item_id)))


KINDS = {"xsoftmax": xs.TwoTowerLoss, "by hand": ByHand}


def make_step(kind: str, args: argparse.Namespace):
    torch.manual_seed(0)
    loss = KINDS[kind](args.items)
    query, item = (torch.randn(args.queries, args.width, requires_grad=True) for _ in range(2))
    distribution = 1.0 / torch.arange(1, args.items + 1)

    def step():
        query.grad = item.grad = None
        loss(query, item, torch.multinomial(distribution, args.queries,
                                            replacement=True)).backward()

    return step


def peak(kind: str, args: argparse.Namespace, results) -> None:
    torch.set_num_threads(args.threads)
    step = make_step(kind, args)
    step()
    found = []
    for _ in range(5):
        with PeakMemory() as memory:
            step()
        found.append(memory.bytes)
    results.put(min(found))


def peak_apart(kind: str, args: argparse.Namespace) -> int:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=peak, args=(kind, args, results))
    process.start()
    found = results.get()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seconds = turns({kind: make_step(kind, args) for kind in KINDS}, args.repeats)
    memory = {kind: peak_apart(kind, args) for kind in KINDS}
    shape = f"{args.queries:,} x {args.queries:,} x {args.width}"
    figures = [{
        "figure": f"{shape}, a step / by hand: time",
        "value": statistics.median(a / b for a, b in zip(*seconds.values())),
        "medians": ", ".join(f"{kind} {1e3 * statistics.median(values):.3g} ms"
                             for kind, values in seconds.items())
    }, {
        "figure": f"{shape}, a step / by hand: peak memory",
        "value": memory["xsoftmax"] / memory["by hand"],
        "medians": ", ".join(f"{kind} {value / 2**20:.3g} MB" for kind, value in memory.items())
    }]
    report(args, __doc__, question="What does a step of two towers cost?",
           against="the same by hand in PyTorch", tables=[figures_table(figures)], figures=figures)


if __name__ == "__main__":
    main()
