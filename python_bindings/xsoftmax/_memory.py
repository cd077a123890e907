"""Memory for class tables and what stands beside them."""

from typing import Any, Dict

import torch
from torch import Tensor, nn
from torch.types import Device


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages behind a large CPU tensor that is not yet written: rows are found faster in a table of gigabytes."""
    torch.ops.xsoftmax.advise_huge_pages(tensor)


def table_empty(*size: int, dtype: torch.dtype, device: Device = None) -> Tensor:
    """`torch.empty` on such pages."""
    table = torch.empty(*size, dtype=dtype, device=device)
    advise_huge_pages(table)
    return table


def device_of_values(device: Device) -> torch.device:
    """That device, or the default one; the CPU in the place of meta, on which only class tables are left unmade."""
    found = torch.get_default_device() if device is None else torch.device(device)
    return torch.device("cpu") if found.type == "meta" else found


def moved_table(owner: str, table: Tensor, moved: Any) -> Tensor:
    """What a buffer that no state dict restores becomes where ``Module._apply`` made ``moved`` of ``table``: the same values and
    dtype on the new device, also under ``half()`` and ``to_empty()``."""
    if table.is_meta and not moved.is_meta:
        raise RuntimeError(f"{owner}: its tables have no values on the meta device, from which they were to move to {moved.device}: "
                           "make the module anew (with device=\"meta\" only the class table is left unmade)")
    return moved if moved.is_meta else table.to(moved.device)


def fill_empty(module: nn.Module, state_dict: Dict[str, Any], prefix: str) -> None:
    """Before a state dict is loaded: buffers without elements may be missing there. What writes tensors by their memory, as Accelerate does, takes all that
    have none for one tensor and keeps one of them."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.numel() == 0 and name not in module._non_persistent_buffers_set:
            state_dict.setdefault(prefix + name, buffer)
