"""Memory of class tables and of the buffers that accompany them."""

from typing import Any, Dict

import torch
from torch import Tensor, nn
from torch.types import Device


def advise_huge_pages(tensor: Tensor) -> None:
    """Requests huge pages for a large CPU tensor before it is written to: they speed up access to
    rows of a table of gigabytes."""
    torch.ops.xsoftmax.advise_huge_pages(tensor)


def table_empty(*size: int, dtype: torch.dtype, device: Device = None) -> Tensor:
    """Returns ``torch.empty`` backed by huge pages."""
    table = torch.empty(*size, dtype=dtype, device=device)
    advise_huge_pages(table)
    return table


def device_of_values(device: Device) -> torch.device:
    """Returns the device, or the default device for None. Meta is replaced by the CPU, since only
    class tables are left without values there."""
    value_device = torch.get_default_device() if device is None else torch.device(device)
    return torch.device("cpu") if value_device.type == "meta" else value_device


def move_table(owner: str, table: Tensor, new_table: Any) -> Tensor:
    """Returns the new value of a buffer that no state dict restores, after ``Module._apply`` has
    turned ``table`` into ``moved``.

    Values and dtype are preserved and only the device changes, also under ``half()`` and
    ``to_empty()``.
    """
    if table.is_meta and not new_table.is_meta:
        raise RuntimeError(f"{owner}: its tables have no values on the meta device, from which "
                           f"they were to move to {new_table.device}: "
                           "make the module anew (with device=\"meta\" only the class table is "
                           "left unmade)")
    return new_table if new_table.is_meta else table.to(new_table.device)


def fill_empty(module: nn.Module, state_dict: Dict[str, Any], prefix: str) -> None:
    """Adds missing buffers without elements to a state dict before it is loaded.

    Tools that identify tensors by their memory, such as Accelerate, treat all empty tensors as one
    and save only one of them.
    """
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.numel(
        ) == 0 and name not in module._non_persistent_buffers_set:
            state_dict.setdefault(prefix + name, buffer)
