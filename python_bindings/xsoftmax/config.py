"""Which code runs, and where the library lies."""

import contextlib
from pathlib import Path
from typing import Iterator

import torch

from . import _library
from ._public import public_names

__all__ = ["cmake_prefix_path", "cpu_capability", "cpu_products", "use_impl"]
__dir__ = public_names(__all__)

#: For CMake: the prefix of the installed CMake package, as torch.utils.cmake_prefix_path is of torch's.
cmake_prefix_path: str = str(Path(_library.path).parent.parent / "share" / "cmake")


def cpu_capability() -> str:
    """The instruction set of the CPU kernels: "default", "avx2" or "avx512"; XSOFTMAX_CPU overrides what the CPU offers."""
    return torch.ops.xsoftmax.cpu_capability()


def cpu_products() -> str:
    """How products of bfloat16 tables are made on this CPU, and those of float32 tables under ``torch.set_float32_matmul_precision("medium")``:
    "bfloat16": of numbers rounded to bfloat16, with sums in float32, where the CPU does that faster (AMX; AMD with AVX-512 bfloat16 instructions); else
    "float32", of which "medium" is no other. XSOFTMAX_PRODUCTS=float32|bfloat16 overrides it, and is an error where the CPU cannot follow.
    Products of float32 numbers are oneDNN's where MKL has no kernels of the CPU's full width (AMD, from Zen 5 on), else those of ``torch.mm``;
    XSOFTMAX_FLOAT32_PRODUCTS=blocks|aten overrides that."""
    return torch.ops.xsoftmax.cpu_products()


@contextlib.contextmanager
def use_impl(impl: str) -> Iterator[None]:
    """Within the context, every op of the package runs its kernel ("kernel", as always) or the plain ATen composite behind it
    ("reference"). For the whole process, since backward runs on threads of autograd's own."""
    previous = torch.ops.xsoftmax.get_impl()
    torch.ops.xsoftmax.set_impl(impl)
    try:
        yield
    finally:
        torch.ops.xsoftmax.set_impl(previous)
