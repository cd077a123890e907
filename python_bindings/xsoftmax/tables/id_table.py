"""A hash table from raw ids to rows of a table, for ids that come and go."""

import threading
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .._core.checks import check_count, check_tensor
from .._core.options import option_text, read_options
from .._core.placement import are_local
from .resize import KNOWN_OPTIMIZERS
from .table_module import make_rows
from .._core.typing import Module
from ..losses.linear_loss import LinearLoss
from ..optim import reset_rows
from ..optim.row_optimizer import RowOptimizer
from ..samplers import Sampler
from ..samplers.streaming import StreamingCounts

STATE = ("slots", "row_ids", "seen", "victims", "counters")
Attached = Union[Tensor, nn.Module, torch.optim.Optimizer]


class IdTable(Module):
    """Hash table from raw ids, any int64, to rows [0, capacity) of a class table or an embedding.
    Ids may come and go forever; the tables keep their size.

    In train(), a call counts its ids and assigns rows to new ones; in eval(), it only looks them
    up. Row 0 is shared by all ids without a row: those seen fewer than ``admission`` times, those
    that were evicted, and, in eval(), those never seen.

    If no row is free, a new id evicts another one: the least often seen ("lfu"; ties: the least
    recently seen), or the least recently seen ("lru"; ties: the least often seen). Ids to evict are
    chosen in batches of capacity / 16, in O(capacity), and an id that has been seen since it was
    chosen is skipped. Ids of the current batch are therefore never evicted, a new id is safe until
    the next choice, and a new id costs O(1), amortised. If no id can be evicted, or with
    ``eviction=None``, a new id stays without a row.

    When a row changes from one id to another, it is reset in everything passed to :meth:`attach`,
    tables, optimizer state and counts, before the call returns.

    Call the table between an optimizer's step and the next forward pass. Rows are assigned in the
    order of the batch, for any number of threads: two tables that see the same batches are equal
    bit for bit. Threads of a program may share a table: look-ups run concurrently, while inserting
    a batch, with its resets, and removing ids run one at a time. A copy (copy.deepcopy, pickle,
    torch.save) has the same rows and nothing attached. A table serves one process: ranks that see
    different batches would assign different rows, so replicated and sharded tables are refused.

    Look-ups in eval() script, compile and export. In train(), a scripted table counts and evicts
    but does not reset: :meth:`insert` returns the rows to reset. In a compiled function, a call in
    train() breaks the graph (an error with ``fullgraph=True``): call it outside, and pass rows to
    the function.

    Args:
        capacity: C >= 2, the number of rows, including the shared one.
        eviction: "lfu", "lru", or None: no id is evicted.
        admission: in [1, 1,000,000]: how often an id must be seen before it gets a row. At most C
            ids wait, in the same memory; for one more, the least recently seen half is forgotten.

    Memory: 57 bytes per row, or 89 with ``admission`` above 1, on the CPU. Buffers, all int64 and
    in the state dict: ``slots`` [2 C, 2] ([4 C, 2] with ``admission`` above 1), the hash table;
    ``row_ids`` [C]; ``seen`` [C, 2], count and last batch; ``victims`` [C / 16], the ids to evict
    next; ``counters`` [9].

    Shape: ids [*], int64 on any device; rows [*], on the same device.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option has another type, or ids are not an int64 tensor.

    Example::

        ids = xs.IdTable(1_000_000, eviction="lfu", admission=3)
        loss = xs.SampledSoftmaxLoss(64, ids.capacity, sampler="midx")
        optimizer = xs.optim.RowAdagrad(loss.parameters(), lr=0.1)
        ids.attach(loss)  # row optimizers are found by their tables
        loss(hidden, ids(raw_target)).backward()
    """
    def __init__(self, capacity: int, *, eviction: Optional[str] = "lfu", admission: int = 1):
        super().__init__()
        owner = type(self).__name__
        self.capacity = check_count(owner, "capacity", capacity, 2)
        if eviction is not None and not isinstance(eviction, str):
            raise TypeError(f"{owner}: expected eviction as \"lfu\", \"lru\" or None, got "
                            f"{type(eviction).__name__}")
        self.options = option_text(eviction=eviction,
                                   admission=check_count(owner, "admission", admission, 1))
        with torch.device("cpu"):
            state = torch.ops.xsoftmax.id_table(self.capacity, self.options)
        for name, tensor in zip(STATE, state):
            self.register_buffer(name, tensor)
        self._attachments = []  # type: ignore[var-annotated]  # pairs (table, init)
        # Rows whose reset failed.
        self._pending = torch.empty(0, dtype=torch.int64, device="cpu")
        self._lock = threading.RLock()  # held during an insertion and its resets

    def _state(self) -> List[Tensor]:
        return [self.slots, self.row_ids, self.seen, self.victims, self.counters]

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the rows of a batch: :meth:`insert` in train(), :meth:`find` in eval().

        ids int64 [*] -> rows int64 [*].
        """
        if self.training:
            return self.insert(ids)[0]
        return self.find(ids)

    @torch.jit.export
    def insert(self, ids: Tensor) -> Tuple[Tensor, Tensor]:
        """Counts a batch and assigns rows to its new ids, in train() and in eval().

        Args:
            ids: int64 [*].

        Returns:
            (rows int64 [*], evicted int64 [E]): the rows of the ids, and the rows that changed from
            one id to another. The latter have been reset in everything attached (not in
            TorchScript). If a reset raises, for example in ``init``, the ids already have their
            rows; the next call resets and returns these rows too.

        Raises:
            TypeError: ids are not an int64 tensor.
            ValueError: the number of rows of an attached object has changed.
        """
        if torch.jit.is_scripting():
            rows, evicted = torch.ops.xsoftmax.id_table_insert_(ids, self._state(), self.options)
            # Filter `evicted`, because counters may be those of another thread's batch by now.
            return rows, evicted[evicted >= 0]
        else:
            return self._insert(ids)

    @torch.jit.unused
    def _insert(self, ids: Tensor) -> Tuple[Tensor, Tensor]:
        with self._lock:
            for table, _ in self._attachments:
                self._check_attached(table)
            rows, evicted = torch.ops.xsoftmax.id_table_insert_(self._check_tensor("ids", ids),
                                                                self._state(), self.options)
            evicted = evicted[evicted >= 0]
            if self._pending.numel() > 0:
                evicted = torch.cat([self._pending[~torch.isin(self._pending, evicted)], evicted])
            if evicted.numel() > 0:
                self._pending = evicted
                self._reset(evicted)
                self._pending = evicted[:0]
            return rows, evicted

    @torch.jit.export
    def find(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids without counting them: ids int64 [*] -> rows int64 [*], 0 for an
        id without a row.

        Errors as :meth:`insert`.
        """
        return torch.ops.xsoftmax.id_table_find(self._check_tensor("ids", ids), self._state())

    @torch.jit.export
    def remove(self, ids: Tensor) -> Tensor:
        """Removes ids from the table, including those that wait for a row. Their rows are the first
        to be assigned to new ids, and are reset then.

        ids int64 [*] -> their former rows int64 [*], 0 for an id without a row. Errors as
        :meth:`insert`.
        """
        if torch.jit.is_scripting():
            return torch.ops.xsoftmax.id_table_remove_(ids, self._state())
        else:
            return self._remove(ids)

    @torch.jit.unused
    def _remove(self, ids: Tensor) -> Tensor:
        with self._lock:
            return torch.ops.xsoftmax.id_table_remove_(self._check_tensor("ids", ids),
                                                       self._state())

    @torch.jit.export
    def ids_of(self, rows: Tensor, missing: int = -1) -> Tensor:
        """Returns the raw ids of rows, to map the classes of ``topk`` back to items.

        rows int64 [*] in [0, capacity) -> ids int64 [*], ``missing`` for rows without an id, such
        as row 0.

        Raises:
            TypeError: rows are not an int64 tensor.
            IndexError: a row is not in [0, capacity).
        """
        return torch.ops.xsoftmax.id_table_ids(self._check_tensor("rows", rows), self._state(),
                                               missing)

    def _check_tensor(self, name: str, numbers: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            check_tensor("IdTable", name, numbers)
        return numbers

    def __len__(self) -> int:
        """Returns the number of ids that have a row."""
        return int(self.counters[1])

    def __bool__(self) -> bool:
        return True  # like other modules, also while it is empty

    @torch.jit.unused
    def attach(self, *tables: Attached, init: Optional[Callable[[Tensor],
                                                                object]] = None) -> "IdTable":
        """Attaches objects whose rows are reset when they change from one id to another.

        Args:
            tables: losses over a class table (including the counts of their samplers; an index
                follows with its next refresh or update, and stays exact until then); ``nn.Linear``,
                ``nn.Embedding``, ``nn.EmbeddingBag``; parameters [C, ...];
                :class:`xsoftmax.samplers.StreamingCounts` of C ids; and optimizers of
                ``torch.optim``, whose state in the shape of the table is reset to 0, or to
                Adagrad's initial value. Row optimizers (:mod:`xsoftmax.optim`) of these tables are
                found automatically. All objects except optimizers have C rows.
            init: fills a tensor [E, ...] in the dtype of each table in place, like functions of
                ``torch.nn.init``. None: as ``reset_parameters()`` of the module. Required for
                parameters. A table shared by several modules is initialised as in the first one
                attached.

        Returns:
            self

        Raises:
            ValueError: a table has another number of rows, is replicated or sharded over ranks, or
                is an embedding whose padding_idx is a row that an id can get.
            TypeError: an object is none of these, or a parameter without ``init``. Exceptions of
                ``init`` for a tensor of one row are raised too.
        """
        for table in tables:
            self._check_attached(table)
            if init is None and isinstance(table, nn.Parameter):
                raise TypeError("IdTable: expected init with a parameter, to fill the rows of new "
                                "ids, got none")
            if init is not None and not callable(init):
                raise TypeError("IdTable: expected init as a function of a tensor, got "
                                f"{type(init).__name__}")
            if init is not None:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    for rows in _tables_of(table):
                        # Fail now rather than at the first reset.
                        init(torch.empty_like(rows[:1]))
        self._attachments += [(table, init) for table in tables]
        # Not as a decorator, because it imports torch's compiler, which takes seconds.
        if not hasattr(IdTable._reset, "_torchdynamo_disable"):
            IdTable._reset = torch.compiler.disable(IdTable._reset)  # type: ignore[method-assign]
        return self

    @torch.jit.unused
    def _check_attached(self, table: Attached) -> None:
        if isinstance(table, torch.optim.Optimizer):
            if not isinstance(table, (RowOptimizer, *KNOWN_OPTIMIZERS)):
                names = ", ".join(kind.__name__ for kind in KNOWN_OPTIMIZERS)
                raise TypeError(
                    f"IdTable: expected optimizers among {names}, whose state is known, "
                    f"got a {type(table).__name__}")
            return
        if not isinstance(
                table,
            (LinearLoss, nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Parameter, StreamingCounts)):
            raise TypeError("IdTable: expected a loss over a class table, nn.Linear, nn.Embedding, "
                            "nn.EmbeddingBag, a parameter, StreamingCounts or an "
                            f"optimizer to attach, got {type(table).__name__}")
        counts = [module for module in table.modules()
                  if isinstance(module, StreamingCounts)] if isinstance(table, nn.Module) else []
        sizes = [count.num_ids for count in counts
                 ] + [len(rows) if rows.dim() > 0 else None for rows in _tables_of(table)]
        if any(size != self.capacity for size in sizes):
            wrong_size = next(size for size in sizes if size != self.capacity)
            raise ValueError(f"IdTable: expected a {type(table).__name__} of {self.capacity} rows, "
                             f"the capacity, got {wrong_size}")
        if not (are_local(table, *_tables_of(table)) and all(count._ranks.is_single
                                                             for count in counts)):
            raise ValueError("IdTable: expected tables and counts of one process, got some that "
                             "are replicated or split over ranks, where ids would have other rows "
                             "on each")
        if getattr(table, "padding_idx", None):
            raise ValueError("IdTable: expected padding_idx to be 0, which no id has, or None, "
                             f"got {table.padding_idx}")  # type: ignore[union-attr]

    @torch.jit.unused
    @torch.no_grad()
    def _reset(self, rows: Tensor) -> None:
        optimizers = [
            table for table, _ in self._attachments if isinstance(table, torch.optim.Optimizer)
        ]
        done: List[Tensor] = []
        for table, init in self._attachments:
            if isinstance(table, nn.Module):
                for module in table.modules():
                    if isinstance(module, (Sampler, StreamingCounts)):
                        module.forget(
                            rows.to(
                                next((buffer.device for buffer in module.buffers()), rows.device)))
            new_rows: Any = None if init is not None else _make_rows(table, len(rows))
            for i, parameter in enumerate(_tables_of(table)):
                if any(parameter is parameter_done for parameter_done in done):
                    continue
                done.append(parameter)
                if init is None:
                    values = new_rows[i]
                else:
                    values = torch.empty_like(parameter[:1]).repeat(len(rows),
                                                                    *[1] * (parameter.dim() - 1))
                    init(values)
                local_rows = rows.to(parameter.device)
                reset_rows(parameter, local_rows, values)
                for optimizer in optimizers:
                    _reset_state(optimizer, parameter, local_rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # look-ups run on the host, so its integer tensors stay there

    def __getstate__(self) -> Dict[str, Any]:
        return {
            **{name: value
               for name, value in self.__dict__.items() if name != "_lock"}, "_attachments": []
        }

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__({**state, "_lock": threading.RLock()})

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        saved_state = {
            name: state_dict[prefix + name]
            for name in STATE if prefix + name in state_dict
        }
        if saved_state:
            try:
                if offender := next(
                    (name
                     for name, tensor in saved_state.items() if not isinstance(tensor, Tensor)),
                        None):
                    raise TypeError(f"expected {prefix}{offender} as a tensor, got "
                                    f"{type(saved_state[offender]).__name__}")
                if len(saved_state) < len(STATE):
                    raise ValueError(
                        f"expected all of {', '.join(STATE)}, got {', '.join(saved_state)} "
                        "alone")
                state = [
                    tensor.detach().cpu().contiguous() if tensor.layout == torch.strided else tensor
                    for tensor in saved_state.values()
                ]
                torch.ops.xsoftmax.id_table_check(state, self.capacity, self.options)
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                error_msgs.append(f"IdTable at \"{prefix}\": {error}")
                return
            state_dict |= {prefix + name: tensor for name, tensor in zip(STATE, state)}
            self._pending = self._pending[:0]  # the loaded state replaces these rows
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)

    def extra_repr(self) -> str:
        options = read_options(self.options)
        eviction = None if options["eviction"] == "none" else options["eviction"]
        return f"{self.capacity}, eviction={eviction!r}, admission={options['admission']}"


def _module_of(table: Attached) -> Optional[nn.Module]:
    return table.linear if isinstance(
        table, LinearLoss) else table if isinstance(table, (nn.Linear, nn.Embedding,
                                                            nn.EmbeddingBag)) else None


def _tables_of(table: Attached) -> List[Tensor]:
    """Returns the parameters of an attached object that have a row per id."""
    module = _module_of(table)
    if module is None:
        return [table] if isinstance(table, nn.Parameter) else []
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _make_rows(table: Attached, count: int) -> List[Tensor]:
    module = _module_of(table)
    return [] if module is None else [
        rows for rows in make_rows(module, count).values() if rows is not None
    ]


def _reset_state(optimizer: torch.optim.Optimizer, parameter: Tensor, rows: Tensor) -> None:
    """Resets rows of the state of a torch.optim optimizer to that before the first gradient. That
    of row optimizers is reset with the table."""
    if isinstance(optimizer, RowOptimizer):
        return
    group = next((group for group in optimizer.param_groups if any(parameter is param
                                                                   for param in group["params"])),
                 None)
    for name, value in optimizer.state.get(parameter, {}).items():
        # The momentum of SGD is sparse after sparse gradients.
        if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
            value._values()[torch.isin(value._indices()[0], rows)] = 0
        elif isinstance(value, Tensor) and value.shape == parameter.shape:
            value.index_fill_(
                0,
                rows,
                group.get("initial_accumulator_value", 0.0)  # type: ignore[union-attr]
                if name == "sum" else 0.0)
