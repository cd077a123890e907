"""Selects which implementation runs, and locates the installed library."""

import contextlib
from pathlib import Path
from typing import Iterator

import torch

from . import library
from .public import public_names

__all__ = ["cmake_prefix_path", "cpu_capability", "cpu_products", "use_impl"]
__dir__ = public_names(__all__)

#: Prefix of the installed CMake package, like torch.utils.cmake_prefix_path for torch.
cmake_prefix_path: str = str(Path(library.path).parent.parent / "share" / "cmake")


def cpu_capability() -> str:
    """Returns the instruction set of the CPU kernels: "default", "avx2" or "avx512".

    The environment variable XSOFTMAX_CPU overrides the detected one.
    """
    return torch.ops.xsoftmax.cpu_capability()


def cpu_products() -> str:
    """Returns the dtype in which the CPU multiplies matrices of bfloat16 tables, and of float32
    tables under ``torch.set_float32_matmul_precision("medium")``.

    - "bfloat16": operands are rounded to bfloat16 and sums are float32. Selected where the CPU is
      faster that way: AMX, or AMD with AVX-512 bfloat16 instructions.
    - "float32": otherwise. "medium" then has no effect.

    The environment variable XSOFTMAX_PRODUCTS=float32|bfloat16 overrides the choice; it is an error
    if the CPU does not support it.

    Products of float32 matrices use oneDNN where MKL has no kernels of the CPU's full vector width
    (AMD, from Zen 5 on), else ``torch.mm``. XSOFTMAX_FLOAT32_PRODUCTS=blocks|aten overrides that.
    """
    return torch.ops.xsoftmax.cpu_products()


@contextlib.contextmanager
def use_impl(impl: str) -> Iterator[None]:
    """Context manager that selects the implementation of all operators of the package.

    The setting applies to the whole process, because backward passes run on autograd's own threads.

    Args:
        impl: "kernel", the default, or "reference", the composite of ATen calls that each kernel is
            tested against.
    """
    previous = torch.ops.xsoftmax.get_impl()
    torch.ops.xsoftmax.set_impl(impl)
    try:
        yield
    finally:
        torch.ops.xsoftmax.set_impl(previous)
