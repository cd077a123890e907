"""Work that the ranks of a process group share."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._ranks import Alone, Result
from ._group import Ragged, all_gather, broadcast, check_alike, group_of, has_backend


class Together(Alone):
    """The ranks of a group: all call the same methods in the same order."""

    def __init__(self, owner: str, group: Any) -> None:
        if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
            raise TypeError(f"{owner}: expected group to be a process group, a DeviceMesh or None, got {type(group).__name__}")
        self.owner, self.group = owner, group if isinstance(group, dist.ProcessGroup) else group_of(owner, group)
        if not has_backend(self.group, "cpu"):
            raise ValueError(f"{owner}: expected a process group with a backend for the CPU, such as gloo, "
                             f"got one with {dist.get_backend_config(self.group)}")
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)

    def check_alike(self, facts: Callable[[], Dict[str, Any]]) -> None:
        check_alike(self.owner, self.do(facts), self.group)

    def do(self, work: Callable[[], Result]) -> Result:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:
            error = failure
        failed = torch.empty(self.size, dtype=torch.int64)
        all_gather(failed, torch.tensor([error is not None], dtype=torch.int64), group=self.group)
        if not failed.any():
            return result  # type: ignore[return-value]
        texts: List[Optional[str]] = [None] * self.size
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=self.group)
        if error is not None:
            raise error
        rank = int(failed.argmax())
        raise RuntimeError(f"{self.owner}: rank {rank} failed: {texts[rank]}")

    def first(self, value: Tensor) -> Tensor:
        broadcast([value], self.group)
        return value

    def gather(self, part: Tensor) -> Tensor:
        return Ragged(len(part), part.device, self.group).gather(part)

    def sum(self, part: Tensor) -> Tensor:
        dist.all_reduce(part, group=self.group)
        return part

    def deal(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
        each = work()
        middles = 2 * each.cumsum(0) - each  # a task is the rank's in whose share its middle lies
        shares = 2 * each.sum() * torch.arange(self.rank, self.rank + 2) // self.size
        shares[1] += self.rank + 1 == self.size  # tasks of no work at the end
        begin, end = torch.searchsorted(middles, shares).tolist()
        return begin, end
