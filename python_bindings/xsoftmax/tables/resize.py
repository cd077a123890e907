"""Resizing: changes the number of classes of a table, its optimizers and its samplers."""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from .._core import hooks
from .._core.lazy_gradient import LazyGradParameter
from .._core.checks import check_count
from .._core.placement import are_local
from .table_module import TableModule, make_rows
from ..optim.row_optimizer import RowOptimizer
from ..optim.catch_up import catch_up

# Optimizers whose state is 0 before a parameter's first gradient, except the sum of Adagrad.
KNOWN_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam,
                    torch.optim.RAdam, torch.optim.Adamax, torch.optim.SparseAdam,
                    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adagrad)
# Optimizers whose state has other shapes or initial values: a resized table needs a new one.
OTHER_OPTIMIZERS = (torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon,
                    torch.optim.LBFGS)


def resize_classes(loss: TableModule, num_classes: int, weight: Optional[Tensor],
                   optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Implements :meth:`LinearLoss.resize_classes`.

    Everything that may fail precedes the first change, except memory allocation of samplers. The
    loss keeps its former number of classes until its samplers have been resized, so that another
    call can complete the resize.
    """
    owner, linear = loss._name, loss.linear
    num_classes = check_count(owner, "num_classes", num_classes, 1)
    tables = _tables(owner, loss)
    for argument, ids in loss._fixed_ids().items():
        if ids.numel() > 0 and int(ids.max()) >= num_classes:
            raise ValueError(f"{owner}: expected num_classes above {int(ids.max())}, one of "
                             f"{argument}, got {num_classes}")
    old_rows, old_classes = len(linear.weight), loss.num_classes
    more_weights = _check_class_weights(owner, loss, num_classes, weight)
    # If nothing changes, gradients and graphs stay valid, but an optimizer that an earlier call
    # left out may still have to be resized.
    changes = not num_classes == old_rows == old_classes
    plans: List[Callable[[], None]] = []
    with torch.no_grad():
        states = {
            id(state.value): state
            for optimizer in optimizers
            for state in _states(owner, optimizer, tables, num_classes)
        }.values()
        sparse = [(state, state.sparse(num_classes)) for state in states if state.is_sparse]
        changed_tables = [(state.value, state.rows(num_classes))
                          for state in states if not state.is_sparse]
        if changes:
            init_rows = make_rows(linear, num_classes - old_rows) if num_classes > old_rows else {
                "weight": tables[0][:0], "bias": tables[-1][:0]
            }
            changed_tables += zip(tables, (init_rows["weight"], init_rows["bias"]))
            plans += _plan_samplers(loss, init_rows, min(old_classes, num_classes), num_classes)
            if more_weights is not None:
                loss.weight = loss.weight.detach()  # the user's tensor keeps its size
                changed_tables.append((loss.weight, more_weights))
        # In one call, so that none changes if there is no memory for one of them.
        torch.ops.xsoftmax.resize_tables_([table for table, _ in changed_tables],
                                          [rows for _, rows in changed_tables],
                                          [num_classes] * len(changed_tables))
        for state, value in sparse:
            state.param_state[state.name] = value
        for plan in plans:
            plan()
    if changes:
        linear.out_features = loss.num_classes = num_classes
        _watch(tables)


def resize_parameters(owner: str, changes: List[Tuple[Any, Tensor]],
                      optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Assigns tensors with another number of rows to parameters, in place.

    State of row optimizers is resized too, and so is that of the given optimizers of
    ``torch.optim``.
    """
    optimizer_list = list(optimizers)
    with torch.no_grad():
        for parameter, values in changes:
            count = len(values)
            states = [
                state for optimizer in optimizer_list
                for state in _states(owner, optimizer, [parameter], count)
            ]
            dense = [state for state in states if not state.is_sparse]
            sparse = [(state, state.sparse(count)) for state in states if state.is_sparse]
            tables = [parameter, *(state.value for state in dense)]
            rows = [values[len(parameter):], *(state.rows(count) for state in dense)]
            torch.ops.xsoftmax.resize_tables_(tables, rows, [count] * len(tables))
            parameter.copy_(values)
            for state, value in sparse:
                state.param_state[state.name] = value
    _watch([parameter for parameter, _ in changes])


def _tables(owner: str, loss: TableModule) -> List[Any]:
    """Returns the parameters of a table, after checking that they are plain and local to this
    process."""
    linear = loss.linear
    tables = [linear._parameters.get("weight")
              ] + [linear.bias] * (getattr(linear, "bias", None) is not None) if isinstance(
                  linear, nn.Linear) else [None]
    if any(type(table) not in (nn.Parameter, LazyGradParameter) for table in tables):
        raise TypeError(f"{owner}: expected linear as an nn.Linear whose weight and bias are "
                        "parameters, got one that is parametrized, split or of another "
                        "kind")
    if not are_local(loss, *tables):
        raise RuntimeError(f"{owner}: expected a table that is neither split over ranks nor "
                           "replicated, got one that is: resize it before, or load its state "
                           "dict into a loss of the new size")
    return tables


def _check_class_weights(owner: str, loss: TableModule, num_classes: int,
                         weight: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the class weights of new classes, or None if the loss has no class weights."""
    old_weight = loss.weight
    if old_weight is None:
        if weight is not None:
            raise ValueError(f"{owner}: expected no weight of new classes for a loss without class "
                             "weights, got one")
        return None
    if weight is None:
        return old_weight.new_ones(max(0, num_classes - len(old_weight)))
    if not isinstance(weight, Tensor):
        raise TypeError(f"{owner}: expected weight as a tensor, got {type(weight).__name__}")
    num_new = max(0, num_classes - loss.num_classes)
    if weight.shape != (num_new,):
        raise ValueError(
            f"{owner}: expected weight of shape [{num_new}], the classes that are new, "
            f"got {list(weight.shape)}")
    # An earlier call may have resized the weights before it ran out of memory for a sampler.
    return weight.to(old_weight)[max(0, len(old_weight) - loss.num_classes):]


def _plan_samplers(loss: TableModule, init_rows: Any, first_row: int,
                   num_classes: int) -> List[Callable[[], None]]:
    """Returns functions that resize the samplers: in O(new classes) if possible, else with all
    biases of the table."""
    samplers = loss._samplers()
    needs_rows = not loss.linear.weight.is_meta and any(sampler.follows_table
                                                        for sampler in samplers)

    def read_rows(name: str, first: int) -> Optional[Tensor]:
        table = getattr(loss.linear, name)
        if not needs_rows or table is None:
            return None
        if first >= min(len(table), num_classes):
            return init_rows[name]
        catch_up(table)  # another loss has resized the table already, or all rows are requested
        return torch.cat([table.detach()[first:num_classes], init_rows[name]])

    rows, bias, plans = read_rows("weight", first_row), read_rows("bias", first_row), []
    for sampler in samplers:
        plan = sampler.plan_growth(num_classes, rows, bias)
        plans.append(
            sampler.plan_resize(num_classes, rows, read_rows("bias", 0)) if plan is None else plan)
    return plans


class _State(NamedTuple):
    """A tensor of the state of a torch.optim optimizer for a table."""

    param_state: Dict[str, Any]
    name: str
    value: Tensor
    initial: float

    @property
    def is_sparse(self) -> bool:
        """Whether the tensor is sparse, like the momentum of SGD after sparse gradients."""
        return self.value.layout == torch.sparse_coo

    def rows(self, num_classes: int) -> Tensor:
        """Returns the initial state of new classes, as an expanded tensor that takes no memory."""
        return self.value.new_full((), self.initial).expand(max(0, num_classes - len(self.value)),
                                                            *self.value.shape[1:])

    def sparse(self, num_classes: int) -> Tensor:
        """Returns a sparse state with another number of rows."""
        value = self.value.coalesce()
        is_kept = value.indices()[0] < num_classes
        return torch.sparse_coo_tensor(value.indices()[:, is_kept],
                                       value.values()[is_kept], (num_classes, *value.shape[1:]),
                                       check_invariants=False)


def _states(owner: str, optimizer: torch.optim.Optimizer, tables: List[nn.Parameter],
            num_classes: int) -> List[_State]:
    """Returns the state of tables in a torch.optim optimizer that has another number of rows. It is
    empty for row optimizers, whose state the operator finds."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{owner}: expected optimizers, got {type(optimizer).__name__}")
    states: List[_State] = []
    if isinstance(optimizer, RowOptimizer):
        return states
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for table in tables:
        for name, value in optimizer.state.get(table, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape == (
                    num_classes, *table.shape[1:]):
                continue
            # Another number of rows than the table's: an earlier resize left the optimizer out.
            if not isinstance(optimizer, KNOWN_OPTIMIZERS) or value.shape[1:] != table.shape[1:]:
                names = ", ".join(optimizer_class.__name__ for optimizer_class in KNOWN_OPTIMIZERS)
                raise TypeError(f"{owner}: expected optimizers among {names}, whose state has the "
                                f"parameter's shape, got a {type(optimizer).__name__} with "
                                f"{name} of shape {list(value.shape)}")
            states.append(
                _State(
                    optimizer.state[table], name, value,
                    groups[table].get("initial_accumulator_value", 0.0) if name == "sum" else 0.0))
    return states


def _watch(tables: List[nn.Parameter]) -> None:
    """Makes optimizers that were not resized with their table raise before a step changes anything.
    """
    for table in tables:
        hooks.resized_tables[table] = True
    hooks.before_steps(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    is_known = isinstance(optimizer, KNOWN_OPTIMIZERS)
    if not is_known and not isinstance(optimizer, OTHER_OPTIMIZERS):
        return
    for table in list(hooks.resized_tables.keys()):
        for name, value in _state_of(optimizer, table).items():
            if isinstance(value, Tensor) and not _fits(optimizer, table, name, value):
                advice = ("give it the optimizer, resize_classes(n, optimizers=[optimizer])"
                          if is_known else "its state cannot follow, make a new one")
                raise RuntimeError(f"{type(optimizer).__name__}: its {name} is of shape "
                                   f"{list(value.shape)}, but resize_classes made the parameter "
                                   f"{list(table.shape)}: {advice}")


def _state_of(optimizer: torch.optim.Optimizer, table: nn.Parameter) -> Dict[str, Any]:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.state.get(table, {})
    # LBFGS keeps the state of all parameters, flattened and concatenated, with the first one.
    params = optimizer.param_groups[0]["params"]
    return optimizer.state.get(params[0], {}) if any(param is table for param in params) else {}


def _fits(optimizer: torch.optim.Optimizer, table: nn.Parameter, name: str, value: Tensor) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):
        return value.dim() != 1 or len(value) == sum(
            param.numel() for param in optimizer.param_groups[0]["params"])
    if isinstance(optimizer, torch.optim.Adafactor):
        return value.dim() == 0 or name == "col_var" or len(value) == len(table)
    return value.dim() != table.dim() or value.shape == table.shape
