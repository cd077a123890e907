"""Ranks: the processes of a process group that do a piece of work together, and what they send each other.

:class:`Alone` is the interface and one process; :class:`Together` has the same methods for several. Tables over ranks are :mod:`xsoftmax.distributed`.
"""

import hashlib
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

Result = TypeVar("Result")
# Under its newer name where torch has one. Not every build of torch has either.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Alone:
    """One process: nobody to share with."""

    alone = True
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
        """The parts [n, ...] of all ranks, one after the other. Ranks may have parts of different lengths."""
        return part

    def sum(self, part: Tensor) -> Tensor:
        """Over ranks."""
        return part

    def deal(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
        """Of tasks that take ``work()`` int64 [count]: where those of this rank begin and end. Neighbours go to one rank, in about equal shares."""
        return 0, count


ALONE = Alone()


class Together(Alone):
    """The ranks of a group: all call the same methods in the same order."""

    alone = False

    def __init__(self, owner: str, group: "dist.ProcessGroup") -> None:
        self.owner, self.group = owner, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

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


def ranks_of(owner: str, group: Any) -> Alone:
    """The ranks that a user names to share work on the CPU. group: None, a process group or a DeviceMesh of one dimension."""
    if group is None:
        return ALONE
    if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
        raise TypeError(f"{owner}: expected group to be a process group, a DeviceMesh or None, got {type(group).__name__}")
    group = group if isinstance(group, dist.ProcessGroup) else group_of(owner, group)
    if not has_backend(group, "cpu"):
        raise ValueError(f"{owner}: expected a process group with a backend for the CPU, such as gloo, "
                         f"got one with {dist.get_backend_config(group)}")
    return Together(owner, group)


def digest(*tensors: Tensor) -> str:
    """What tells apart tensors of other values, nearly surely."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]  # an array is a buffer
    return found.hexdigest()[:16]


def group_of(owner: str, mesh: Any) -> Any:
    """The group of a 1-D DeviceMesh, or of all ranks for None."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{owner}: expected torch.distributed to be initialized (torch.distributed.init_process_group), got no process group")
    if mesh is None:
        return dist.group.WORLD
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise TypeError(f"{owner}: expected mesh to be a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{owner}: expected a mesh of one dimension, got {mesh.ndim}: name one of them, as mesh[\"dp\"]")
    return mesh.get_group()


def check_alike(owner: str, facts: Dict[str, Any], group: "dist.ProcessGroup") -> None:
    """Raises on all ranks where a fact differs between them."""
    of_ranks: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, facts, group=group)
    for rank, others in enumerate(of_ranks):
        for name in {**of_ranks[0], **others}:
            first, other = of_ranks[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{owner}: expected the same on all ranks, got {name} of {first} on rank 0 and {other} on rank {rank}")


def broadcast(tensors: List[Tensor], group: "dist.ProcessGroup") -> None:
    """The values of the group's first rank, on all ranks."""
    source = dist.get_global_rank(group, 0)
    backends = {device for device, _ in _backends(group)}
    elsewhere = [tensor for tensor in tensors if tensor.device.type not in backends]  # counters stay on the host beside NCCL
    for tensor in tensors:
        if tensor.device.type in backends:
            value = tensor.detach().contiguous()
            dist.broadcast(value, source, group=group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)
    if elsewhere:
        values = [tensor.detach() for tensor in elsewhere]
        dist.broadcast_object_list(values, source, group=group)
        for tensor, value in zip(elsewhere, values):
            tensor.detach().copy_(value)


def _backends(group: "dist.ProcessGroup") -> List[Tuple[str, str]]:
    """(device type, backend)."""
    return [(pair.split(":")[0], pair.split(":")[1]) for pair in dist.get_backend_config(group).split(",")]


def has_backend(group: "dist.ProcessGroup", device: str) -> bool:
    return device in {of for of, _ in _backends(group)}


class Ragged:
    """A batch of every rank, of different sizes, one after the other."""

    def __init__(self, count: int, device: Device, group: "dist.ProcessGroup") -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        counts = torch.empty(self.size, dtype=torch.int64, device=device)
        all_gather(counts, torch.full([1], count, device=device), group=group)
        self.counts: List[int] = counts.tolist()
        self.most, self.total, self.begin = max(self.counts), sum(self.counts), sum(self.counts[:self.rank])

    def local(self, whole: Tensor) -> Tensor:
        return whole[self.begin:self.begin + self.counts[self.rank]]

    def _padded(self, part: Tensor) -> Tensor:
        missing = self.most - len(part)
        return part.contiguous() if missing == 0 else torch.cat([part, part.new_zeros(missing, *part.shape[1:])])

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, one after the other."""
        return self.start_gather(part)()

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """What waits for them."""
        whole, padded = part.new_empty(self.size * self.most, *part.shape[1:]), self._padded(part)
        work = all_gather(whole, padded, group=self.group, async_op=True)

        def gathered() -> Tensor:
            work.wait()
            if self.size * self.most == self.total:
                return whole
            return torch.cat([piece[:count] for piece, count in zip(whole.split(self.most), self.counts)])
        return gathered

    def scatter(self, whole: Tensor) -> Tensor:
        """What all ranks have for this rank's part of the batch, [ranks, its size, ...]."""
        return self.start_scatter(whole)()

    def start_scatter(self, whole: Tensor) -> Callable[[], Tensor]:
        """What waits for it."""
        count, whole = self.counts[self.rank], whole.contiguous()
        parts = whole.new_empty(self.size * count, *whole.shape[1:])
        work = dist.all_to_all_single(parts, whole, [count] * self.size, self.counts, group=self.group, async_op=True)

        def scattered() -> Tensor:
            work.wait()
            return parts.view(self.size, count, *whole.shape[1:])
        return scattered

    def scattered_back(self, parts: Tensor) -> Tensor:
        """The inverse: what this rank has for the parts of all ranks' batches."""
        whole = parts.new_empty(self.total, *parts.shape[2:])
        dist.all_to_all_single(whole, parts.flatten(0, 1).contiguous(), self.counts, [self.counts[self.rank]] * self.size, group=self.group)
        return whole
