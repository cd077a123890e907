"""Checks at an optimizer's first step: errors for row-sparse gradients and state that it cannot
take, and warnings for gradients that are dense without need."""

import gc
import warnings
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple, Type

import torch

from .._core import hooks
from .._core.typing import Module

_MANY_ROWS = 10_000  # minimum rows of a table to warn of a dense gradient that is mostly zero
_UNOWNED_STEPS = 16  # the table's optimizer may step less often than that of the encoder
_owned_ids: Optional[Set[int]] = None  # `id` of parameters of known optimizers; None: out of date


def watch(module: Module) -> None:
    """Registers a module that has its tables, so that their optimizers are checked at their first
    step."""
    with hooks.lock:
        hooks.table_modules.add(module)
    hooks.before_steps(_before_step)


def watch_functions() -> None:
    """Enables the checks for functional losses. Without a module, the tables are those passed to
    operators."""
    hooks.before_steps(_before_step)


def register_row_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Registers a row optimizer, so that its tables count as trained."""
    global _owned_ids
    with hooks.lock:
        hooks.row_optimizers.add(optimizer)
        _owned_ids = None
    hooks.before_steps(_before_step)


def known_optimizers() -> List[torch.optim.Optimizer]:
    """Returns the optimizers that have taken a step since the first table was created."""
    with hooks.lock:
        return list(hooks.watched_groups)


def row_sparse_tables() -> Dict[int, Module]:
    """Returns the modules of tables that may get row-sparse gradients, by `id` of the table."""
    with hooks.lock:
        return {
            id(table): module
            for module in list(hooks.table_modules) if module._has_row_gradients()
            for table in module._tables() if table is not None
        }


def row_optimizer(kind: Type[torch.optim.Optimizer]) -> Optional[str]:
    """Returns the name of the optimizer of :mod:`xsoftmax.optim` that is equal or closest to an
    optimizer of torch.optim, or None if `kind` is not from torch.optim."""
    base = next(
        (base_class
         for base_class in kind.__mro__ if f"{base_class.__module__}.".startswith("torch.optim.")
         and base_class is not torch.optim.Optimizer), None)
    names: Dict[Any, str] = {torch.optim.SGD: "RowSGD", torch.optim.Adagrad: "RowAdagrad"}
    return None if base is None else names.get(base, "RowAdam")


def _takes_rows(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> bool:
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        return not group["weight_decay"] and not group.get("fused")
    # None: an optimizer of another library, about which nothing is known.
    return isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.LBFGS)) or row_optimizer(
        type(optimizer)) is None


def _is_known(optimizer: torch.optim.Optimizer, groups: hooks.Groups) -> bool:
    """Returns whether the groups of an optimizer are known. Loading state creates new groups, and
    add_param_group adds one."""
    entry = groups.get(optimizer)
    return entry is not None and entry[0] is optimizer.param_groups and entry[1] == len(entry[0])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Checks an optimizer. torch calls this hook before each step; its result replaces the
    arguments of the step."""
    if torch.compiler.is_compiling() or _is_known(optimizer, hooks.seen_groups):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        with hooks.lock:
            _check_optimizer(optimizer)
        return None

    def run_closure() -> Any:  # the gradients to check are computed by the closure
        value = closure()
        if not _is_known(optimizer, hooks.seen_groups):
            with hooks.lock:
                _check_optimizer(optimizer)
        return value

    return ((args[0], run_closure, *args[2:]),
            kwargs) if len(args) > 1 else (args, {**kwargs, "closure": run_closure})


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    global _owned_ids
    tables = row_sparse_tables()
    if not _is_known(optimizer, hooks.watched_groups):
        group_params = [(group, param) for group in optimizer.param_groups
                        for param in group["params"] if param.grad is not None]
        if not group_params or all(group["lr"] == 0 for group, _ in group_params):
            # torch.distributed.checkpoint creates state by a step with lr=0 and zero gradients. A
            # schedule that starts at lr=0 has other gradients, which are checked.
            if any(
                    id(param) in tables and (param.grad.layout != torch.strided or param.grad.any())
                    for _, param in group_params):
                _follow_state(optimizer, group_params)
                _check_gradients(optimizer, group_params, tables)
                _fix_forms(optimizer)
            return
        _refuse_row_state(optimizer)
        _follow_state(optimizer, group_params)
        _check_gradients(optimizer, group_params, tables)
        _fix_forms(optimizer)
        hooks.watched_groups[optimizer] = optimizer.param_groups, len(optimizer.param_groups)
        _owned_ids = None
    if not _has_unowned_table(optimizer, tables):
        hooks.seen_groups[optimizer] = optimizer.param_groups, len(optimizer.param_groups)


