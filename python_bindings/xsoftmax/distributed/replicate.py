"""Tables that every rank has whole, beside data parallelism of the encoder."""

import contextlib
import weakref
from typing import Any, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._placement import Table, attach, table_of
from .._ranks import Ragged, broadcast, check_alike, group_of
from .._table import TableModule
from ..optim._base import sparse_rows
from ._models import facts_of, leave_out, tables_of
from .counts import count_over


class _Exchange:
    """Averages the gradient of a parameter over ranks as soon as it is there."""

    def __init__(self, name: str, parameter: Tensor, group: dist.ProcessGroup) -> None:
        # The parameter refers to this by its hook, in which Python's collector of cycles does not see it: what it refers to would outlive the model.
        self.name, self.parameter, self.group, self.enabled = name, weakref.ref(parameter), group, True
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
        # Equal rows are summed here, so that a row travels once a rank.
        rows, values = sparse_rows(self.name, parameter, grad.coalesce())
        of_ranks = Ragged(len(rows), rows.device, self.group)
        parameter.grad = torch.sparse_coo_tensor(of_ranks.gather(rows)[None], of_ranks.gather(values).div_(size), grad.shape, check_invariants=False)


class ReplicatedTable(Table):
    """Rows that every rank has, all of them. The gradients of its parameters are averaged."""

    is_local = False

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.exchanges = [_Exchange(f"{name}.{parameter}", value, group)
                          for parameter, value in module.named_parameters()]

    def check(self, owner: str, parameters: Sequence[Optional[Tensor]]) -> None:
        # fully_shard puts parameters of its own in the place of those that it is not told to leave
        # out.
        known = [exchange.parameter() for exchange in self.exchanges]
        if any(table is not None and all(table is not each for each in known)
               for table in parameters):
            raise RuntimeError(f"{owner}: expected the parameters that were replicated, got others: call "
                               "fully_shard(model, ..., ignored_params=set(loss.parameters())), which leaves the table out")


def replicate_tables(owner: str, tables: List[TableModule], group: dist.ProcessGroup) -> None:
    """Those that all ranks have alike."""
    for table in tables:
        if not table_of(table).is_local:
            way = "split over ranks" if table_of(table).is_split else "replicated"
            raise RuntimeError(f"{owner}: expected a model that is not {way} yet, got one that is")
    for table in tables:
        table.settle()
        broadcast([*table.parameters(), *table.buffers()], group)
        count_over(table, group)
        if table.sparse_grad is None:
            table.sparse_grad = True  # ranks whose batches differ in size could disagree on the form, and an exchange of rows waits for all of them
        attach(ReplicatedTable(table._name, table, group), table)


def replicate(model: nn.Module, mesh: Optional[DeviceMesh] = None) -> nn.Module:
    """Trains the class tables in `model` by data parallelism: every rank has them whole, and their row-sparse gradients are averaged over ranks.

    DistributedDataParallel and ``fully_shard`` know no row-sparse gradients of tables; their dense ones cost O(N). Here the rows that have a
    gradient travel: a rank receives ``(W - 1) R (D e + 8)`` bytes a step, R different rows of a rank and e bytes a number, whatever N is. Since all
    ranks sum the same rows in the same order, their tables stay equal bit for bit. A dense gradient (``sparse_grad=False``, the exact loss) is
    all-reduced; ``sparse_grad=None`` becomes True. The encoder is left to others::

        model = xs.distributed.replicate(model)                              # before DistributedDataParallel, which then leaves tables out
        model = torch.nn.parallel.DistributedDataParallel(model)

        xs.distributed.replicate(model, mesh)                                # or beside FSDP2
        torch.distributed.fsdp.fully_shard(model, mesh=mesh, ignored_params=set(model.loss.parameters()))

    As under DistributedDataParallel, gradients are means over ranks of the gradients of each rank's loss, each rank draws its candidates by its torch
    generator (seed ranks differently, or they draw the same), samplers that follow the table keep an index of each rank's, counts of a stream
    (:class:`xsoftmax.samplers.StreamingCounts`) are those of all ranks' targets, and all ranks call ``forward()`` and ``backward()`` equally often.
    Gradients are there when ``backward()`` returns, so :func:`xsoftmax.clip_grad_norm_` and optimizers see what one process would.

    Args:
        model: a loss, a matcher, or a module that holds some. Their parameters and buffers become those of the first rank.
        mesh: a DeviceMesh of one dimension. None: all ranks.

    Returns:
        `model`.

    Raises:
        RuntimeError: no process group; a model that is replicated already, or split over ranks
        ValueError: a model without a class table; ranks that disagree on a table, with both values
    """
    owner = "replicate"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    tables = tables_of(model)
    if not tables:
        raise ValueError(f"{owner}: expected a model with a class table (a loss or a matcher of this library), got a {type(model).__name__} without one")
    check_alike(owner, facts_of(tables), group)
    replicate_tables(owner, tables, group)
    leave_out(model)
    return model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients of replicated tables stay each rank's inside, as in ``DistributedDataParallel.no_sync()``, and are averaged, with what has
    accumulated, by the first backward pass outside."""
    replicated = [place for place in map(table_of, tables_of(model)) if isinstance(place, ReplicatedTable)]
    exchanges = [exchange for place in replicated for exchange in place.exchanges]
    before = [exchange.enabled for exchange in exchanges]
    for exchange in exchanges:
        exchange.enabled = False
    try:
        yield
    finally:
        for exchange, enabled in zip(exchanges, before):
            exchange.enabled = enabled
