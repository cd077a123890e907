"""State of split tables and of their optimizers: whole tables as DTensors outside, each rank's rows inside."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ._exchange import ClassShards

def rows_of_all(local: Tensor, shards: ClassShards) -> DTensor:
    """This rank's rows as a part of the whole table."""
    shape = torch.Size([shards.num_classes, *local.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, shards.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def rows_of_rank(owner: str, name: str, table: Tensor, shards: ClassShards) -> Tensor:
    """This rank's rows of a whole table, of one that is split in any way, or these rows alone."""
    if table.shape[:1] == (shards.num_classes,):
        return table.redistribute(shards.mesh, [Shard(0)]).to_local() if isinstance(table, DTensor) else shards.local(table)
    if isinstance(table, DTensor) or table.shape[:1] != (shards.end - shards.begin,):
        raise ValueError(f"{owner}: expected {name} of {shards.num_classes} classes, or of the {shards.end - shards.begin} of this rank, got shape "
                         f"{list(table.shape)}")
    return table
