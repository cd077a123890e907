"""Replicated class tables: every rank holds the whole table, next to a data-parallel encoder."""

import contextlib
import weakref
from typing import Any, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._core.placement import Table, attach, table_of
from .._core.ranks import Ragged, broadcast, check_equal, group_of
from ..tables.table_module import TableModule
from ..optim.row_optimizer import sparse_rows
from .models import facts_of, leave_out, tables_of
from .counts import count_over_ranks


class _Exchange:
    """A hook that averages the gradient of a parameter over ranks as soon as it is accumulated."""
    def __init__(self, name: str, parameter: Tensor, group: dist.ProcessGroup) -> None:
        # A weak reference, because Python's garbage collector does not see the reference from the
        # parameter to its hook: the cycle would keep the parameter alive.
        self.name, self.parameter, self.group, self.enabled = name, weakref.ref(
            parameter), group, True
        parameter.register_post_accumulate_grad_hook(self)

    @torch.no_grad()
    def __call__(self, parameter: Any) -> None:
        if not self.enabled:
            return
        size, grad = dist.get_world_size(self.group), parameter.grad
        if grad.layout == torch.strided:
            dist.all_reduce(grad, group=self.group)
            grad.div_(size)
            return
        # Sum duplicate rows first, so that each rank sends a row only once.
        rows, values = sparse_rows(self.name, parameter, grad.coalesce())
        batch = Ragged(len(rows), rows.device, self.group)
        parameter.grad = torch.sparse_coo_tensor(
            batch.gather(rows)[None],
            batch.gather(values).div_(size), grad.shape, check_invariants=False)


class ReplicatedTable(Table):
    """A table that every rank holds completely. The gradients of its parameters are averaged."""

    is_local = False

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.exchanges = [
            _Exchange(f"{name}.{parameter}", value, group)
            for parameter, value in module.named_parameters()
        ]

    def check(self, owner: str, parameters: Sequence[Optional[Tensor]]) -> None:
        # fully_shard replaces all parameters that are not in ignored_params.
        replicas = [exchange.parameter() for exchange in self.exchanges]
        if any(table is not None and all(table is not replica for replica in replicas)
               for table in parameters):
            raise RuntimeError(f"{owner}: expected the parameters that were replicated, got "
                               "others: call "
                               "fully_shard(model, ..., ignored_params=set(loss.parameters())), "
                               "which leaves the table out")


def replicate_tables(owner: str, tables: List[TableModule], group: dist.ProcessGroup) -> None:
    """Makes tables identical on all ranks and registers the averaging of their gradients."""
    for table in tables:
        if not table_of(table).is_local:
            state = "split over ranks" if table_of(table).is_split else "replicated"
            raise RuntimeError(
                f"{owner}: expected a model that is not {state} yet, got one that is")
    for table in tables:
        table.catch_up()
        broadcast([*table.parameters(), *table.buffers()], group)
        count_over_ranks(table, group)
        if table.sparse_grad is None:
            # Decide it now: ranks with batches of different sizes could choose different gradient
            # layouts, and the exchange of rows would then wait forever.
            table.sparse_grad = True
        attach(ReplicatedTable(table._name, table, group), table)


def replicate(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
    """Trains the class tables in `model` with data parallelism: every rank holds the whole tables,
    and their row-sparse gradients are averaged over ranks.

    DistributedDataParallel and ``fully_shard`` do not support row-sparse gradients of tables, and
    dense gradients cost O(N). Here only the rows with a gradient are exchanged: a rank receives
    ``(W - 1) R (D e + 8)`` bytes per step, for R distinct rows per rank and e bytes per number,
    independent of N. All ranks sum the same rows in the same order, so their tables stay
    bit-identical. Dense gradients (``sparse_grad=False``, the exact loss) are all-reduced, and
    ``sparse_grad=None`` becomes True. Parallelise the encoder as usual::

        # with DistributedDataParallel, which then skips the tables
        model = xs.distributed.replicate(model)
        model = torch.nn.parallel.DistributedDataParallel(model)

        # with FSDP2
        xs.distributed.replicate(model, mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh,
                                           ignored_params=set(model.loss.parameters()))

    As under DistributedDataParallel:

    - Gradients are means over ranks of the gradients of each rank's loss. They are complete when
      ``backward()`` returns, so :func:`xsoftmax.clip_grad_norm_` and optimizers see the same
      gradients as in one process.
    - All ranks call ``forward()`` and ``backward()`` equally often.
    - Each rank draws candidates with its own torch generator. Seed ranks differently, or they draw
      the same candidates.
    - Samplers that follow the table keep a separate index on each rank. Counts of a stream
      (:class:`xsoftmax.samplers.StreamingCounts`) include the targets of all ranks.

    Args:
        model: a loss, a matcher, or a module that contains some. Their parameters and buffers are
            set to those of the first rank.
        mesh: a one-dimensional DeviceMesh. None: all ranks.

    Returns:
        `model`.

    Raises:
        RuntimeError: there is no process group, or the model is already replicated or sharded.
        ValueError: the model has no class table, or a table differs between ranks; the message
            gives both values.
    """
    owner = "replicate"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    tables = tables_of(model)
    if not tables:
        raise ValueError(f"{owner}: expected a model with a class table (a loss or a matcher of "
                         f"this library), got a {type(model).__name__} without one")
    check_equal(owner, facts_of(tables), group)
    replicate_tables(owner, tables, group)
    leave_out(model)
    return model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the averaging of gradients of replicated tables, as
    ``DistributedDataParallel.no_sync()`` does for other parameters. The first backward pass outside
    averages the accumulated gradients."""
    tables = [
        place for place in map(table_of, tables_of(model)) if isinstance(place, ReplicatedTable)
    ]
    exchanges = [exchange for place in tables for exchange in place.exchanges]
    flags = [exchange.enabled for exchange in exchanges]
    for exchange in exchanges:
        exchange.enabled = False
    try:
        yield
    finally:
        for exchange, enabled in zip(exchanges, flags):
            exchange.enabled = enabled
