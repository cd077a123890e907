"""Simulates the cost of a training step with a sharded class table on many machines, from a
measured local step and the number of bytes of each exchange.

    python benchmarks/scale_out.py [--ranks 8 64 256 1024] [--links 10 25 100 400]
                                   [--classes 10000000 100000000 1000000000] [--json [FILE]]

Measured in one process: forward and backward pass of the sampled loss for the queries of one rank,
RowAdam on the rows with a gradient, and sampling. With exchange "queries", every rank samples for
the queries of all ranks; with "rows", only for its own. Computed: the bytes that a rank receives,
and their transfer time. Assumptions:

- The encoder and its gradients are left out, because their cost does not depend on classes.
- A rank computes the same number of scores in both exchanges: its queries against all their
  candidates, or those of all ranks against its share of them. Samples and targets are spread evenly
  over ranks, and are distinct.
- The local step does not depend on the number of classes; it is measured with --local-classes.
- Links receive at their full rate on all ranks at the same time. A collective takes W - 1
  sequential messages, as with gloo, each with a delay of --latency.
- The smaller of the two step times is reached if all communication overlaps with computation, the
  larger if none does. The exchange that is faster without overlap wins.
"""

import argparse
import math

import torch

import xsoftmax as xs
from common.records import add_json, report, table
from common.timing import interleave

EXCHANGES = ("queries", "rows")
# The collectives of a step. In both exchanges: batch sizes, targets, the generator's state, the
# value of the loss. "queries": queries, each rank's terms of a query's loss, and the gradients of
# both. "rows": numbers of rows, their ids, the rows, their gradients.
COLLECTIVES = {"queries": 4 + 4, "rows": 4 + 4}
ADAM_STATE = 8  # bytes of both moments per number


def queries_bytes(ranks: int, queries: int, width: int, number: int = 4) -> float:
    """Returns the bytes that a rank receives in a step with exchange "queries": the queries of the
    other ranks, the gradients of its own, and the normalisers of each query."""
    return 2 * (ranks - 1) * queries * width * number + 24 * (ranks - 1) * queries


def rows_bytes(ranks: int, rows: int, width: int, number: int = 4) -> float:
    """Returns the bytes with exchange "rows", where a rank needs `rows` distinct rows for its
    targets and candidates, and their gradients are sent back."""
    return 2 * (ranks - 1) / ranks * rows * width * number


def rows_of_step(queries: int, shared: int = 0, private: int = 0) -> int:
    """Returns the number of rows that a rank's queries need in a step: targets, `shared` samples
    for all queries, and `private` samples per query. An upper bound: all are distinct."""
    return queries + shared + private * queries


def exchange_bytes(exchange: str, ranks: int, rows: int, args: argparse.Namespace) -> float:
    return queries_bytes(ranks, args.queries, args.width) if exchange == "queries" else rows_bytes(
        ranks, rows, args.width)


def network_seconds(exchange: str, ranks: int, received: float, gigabits: float,
                    latency: float) -> float:
    """Returns the network time of a step: its bytes, and its sequential messages."""
    return 8 * received / (1e9 * gigabits) + COLLECTIVES[exchange] * (ranks - 1) * latency


def step_seconds(compute: float, network: float) -> tuple[float, float]:
    """Returns the step time with full overlap, and without overlap."""
    return max(compute, network), compute + network


def memory_bytes(classes: int, ranks: int, width: int, number: int = 4) -> int:
    """Returns the bytes of a rank's table and its RowAdam state: two moments per number and the
    last step of each row."""
    return math.ceil(classes / ranks) * (width * (number + ADAM_STATE) + 4)


def measure(args: argparse.Namespace, kind: str) -> tuple[float, float]:
    """Returns the seconds of the local step, and of sampling for the same number of queries."""
    num_samples = args.shared if kind == "shared" else args.private
    loss = xs.SampledSoftmaxLoss(args.width, args.local_classes, sampler="log_uniform",
                                 num_samples=num_samples, shared=kind == "shared")
    optimizer = xs.optim.RowAdam(loss.parameters())
    input = torch.randn(args.queries, args.width, requires_grad=True)
    target = torch.randint(args.local_classes, (args.queries,))
    many = 16  # number of ranks to sample for

    def step():
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()

    def draw(count: int):
        loss.propose(input.detach()[:1].expand(count * args.queries, args.width),
                     target.repeat(count))

    seconds = interleave({"step": step, "one": lambda: draw(1), "many": lambda: draw(many)},
                         args.repeats)
    return seconds["step"], max(seconds["many"] - seconds["one"], 0.0) / (many - 1)


