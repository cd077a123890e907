"""Which code runs, and where the library lies."""

import contextlib
from pathlib import Path
from typing import Iterator

import torch

from . import _library

#: For CMake: the prefix of the installed CMake package, as torch.utils.cmake_prefix_path is of torch's.
cmake_prefix_path: str = str(Path(_library.path).parent.parent / "share" / "cmake")


def cpu_capability() -> str:
    """The instruction set of the CPU kernels: "default", "avx2" or "avx512"; XSOFTMAX_CPU overrides what the CPU offers."""
    return torch.ops.xsoftmax.cpu_capability()


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
