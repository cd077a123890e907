"""What ranks send each other where a class table is split over them, as functions that autograd follows."""

import contextlib
from typing import Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Ragged, all_gather


class ClassShards:
    """Which classes a rank has: a contiguous chunk of ceil(N / W), as ``Shard(0)`` of DTensor cuts a table. The last ranks may have fewer."""

    def __init__(self, num_classes: int, mesh) -> None:
        self.num_classes, self.mesh, self.group = num_classes, mesh, mesh.get_group()
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.chunk = -(-num_classes // self.size)
        self.begin, self.end = (min(num_classes, (self.rank + i) * self.chunk) for i in (0, 1))

    def local(self, table: Tensor) -> Tensor:
        """The rows of this rank."""
        return table[self.begin:self.end]

    def here(self, classes: Tensor) -> Tensor:
        """Whether this rank has them."""
        return (classes >= self.begin) & (classes < self.end)

    def norm(self, of_rank: Tensor, p: float) -> Tensor:
        """Of all ranks' rows together."""
        if p == float("inf"):
            total = of_rank.clone()
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group)
            return total
        total = of_rank.double().pow(p)
        dist.all_reduce(total, group=self.group)
        return total.pow(1 / p).to(of_rank.dtype)

    def owners(self, classes: Tensor) -> List[int]:
        """How many of these rising classes each rank has."""
        bounds = torch.arange(1, self.size, device=classes.device) * self.chunk
        return torch.searchsorted(classes, bounds).diff(prepend=bounds.new_zeros(1), append=bounds.new_full([1], len(classes))).tolist()


class GatherQueries(torch.autograd.Function):
    """The queries of all ranks. Backward: each rank's share of their gradients, summed."""

    @staticmethod
    def forward(ctx, queries: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.gather(queries)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # An exchange and a local sum: gloo's reduce-scatter is an all-reduce for each rank.
        return ctx.batch.scatter(grad).sum(0), None


class ScatterShares(torch.autograd.Function):
    """What each rank knows of all queries, [queries, ...], as all ranks know it of this rank's: [ranks, its queries, ...]."""

    @staticmethod
    def forward(ctx, shares: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.scatter(shares)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.batch.scattered_back(grad), None


class SumOverRanks(torch.autograd.Function):
    """A sum whose gradient every rank has already, since all of them go on alike."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class ScaleGradient(torch.autograd.Function):
    """x, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


class RowRequests:
    """Rows of rising, different classes that this rank asks of their owners, and what others ask of it."""

    def __init__(self, classes: Tensor, shards: ClassShards) -> None:
        self.shards, self.asked = shards, shards.owners(classes)
        counts, others = torch.tensor(self.asked, device=classes.device), torch.empty(shards.size, dtype=torch.int64, device=classes.device)
        dist.all_to_all_single(others, counts, group=shards.group)
        self.owed: List[int] = others.tolist()
        rows = classes.new_empty(sum(self.owed))
        dist.all_to_all_single(rows, classes, self.owed, self.asked, group=shards.group)
        self.rows = rows - shards.begin  # of this rank's table, asked by rank 0, rank 1, ...

    def fetch(self, table: Tensor) -> Tensor:
        fetched = table.new_empty(sum(self.asked), *table.shape[1:])
        dist.all_to_all_single(fetched, table.index_select(0, self.rows), self.asked, self.owed, group=self.shards.group)
        return fetched

    def give_back(self, grad: Tensor) -> Tensor:
        """What all ranks have for the rows of this one."""
        given = grad.new_empty(sum(self.owed), *grad.shape[1:])
        dist.all_to_all_single(given, grad.contiguous(), self.owed, self.asked, group=self.shards.group)
        return given


class FetchRows(torch.autograd.Function):
    """Rows of a split table. Backward: its gradient on this rank, row-sparse or dense, from all ranks."""

    @staticmethod
    def forward(ctx, table: Tensor, requests: RowRequests, sparse_grad: bool) -> Tensor:
        ctx.requests, ctx.shape, ctx.sparse_grad = requests, table.shape, sparse_grad
        return requests.fetch(table)

    @staticmethod
    def backward(ctx, grad: Tensor):
        values, rows = ctx.requests.give_back(grad), ctx.requests.rows
        sparse = torch.sparse_coo_tensor(rows[None], values, ctx.shape, check_invariants=False)
        return sparse if ctx.sparse_grad else sparse.to_dense(), None, None


def same_generator(generator: Optional[torch.Generator], device, group: dist.ProcessGroup) -> torch.Generator:
    """The first rank's generator; on others one that goes on as it does."""
    if generator is None:
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state().to(device)
    dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
    if dist.get_rank(group) == 0:
        return generator
    return torch.Generator(device).set_state(state.cpu())


@contextlib.contextmanager
def rank_generator(shards: ClassShards) -> Iterator[None]:
    """torch's default generators are inside those of this rank, by a seed that the first rank draws."""
    seed = torch.randint(2 ** 62, [1]).to(shards.mesh.device_type)
    dist.broadcast(seed, dist.get_global_rank(shards.group, 0), group=shards.group)
    with torch.random.fork_rng([torch.cuda.current_device()] if shards.mesh.device_type == "cuda" else []):
        torch.manual_seed(int(seed) + shards.rank)
        yield


def unique_of(parts: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
    """The different numbers in `parts`, rising, and each part as places among them."""
    different, places = torch.unique(torch.cat([part.flatten() for part in parts]), return_inverse=True)
    return different, [place.view(part.shape) for place, part in zip(places.split([part.numel() for part in parts]), parts)]
