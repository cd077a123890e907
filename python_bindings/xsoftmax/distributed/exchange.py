"""Communication between the ranks of a sharded class table, as autograd functions."""

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._core.ranks import Ragged


class ClassShards:
    """The assignment of classes to ranks: each rank holds a contiguous chunk of ceil(N / W)
    classes, as ``Shard(0)`` of DTensor splits a table. The last ranks may hold fewer."""
    def __init__(self, num_classes: int, mesh: DeviceMesh) -> None:
        self.num_classes, self.mesh, self.group = num_classes, mesh, mesh.get_group()
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.chunk = -(-num_classes // self.size)
        self.begin, self.end = (min(num_classes, (self.rank + i) * self.chunk) for i in (0, 1))

    def local(self, table: Tensor) -> Tensor:
        """Returns the rows of this rank."""
        return table[self.begin:self.end]

    def contains(self, classes: Tensor) -> Tensor:
        """Returns whether this rank holds each class."""
        return (classes >= self.begin) & (classes < self.end)

    def norm(self, local_norm: Tensor, p: float) -> Tensor:
        """Returns the p-norm over the rows of all ranks, from those of each rank."""
        if p == float("inf"):
            total = local_norm.clone()
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group)
            return total
        total = local_norm.double().pow(p)
        dist.all_reduce(total, group=self.group)
        return total.pow(1 / p).to(local_norm.dtype)

    def owners(self, classes: Tensor) -> Tensor:
        return classes // self.chunk


