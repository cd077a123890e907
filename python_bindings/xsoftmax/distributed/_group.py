"""Process groups, and what must be the same on all their ranks."""

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.types import Device
from torch.distributed.device_mesh import DeviceMesh

from .._table import TableModule
from ..samplers import Sampler

# Under its newer name where torch has one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_of(owner: str, mesh: Optional[DeviceMesh]) -> Any:
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


def facts_of(tables: Iterable[nn.Module]) -> Dict[str, Any]:
    """What ranks must agree on."""
    facts: Dict[str, Any] = {}
    for place, table in enumerate(tables):
        of_table = {"type": type(table).__name__, "options": getattr(table, "_options", None)}
        of_table |= {name: f"{list(tensor.shape)} in {tensor.dtype}" for name, tensor in [*table.named_parameters(), *table.named_buffers()]}
        of_table |= {name: repr(module) for name, module in table.named_modules() if isinstance(module, Sampler)}
        facts |= {f"{name} of class table {place}": fact for name, fact in of_table.items()}
    return facts


def tables_of(model: nn.Module) -> List[TableModule]:
    """The class tables in `model`, and those of losses that :mod:`xsoftmax.integrations` gave it beside its modules."""
    heads: List[Any] = [module._xsoftmax_head for module in model.modules() if "_xsoftmax_head" in module.__dict__]
    return [module for module in model.modules() if isinstance(module, TableModule)] + [head.loss for head in heads]


def leave_out(model: Any) -> None:
    """Has ``DistributedDataParallel(model)`` leave the class tables in `model` to :func:`replicate` and :func:`shard_classes`, which call this for the
    model that they are given."""
    parts = {id(part) for table in tables_of(model) for part in [*table.parameters(), *table.buffers()]}
    # By all names: the rows of a table may be those of an embedding, too.
    names = {name for parts_of in (model.named_parameters, model.named_buffers) for name, part in parts_of(remove_duplicate=False) if id(part) in parts}
    model._ddp_params_and_buffers_to_ignore = sorted({*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names})


def check_alike(owner: str, facts: Dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raises on all ranks where a fact differs between them."""
    of_ranks: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, facts, group=group)
    for rank, others in enumerate(of_ranks):
        for name in {**of_ranks[0], **others}:
            first, other = of_ranks[0].get(name), others.get(name)
            if first != other:
                raise ValueError(f"{owner}: expected the same on all ranks, got {name} of {first} on rank 0 and {other} on rank {rank}")


def broadcast(tensors: List[Tensor], group: dist.ProcessGroup) -> None:
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


def _backends(group: dist.ProcessGroup) -> List[Tuple[str, str]]:
    """(device type, backend)."""
    return [(pair.split(":")[0], pair.split(":")[1]) for pair in dist.get_backend_config(group).split(",")]


def has_backend(group: dist.ProcessGroup, device: str) -> bool:
    return device in {of for of, _ in _backends(group)}


class Ragged:
    """A batch of every rank, of different sizes, one after the other."""

    def __init__(self, count: int, device: Device, group: dist.ProcessGroup) -> None:
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
