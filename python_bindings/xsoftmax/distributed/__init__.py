"""Class tables over several ranks, with torch.distributed. Each rank is a process, as started by
torchrun."""

from .._core.public import public_names
from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .class_parallel import ClassParallel, shard_classes
from .counts import share_counts
from .models import leave_out
from .embedding import TiedEmbedding
from .replicate import no_sync, replicate
from .two_tower import share_candidates

__all__ = [
    "ClassParallel", "TiedEmbedding", "latest_checkpoint", "leave_out", "load_checkpoint",
    "no_sync", "replicate", "save_checkpoint", "shard_classes", "share_candidates", "share_counts"
]
__dir__ = public_names(__all__)