def _check_gradients(optimizer: torch.optim.Optimizer,
                     group_params: List[Tuple[Dict[str, Any], Any]], tables: Dict[int,
                                                                                  Module]) -> None:
    name, dense = type(optimizer).__name__, None
    for group, param in group_params:
        if param.grad.layout != torch.strided:
            if not _takes_rows(optimizer, group):
                options = ", ".join(
                    option for option in ("weight_decay", "fused")
                    if group.get(option)) if row_optimizer(type(optimizer)) != "RowAdam" else ""
                raise RuntimeError(f"{name}{f' with {options}' if options else ''}: expected dense "
                                   "gradients, got a row-sparse one of a parameter of shape "
                                   f"{list(param.shape)}: use "
                                   f"xs.optim.{row_optimizer(type(optimizer))}, which steps only "
                                   "the rows that have a gradient, or "
                                   "make the loss with sparse_grad=False (an nn.Embedding with "
                                   "sparse=False), at a cost of all rows a step")
            state = optimizer.state.get(param)
            # Row optimizers keep the step of row state as int64.
            if state and hasattr(optimizer, "flush") and state["step"].dtype != torch.int64:
                warnings.warn(
                    f"{name}: the state of a parameter of shape {list(param.shape)} is "
                    "that of dense gradients, as torch.optim keeps it, so each "
                    "step costs all of its rows. Begin with fresh state of this "
                    "optimizer to step only the rows that have a gradient", stacklevel=5)
        elif (id(param) in tables
              or torch.ops.xsoftmax.is_row_table(param)) and not hasattr(param.grad, "full_tensor"):
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise RuntimeError(f"{name}: expected row-sparse gradients, got a dense one of a "
                                   f"parameter of shape {list(param.shape)}: make the loss with "
                                   "sparse_grad=True (an nn.Embedding with sparse=True), or use "
                                   "xs.optim.RowAdam, which takes both")
            if id(param) not in tables:
                continue
            if tables[id(param)].sparse_grad or (torch.ops.xsoftmax.has_row_gradient(param)
                                                 and _has_few_rows(param.grad)):
                dense = dense or (param, tables[id(param)])
    if row_optimizer(type(optimizer)) is None and hasattr(optimizer, "flush"):
        _hint_at_embeddings(name, [param for _, param in group_params])
    if dense is not None:
        reason = "since sparse_grad=True" if dense[1].sparse_grad else "as the loss made it"
        warnings.warn(
            f"{dense[1]._name}: expected a row-sparse gradient of its table of shape "
            f"{list(dense[0].shape)}, {reason}, got a dense one, so each step "
            "costs all rows. What else uses the table gives it a dense gradient: make an "
            "nn.Embedding that is tied to it with sparse=True", stacklevel=5)


def _fix_forms(optimizer: torch.optim.Optimizer) -> None:
    """Fixes the form of gradients, row-sparse or dense, for all tables of an optimizer that takes
    only one form. With sparse_grad=None, a batch of another size would otherwise change it.

    Eager and scripted losses look up the form with the table. A compiled graph does not, so
    sparse_grad of the module is set too, which recompiles the graph. An optimizer that takes both
    forms, such as a row optimizer, undoes what an earlier optimizer has fixed.
    """
    takes_both = row_optimizer(type(optimizer)) is None
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    module_tables: Set[int] = set()
    for module in list(hooks.table_modules):
        tables = [table for table in module._tables() if table is not None]
        group_tables = [(group_of[id(table)], table) for table in tables if id(table) in group_of]
        module_tables.update(map(id, tables))
        if not group_tables or (takes_both and len(group_tables) < len(tables)):
            continue
        if hooks.fixed_forms.pop(module, module) is module.sparse_grad:
            module.sparse_grad = None
        if not module._has_row_gradients():
            continue
        form = None if takes_both else _find_form(optimizer, group_tables)
        if form is not None and module.sparse_grad is None:
            module.sparse_grad = hooks.fixed_forms[module] = form
        for table in tables:
            torch.ops.xsoftmax.fix_row_gradient(table, form)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in module_tables and torch.ops.xsoftmax.is_row_table(param):
                torch.ops.xsoftmax.fix_row_gradient(
                    param, None if takes_both else _find_form(optimizer, [(group, param)]))