def simulate(args: argparse.Namespace) -> list[dict]:
    """Returns a dict of results for each kind of samples, number of ranks and link."""
    result = []
    for kind in ("shared", "private"):
        local, draws = measure(args, kind)
        rows = rows_of_step(args.queries, **{kind: getattr(args, kind)})
        for ranks in args.ranks:
            compute = {"queries": local + (ranks - 1) * draws, "rows": local}
            received = {
                exchange: exchange_bytes(exchange, ranks, rows, args)
                for exchange in EXCHANGES
            }
            for gigabits in args.links:
                times = {
                    exchange: step_seconds(
                        compute[exchange],
                        network_seconds(exchange, ranks, received[exchange], gigabits,
                                        args.latency))
                    for exchange in EXCHANGES
                }
                result.append({
                    "draws": kind, "ranks": ranks, "gigabits": gigabits, "compute_seconds": compute,
                    "received_bytes": received, "step_seconds": times,
                    "wins": min(EXCHANGES, key=lambda exchange: times[exchange][1])
                })
    return result


def memory(args: argparse.Namespace) -> list[dict]:
    return [{"classes": classes, "ranks": ranks, "bytes": memory_bytes(classes, ranks, args.width)}
            for classes in args.classes for ranks in args.ranks]


def tables_of(steps: list[dict], tables: list[dict], args: argparse.Namespace) -> list[dict]:
    title = (f"{args.queries} queries per rank, width {args.width}, float32; {args.shared:,} "
             f"samples shared by all queries, or {args.private} per query; "
             f"{1e6 * args.latency:.3g} us per message. Times: computation and communication "
             "overlap fully, to not at all")

    def times(step: dict, exchange: str) -> str:
        return " to ".join(f"{1e3 * seconds:.1f}" for seconds in step["step_seconds"][exchange])

    texts = [{
        "samples": step["draws"], "ranks": f"{step['ranks']:,}",
        "link, Gb/s": f"{step['gigabits']:g}", **{
            f"{exchange} compute, ms": f"{1e3 * step['compute_seconds'][exchange]:.1f}"
            for exchange in EXCHANGES
        }, **{
            f"{exchange}, MB": f"{step['received_bytes'][exchange] / 1e6:.2f}"
            for exchange in EXCHANGES
        }, **{f"{exchange}, ms": times(step, exchange)
              for exchange in EXCHANGES}, "faster": step["wins"]
    } for step in steps]
    rows: dict[int, dict] = {}
    for one in tables:
        rows.setdefault(
            one["classes"],
            {"classes": f"{one['classes']:,}"})[f"{one['ranks']:,} "
                                                "ranks"] = f"{one['bytes'] / 1e9:.2f} GB"
    return [table(texts, title), table(list(rows.values()), "Table and RowAdam state per rank")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--links", type=float, nargs="+", default=[10, 25, 100, 400],
                        help="receive rates of a rank, in Gb/s")
    parser.add_argument("--classes", type=int, nargs="+",
                        default=[10_000_000, 100_000_000, 1_000_000_000])
    parser.add_argument("--queries", type=int, default=256,
                        help="queries per rank (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--shared", type=int, default=8192, help="samples shared by all queries "
                        "(default: %(default)s)")
    parser.add_argument("--private", type=int, default=64, help="samples per query (default: "
                        "%(default)s)")
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds per message "
                        "(default: %(default)s)")
    parser.add_argument("--local-classes", type=int, default=1_000_000, help="number of classes in "
                        "the measured step (default: "
                        "%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=21)
    add_json(parser)
    args = parser.parse_args()
    for name in ("ranks", "links", "classes"):
        if min(getattr(args, name)) <= 0:
            parser.error(f"--{name}: expected more than 0, got {min(getattr(args, name)):g}")
    if args.latency < 0:
        parser.error(f"--latency: expected 0 or more, got {args.latency}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    steps, tables = simulate(args), memory(args)
    report(args, __doc__, question="Which exchange of a split table is faster, on how many ranks?",
           against="each exchange with the other, in a simulation",
           tables=tables_of(steps, tables, args),
           arguments={name: value
                      for name, value in vars(args).items()
                      if name != "json"}, steps=steps, memory=tables)


if __name__ == "__main__":
    main()
