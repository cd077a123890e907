"""Classes that come and go: what becomes of a table, its optimizers and its samplers where a loss gets another number of classes."""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from . import _hooks
from ._lazy_gradient import LazyGradParameter
from ._checks import check_count
from ._placement import are_local
from ._table import TableModule, fresh_rows
from .optim._base import RowOptimizer
from .optim.settle import settle

# Whose state of a parameter is 0 before the parameter's first gradient, but for the sum of Adagrad.
KNOWN_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SparseAdam,
                    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adagrad)
# Of other shapes, or of other values at first: a table that was resized needs a new one.
OTHER_OPTIMIZERS = (torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)


def resize_classes(loss: TableModule, num_classes: int, weight: Optional[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """See :meth:`LinearLoss.resize_classes`. What may fail comes before the first change, but for the memory of samplers; the loss has its former number until
    they have followed, so that another call goes on."""
    owner, linear = loss._name, loss.linear
    num_classes = check_count(owner, "num_classes", num_classes, 1)
    tables = _tables(owner, loss)
    for argument, ids in loss._fixed_ids().items():
        if ids.numel() > 0 and int(ids.max()) >= num_classes:
            raise ValueError(f"{owner}: expected num_classes above {int(ids.max())}, one of {argument}, got {num_classes}")
    before, known = len(linear.weight), loss.num_classes
    more_weights = _class_weights(owner, loss, num_classes, weight)
    changes = not num_classes == before == known  # else gradients and graphs stay; an optimizer that a former call went without follows
    plans: List[Callable[[], None]] = []
    with torch.no_grad():
        states = {id(state.value): state for optimizer in optimizers for state in _states(owner, optimizer, tables, num_classes)}.values()
        sparse = [(state, state.sparse(num_classes)) for state in states if state.is_sparse]
        resized = [(state.value, state.rows(num_classes)) for state in states if not state.is_sparse]
        if changes:
            made = fresh_rows(linear, num_classes - before) if num_classes > before else {"weight": tables[0][:0], "bias": tables[-1][:0]}
            resized += zip(tables, (made["weight"], made["bias"]))
            plans += _sampler_plans(loss, made, min(known, num_classes), num_classes)
            if more_weights is not None:
                loss.weight = loss.weight.detach()  # the tensor that the user gave keeps its size
                resized.append((loss.weight, more_weights))
        # All in one call: where there is no memory for one of them, none changes.
        torch.ops.xsoftmax.resize_tables_([table for table, _ in resized], [rows for _, rows in resized], [num_classes] * len(resized))
        for state, value in sparse:
            state.of_table[state.name] = value
        for plan in plans:
            plan()
    if changes:
        linear.out_features = loss.num_classes = num_classes
        _watch(tables)


def resize_parameters(owner: str, changes: List[Tuple[Any, Tensor]],
                      optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Gives parameters the values of tensors with other numbers of rows, in place.

    Row optimizers that keep something of them follow, and so do the given ones of ``torch.optim``.
    """
    given = list(optimizers)
    with torch.no_grad():
        for parameter, values in changes:
            count = len(values)
            states = [state for each in given for state in _states(owner, each, [parameter], count)]
            dense = [state for state in states if not state.is_sparse]
            sparse = [(state, state.sparse(count)) for state in states if state.is_sparse]
            tables = [parameter, *(state.value for state in dense)]
            rows = [values[len(parameter):], *(state.rows(count) for state in dense)]
            torch.ops.xsoftmax.resize_tables_(tables, rows, [count] * len(tables))
            parameter.copy_(values)
            for state, value in sparse:
                state.of_table[state.name] = value
    _watch([parameter for parameter, _ in changes])


def _tables(owner: str, loss: TableModule) -> List[Any]:
    """The parameters of a table that this process has by itself."""
    linear = loss.linear
    tables = [linear._parameters.get("weight")] + [linear.bias] * (getattr(linear, "bias", None) is not None) if isinstance(linear, nn.Linear) else [None]
    if any(type(table) not in (nn.Parameter, LazyGradParameter) for table in tables):
        raise TypeError(f"{owner}: expected linear as an nn.Linear whose weight and bias are parameters, got one that is parametrized, split or of another "
                        "kind")
    if not are_local(loss, *tables):
        raise RuntimeError(f"{owner}: expected a table that is neither split over ranks nor replicated, got one that is: resize it before, or load its state "
                           "dict into a loss of the new size")
    return tables


def _class_weights(owner: str, loss: TableModule, num_classes: int, given: Optional[Tensor]) -> Optional[Tensor]:
    """The rows that class weights gain, where there are any."""
    before = loss.weight
    if before is None:
        if given is not None:
            raise ValueError(f"{owner}: expected no weight of new classes for a loss without class weights, got one")
        return None
    if given is None:
        return before.new_ones(max(0, num_classes - len(before)))
    if not isinstance(given, Tensor):
        raise TypeError(f"{owner}: expected weight as a tensor, got {type(given).__name__}")
    added = max(0, num_classes - loss.num_classes)
    if given.shape != (added,):
        raise ValueError(f"{owner}: expected weight of shape [{added}], the classes that are new, got {list(given.shape)}")
    return given.to(before)[max(0, len(before) - loss.num_classes):]  # an earlier call may have found no memory for a sampler


def _sampler_plans(loss: TableModule, made: Any, known: int, num_classes: int) -> List[Callable[[], None]]:
    """What resizes samplers: in the time that new classes take where that is all, and with all biases of the table where it is not."""
    samplers = loss._samplers()
    followed = not loss.linear.weight.is_meta and any(sampler.follows_table for sampler in samplers)

    def rows_from(name: str, first: int) -> Optional[Tensor]:
        table = getattr(loss.linear, name)
        if not followed or table is None:
            return None
        if first >= min(len(table), num_classes):
            return made[name]
        settle(table)  # another loss has resized it already, or all rows are asked for
        return torch.cat([table.detach()[first:num_classes], made[name]])

    rows, bias, plans = rows_from("weight", known), rows_from("bias", known), []
    for sampler in samplers:
        plan = sampler.plan_growth(num_classes, rows, bias)
        plans.append(sampler.plan_resize(num_classes, rows, rows_from("bias", 0)) if plan is None else plan)
    return plans


class _State(NamedTuple):
    """A tensor that an optimizer of torch.optim keeps for a table."""

    of_table: Dict[str, Any]
    name: str
    value: Tensor
    initial: float

    @property
    def is_sparse(self) -> bool:
        """The momentum of SGD after sparse gradients."""
        return self.value.layout == torch.sparse_coo

    def rows(self, num_classes: int) -> Tensor:
        """Those of new classes, in no memory."""
        return self.value.new_full((), self.initial).expand(max(0, num_classes - len(self.value)), *self.value.shape[1:])

    def sparse(self, num_classes: int) -> Tensor:
        """With another number of rows."""
        value = self.value.coalesce()
        stays = value.indices()[0] < num_classes
        return torch.sparse_coo_tensor(value.indices()[:, stays], value.values()[stays], (num_classes, *value.shape[1:]), check_invariants=False)


def _states(owner: str, optimizer: torch.optim.Optimizer, tables: List[nn.Parameter], num_classes: int) -> List[_State]:
    """The state of tables in an optimizer of torch.optim that has another number of rows. Of row optimizers none: the operator finds it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{owner}: expected optimizers, got {type(optimizer).__name__}")
    states: List[_State] = []
    if isinstance(optimizer, RowOptimizer):
        return states
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for table in tables:
        for name, value in optimizer.state.get(table, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape == (num_classes, *table.shape[1:]):
                continue
            if not isinstance(optimizer, KNOWN_OPTIMIZERS) or value.shape[1:] != table.shape[1:]:  # of other rows where a resize before went without it
                names = ", ".join(known.__name__ for known in KNOWN_OPTIMIZERS)
                raise TypeError(f"{owner}: expected optimizers among {names}, whose state has the parameter's shape, got a {type(optimizer).__name__} with "
                                f"{name} of shape {list(value.shape)}")
            states.append(_State(optimizer.state[table], name, value, groups[table].get("initial_accumulator_value", 0.0) if name == "sum" else 0.0))
    return states


def _watch(tables: List[nn.Parameter]) -> None:
    """From now on an optimizer that was not resized with its table says so before it changes anything."""
    for table in tables:
        _hooks.resized_tables[table] = True
    _hooks.before_steps(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = isinstance(optimizer, KNOWN_OPTIMIZERS)
    if not known and not isinstance(optimizer, OTHER_OPTIMIZERS):
        return
    for table in list(_hooks.resized_tables.keys()):
        for name, value in _state_of(optimizer, table).items():
            if isinstance(value, Tensor) and not _fits(optimizer, table, name, value):
                way = "give it the optimizer, resize_classes(n, optimizers=[optimizer])" if known else "its state cannot follow, make a new one"
                raise RuntimeError(f"{type(optimizer).__name__}: its {name} is of shape {list(value.shape)}, but resize_classes made the parameter "
                                   f"{list(table.shape)}: {way}")


def _state_of(optimizer: torch.optim.Optimizer, table: nn.Parameter) -> Dict[str, Any]:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.state.get(table, {})
    params = optimizer.param_groups[0]["params"]  # the first of which has the state of all, laid end to end
    return optimizer.state.get(params[0], {}) if any(param is table for param in params) else {}


def _fits(optimizer: torch.optim.Optimizer, table: nn.Parameter, name: str, value: Tensor) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):
        return value.dim() != 1 or len(value) == sum(param.numel() for param in optimizer.param_groups[0]["params"])
    if isinstance(optimizer, torch.optim.Adafactor):
        return value.dim() == 0 or name == "col_var" or len(value) == len(table)
    return value.dim() != table.dim() or value.shape == table.shape