def _follow_state(optimizer: torch.optim.Optimizer, group_params: List[Tuple[Dict[str, Any],
                                                                             Any]]) -> None:
    """Converts the first gradients after state was loaded to the form of the earlier ones, if the
    optimizer takes no other form and the loss chose the form by itself."""
    if row_optimizer(type(optimizer)) is None:
        return
    fixed_tables = {
        id(table)
        for module in list(hooks.table_modules) if module.sparse_grad is not None
        for table in module._tables() if table is not None
    }
    for group, param in group_params:
        state = optimizer.state.get(param)  # Adagrad has state before its first step
        if state and float(state.get("step", 1)) > 0 and id(
                param) not in fixed_tables and torch.ops.xsoftmax.is_row_table(param) and type(
                    param.grad) is torch.Tensor:
            form, is_sparse = _find_form(optimizer,
                                         [(group, param)]), param.grad.layout != torch.strided
            if form is not None and form != is_sparse:
                param.grad = param.grad.to_sparse(1) if form else param.grad.to_dense()


def _find_form(optimizer: torch.optim.Optimizer, tables: List[Tuple[Dict[str, Any],
                                                                    Any]]) -> Optional[bool]:
    """Returns the form of gradient that an optimizer takes for the tables of a loss: True for
    row-sparse (SparseAdam), False for dense (most others), or None for both.

    SGD with momentum only takes the form of its momentum buffer, loaded or created in this step.
    """
    if isinstance(optimizer, torch.optim.SparseAdam):
        return True
    if not all(_takes_rows(optimizer, group) for group, _ in tables):
        return False
    momentum_tables = [table for group, table in tables if group.get("momentum")]
    buffers = [
        optimizer.state.get(table, {}).get("momentum_buffer", table.grad)
        for table in momentum_tables
    ]
    return any(buffer is None or buffer.layout != torch.strided
               for buffer in buffers) if buffers else None


