"""What an optimizer is told in its first step of parameters with row-sparse gradients: that it cannot take them, or that it misses what they save."""

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Type

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ._table import TableModule

_modules: "weakref.WeakSet[TableModule]" = weakref.WeakSet()
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # optimizers whose first step is behind them: they cost a look-up a step
_hook: Any = None


def watch(module: "TableModule") -> None:
    """From the first table on, each optimizer's first step is looked at."""
    global _hook
    _modules.add(module)
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def look_again(optimizer: torch.optim.Optimizer) -> None:
    """Its next step counts as its first: it has loaded other state."""
    _seen.discard(optimizer)


def known_optimizers() -> List[torch.optim.Optimizer]:
    """Those that have taken a step since the first table was made."""
    return list(_seen)


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
    name, tables = type(optimizer).__name__, row_sparse_tables()
    stepped = [(group, param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if not stepped or all(group["lr"] == 0 for group, _ in stepped):  # torch.distributed.checkpoint makes state by such a step
        return
    dense = None
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
    _seen.add(optimizer)
