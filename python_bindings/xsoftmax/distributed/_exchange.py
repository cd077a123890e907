"""What ranks send each other where a class table is split over them, as functions that autograd follows."""

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._ranks import Ragged


class ClassShards:
    """Which classes a rank has: a contiguous chunk of ceil(N / W), as ``Shard(0)`` of DTensor cuts a table. The last ranks may have fewer."""

    def __init__(self, num_classes: int, mesh: DeviceMesh) -> None:
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

    def owners(self, classes: Tensor) -> Tensor:
        return classes // self.chunk


class GatherQueries(torch.autograd.Function):
    """The queries of all ranks. Backward: each rank's share of their gradients, summed."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.gather(queries)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # An exchange and a local sum: gloo's reduce-scatter is an all-reduce for each rank.
        return ctx.batch.scatter(grad).sum(0), None


class ScoresOfAll(torch.autograd.Function):
    """``candidate_scores`` of the queries of all ranks and classes of this one. `everyone` are those queries, zeros where they do not count.
    Backward: the gradient of this rank's queries, as that of :class:`GatherQueries`, travels while that of the table is made."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, weight: Tensor, bias: Optional[Tensor], everyone: Tensor, counts: Tensor, private: Tensor, shared: Optional[Tensor],
                batch: Ragged, sparse_grad: Optional[bool]) -> Tensor:
        ctx.save_for_backward(everyone.to(weight.dtype), weight, counts, private, shared)  # as autocast has it
        ctx.batch, ctx.dtype, ctx.sparse_grad = batch, queries.dtype, sparse_grad
        if len(weight) == 0:  # a rank without classes takes part in the exchange all the same
            return everyone.new_zeros(private.shape, dtype=torch.promote_types(everyone.dtype, torch.float32))
        return torch.ops.xsoftmax.candidate_scores(everyone, weight, bias, private, shared, sparse_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        everyone, weight, counts, private, shared = ctx.saved_tensors
        of_queries, *of_table = ctx.needs_input_grad[:3]
        finish = None
        result: List[Optional[Tensor]] = [None] * 9
        dense = not is_row_sparse(ctx.sparse_grad, private.numel() + (0 if shared is None else len(shared)), len(weight))

        def gradients(*wanted: bool) -> Any:
            if len(weight) == 0:
                return torch.zeros_like(everyone), private.new_empty(0), weight.new_empty(weight.shape), weight.new_empty(0)
            return torch.ops.xsoftmax.candidate_scores_backward(grad, everyone, weight, private, shared, wanted, None, dense)

        if of_queries:
            of_everyone = gradients(True, False, False)[0].to(ctx.dtype)
            finish = ctx.batch.start_scatter(torch.where(counts.unsqueeze(1), of_everyone, 0.0))
        if any(of_table):
            _, rows, *values = gradients(False, *of_table)
            for i, wanted in enumerate(of_table):
                if wanted:
                    result[1 + i] = values[i] if dense else row_gradient(rows, values[i], len(weight), True)
        if finish is not None:
            result[0] = finish().sum(0)
        return tuple(result)


class ScatterShares(torch.autograd.Function):
    """What each rank knows of all queries, [queries, ...], as all ranks know it of this rank's: [ranks, its queries, ...]."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.scatter(shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.batch.scattered_back(grad), None


class SumOverRanks(torch.autograd.Function):
    """A sum whose gradient every rank has already, since all of them go on alike."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class ScaleGradient(torch.autograd.Function):
    """x, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Requests:
    """Numbers that this rank asks of others, and what they ask of it.

    Args:
        numbers: int64, those for the first rank first.
        owners: which rank each of them is asked of, rising.
        invalid: bool [], whether one of the numbers is none; it travels with the counts, so no step waits for it. Where it is so on a rank, no rank asks.
    """

    def __init__(self, numbers: Tensor, owners: Tensor, group: dist.ProcessGroup, invalid: Optional[Tensor] = None) -> None:
        self.group = group
        ranks = dist.get_world_size(group)
        counts = torch.bincount(owners.clamp(0, ranks - 1), minlength=ranks)
        if invalid is not None:
            counts = counts.masked_fill(invalid, -1)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts, group=group)
        self.asked: List[int] = counts.tolist()
        self.owed: List[int] = others.tolist()
        self.refused_by = [rank for rank, count in enumerate(self.owed) if count < 0]
        """The ranks whose numbers were not valid, which all ranks know."""
        self.numbers = numbers[:0] if self.refused_by else self.give_back(numbers)
        """That this rank is asked for, by the first rank, the second, ..."""

    def answer(self, answers: Tensor) -> Tensor:
        """From an answer to each of :attr:`numbers`, those to this rank's."""
        found = answers.new_empty(sum(self.asked), *answers.shape[1:])
        dist.all_to_all_single(found, answers.contiguous(), self.asked, self.owed, group=self.group)
        return found

    def give_back(self, values: Tensor) -> Tensor:
        """The other way: what all ranks have for each of :attr:`numbers`."""
        given = values.new_empty(sum(self.owed), *values.shape[1:])
        dist.all_to_all_single(given, values.contiguous(), self.owed, self.asked, group=self.group)
        return given


class FetchRows(torch.autograd.Function):
    """Rows of a split table, by :class:`Requests` of their numbers on the ranks that have them. Backward: its gradient on this rank, row-sparse or
    dense, from all ranks."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, requests: Requests, sparse_grad: Optional[bool]) -> Tensor:
        ctx.requests, ctx.shape, ctx.sparse_grad = requests, table.shape, sparse_grad
        return requests.answer(table.index_select(0, requests.numbers))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return row_gradient(ctx.requests.numbers, ctx.requests.give_back(grad), ctx.shape[0], ctx.sparse_grad), None, None


def is_row_sparse(asked: Optional[bool], rows: int, num_rows: int) -> bool:
    """Whether a gradient of some rows of a table is row-sparse: as asked, or as sparse_grad=None has it."""
    return rows <= num_rows if asked is None else asked


def row_gradient(rows: Tensor, values: Tensor, num_rows: int, sparse: Optional[bool]) -> Tensor:
    """Of a table, from those of some rows, of which some may stand twice."""
    grad = torch.sparse_coo_tensor(rows[None], values, [num_rows, *values.shape[1:]], check_invariants=False)
    return grad if is_row_sparse(sparse, len(rows), num_rows) else grad.to_dense()


def row_requests(owner: str, argument: str, classes: Tensor, shards: ClassShards) -> Requests:
    """Of the rows of rising, different classes, which each rank numbers from its first one. Where a rank has a class that is none, all ranks raise
    IndexError: one that raised alone would leave the others waiting."""
    owners, bad = shards.owners(classes), (classes < 0) | (classes >= shards.num_classes)
    requests = Requests(classes - owners * shards.chunk, owners, shards.group, invalid=bad.any())
    if requests.refused_by:
        wrong = classes[bad][:1].tolist()
        raise IndexError(f"{owner}: expected {argument} in [0, {shards.num_classes}), got {wrong[0] if wrong else 'another'} on rank "
                         f"{shards.rank if wrong else requests.refused_by[0]}")
    return requests


def same_generator(generator: Optional[torch.Generator], device: torch.device, group: dist.ProcessGroup) -> torch.Generator:
    """The first rank's generator; on others one that goes on as it does."""
    return start_same_generator(generator, device, group)()


def start_same_generator(generator: Optional[torch.Generator], device: torch.device, group: dist.ProcessGroup) -> Callable[[], torch.Generator]:
    """What waits for it."""
    if generator is None:
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state().to(device)
    work = dist.broadcast(state, dist.get_global_rank(group, 0), group=group, async_op=True)

    def received() -> torch.Generator:
        work.wait()
        return generator if dist.get_rank(group) == 0 else torch.Generator(device).set_state(state.cpu())
    return received


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
