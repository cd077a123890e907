"""Checks of an optimizer's first step: errors for row-sparse gradients and state that it cannot take, warnings for gradients that are dense for no reason."""

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Type

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from ._table import TableModule

_modules: "weakref.WeakSet[TableModule]" = weakref.WeakSet()
# The groups of optimizers whose first step is behind them, which costs a look-up a step. A load of
# state makes new groups, so the next step counts as the first.
_seen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, List[Any]]" = weakref.WeakKeyDictionary()
# The groups of optimizers whose gradients were checked: those above, and optimizers beside which a
# table has a gradient that no optimizer has stepped.
_watched: "weakref.WeakKeyDictionary[torch.optim.Optimizer, List[Any]]" = weakref.WeakKeyDictionary()
_grown: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # entries and growths of a gradient
_warned: "weakref.WeakSet[TableModule]" = weakref.WeakSet()
_hook: Any = None
_MANY_ROWS = 10_000  # from so many on, a dense gradient of a few rows is worth a warning
_GROWTHS = 16  # a table may be stepped every few steps of the encoder
# Row optimizers, whether they have taken a step or not.
_made: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def watch(module: "TableModule") -> None:
    """From the first table on, each optimizer's first step is looked at."""
    _modules.add(module)
    watch_steps()


def watch_steps() -> None:
    """Has torch call :func:`_before_step`."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def made(optimizer: torch.optim.Optimizer) -> None:
    """From its making on, the tables of a row optimizer count as trained."""
    _made.add(optimizer)
    watch_steps()


def known_optimizers() -> List[torch.optim.Optimizer]:
    """Returns the optimizers that have taken a step since the first table was made."""
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
    if torch.compiler.is_compiling() or _seen.get(optimizer) is optimizer.param_groups:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _look(optimizer)
        return None

    def looked_at() -> Any:  # gradients are those of the closure
        value = closure()
        if _seen.get(optimizer) is not optimizer.param_groups:
            _look(optimizer)
        return value

    return ((args[0], looked_at, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": looked_at})


def _look(optimizer: torch.optim.Optimizer) -> None:
    tables = row_sparse_tables()
    stepped = [(group, param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if not stepped or all(group["lr"] == 0 for group, _ in stepped):  # torch.distributed.checkpoint makes state by such a step
        return
    if _watched.get(optimizer) is not optimizer.param_groups:
        _refuse_row_state(optimizer)
        _check_gradients(optimizer, stepped, tables)
        _watched[optimizer] = optimizer.param_groups
    if not _is_left_out(optimizer, tables):
        _seen[optimizer] = optimizer.param_groups


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
    if row_optimizer(type(optimizer)) is None and hasattr(optimizer, "flush"):
        _hint_at_embeddings(name, [param for _, param in stepped])
    if dense is not None:
        warnings.warn(f"{dense[1]._name}: expected a row-sparse gradient of its table of shape {list(dense[0].shape)}, since sparse_grad=True, got a dense "
                      "one, so each step costs all rows. What else uses the table gives it a dense gradient: make an nn.Embedding that is tied to it with "
                      "sparse=True", stacklevel=5)


def _refuse_row_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises where an optimizer of torch.optim has loaded the state of a row optimizer, or of other steps."""
    if row_optimizer(type(optimizer)) is None:
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "stochastic_rounding" not in group:  # an option of all optimizers of ours
            continue
        ours = "RowAdam" if "betas" in group else "RowAdagrad" if "lr_decay" in group else "RowSGD"
        kinds: Any = dict(RowAdam=torch.optim.Adam, RowAdagrad=torch.optim.Adagrad, RowSGD=torch.optim.SGD)[ours]
        if not isinstance(optimizer, kinds):
            raise RuntimeError(f"{name}: expected state of its own kind, got that of xs.optim.{ours}: load it into that, or begin with fresh state")
        if ours == "RowAdam" and group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise RuntimeError(f"{name}: expected state of its own kind, got that of xs.optim.RowAdam with weight_decay={group['weight_decay']}, which is "
                               "decoupled: load it into torch.optim.AdamW or xs.optim.RowAdam")
        for param in group["params"]:
            of_rows = [key for key, value in optimizer.state.get(param, {}).items()
                       if key == "owed" or (isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape)]
            if of_rows:
                raise RuntimeError(f"{name}: expected state of dense gradients for a parameter of shape {list(param.shape)}, got {of_rows[0]}, which "
                                   f"xs.optim.{ours} keeps for rows: load it into that, or begin with fresh state")


@torch.no_grad()
def _hint_at_embeddings(name: str, params: List[Any]) -> None:
    """Warns of the first of many rows whose dense gradient has few that are not zero, as an nn.Embedding makes it."""
    known = {id(table) for module in list(_modules) for table in module._tables() if table is not None}
    for param in params:
        grad = param.grad
        if (grad.layout != torch.strided or grad.dim() != 2 or len(grad) < _MANY_ROWS or id(param) in known or hasattr(grad, "full_tensor")
                or (grad.is_cuda and torch.cuda.is_current_stream_capturing())):
            continue
        share = grad[::len(grad) // 4096].ne(0).any(1).double().mean()  # of some rows: a step reads all of them anyway, but needs no copy
        if bool((share < 0.5) & grad.any()):
            warnings.warn(f"{name}: a parameter of shape {list(param.shape)} has a dense gradient, most of whose rows are zero, so each step costs all of "
                          "its rows. If it is that of an nn.Embedding, make it nn.Embedding(..., sparse=True), or set embedding.sparse = True: a step then "
                          "costs the rows that have a gradient", stacklevel=6)
            return


def _is_left_out(optimizer: torch.optim.Optimizer, tables: Dict[int, "TableModule"]) -> bool:
    """Whether a table has a row-sparse gradient, no row optimizer, and no step behind it.

    Such an optimizer is looked at again in its next step. A gradient that has grown over several
    steps is warned of once.
    """
    owned = {id(param) for each in (*_watched, *_made) for group in each.param_groups
             for param in group["params"]}
    is_left_out = False
    for module in {id(module): module for module in tables.values()}.values():
        for table in module._tables():
            if table is None or id(table) in owned or module in _warned:
                continue
            grad = table.grad
            if type(grad) is not torch.Tensor or grad.layout != torch.sparse_coo:  # not of another FakeTensorMode
                continue
            is_left_out = True
            entries, growths = _grown.get(table, (0, 0))
            growths = growths + 1 if grad._nnz() > entries > 0 else 0
            _grown[table] = grad._nnz(), growths
            if growths >= _GROWTHS:
                _warned.add(module)
                warnings.warn(
                    f"{module._name}: the row-sparse gradient of its table of shape "
                    f"{list(table.shape)} has grown over {_GROWTHS + 1} steps of "
                    f"{type(optimizer).__name__}, and no optimizer steps or clears it, so the table "
                    "is not trained: give an optimizer loss.parameters() too (after "
                    "xs.replace_head: model.parameters())", stacklevel=5)
    return is_left_out
