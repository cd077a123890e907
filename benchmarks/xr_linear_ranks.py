"""Compares the training of XR-Linear by all ranks of a process group together
(XRLinear.train(group=...)) with one rank alone.

    python benchmarks/xr_linear_ranks.py --gowalla FOLDER [--ranks 2] [--negatives tfn tfn+man]
                                         [--repeats 7] [--json [FILE]]

Training consists of label vectors (PIFA), tree and layers, on the training part of the split of
extreme_labels.py. Ranks are processes with one thread on this machine, connected by gloo. One alone
and all together are interleaved; results are medians. CPU is the CPU time of the busiest rank,
which depends less on other programs than the time. The models of all ranks are compared bit for bit
with that of one.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import xsoftmax as xs
from common import extreme_data
from common.records import add_json, report, table


def examples(folder: Path):
    parts = extreme_data.split(*extreme_data.gowalla(folder), seed=0)
    return tuple(map(extreme_data.float_rows, parts["train"]))


def parts(model: xs.XRLinear) -> list[torch.Tensor]:
    return [
        model.model.labels(),
        *(part for depth in range(model.depth) for part in model.model.layer(depth))
    ]


def measure(rank: int, args: argparse.Namespace, negatives: str, X, Y) -> dict:
    def train(group) -> tuple[list[float], xs.XRLinear]:
        """Returns the seconds and CPU seconds of training, and the model."""
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        model = xs.XRLinear.train(X, Y, negatives=negatives,
                                  generator=torch.Generator().manual_seed(0), group=group)
        return [time.perf_counter() - start[0], time.process_time() - start[1]], model

    runs: list[dict[str, float]] = []
    for round_ in range(args.repeats + 1):
        alone = train(None) if rank == 0 else (dist.barrier(), None)
        together = train(dist.group.WORLD)
        busiest = torch.tensor(together[0])
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        of_one = [parts(alone[1])] if rank == 0 else [None]
        dist.broadcast_object_list(of_one)
        if not all(
                torch.equal(one, other)
                for one, other in zip(of_one[0], parts(together[1]), strict=True)):
            raise RuntimeError(f"rank {rank} has another model than one process")
        if rank == 0 and round_ > 0:
            runs.append(
                dict(
                    zip(("alone", "alone, CPU", "together", "together, CPU"),
                        [*alone[0], *busiest.tolist()])))
    if rank > 0:
        return {}
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratios = {
        f"together / alone{what}": medians[f"together{what}"] / medians[f"alone{what}"]
        for what in ("", ", CPU")
    }
    return {
        "negatives": negatives, "ranks": args.ranks, **medians, **ratios, "runs": runs,
        "layers": together[1].stats
    }


def work(rank: int, args: argparse.Namespace, file: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=args.ranks)
    X, Y = examples(args.gowalla)
    for negatives in args.negatives:
        found = measure(rank, args, negatives, X, Y)
        if rank == 0:
            results.put(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gowalla", type=Path, required=True, help="the folder of train.txt and "
                        "test.txt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--negatives", nargs="+", default=["tfn", "tfn+man"])
    parser.add_argument("--repeats", type=int, default=7)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (args, f"{folder}/group", results), nprocs=args.ranks,
                           start_method="spawn")
    rows = [results.get() for _ in args.negatives]
    columns = [
        "alone", "together", "together / alone", "alone, CPU", "together, CPU",
        "together / alone, CPU"
    ]
    texts = [{
        "negatives": row["negatives"], "ranks": row["ranks"],
        **{name: f"{row[name]:.3f}" if "/" in name else f"{row[name]:.2f} s"
           for name in columns}
    } for row in rows]
    report(args, __doc__, question="How much faster do several ranks train an extreme multi-label "
           "model?", against="one process of one thread", tables=[table(texts)], figures=rows)


if __name__ == "__main__":
    main()
