"""Placement of the rows of a table: the interface, and its default, a single process that has all
rows.

Losses, samplers and optimizers look up the :class:`Table` of a module or of a parameter with
:func:`table_of`. `xsoftmax.distributed` implements the interface for replicated tables
(`replicate`), for sharded tables (`shard_classes`), and for item vectors that ranks share
(`share_candidates`), and attaches its tables. No other module depends on it.
"""

from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor

State = Dict[str, Any]  # the optimizer state of one parameter, by name


class Table:
    """A table whose rows are all on this process, and on no other."""

    is_local = True
    """Whether no other rank has rows of the table, or a copy."""
    is_split = False
    """Whether this rank has only some of the rows."""
    def check(self, owner: str, parameters: Sequence[Optional[Tensor]]) -> None:
        """Raises RuntimeError if the parameters of a module are not those that the table was
        created for."""

    def norm(self, local_norm: Tensor, norm_type: float) -> Tensor:
        """Returns the norm of the gradient of the whole table, given that of the local rows."""
        return local_norm

    def whole_state(self, optimizer: Any, group: Dict[str, Any], param: Any, state: State) -> State:
        """Returns the optimizer state of the whole table, given that of the local rows."""
        return state

    def state_of_rank(self, optimizer: Any, group: Dict[str, Any], param: Any,
                      state: State) -> State:
        """Returns the optimizer state of the local rows, given that of the whole table."""
        return state

    def tower_step(self, loss: Any, query: Tensor, item: Tensor, item_id: Tensor,
                   negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        """Returns the two-tower loss of a batch; the candidates are the items of the call."""
        value: Tensor = loss._step(query, item, item_id, negatives, [], weight, True, loss._options)
        return value


LOCAL = Table()


def table_of(owner: Any) -> Table:
    """Returns the table of a module or of a parameter: where its rows are placed."""
    table: Table = getattr(owner, "_class_table", LOCAL)
    return table


def attach(table: Table, owner: Any) -> None:
    """Sets the table of a module or of a parameter."""
    owner._class_table = table


def are_local(*owners: Any) -> bool:
    """Returns whether the tables of all these modules and parameters are local."""
    return all(table_of(owner).is_local for owner in owners)


def whole_state(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns an optimizer's `state_dict()` in which sharded tables have the state of the whole
    table."""
    return _convert_states(optimizer, state_dict, "whole_state")


def state_of_rank(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a state dict for `load_state_dict`, in which sharded tables have the state of this
    rank's rows."""
    return _convert_states(optimizer, state_dict, "state_of_rank")


def _convert_states(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any],
                    method: str) -> Dict[str, Any]:
    state, is_changed = dict(state_dict["state"]), False
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"]):
        for param, key in zip(group["params"], saved_group["params"]):
            table = table_of(param)
            if table.is_split and key in state:
                state[key] = getattr(table, method)(optimizer, group, param, state[key])
                is_changed = True
    return {**state_dict, "state": state} if is_changed else state_dict
