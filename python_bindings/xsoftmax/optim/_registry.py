"""Which optimizers keep state for a table, and what becomes of it where rows begin anew, come or go."""

import weakref
from typing import List

import torch
from torch import Tensor

_ROW_OPTIMIZERS = weakref.WeakSet()


def register(optimizer) -> None:
    """What a row optimizer does when it is made, copied or unpickled."""
    _ROW_OPTIMIZERS.add(optimizer)


def optimizers_of(parameter: Tensor) -> List[torch.optim.Optimizer]:
    """The row optimizers that have the parameter."""
    return [optimizer for optimizer in _ROW_OPTIMIZERS if any(parameter is each for group in optimizer.param_groups for each in group["params"])]


def reset_state_rows(optimizer: torch.optim.Optimizer, parameter: Tensor, rows: Tensor) -> None:
    """State of ``rows`` of the parameter as before their first gradient. Of an optimizer of ``torch.optim``: 0, of Adagrad ``initial_accumulator_value``, in what has
    the parameter's shape."""
    state = optimizer.state.get(parameter)
    if not state:
        return
    if hasattr(optimizer, "reset_rows"):
        optimizer.reset_rows(parameter, rows)
        return
    group = next(group for group in optimizer.param_groups if any(parameter is each for each in group["params"]))
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
            tensor.index_fill_(0, rows.to(tensor.device), group.get("initial_accumulator_value", 0.0) if name == "sum" else 0.0)
