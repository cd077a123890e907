"""Class tables on several machines, over torch.distributed: each rank is a process, as torchrun starts them."""

from ._group import leave_out
from .class_parallel import ClassParallel, shard_classes
from .embedding import TiedEmbedding
from .replicate import no_sync, replicate

__all__ = ["ClassParallel", "TiedEmbedding", "leave_out", "no_sync", "replicate", "shard_classes"]
