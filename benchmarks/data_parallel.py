"""Measures a training step with a class table on several ranks: replicated on every rank
(xs.distributed.replicate) or split over them (xs.distributed.shard_classes), compared with a dense
gradient reduced by DistributedDataParallel, and with Partial FC v2.

    python benchmarks/data_parallel.py [--classes 100000 1000000] [--kinds whole,split,dense]
                                       [--ranks 2] [--queries 256] [--width 128] [--json [FILE]]
    python benchmarks/data_parallel.py --classes 1000000 \\
        --kinds split,dense,partial_fc,partial_fc_sgd
    # how the cost of a step grows with the number of classes
    python benchmarks/data_parallel.py --classes 1000000 10000000 --kinds split --width 64

"whole" is a replicated table. "split" uses exchange="auto" of shard_classes; "queries" and "rows"
are its two exchanges. A step consists of an encoder with one layer, the sampled loss (512 classes
shared by the batch), the backward pass with the exchange, and the optimizer: RowAdam, or fused Adam
for a dense gradient. Partial FC trains on a tenth of its classes per step, without the margin and
the normalisation of face recognition; its optimizer is fused Adam, or with _sgd the fused SGD with
momentum of its authors. Ranks are processes with one thread on this machine, connected by gloo. All
kinds and numbers of classes are interleaved, so their tables are in memory at once. Times are
medians; ratios are medians of the ratios of each turn.
"""

import argparse
import functools
import gc
import statistics
import tempfile
from typing import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import xsoftmax as xs
from common.records import add_json, figures_table, report, table
from common.timing import turns


class Model(nn.Module):
    def __init__(self, width: int, loss: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.loss = loss

    def forward(self, input, target):
        return self.loss(self.encoder(input), target)


class PartialFC(nn.Module):
    """Partial FC v2 (An et al., "Killing Two Birds with One Stone", CVPR 2022). Each rank holds N /
    W classes. It trains on the targets of the batch among them and on random other ones, a fixed
    fraction in total. The gradient of its table is dense."""

    RATE = 0.1

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        size, rank = dist.get_world_size(), dist.get_rank()
        self.begin, end = classes * rank // size, classes * (rank + 1) // size
        self.drawn = int(self.RATE * (end - self.begin))
        self.weight = nn.Parameter(torch.normal(0.0, 0.01, (end - self.begin, width)))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        queries = Gather.apply(input)
        targets = gathered(target) - self.begin
        mine = ((targets >= 0) & (targets < len(self.weight))).nonzero().squeeze(1)
        chance = torch.rand(len(self.weight))
        chance[targets[mine]] = 2.0  # larger than all others
        chosen = chance.topk(self.drawn).indices.sort().values
        logits = queries @ self.weight[chosen].t()
        return CrossEntropyOverRanks.apply(logits, mine, torch.searchsorted(chosen, targets[mine]))


def gathered(part: Tensor) -> Tensor:
    """Gathers the rows of all ranks."""
    whole = part.new_empty(dist.get_world_size(), *part.shape)
    dist.all_gather(list(whole), part)
    return whole.flatten(0, 1)


class Gather(torch.autograd.Function):
    """Gathers rows. Backward sums over ranks and multiplies by W, because data parallelism averages
    gradients."""
    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        return gathered(input)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        parts = torch.empty_like(grad)
        dist.all_to_all_single(parts, grad.contiguous())
        return parts.view(dist.get_world_size(), -1, *grad.shape[1:]).sum(0) * dist.get_world_size()


class CrossEntropyOverRanks(torch.autograd.Function):
    """Mean cross entropy of logits whose columns are split over ranks. The target of query
    `mine[i]` is column `columns[i]` of this rank."""
    @staticmethod
    def forward(ctx, logits: Tensor, mine: Tensor, columns: Tensor) -> Tensor:
        most = logits.amax(1, keepdim=True)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        probability = (logits - most).exp_()
        total = probability.sum(1, keepdim=True)
        dist.all_reduce(total)
        probability /= total
        ctx.save_for_backward(probability, mine, columns)
        of_target = torch.zeros(len(logits))
        of_target[mine] = probability[mine, columns]
        dist.all_reduce(of_target)
        return -of_target.clamp_min_(1e-30).log_().mean()

    @staticmethod
    def backward(ctx, grad: Tensor):
        probability, mine, columns = ctx.saved_tensors
        probability[mine, columns] -= 1
        return probability.mul_(grad / len(probability)), None, None


def sampled(args: argparse.Namespace, classes: int, prepare: Callable = lambda model: model,
            sparse_grad: bool = True) -> Model:
    return prepare(
        Model(
            args.width,
            xs.SampledSoftmaxLoss(args.width, classes, sampler="log_uniform", num_samples=512,
                                  sparse_grad=sparse_grad)))


def partial_fc(args: argparse.Namespace, classes: int) -> Model:
    model = Model(args.width, PartialFC(args.width, classes))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["loss.weight"])
    return model


