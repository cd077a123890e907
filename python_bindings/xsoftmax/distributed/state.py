"""State dicts of sharded tables and their optimizers. State dicts hold whole tables as DTensors,
modules hold the rows of their rank."""

from typing import Any, Dict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._core.placement import State, Table
from .exchange import ClassShards

# The number of leading entries of "pending" before its table, which is empty after a flush
# (csrc/table/updates/pending_table.h).
_PENDING_HEADER = 4


def rows_of_all(local: Tensor, shards: ClassShards) -> DTensor:
    """Returns this rank's rows as a DTensor of the whole table."""
    shape = torch.Size([shards.num_classes, *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, shards.mesh, [Shard(0)], run_check=False, shape=shape,
                              stride=stride)


def rows_of_rank(owner: str, name: str, table: Tensor, shards: ClassShards) -> Tensor:
    """Returns this rank's rows of a table: a whole table, a DTensor with any placement, or a tensor
    that already holds only these rows."""
    if table.shape[:1] == (shards.num_classes,):
        return table.redistribute(shards.mesh, [Shard(0)]).to_local() if isinstance(
            table, DTensor) else shards.local(table)
    if isinstance(table, DTensor) or table.shape[:1] != (shards.end - shards.begin,):
        raise ValueError(f"{owner}: expected {name} of {shards.num_classes} classes, or of the "
                         f"{shards.end - shards.begin} of this rank, got shape "
                         f"{list(table.shape)}")
    return table


class ShardedTable(Table):
    """A table that is split over ranks into contiguous chunks of rows."""

    is_local, is_split = False, True

    def __init__(self, shards: ClassShards) -> None:
        self.shards = shards

    def norm(self, local_norm: Tensor, norm_type: float) -> Tensor:
        return self.shards.norm(local_norm, norm_type)

    def whole_state(self, optimizer: Any, group: Dict[str, Any], param: Any, state: State) -> State:
        """Returns the state with rows as DTensors."""
        return _gather_state(optimizer, group, param, state, self.shards)

    def state_of_rank(self, optimizer: Any, group: Dict[str, Any], param: Any,
                      state: State) -> State:
        """Returns the state with this rank's rows, from any form that :func:`rows_of_rank`
        accepts."""
        return _split_state(optimizer, group, param, state, self.shards)


def _is_number(group: Dict[str, Any], name: str, value: Any) -> bool:
    """Returns whether a value of the state is the same on all ranks: a number, or the empty buffer
    of SGD without momentum."""
    return not isinstance(value, Tensor) or value.dim() == 0 or (name == "momentum_buffer"
                                                                 and not group["momentum"])


def _gather_state(optimizer: Any, group: Dict[str, Any], param: Any, state: State,
                  shards: ClassShards) -> State:
    owner, result = type(optimizer).__name__, {}
    for name, value in state.items():
        if name == "pending":
            result[name] = _resize_pending(optimizer, group, param, shards.num_classes, value)
        elif _is_number(group, name, value) or isinstance(value, DTensor):
            result[name] = value
        elif value.shape[0] == len(param) and value.layout == torch.strided:
            result[name] = rows_of_all(value, shards)
        else:
            raise TypeError(f"{owner}: expected dense state with a row for each class, or a "
                            "number, of the split parameter of shape "
                            f"{list(param.shape)}, got {name} of shape {list(value.shape)} and "
                            f"layout {value.layout}")
    return result


def _split_state(optimizer: Any, group: Dict[str, Any], param: Any, state: State,
                 shards: ClassShards) -> State:
    owner, result = type(optimizer).__name__, {}
    for name, value in state.items():
        if name == "pending":
            if value[0] != state["step"]:
                raise ValueError(f"{owner}: expected state of a table that was flushed after step "
                                 f"{state['step']}, as state_dict() gives it, got one "
                                 f"after step {int(value[0])}")
            result[name] = _resize_pending(optimizer, group, param, len(param), value)
        else:
            result[name] = value if _is_number(group, name, value) else rows_of_rank(
                owner, name, value, shards)
    return result


def _resize_pending(optimizer: Any, group: Dict[str, Any], param: Tensor, num_rows: int,
                    pending: Tensor) -> Tensor:
    """Returns a flushed "pending" tensor for another number of rows, which determines its size."""
    rows = torch.empty([num_rows, *param.shape[1:]], dtype=param.dtype, device="meta")
    result = pending.new_zeros(
        optimizer._call("_state", rows, True, optimizer._text(group))[-1].shape)
    result[:_PENDING_HEADER] = pending[:_PENDING_HEADER]
    return result
