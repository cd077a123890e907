"""What a step of data parallelism costs with a class table: whole on every rank (xs.distributed.replicate) or split over them
(xs.distributed.shard_classes), against a dense gradient reduced by DistributedDataParallel.

    python benchmarks/data_parallel.py [--classes 100000 1000000] [--kinds whole,split,dense] [--ranks 2] [--queries 256] [--width 128] [--json]

A step is an encoder of one layer, the sampled loss (512 classes shared by the batch), backward with the exchange, and the optimizer: RowAdam, and
fused Adam beside the dense gradient. Ranks are processes of one thread on this machine, over gloo.
"""

import argparse
import json
import tempfile

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xsoftmax as xs
from timing import interleave, machine, print_machine, print_table


class Model(nn.Module):
    def __init__(self, width: int, classes: int, sparse_grad: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.loss = xs.SampledSoftmaxLoss(width, classes, sampler="log_uniform", num_samples=512, sparse_grad=sparse_grad)

    def forward(self, input, target):
        return self.loss(self.encoder(input), target)


KINDS = {"whole": xs.distributed.replicate, "split": xs.distributed.shard_classes, "dense": lambda model: model}


def make_step(kind: str, args: argparse.Namespace, classes: int):
    torch.manual_seed(0)
    model = Model(args.width, classes, sparse_grad=kind != "dense")
    parallel = DistributedDataParallel(KINDS[kind](model))
    optimizer = torch.optim.Adam(model.parameters(), fused=True) if kind == "dense" else xs.optim.RowAdam(model.parameters())
    torch.manual_seed(1 + torch.distributed.get_rank())

    def step():
        optimizer.zero_grad()
        parallel(torch.randn(args.queries, args.width), torch.randint(classes, (args.queries,))).backward()
        optimizer.step()

    return step


def work(rank: int, args: argparse.Namespace, file: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=args.ranks)
    for classes in args.classes:
        seconds = interleave({kind: make_step(kind, args, classes) for kind in args.kinds.split(",")}, args.repeats, warmup=2)
        if rank == 0:
            results.put({"classes": classes, **seconds})
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--kinds", default="whole,split,dense", help="%(default)s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--queries", type=int, default=256, help="of a rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not set(args.kinds.split(",")) <= set(KINDS):
        parser.error(f"--kinds: expected names out of {', '.join(KINDS)}, got {args.kinds}")
    torch.set_num_threads(1)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (args, f"{folder}/group", results), nprocs=args.ranks, start_method="spawn")
    rows = [results.get() for _ in args.classes]
    if args.json:
        print(json.dumps({"machine": machine(), "ranks": args.ranks, "figures": rows}, indent=2))
        return
    print_machine()
    kinds = args.kinds.split(",")
    texts = [{"classes": f"{row['classes']:,}", **{f"{kind}, ms": f"{1e3 * row[kind]:.1f}" for kind in kinds},
              **{f"{kind} / dense": f"{row[kind] / row['dense']:.3f}" for kind in kinds if "dense" in kinds and kind != "dense"}} for row in rows]
    print_table(texts, list(texts[0]))


if __name__ == "__main__":
    main()