class GatherQueries(torch.autograd.Function):
    """Gathers the queries of all ranks. Backward sums the gradients computed by all ranks for this
    rank's queries."""
    @staticmethod
    def forward(ctx: Any, queries: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.gather(queries)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # All-to-all and a local sum: gloo implements reduce-scatter as one all-reduce per rank.
        return ctx.batch.scatter(grad).sum(0), None


class ScoresOfAll(torch.autograd.Function):
    """Computes ``candidate_scores`` of the queries of all ranks, `everyone`, for the classes of
    this rank. Queries that do not count are zeros in `everyone`. In backward, the gradient of the
    queries is exchanged as in :class:`GatherQueries`, while that of the table is computed."""
    @staticmethod
    def forward(ctx: Any, queries: Tensor, weight: Tensor, bias: Optional[Tensor],
                all_queries: Tensor, counts: Tensor, private: Tensor, shared: Optional[Tensor],
                batch: Ragged, sparse_grad: Optional[bool]) -> Tensor:
        # the cast that autocast makes
        ctx.save_for_backward(all_queries.to(weight.dtype), weight, counts, private, shared)
        ctx.batch, ctx.dtype, ctx.sparse_grad = batch, queries.dtype, sparse_grad
        if len(weight) == 0:  # a rank without classes must still take part in the exchange
            return all_queries.new_zeros(
                private.shape, dtype=torch.promote_types(all_queries.dtype, torch.float32))
        return torch.ops.xsoftmax.candidate_scores(all_queries, weight, bias, private, shared,
                                                   sparse_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        all_queries, weight, counts, private, shared = ctx.saved_tensors
        needs_queries, *needs_table = ctx.needs_input_grad[:3]
        finish = None
        result: List[Optional[Tensor]] = [None] * 9
        dense = not is_row_sparse(ctx.sparse_grad,
                                  private.numel() +
                                  (0 if shared is None else len(shared)), len(weight))

        def compute_gradients(*needs_gradient: bool) -> Any:
            if len(weight) == 0:
                return torch.zeros_like(all_queries), private.new_empty(0), weight.new_empty(
                    weight.shape), weight.new_empty(0)
            return torch.ops.xsoftmax.candidate_scores_backward(grad, all_queries, weight, private,
                                                                shared, needs_gradient, None, dense)

        if needs_queries:
            query_gradients = compute_gradients(True, False, False)[0].to(ctx.dtype)
            finish = ctx.batch.start_scatter(torch.where(counts.unsqueeze(1), query_gradients, 0.0))
        if any(needs_table):
            _, rows, *values = compute_gradients(False, *needs_table)
            for i, needs_gradient in enumerate(needs_table):
                if needs_gradient:
                    result[1 + i] = values[i] if dense else row_gradient(
                        rows, values[i], len(weight), True)
        if finish is not None:
            result[0] = finish().sum(0)
        return tuple(result)


class ScatterShares(torch.autograd.Function):
    """Exchanges what each rank has computed for all queries, [queries, ...], for what all ranks
    have computed for this rank's queries, [ranks, its queries, ...]."""
    @staticmethod
    def forward(ctx: Any, shares: Tensor, batch: Ragged) -> Tensor:
        ctx.batch = batch
        return batch.scatter(shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.batch.gather_back(grad), None


class SumOverRanks(torch.autograd.Function):
    """Sums over ranks. Backward passes the gradient on, because it is the same on every rank."""
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class ScaleGradient(torch.autograd.Function):
    """Returns x and multiplies its gradient by a factor."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Requests:
    """Numbers that this rank requests from other ranks, and the numbers they request from it.

    Args:
        numbers: int64, ordered by the rank they are requested from.
        owners: the rank that each number is requested from, in increasing order.
        invalid: bool [], whether a number is invalid. It is sent along with the counts, without a
            separate synchronisation. If it is set on any rank, no numbers are exchanged.
    """
    def __init__(self, numbers: Tensor, owners: Tensor, group: dist.ProcessGroup,
                 invalid: Optional[Tensor] = None) -> None:
        self.group = group
        ranks = dist.get_world_size(group)
        counts = torch.bincount(owners.clamp(0, ranks - 1), minlength=ranks)
        if invalid is not None:
            counts = counts.masked_fill(invalid, -1)
        counts_of_ranks = torch.empty_like(counts)
        dist.all_to_all_single(counts_of_ranks, counts, group=group)
        self.request_counts: List[int] = counts.tolist()
        self.answer_counts: List[int] = counts_of_ranks.tolist()
        self.refused_by = [rank for rank, count in enumerate(self.answer_counts) if count < 0]
        """The ranks with invalid numbers, known to all ranks."""
        self.numbers = numbers[:0] if self.refused_by else self.send_back(numbers)
        """The numbers requested from this rank, by the first rank, the second, and so on."""

    def answer(self, answers: Tensor) -> Tensor:
        """Takes an answer to each of :attr:`numbers`, and returns the answers to this rank's
        requests."""
        result = answers.new_empty(sum(self.request_counts), *answers.shape[1:])
        dist.all_to_all_single(result, answers.contiguous(), self.request_counts,
                               self.answer_counts, group=self.group)
        return result

    def send_back(self, values: Tensor) -> Tensor:
        """The reverse of :meth:`answer`: sends a value for each number that this rank requested,
        and returns the values of all ranks for each of :attr:`numbers`."""
        result = values.new_empty(sum(self.answer_counts), *values.shape[1:])
        dist.all_to_all_single(result, values.contiguous(), self.answer_counts, self.request_counts,
                               group=self.group)
        return result


class FetchRows(torch.autograd.Function):
    """Fetches rows of a sharded table through :class:`Requests` for their local row numbers.
    Backward computes the gradient of this rank's rows, row-sparse or dense, from all ranks."""
    @staticmethod
    def forward(ctx: Any, table: Tensor, requests: Requests, sparse_grad: Optional[bool]) -> Tensor:
        ctx.requests, ctx.shape, ctx.sparse_grad = requests, table.shape, sparse_grad
        return requests.answer(table.index_select(0, requests.numbers))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return row_gradient(ctx.requests.numbers, ctx.requests.send_back(grad), ctx.shape[0],
                            ctx.sparse_grad), None, None


def is_row_sparse(sparse_grad: Optional[bool], rows: int, num_rows: int) -> bool:
    """Returns whether the gradient of a table is row-sparse: as `sparse_grad`, or by the rule
    for sparse_grad=None."""
    return rows <= num_rows if sparse_grad is None else sparse_grad


def row_gradient(rows: Tensor, values: Tensor, num_rows: int, sparse: Optional[bool]) -> Tensor:
    """Returns the gradient of a table from the gradients of some rows, which may repeat."""
    grad = torch.sparse_coo_tensor(rows[None], values, [num_rows, *values.shape[1:]],
                                   check_invariants=False)
    return grad if is_row_sparse(sparse, len(rows), num_rows) else grad.to_dense()


def row_requests(owner: str, argument: str, classes: Tensor, shards: ClassShards) -> Requests:
    """Returns requests for the rows of distinct classes in increasing order. If any rank has an
    invalid class, all ranks raise an IndexError; raised by one rank only, it would leave the others
    waiting."""
    owners, is_invalid = shards.owners(classes), (classes < 0) | (classes >= shards.num_classes)
    requests = Requests(classes - owners * shards.chunk, owners, shards.group,
                        invalid=is_invalid.any())
    if requests.refused_by:
        invalid_ids = classes[is_invalid][:1].tolist()
        raise IndexError(f"{owner}: expected {argument} in [0, {shards.num_classes}), got "
                         f"{invalid_ids[0] if invalid_ids else 'another'} on rank "
                         f"{shards.rank if invalid_ids else requests.refused_by[0]}")
    return requests


def same_generator(generator: Optional[torch.Generator], device: torch.device,
                   group: dist.ProcessGroup) -> torch.Generator:
    """Returns the first rank's generator; on other ranks, a generator with the same state."""
    return start_same_generator(generator, device, group)()


def start_same_generator(generator: Optional[torch.Generator], device: torch.device,
                         group: dist.ProcessGroup) -> Callable[[], torch.Generator]:
    """Starts the exchange for :func:`same_generator`, and returns a function that waits for it."""
    if generator is None:
        generator = (torch.default_generator
                     if device.type == "cpu" else torch.cuda.default_generators[device.index])
    state = generator.get_state().to(device)
    work = dist.broadcast(state, dist.get_global_rank(group, 0), group=group, async_op=True)

    def finish() -> torch.Generator:
        work.wait()
        return generator if dist.get_rank(group) == 0 else torch.Generator(device).set_state(
            state.cpu())

    return finish


@contextlib.contextmanager
def rank_generator(shards: ClassShards) -> Iterator[None]:
    """Context manager in which torch's default generators have a seed per rank, derived from a seed
    that the first rank draws."""
    seed = torch.randint(2**62, [1]).to(shards.mesh.device_type)
    dist.broadcast(seed, dist.get_global_rank(shards.group, 0), group=shards.group)
    with torch.random.fork_rng([torch.cuda.current_device()] if shards.mesh.device_type ==
                               "cuda" else []):
        torch.manual_seed(int(seed) + shards.rank)
        yield


def find_unique(parts: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
    """Returns the distinct numbers in `parts`, sorted, and the position of each element in them."""
    unique_numbers, places = torch.unique(torch.cat([part.flatten() for part in parts]),
                                          return_inverse=True)
    return unique_numbers, [
        place.view(part.shape)
        for place, part in zip(places.split([part.numel() for part in parts]), parts)
    ]


class SumGradient(torch.autograd.Function):
    """A parameter replicated on all ranks. Backward sums the ranks' shares of its gradient."""
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
