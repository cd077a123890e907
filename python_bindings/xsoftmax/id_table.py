"""Raw ids to rows of a table, where ids come and go."""

from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ._checks import check_count
from ._options import option_text
from ._table import TableModule, fresh_rows
from .optim._base import RowOptimizer
from .optim._registry import optimizers_of, reset_state_rows
from .optim.settle import settle
from .samplers.streaming import StreamingCounts

STATE = ("slots", "row_ids", "seen", "victims", "counters")
_SIZE, _EVICTED = 1, 8  # of counters (csrc/ids/id_table.h)


class IdTable(nn.Module):
    """Raw ids, any int64, to rows [0, capacity) of a class table or an embedding. Ids may come and go for ever; the tables keep their size.

    In train() a call counts its ids and gives rows to new ones; in eval() it looks up alone. Row 0 is shared by all ids without a row: those that have not been
    seen ``admission`` times, those that gave way, and, in eval(), those never seen. In a table without a free row an id gives way to a new one: the least
    often seen ("lfu"; ties: seen longest ago), or the one seen longest ago ("lru"; ties: seen least often). Who gives way is chosen for a sixteenth of the rows at a
    time, in O(capacity); who has been seen since is passed over. So an id of the batch never gives way, a new id is safe until the next choice, and a new
    id costs O(1) on average. Where nobody can give way, or with ``eviction=None``, an id stays without a row.

    A row that goes from an id to another starts anew: what :meth:`attach` was given, tables, state of optimizers and counts, is reset there before the call
    returns::

        ids = xs.IdTable(1_000_000, eviction="lfu", admission=3)
        loss = xs.SampledSoftmaxLoss(64, ids.capacity, sampler="midx")
        optimizer = xs.optim.RowAdagrad(loss.parameters(), lr=0.1)
        ids.attach(loss)                                                # row optimizers are found by the table
        loss(hidden, ids(raw_target)).backward()

    Rows are given out in the order of the batch, whatever the number of threads: two tables that see the same batches are equal bit for bit.

    Args:
        capacity: C >= 2, the rows with the shared one.
        eviction: "lfu", "lru", or None: nobody gives way.
        admission: in [1, 1,000,000]: an id gets its row when it has been seen so often. Ids that wait are kept in the same memory, C of them at most: where
            one more comes, the half seen longest ago is forgotten.

    Memory: 57 bytes a row, 89 with ``admission`` above 1, on the CPU. Buffers, all in the state dict, int64: ``slots`` [2 C, 2] ([4 C, 2] with ``admission`` above
    1), the hash table; ``row_ids`` [C]; ``seen`` [C, 2], count and last batch; ``victims`` [C / 16], who gives way next; ``counters`` [9].

    Shape: ids [*], int64 on any device; rows [*], on the same device.

    Raises:
        TypeError: ids of another dtype. ValueError: an option out of range
    """

    def __init__(self, capacity: int, *, eviction: Optional[str] = "lfu", admission: int = 1):
        super().__init__()
        owner = type(self).__name__
        self.capacity = check_count(owner, "capacity", capacity, 2)
        if eviction is not None and not isinstance(eviction, str):
            raise TypeError(f"{owner}: expected eviction as \"lfu\", \"lru\" or None, got {type(eviction).__name__}")
        self.options = option_text(eviction=eviction, admission=check_count(owner, "admission", admission, 1))
        with torch.device("cpu"):
            state = torch.ops.xsoftmax.id_table(self.capacity, self.options)
        for name, tensor in zip(STATE, state):
            self.register_buffer(name, tensor)
        self._attached: List[Tuple[object, Optional[Callable]]] = []

    def _state(self) -> List[Tensor]:
        return [self.slots, self.row_ids, self.seen, self.victims, self.counters]

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of a batch: :meth:`insert` in train(), :meth:`find` in eval()."""
        if self.training:
            return self.insert(ids)[0]
        return self.find(ids)

    @torch.jit.export
    def insert(self, ids: Tensor) -> Tuple[Tensor, Tensor]:
        """A batch that is counted, in train() and eval() alike.

        Returns:
            rows [*], and int64 [E]: the rows that went from an id to another, which have been reset in all that is attached (in TorchScript they have not)
        """
        rows, evicted = torch.ops.xsoftmax.id_table_insert_(ids, self._state(), self.options)
        evicted = evicted[:int(self.counters[8])]
        if not torch.jit.is_scripting():
            if evicted.numel() > 0:
                self._reset(evicted)
        return rows, evicted

    @torch.jit.export
    def find(self, ids: Tensor) -> Tensor:
        """Rows of ids, 0 for one without a row. Counts nothing."""
        return torch.ops.xsoftmax.id_table_find(ids, self._state())

    @torch.jit.export
    def remove(self, ids: Tensor) -> Tensor:
        """Takes their rows from ids, and forgets those that wait. Returns the rows they had, 0 for one without. The rows go to new ids before all others,
        and are reset then."""
        return torch.ops.xsoftmax.id_table_remove_(ids, self._state())

    @torch.jit.export
    def ids_of(self, rows: Tensor, missing: int = -1) -> Tensor:
        """The raw ids of rows [*] in [0, capacity), ``missing`` where no id has the row (so for row 0): what turns the classes of ``topk`` into items."""
        return torch.ops.xsoftmax.id_table_ids(rows, self._state(), missing)

    def __len__(self) -> int:
        """How many ids have a row."""
        return int(self.counters[_SIZE])

    def __bool__(self) -> bool:
        return True  # a module, also while it is empty

    def attach(self, *tables, init: Optional[Callable[[Tensor], object]] = None) -> "IdTable":
        """What starts anew in a row that goes from an id to another.

        Args:
            tables: losses over a class table of C classes, ``nn.Linear``, ``nn.Embedding`` and ``nn.EmbeddingBag`` of C rows, parameters [C, ...];
                :class:`xsoftmax.samplers.StreamingCounts` of C ids (those of a loss's sampler come with the loss); and optimizers of ``torch.optim``. Row optimizers
                (:mod:`xsoftmax.optim`) are found by their table.
            init: fills a tensor [E, ...] of the parameters' dtype in place, as ``torch.nn.init`` does. None: as ``reset_parameters()`` of the module. Parameters
                have none, so it is needed there.

        Returns:
            self

        Raises:
            ValueError: a table of another number of rows, or one that is split over ranks. TypeError: none of these, or a parameter without ``init``
        """
        for table in tables:
            self._check_attached(table, init)
        self._attached += [(table, init) for table in tables]
        return self

    def _check_attached(self, table, init: Optional[Callable]) -> None:
        owner = type(self).__name__
        if isinstance(table, torch.optim.Optimizer):
            return
        if isinstance(table, StreamingCounts):
            rows = table.num_ids
        elif isinstance(table, nn.Parameter):
            rows = table.shape[0] if table.dim() > 0 else 0
            if init is None:
                raise TypeError(f"{owner}: expected init beside a parameter, which does not say how its rows begin")
        elif isinstance(table, (TableModule, nn.Linear, nn.Embedding, nn.EmbeddingBag)):
            parameters = _tables_of(table)
            rows = parameters[0].shape[0] if parameters else 0
            if any(hasattr(parameter, "_class_shards") for parameter in parameters):
                raise ValueError(f"{owner}: expected a table that is whole, got one that is split over ranks")
        else:
            raise TypeError(f"{owner}: expected a loss, nn.Linear, nn.Embedding, nn.EmbeddingBag, a parameter, StreamingCounts or an optimizer to attach, got "
                            f"{type(table).__name__}")
        if rows != self.capacity:
            raise ValueError(f"{owner}: expected a table of {self.capacity} rows, the capacity, got {rows}")

    @torch.no_grad()
    def _reset(self, rows: Tensor) -> None:
        optimizers = [table for table, _ in self._attached if isinstance(table, torch.optim.Optimizer)]
        done: Dict[int, Tensor] = {}
        for table, init in self._attached:
            if isinstance(table, StreamingCounts):
                table.forget(rows)
            elif isinstance(table, nn.Module):
                for module in table.modules():
                    if isinstance(module, StreamingCounts):
                        module.forget(rows)
            for parameter in _tables_of(table):
                if id(parameter) not in done:
                    done[id(parameter)] = parameter
                    there = rows.to(parameter.device)
                    parameter.index_copy_(0, there, fresh_rows(table, parameter, len(rows), init))
                    for optimizer in {*optimizers_of(parameter), *optimizers}:
                        reset_state_rows(optimizer, parameter, there)

    def _apply(self, fn, recurse=True):
        return self  # its tensors are integers, and stay on the host, which looks up there

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        before = [tensor.clone() for tensor in self._state()]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for name in STATE:
            setattr(self, name, getattr(self, name).cpu())  # load_state_dict(assign=True) takes tensors as they are
        try:
            self.find(torch.empty(0, dtype=torch.int64))  # checks the state
        except (ValueError, TypeError, RuntimeError) as error:
            for name, tensor in zip(STATE, before):
                setattr(self, name, tensor)
            error_msgs.append(f"IdTable: {error}")

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, " + self.options.replace(",", ", ").replace("=none", "=None")


def _tables_of(table) -> List[Tensor]:
    """Parameters with a row for each of a table's."""
    if isinstance(table, nn.Parameter):
        return [table]
    if isinstance(table, TableModule):
        return [parameter for parameter in table._tables() if parameter is not None]
    if isinstance(table, nn.Module) and not isinstance(table, StreamingCounts):
        return [parameter for parameter in (table.weight, getattr(table, "bias", None)) if parameter is not None]
    return []
