"""Memory for class tables and what stands beside them."""

import torch
from torch import Tensor


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages behind a large CPU tensor that is not yet written: rows are found faster in a table of gigabytes."""
    torch.ops.xsoftmax.advise_huge_pages(tensor)


def table_empty(*size: int, dtype: torch.dtype, device=None) -> Tensor:
    """`torch.empty` on such pages."""
    table = torch.empty(*size, dtype=dtype, device=device)
    advise_huge_pages(table)
    return table