def adam(parameters):
    return torch.optim.Adam(parameters, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)


# How to create a model, and its optimizer. Kinds that are not in RIVALS are compared with those
# that are.
KINDS = {
    "whole": (lambda args, classes: sampled(args, classes, xs.distributed.replicate),
              xs.optim.RowAdam),
    "split": (lambda args, classes: sampled(args, classes, xs.distributed.shard_classes),
              xs.optim.RowAdam),
    "queries": (lambda args, classes: sampled(
        args, classes, functools.partial(xs.distributed.shard_classes, exchange="queries")),
                xs.optim.RowAdam),
    "rows": (lambda args, classes: sampled(
        args, classes, functools.partial(xs.distributed.shard_classes, exchange="rows")),
             xs.optim.RowAdam),
    "dense": (lambda args, classes: sampled(args, classes, sparse_grad=False), adam),
    "partial_fc": (partial_fc, adam),
    "partial_fc_sgd": (partial_fc, sgd),
}
RIVALS = ("dense", "partial_fc", "partial_fc_sgd")


def make_step(kind: str, args: argparse.Namespace, classes: int):
    torch.manual_seed(0)
    make, make_optimizer = KINDS[kind]
    model = make(args, classes)
    parallel = DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1 + dist.get_rank())

    def step():
        optimizer.zero_grad()
        parallel(torch.randn(args.queries, args.width), torch.randint(classes,
                                                                      (args.queries,))).backward()
        optimizer.step()

    return step


def work(rank: int, args: argparse.Namespace, file: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=args.ranks)
    seconds = turns(
        {(kind, classes): make_step(kind, args, classes)
         for classes in args.classes
         for kind in args.kinds}, args.repeats, warmup=2)
    if rank == 0:
        results.put(seconds)
    gc.collect()  # DistributedDataParallel is in a reference cycle and refers to the group
    dist.destroy_process_group()


def ratios(seconds: dict, args: argparse.Namespace) -> list[dict]:
    """Returns the ratios of each of our kinds to each rival with the same number of classes, and of
    each kind to itself with the fewest classes."""
    pairs = [(f"{ours} / {rival}, N {classes:,}", (ours, classes), (rival, classes))
             for classes in args.classes for rival in args.kinds if rival in RIVALS
             for ours in args.kinds if ours not in RIVALS]
    pairs += [(f"{kind}, N {classes:,} / {args.classes[0]:,}", (kind, classes),
               (kind, args.classes[0])) for classes in args.classes[1:] for kind in args.kinds]
    return [{
        "figure": figure, "value": statistics.median(a / b
                                                     for a, b in zip(seconds[ours], seconds[other]))
    } for figure, ours, other in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--kinds", default="whole,split,dense", help=f"out of {','.join(KINDS)} "
                        "(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--queries", type=int, default=256, help="queries per rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=11)
    add_json(parser)
    args = parser.parse_args()
    args.kinds = args.kinds.split(",")
    if not set(args.kinds) <= set(KINDS):
        parser.error(f"--kinds: expected names out of {', '.join(KINDS)}, got "
                     f"{','.join(args.kinds)}")
    torch.set_num_threads(1)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (args, f"{folder}/group", results), nprocs=args.ranks,
                           start_method="spawn")
    seconds = results.get()
    rows = [{
        "classes": classes,
        **{kind: statistics.median(seconds[kind, classes])
           for kind in args.kinds}
    } for classes in args.classes]
    figures = ratios(seconds, args)
    times = table([{
        "classes": f"{row['classes']:,}",
        **{f"{kind}, ms": f"{1e3 * row[kind]:.1f}"
           for kind in args.kinds}
    } for row in rows])
    report(
        args, __doc__, question="What does a training step cost on several ranks?",
        against="a dense gradient under DistributedDataParallel with fused Adam; the method of "
        "Partial FC v2 in PyTorch", tables=[times, figures_table(figures)] if figures else [times],
        ranks=args.ranks, seconds=rows, figures=figures)


if __name__ == "__main__":
    main()
