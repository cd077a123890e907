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

    is_single = True
    size, rank = 1, 0

    def check_equal(self, facts: Callable[[], Dict[str, Any]]) -> None:
        """Raises on all ranks if a fact differs between them."""

    def run_together(self, work: Callable[[], Result]) -> Result:
        """Returns ``work()``. If it fails on one rank, the other ranks raise too instead of waiting
        for it."""
        return work()

    def share_first(self, value: Tensor) -> Tensor:
        """Returns the value of the first rank, on all ranks."""
        return value

    def gather(self, part: Tensor) -> Tensor:
        """Returns the parts [n, ...] of all ranks, concatenated. Their lengths n may differ."""
        return part

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum over ranks."""
        return part

    def split_work(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
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

    is_single = False

    def __init__(self, owner: str, group: "dist.ProcessGroup") -> None:
        self.owner, self.group = owner, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def check_equal(self, facts: Callable[[], Dict[str, Any]]) -> None:
        check_equal(self.owner, self.run_together(facts), self.group)

    def run_together(self, work: Callable[[], Result]) -> Result:
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

    def share_first(self, value: Tensor) -> Tensor:
        broadcast([value], self.group)
        return value

    def gather(self, part: Tensor) -> Tensor:
        return Ragged(len(part), part.device, self.group).gather(part)

    def sum(self, part: Tensor) -> Tensor:
        dist.all_reduce(part, group=self.group)
        return part

    def split_work(self, count: int, work: Callable[[], Tensor]) -> Tuple[int, int]:
        sizes = work()
        midpoints = 2 * sizes.cumsum(
            0) - sizes  # a task goes to the rank whose share has its midpoint
        shares = 2 * sizes.sum() * torch.arange(self.rank, self.rank + 2) // self.size
        shares[1] += self.rank + 1 == self.size  # tasks without work at the end go to the last rank
        begin, end = torch.searchsorted(midpoints, shares).tolist()
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
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(memoryview(tensor.contiguous().view(
            torch.uint8).numpy()))  # type: ignore[arg-type]  # an array is a buffer
    return checksum.hexdigest()[:16]


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


def check_equal(owner: str, facts: Dict[str, Any], group: "dist.ProcessGroup") -> None:
    """Raises on all ranks if a fact differs between them."""
    facts_of_ranks: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts_of_ranks, facts, group=group)
    for rank, rank_facts in enumerate(facts_of_ranks):
        for name in {**facts_of_ranks[0], **rank_facts}:
            first_value, value = facts_of_ranks[0].get(name), rank_facts.get(name)
            if first_value != value:
                raise ValueError(
                    f"{owner}: expected the same on all ranks, got {name} of {first_value} "
                    f"on rank 0 and {value} on rank {rank}")


def broadcast(tensors: List[Tensor], group: "dist.ProcessGroup") -> None:
    """Broadcasts the values of the group's first rank to all ranks, in place."""
    source = dist.get_global_rank(group, 0)
    backends = {device for device, _ in _backends(group)}
    # NCCL cannot broadcast counters, which stay on the host.
    other_tensors = [tensor for tensor in tensors if tensor.device.type not in backends]
    for tensor in tensors:
        if tensor.device.type in backends:
            value = tensor.detach().contiguous()
            dist.broadcast(value, source, group=group)
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)
    if other_tensors:
        values = [tensor.detach() for tensor in other_tensors]
        dist.broadcast_object_list(values, source, group=group)
        for tensor, value in zip(other_tensors, values):
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
        self.max_count, self.total, self.begin = max(self.counts), sum(self.counts), sum(
            self.counts[:self.rank])

    def local(self, batch: Tensor) -> Tensor:
        return batch[self.begin:self.begin + self.counts[self.rank]]

    def _pad(self, part: Tensor) -> Tensor:
        padding = self.max_count - len(part)
        return part.contiguous() if padding == 0 else torch.cat(
            [part, part.new_zeros(padding, *part.shape[1:])])

    def gather(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks, concatenated."""
        return self.start_gather(part)()

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`gather`. Returns a function that waits for the result."""
        buffer, padded_part = part.new_empty(self.size * self.max_count,
                                             *part.shape[1:]), self._pad(part)
        work = all_gather(buffer, padded_part, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            if self.size * self.max_count == self.total:
                return buffer
            return torch.cat(
                [slot[:count] for slot, count in zip(buffer.split(self.max_count), self.counts)])

        return finish

    def scatter(self, batch: Tensor) -> Tensor:
        """Exchanges slices of `batch` [total, ...]. Returns what all ranks computed for this rank's
        part of the batch, [ranks, local size, ...]."""
        return self.start_scatter(batch)()

    def start_scatter(self, batch: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`scatter`. Returns a function that waits for the result."""
        count, batch = self.counts[self.rank], batch.contiguous()
        parts = batch.new_empty(self.size * count, *batch.shape[1:])
        work = dist.all_to_all_single(parts, batch, [count] * self.size, self.counts,
                                      group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return parts.view(self.size, count, *batch.shape[1:])

        return finish

    def gather_back(self, parts: Tensor) -> Tensor:
        """Inverts :meth:`scatter`: returns what all ranks sent back for the whole batch, [total,
        ...]."""
        batch = parts.new_empty(self.total, *parts.shape[2:])
        dist.all_to_all_single(batch,
                               parts.flatten(0, 1).contiguous(), self.counts,
                               [self.counts[self.rank]] * self.size, group=self.group)
        return batch
