"""Work that one process does, or that the ranks of a process group share."""

import hashlib
from typing import Any, Callable, Dict, Tuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Alone:
    """One process: nobody to share with. `xsoftmax.distributed._shared_work.Together` has the same methods for several."""

    size, rank = 1, 0

    def check_alike(self, facts: Callable[[], Dict[str, Any]]) -> None:
        """Raises on all ranks where a fact differs between them."""

    def do(self, work: Callable[[], Result]) -> Result:
        """``work()``. Where it fails on one rank, the others hear so in place of waiting for it."""
        return work()

    def first(self, value: Tensor) -> Tensor:
        """The first rank's."""
        return value

    def gather(self, part: Tensor) -> Tensor:
        """The parts [n, ...] of all ranks, one after the other."""
        return part

    def sum(self, part: Tensor) -> Tensor:
        """Over ranks."""
        return part

    def deal(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
        """Of tasks that take ``work()`` int64 [count]: where those of this rank begin and end. Neighbours go to one rank, in about equal shares."""
        return 0, count


def ranks_of(owner: str, group: Any) -> Alone:
    """group: None, a process group or a DeviceMesh of one dimension."""
    if group is None:
        return Alone()
    from .distributed._shared_work import Together

    return Together(owner, group)


def digest(*tensors: Tensor) -> str:
    """What tells apart tensors of other values, nearly surely."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]  # an array is a buffer
    return found.hexdigest()[:16]
