"""Class tables on several machines, over torch.distributed: each rank is a process, as torchrun starts them."""

from .replicate import no_sync, replicate

__all__ = ["no_sync", "replicate"]
