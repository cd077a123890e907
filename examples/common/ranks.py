"""The processes of a run: one, or those started by torchrun, each with its part of every batch."""

import argparse
import contextlib
import gc
import os
import sys
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import xsoftmax as xs

from .errors import UsageError
from .losses import Loss

TABLES = ("replicated", "split")


def add_ranks_arguments(parser: argparse.ArgumentParser, classes: str):
    """Adds --table. `classes` names the classes in the help text."""
    parser.add_argument_group("several processes").add_argument(
        "--table", choices=TABLES, help="under torchrun: keep the whole table of "
        f"{classes} on every rank, or split it over the ranks; each rank trains on "
        "its part of every batch")


def complete_ranks(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Ends the program if --table contradicts the way it was started."""
    table, size = getattr(args, "table", None), int(os.environ.get("WORLD_SIZE", 1))
    if table is not None and "WORLD_SIZE" not in os.environ:
        parser.error(f"--table {table}: expected several processes, as `torchrun --nproc-per-node "
                     f"2 {parser.prog} ...` starts them, got one")
    if "table" in args and table is None and size > 1:
        parser.error(f"--table: expected {' or '.join(TABLES)} for {size} processes, got none")
    if table is not None and args.batch_size < size:
        parser.error(f"--batch-size: expected at least the number of processes, {size}, got "
                     f"{args.batch_size}")
    if table is not None and args.device == "cuda":
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """Joins the process group. Only the first rank prints."""
    if getattr(args, "table", None) is None:
        yield
        return
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(
                sys.stdout if dist.get_rank() == 0 else nowhere):
            yield
    finally:
        # DistributedDataParallel is in a reference cycle and refers to the group; if it outlives
        # the group, the process may abort.
        gc.collect()
        dist.destroy_process_group()


class Ranks:
    """Communication between ranks. All ranks call the methods that communicate equally often. With
    one process, its part is everything and nothing is sent."""
    def __init__(self, table: str | None = None):
        """Takes the value of --table; None: one process."""
        self.table = table
        self.rank, self.size = (0, 1) if table is None else (dist.get_rank(), dist.get_world_size())
        self.first = self.rank == 0

    def seed(self, seed: int):
        """Seeds the samples of this rank. The first rank keeps the generator of one process."""
        if not self.first:
            seeds = torch.randint(2**62, [self.size], generator=torch.Generator().manual_seed(seed))
            torch.manual_seed(seeds[self.rank].item())

    def rows(self, count: int) -> slice:
        """Returns this rank's part of `count` rows."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def mean(self, *numbers: float) -> list[float]:
        """Returns the means over all ranks, the same on each."""
        return list(numbers) if self.table is None else (
            self.sum(torch.tensor(numbers, dtype=torch.float64)) / self.size).tolist()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a CPU tensor over all ranks, in place."""
        if self.table is not None:
            dist.all_reduce(tensor)
        return tensor

    def same(self, what: str, fact: Any):
        """Raises an error if a fact differs between ranks."""
        if self.table is not None:
            of_ranks: list = [None] * self.size
            dist.all_gather_object(of_ranks, fact)
            for rank, other in enumerate(of_ranks):
                if other != of_ranks[0]:
                    raise UsageError(f"{what}: expected the same on all ranks, got others on rank "
                                     f"{rank} than on rank 0")

    def data_parallel(self, encoder: nn.Module, loss: nn.Module) -> Callable:
        """Replicates or shards the tables, and returns a function that calls `compute` inside
        DistributedDataParallel. The loss then becomes a sum, over a rank's targets (replicated) or
        those of all ranks (split); see `batch_mean`."""
        if self.table is None:
            return lambda compute: compute()
        whole = Whole(encoder, loss)
        loss.reduction = "sum"
        if self.table == "replicated":
            if isinstance(loss, Loss):  # not another library's
                xs.distributed.replicate(whole)
            return DistributedDataParallel(whole)
        embedding = encoder.embedding
        tied = isinstance(loss, xs.LinearLoss) and embedding.weight is loss.linear.weight
        try:
            xs.distributed.shard_classes(whole)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--table split: {error}") from error
        if tied:
            encoder.embedding = xs.distributed.TiedEmbedding(loss, sparse=embedding.sparse)
        return DistributedDataParallel(whole)

    def batch_mean(self, loss: Tensor, count: int) -> Tensor:
        """Scales the loss for the backward pass, for `count` targets in the whole batch: the mean
        over ranks of the result, and of its gradient, is the mean over all targets."""
        if self.table is None:
            return loss
        return loss / count if self.table == "split" else loss * (self.size / count)

    def per_batch(self, loss: Tensor | float, count: int) -> Tensor | float:
        """Scales a loss that is not a sum over targets, so that `batch_mean` leaves its value
        unchanged."""
        return loss if self.table is None else loss * (count / self.size)

    def whole_table(self, loss: xs.LinearLoss) -> list[Tensor]:
        """Returns weight and bias of all classes."""
        state = loss.state_dict()
        parts = [state[f"linear.{name}"] for name in ("weight", "bias")]
        return [part.full_tensor() if self.table == "split" else part for part in parts]

    def gather_state(self, state: dict, of_rank: tuple[str, ...]) -> dict:
        """Adds the entries of `state` that differ between ranks, from all ranks, on the first."""
        if self.table is None:
            return state
        mine = {
            key: local(state[key])
            for key in of_rank + (("loss", "optimizer") if self.table == "split" else ())
        }
        of_ranks = [None] * self.size if self.first else None
        dist.gather_object(mine, of_ranks)
        return local(state) | {"ranks": of_ranks}

    def scatter_state(self, state: dict) -> dict:
        """Inverse of `gather_state`: returns the state of this rank."""
        if self.table is None:
            return state
        of_ranks = state["ranks"]
        if len(of_ranks) != self.size:
            raise UsageError(f"--resume: the checkpoint is one of {len(of_ranks)} processes, and "
                             f"this run has {self.size}")
        return state | of_ranks[self.rank]


class Whole(nn.Module):
    """An encoder and a loss as one module, whose call runs any function that uses them.
    DistributedDataParallel needs a module call to prepare gradients."""
    def __init__(self, encoder: nn.Module, loss: nn.Module):
        super().__init__()
        self.encoder, self.loss = encoder, loss

    def forward(self, compute: Callable):
        return compute()


def local(state: Any) -> Any:
    """Returns this rank's part of the contents of a state dict."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state
