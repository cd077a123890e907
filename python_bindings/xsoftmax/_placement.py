"""Where the rows of a table lie: the interface, and its default, one process that has them all.

Losses, samplers and optimizers ask the :class:`Table` of a module or of a parameter
(:func:`table_of`). `xsoftmax.distributed` implements it for tables that ranks have alike
(`replicate`), that they have split (`shard_classes`), and for vectors of item towers that they
share (`share_candidates`). It attaches its tables from above; nothing else knows of it.
"""

from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor

State = Dict[str, Any]  # of one parameter, by name


class Table:
    """Rows that this process has, all of them, and no other process."""

    is_local = True
    """Whether no other rank has a part in the table."""
    is_split = False
    """Whether this rank has some of the rows alone."""

    def check(self, owner: str, parameters: Sequence[Optional[Tensor]]) -> None:
        """Raises RuntimeError where a module's parameters are others than those it was made for."""

    def norm(self, of_rows: Tensor, norm_type: float) -> Tensor:
        """Returns the norm of a gradient of the table from that of the rows here."""
        return of_rows

    def whole_state(self, optimizer: Any, group: Dict[str, Any], param: Any, state: State) -> State:
        """Returns an optimizer's state of the whole table from that of the rows here."""
        return state

    def state_of_rank(self, optimizer: Any, group: Dict[str, Any], param: Any,
                      state: State) -> State:
        """Returns an optimizer's state of the rows here from that of the whole table."""
        return state

    def tower_step(self, loss: Any, query: Tensor, item: Tensor, item_id: Tensor,
                   negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        """Returns the loss of two towers, whose candidates are the items that `loss` is given."""
        of_batch: Tensor = loss._step(query, item, item_id, negatives, [], weight, True,
                                      loss._options)
        return of_batch


LOCAL = Table()


def table_of(owner: Any) -> Table:
    """Returns where the rows of a module or of a parameter lie."""
    found: Table = getattr(owner, "_class_table", LOCAL)
    return found


def attach(table: Table, owner: Any) -> None:
    """Makes a table that of a module or of a parameter."""
    owner._class_table = table


def are_local(*owners: Any) -> bool:
    """Returns whether no other rank has a part in the tables of modules and parameters."""
    return all(table_of(owner).is_local for owner in owners)


def whole_state(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a `state_dict()` with the state of whole tables."""
    return _converted(optimizer, state_dict, "whole_state")


def state_of_rank(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Returns what `load_state_dict` takes: the state of the rows that this rank has."""
    return _converted(optimizer, state_dict, "state_of_rank")


def _converted(optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any],
               method: str) -> Dict[str, Any]:
    state, is_changed = dict(state_dict["state"]), False
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        for param, key in zip(group["params"], saved["params"]):
            table = table_of(param)
            if table.is_split and key in state:
                state[key] = getattr(table, method)(optimizer, group, param, state[key])
                is_changed = True
    return {**state_dict, "state": state} if is_changed else state_dict
