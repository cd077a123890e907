"""Ranks: the processes of a process group that share work, and their communication.

:class:`Alone` defines the interface and implements it for one process; :class:`Together` implements
it for several. Tables over ranks are in :mod:`xsoftmax.distributed`.
"""

import hashlib
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

Result = TypeVar("Result")
# Newer releases of torch rename all_gather_into_tensor to all_gather_single. Some builds of torch
# have neither.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None)


class SingleProcess:
    """A single process, without other ranks."""

    alone = True
    size, rank = 1, 0

    def check_alike(self, facts: Callable[[], Dict[str, Any]]) -> None:
        """Raises on all ranks if a fact differs between them."""

    def do(self, work: Callable[[], Result]) -> Result:
        """Returns ``work()``. If it fails on one rank, the other ranks raise too instead of waiting
        for it."""
        return work()

    def first(self, value: Tensor) -> Tensor:
        """Returns the value of the first rank, on all ranks."""
        return value

    def gather(self, part: Tensor) -> Tensor:
        """Returns the parts [n, ...] of all ranks, concatenated. Their lengths n may differ."""
        return part

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum over ranks."""
        return part

    def deal(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
        """Distributes tasks over ranks, in contiguous ranges of about equal work.

        Args:
            count: the number of tasks.
            work: returns the work of each task, int64 [count].

        Returns:
            The begin and the end of this rank's range.
        """
        return 0, count


SINGLE_PROCESS = SingleProcess()


class ProcessGroupRanks(SingleProcess):
    """The ranks of a process group. All ranks must call the same methods in the same order."""

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
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}",
                               group=self.group)
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
        middles = 2 * each.cumsum(0) - each  # a task goes to the rank whose share has its midpoint
        shares = 2 * each.sum() * torch.arange(self.rank, self.rank + 2) // self.size
        shares[1] += self.rank + 1 == self.size  # tasks without work at the end go to the last rank
        begin, end = torch.searchsorted(middles, shares).tolist()
        return begin, end


def ranks_of(owner: str, group: Any) -> SingleProcess:
    """Returns the ranks that share work on the CPU.

    Args:
        owner: named in errors.
        group: None, a process group or a 1-D DeviceMesh.
    """
    if group is None:
        return SINGLE_PROCESS
    if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
        raise TypeError(f"{owner}: expected group to be a process group, a DeviceMesh or None, got "
                        f"{type(group).__name__}")
    group = group if isinstance(group, dist.ProcessGroup) else group_of(owner, group)
    if not has_backend(group, "cpu"):
        raise ValueError(f"{owner}: expected a process group with a backend for the CPU, such as "
                         "gloo, "
                         f"got one with {dist.get_backend_config(group)}")
    return ProcessGroupRanks(owner, group)


def digest(*tensors: Tensor) -> str:
    """Returns a hash of the values of tensors, to compare them between ranks."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(memoryview(tensor.contiguous().view(
            torch.uint8).numpy()))  # type: ignore[arg-type]  # an array is a buffer
    return found.hexdigest()[:16]


def group_of(owner: str, mesh: Any) -> Any:
    """Returns the process group of a 1-D DeviceMesh; None: that of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"{owner}: expected torch.distributed to be initialized "
                           "(torch.distributed.init_process_group), got no process group")
    if mesh is None:
        return dist.group.WORLD
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise TypeError(f"{owner}: expected mesh to be a DeviceMesh or None, got "
                        f"{type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{owner}: expected a mesh of one dimension, got {mesh.ndim}: name one of "
                         "them, as mesh[\"dp\"]")
    return mesh.get_group()


def check_alike(owner: str, facts: Dict[str, Any], group: "dist.ProcessGroup") -> None:
    """Raises on all ranks if a fact differs between them."""
    of_ranks: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, facts, group=group)
    for rank, others in enumerate(of_ranks):
        for name in {**of_ranks[0], **others}:
            first, other = of_ranks[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{owner}: expected the same on all ranks, got {name} of {first} "
                                 f"on rank 0 and {other} on rank {rank}")


def broadcast(tensors: List[Tensor], group: "dist.ProcessGroup") -> None:
    """Broadcasts the values of the group's first rank to all ranks, in place."""
    source = dist.get_global_rank(group, 0)
    backends = {device for device, _ in _backends(group)}
    # NCCL cannot broadcast counters, which stay on the host.
    elsewhere = [tensor for tensor in tensors if tensor.device.type not in backends]
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
    """Returns the backends of a group as pairs (device type, backend)."""
    return [(pair.split(":")[0], pair.split(":")[1])
            for pair in dist.get_backend_config(group).split(",")]


def has_backend(group: "dist.ProcessGroup", device: str) -> bool:
    return device in {of for of, _ in _backends(group)}


class Ragged:
    """Collectives on a batch that is split over ranks in parts of different sizes."""
    def __init__(self, count: int, device: Device, group: "dist.ProcessGroup") -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        counts = torch.empty(self.size, dtype=torch.int64, device=device)
        all_gather(counts, torch.full([1], count, device=device), group=group)
        self.counts: List[int] = counts.tolist()
        self.most, self.total, self.begin = max(self.counts), sum(self.counts), sum(
            self.counts[:self.rank])

    def local(self, whole: Tensor) -> Tensor:
        return whole[self.begin:self.begin + self.counts[self.rank]]

    def _padded(self, part: Tensor) -> Tensor:
        missing = self.most - len(part)
        return part.contiguous() if missing == 0 else torch.cat(
            [part, part.new_zeros(missing, *part.shape[1:])])

    def gather(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks, concatenated."""
        return self.start_gather(part)()

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`gather`. Returns a function that waits for the result."""
        whole, padded = part.new_empty(self.size * self.most, *part.shape[1:]), self._padded(part)
        work = all_gather(whole, padded, group=self.group, async_op=True)

        def gathered() -> Tensor:
            work.wait()
            if self.size * self.most == self.total:
                return whole
            return torch.cat(
                [piece[:count] for piece, count in zip(whole.split(self.most), self.counts)])

        return gathered

    def scatter(self, whole: Tensor) -> Tensor:
        """Exchanges slices of `whole` [total, ...]. Returns what all ranks computed for this rank's
        part of the batch, [ranks, local size, ...]."""
        return self.start_scatter(whole)()

    def start_scatter(self, whole: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`scatter`. Returns a function that waits for the result."""
        count, whole = self.counts[self.rank], whole.contiguous()
        parts = whole.new_empty(self.size * count, *whole.shape[1:])
        work = dist.all_to_all_single(parts, whole, [count] * self.size, self.counts,
                                      group=self.group, async_op=True)

        def scattered() -> Tensor:
            work.wait()
            return parts.view(self.size, count, *whole.shape[1:])

        return scattered

    def scattered_back(self, parts: Tensor) -> Tensor:
        """Inverts :meth:`scatter`: returns what all ranks sent back for the whole batch, [total,
        ...]."""
        whole = parts.new_empty(self.total, *parts.shape[2:])
        dist.all_to_all_single(whole,
                               parts.flatten(0, 1).contiguous(), self.counts,
                               [self.counts[self.rank]] * self.size, group=self.group)
        return whole