def _refuse_row_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises RuntimeError if an optimizer of torch.optim has loaded state of a row optimizer that
    it cannot continue with."""
    if row_optimizer(type(optimizer)) is None:
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "stochastic_rounding" not in group:  # every row optimizer has this option
            continue
        row_name = ("RowAdam"
                    if "betas" in group else "RowAdagrad" if "lr_decay" in group else "RowSGD")
        kinds: Any = dict(RowAdam=torch.optim.Adam, RowAdagrad=torch.optim.Adagrad,
                          RowSGD=torch.optim.SGD)[row_name]
        if not isinstance(optimizer, kinds):
            raise RuntimeError(f"{name}: expected state of its own kind, got that of "
                               f"xs.optim.{row_name}: load it into that, or begin with fresh state")
        if row_name == "RowAdam" and group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise RuntimeError(f"{name}: expected state of its own kind, got that of "
                               f"xs.optim.RowAdam with weight_decay={group['weight_decay']}, which "
                               "is "
                               "decoupled: load it into torch.optim.AdamW or xs.optim.RowAdam")
        for param in group["params"]:
            row_keys = [
                key for key, value in optimizer.state.get(param, {}).items() if key == "pending" or
                (isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape)
            ]
            if row_keys:
                raise RuntimeError(
                    f"{name}: expected state of dense gradients for a parameter of "
                    f"shape {list(param.shape)}, got {row_keys[0]}, which "
                    f"xs.optim.{row_name} keeps for rows: load it into that, or begin "
                    "with fresh state")


@torch.no_grad()
def _has_few_rows(grad: torch.Tensor) -> bool:
    """Returns whether a dense gradient has many rows, most of which are zero."""
    if grad.dim() != 2 or len(grad) < _MANY_ROWS or (grad.is_cuda
                                                     and torch.cuda.is_current_stream_capturing()):
        return False
    # A sample of rows: the test makes a copy, which should be small.
    share = grad[::len(grad) // 4096].ne(0).any(1).double().mean()
    return bool((share < 0.5) & grad.any())


def _hint_at_embeddings(name: str, params: List[Any]) -> None:
    """Warns of the first parameter, such as an nn.Embedding, whose dense gradient has many rows
    that are mostly zero."""
    table_ids = {
        id(table)
        for module in list(hooks.table_modules)
        for table in module._tables() if table is not None
    }
    for param in params:
        if id(param) not in table_ids and param.grad.layout == torch.strided and not hasattr(
                param.grad, "full_tensor") and _has_few_rows(param.grad):
            warnings.warn(
                f"{name}: a parameter of shape {list(param.shape)} has a dense gradient, "
                "most of whose rows are zero, so each step costs all of "
                "its rows. If it is that of an nn.Embedding, make it nn.Embedding(..., "
                "sparse=True), or set embedding.sparse = True: a step then "
                "costs the rows that have a gradient", stacklevel=6)
            return


class _UnownedTable:
    """Counts the optimizer steps at which a table has a gradient but belongs to no optimizer."""
    def __init__(self) -> None:
        self.gradient: Any = None  # weak reference to the last gradient
        self.versions = -1, -1  # autograd versions of the table and of the gradient
        self.steps = 0

    def count(self, table: torch.Tensor, grad: torch.Tensor) -> int:
        """Counts a step and returns the number of steps so far.

        Steps of several optimizers after one backward pass count once. The count restarts when the
        table is written to, as by an update without an optimizer.
        """
        last = None if self.gradient is None else self.gradient()
        versions = table._version, grad._version
        if last is not grad or versions != self.versions:
            self.steps = self.steps + 1 if versions[0] == self.versions[0] else 1
            self.gradient, self.versions = weakref.ref(grad), versions
        return self.steps


def _owned_parameters() -> Set[int]:
    """Returns the `id` of all parameters of known optimizers."""
    global _owned_ids
    if _owned_ids is None:
        _owned_ids = {
            id(param)
            for optimizer in (*hooks.watched_groups, *hooks.row_optimizers)
            for group in optimizer.param_groups
            for param in group["params"]
        }
    return _owned_ids


def _find_owner(table: torch.Tensor) -> bool:
    """Searches all optimizers of the process for one that has a table, and registers it. Returns
    whether there is one.

    Optimizers of torch.optim are not known before their first step, which may come late. The search
    takes a tenth of a second, so it is done only once, before a warning.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer) and any(
                param is table for group in candidate.param_groups for param in group["params"]):
            register_row_optimizer(candidate)
            return True
    return False


def _has_unowned_table(optimizer: torch.optim.Optimizer, tables: Dict[int, Module]) -> bool:
    """Returns whether a table has a row-sparse gradient but belongs to no optimizer, so that later
    steps must be checked too.

    Warns once per table after several such steps, whether its gradient is cleared between steps or
    accumulates.
    """
    has_unowned = False
    for module in {id(module): module for module in tables.values()}.values():
        for table in module._tables():
            if table is None or module in hooks.warned_modules or id(table) in _owned_parameters():
                continue
            grad = table.grad
            # Skips fake tensors.
            if type(grad) is not torch.Tensor or grad.layout != torch.sparse_coo:
                has_unowned |= table in hooks.unowned_tables
                continue
            record = hooks.unowned_tables.setdefault(table, _UnownedTable())
            if record.count(table, grad) < _UNOWNED_STEPS:
                has_unowned = True
            elif not _find_owner(table):
                hooks.warned_modules.add(module)
                warnings.warn(
                    f"{module._name}: its table of shape {list(table.shape)} has had a gradient "
                    f"over {_UNOWNED_STEPS} steps of {type(optimizer).__name__}, and no optimizer "
                    "has the table, so it is not trained: give an optimizer loss.parameters() too "
                    "(after "
                    "xs.replace_head: model.parameters())", stacklevel=5)
    return has_unowned
