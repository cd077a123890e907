"""What an optimizer is told in its first step of parameters with row-sparse gradients: that it cannot take them, or that it misses what they save."""

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Type

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from ._table import TableModule

_modules: "weakref.WeakSet[TableModule]" = weakref.WeakSet()
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # optimizers whose first step is behind them: they cost a look-up a step
_watched: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # those, and optimizers beside which a table has a gradient that none has stepped
_grown: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # entries and growths of a gradient
_warned: "weakref.WeakSet[TableModule]" = weakref.WeakSet()
_hook: Any = None
GROWTHS = 3


def watch(module: "TableModule") -> None:
    """From the first table on, each optimizer's first step is looked at."""
    global _hook
    _modules.add(module)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def look_again(optimizer: torch.optim.Optimizer) -> None:
    """Its next step counts as its first: it has loaded other state."""
    _seen.discard(optimizer)
    _watched.discard(optimizer)


def known_optimizers() -> List[torch.optim.Optimizer]:
    """Those that have taken a step since the first table was made."""
    return list(_watched)


def row_sparse_tables() -> Dict[int, "TableModule"]:
    """The tables whose gradients their modules make row-sparse, by `id`."""
    return {id(table): module for module in list(_modules) if module._row_gradients() for table in module._tables() if table is not None}


def row_optimizer(kind: Type[torch.optim.Optimizer]) -> Optional[str]:
    """The optimizer of :mod:`xsoftmax.optim` that does what one of torch.optim does, or is nearest to it. None: `kind` is not torch's."""
    base = next((each for each in kind.__mro__ if f"{each.__module__}.".startswith("torch.optim.") and each is not torch.optim.Optimizer), None)
    names: Dict[Any, str] = {torch.optim.SGD: "RowSGD", torch.optim.Adagrad: "RowAdagrad"}
    return None if base is None else names.get(base, "RowAdam")


def _takes_rows(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> bool:
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        return not group["weight_decay"] and not group.get("fused")
    return isinstance(optimizer, (torch.optim.SparseAdam, torch.optim.LBFGS)) or row_optimizer(type(optimizer)) is None  # None: not ours to judge


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """torch's hook: what it returns takes the place of the step's arguments."""
    if torch.compiler.is_compiling() or optimizer in _seen:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _look(optimizer)
        return None

    def looked_at() -> Any:  # gradients are those of the closure
        value = closure()
        if optimizer not in _seen:
            _look(optimizer)
        return value

    return ((args[0], looked_at, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looked_at})


def _look(optimizer: torch.optim.Optimizer) -> None:
    tables = row_sparse_tables()
    stepped = [(group, param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if not stepped or all(group["lr"] == 0 for group, _ in stepped):  # torch.distributed.checkpoint makes state by such a step
        return
    if optimizer not in _watched:
        _check_gradients(optimizer, stepped, tables)
        _watched.add(optimizer)
    if not _is_left_out(optimizer, tables):
        _seen.add(optimizer)


def _check_gradients(optimizer: torch.optim.Optimizer, stepped: List[Tuple[Dict[str, Any], Any]],
                     tables: Dict[int, "TableModule"]) -> None:
    name, dense = type(optimizer).__name__, None
    for group, param in stepped:
        if param.grad.layout != torch.strided:
            if not _takes_rows(optimizer, group):
                options = ", ".join(option for option in ("weight_decay", "fused") if group.get(option)) if row_optimizer(type(optimizer)) != "RowAdam" else ""
                raise RuntimeError(f"{name}{f' with {options}' if options else ''}: expected dense gradients, got a row-sparse one of a parameter of shape "
                                   f"{list(param.shape)}: use xs.optim.{row_optimizer(type(optimizer))}, which steps only the rows that have a gradient, or "
                                   "make the loss with sparse_grad=False (an nn.Embedding with sparse=False), at a cost of all rows a step")
            state = optimizer.state.get(param)
            if state and hasattr(optimizer, "flush") and state["step"].dtype != torch.int64:  # an optimizer of ours counts row steps in int64
                warnings.warn(f"{name}: the state of a parameter of shape {list(param.shape)} is that of dense gradients, as torch.optim keeps it, so each "
                              "step costs all of its rows. Begin with fresh state of this optimizer to step only the rows that have a gradient", stacklevel=5)
        elif id(param) in tables and not hasattr(param.grad, "full_tensor"):
            dense = dense or (param, tables[id(param)])
    if dense is not None:
        warnings.warn(f"{dense[1]._name}: expected a row-sparse gradient of its table of shape {list(dense[0].shape)}, since sparse_grad=True, got a dense "
                      "one, so each step costs all rows. What else uses the table gives it a dense gradient: make an nn.Embedding that is tied to it with "
                      "sparse=True", stacklevel=5)


def _is_left_out(optimizer: torch.optim.Optimizer, tables: Dict[int, "TableModule"]) -> bool:
    """Whether a table has a row-sparse gradient that no optimizer has stepped so far.

    Such an optimizer is looked at again in its next step. A gradient that has grown over several
    steps is warned of once.
    """
    owned = {id(param) for each in _watched for group in each.param_groups
             for param in group["params"]}
    is_left_out = False
    for module in {id(module): module for module in tables.values()}.values():
        for table in module._tables():
            if table is None or id(table) in owned or module in _warned:
                continue
            grad = table.grad
            if grad is None or grad.layout != torch.sparse_coo:
                continue
            is_left_out = True
            entries, growths = _grown.get(table, (0, 0))
            growths = growths + 1 if grad._nnz() > entries > 0 else 0
            _grown[table] = grad._nnz(), growths
            if growths >= GROWTHS:
                _warned.add(module)
                warnings.warn(
                    f"{module._name}: the row-sparse gradient of its table of shape "
                    f"{list(table.shape)} has grown over {GROWTHS + 1} steps of "
                    f"{type(optimizer).__name__}, and no optimizer steps or clears it, so the table "
                    "is not trained: give an optimizer loss.parameters() too (after "
                    "xs.replace_head: model.parameters())", stacklevel=5)
    return is_left_out
