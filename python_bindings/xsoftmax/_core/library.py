"""Loads the native library, or raises ImportError with the reason."""

import os
import re
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent.parent
_NAME = "libxsoftmax.so"
_OLDEST = (2, 11)  # release of torch


def _read_torch_minor(library: Path) -> str:
    """Returns the minor release of torch that the installed CMake package was built for, or ""."""
    config = library.parent.parent / "share" / "cmake" / "xsoftmax" / "torch_minor.txt"
    return config.read_text().strip() if config.is_file() else ""


def _other_cuda(library: Path) -> str:
    """Returns the error for CUDA kernels without a torch for their CUDA, or ""."""
    # The library needs a runtime by its name, which has the major version.
    runtime = re.search(rb"libcudart[.]so[.](\d+)", library.read_bytes())
    cuda = torch.version.cuda or ""
    if runtime is None or cuda.split(".")[0] == runtime[1].decode():
        return ""
    needed, minor = runtime[1].decode(), ".".join(torch.__version__.split(".")[:2])
    return (f"xsoftmax: {library} has CUDA kernels and needs a build of torch for CUDA {needed}, "
            f"but torch {torch.__version__} is built for {f'CUDA {cuda}' if cuda else 'the CPU'}: "
            f"take the wheel of xsoftmax whose version has +torch{minor}.cpu, or a build of torch "
            f"{minor} for CUDA {needed}")


def _load() -> Path:
    library = Path(os.environ.get("XSOFTMAX_LIBRARY") or _FOLDER / "lib" / _NAME)
    remedy = ("Build it against the torch of this environment: pip install --no-build-isolation . "
              "(in a checkout, XSOFTMAX_LIBRARY may name the library that CMake built" +
              ("; it is set)" if os.environ.get("XSOFTMAX_LIBRARY") else ")"))
    built_minor, minor = _read_torch_minor(library), ".".join(torch.__version__.split(".")[:2])
    if not library.is_file():
        raise ImportError(f"xsoftmax: cannot load {library}: no such file. {remedy}")
    if built_minor and built_minor != minor:
        too_old = tuple(map(int, minor.split("."))) < _OLDEST
        raise ImportError(
            f"xsoftmax: {library} was built for torch {built_minor}, but torch "
            f"{torch.__version__} is running: pip install 'torch=={built_minor}.*'" +
            (f". xsoftmax needs torch {'.'.join(map(str, _OLDEST))} or later" if too_old else
             f", or a wheel of xsoftmax whose version has +torch{minor}, or build it from its "
             "source: pip install --no-build-isolation ."))
    try:
        torch.ops.load_library(str(library))
        # Values of XSOFTMAX_CPU, XSOFTMAX_PRODUCTS and XSOFTMAX_FLOAT32_PRODUCTS that this CPU does
        # not support raise here, not in the first step.
        torch.ops.xsoftmax.cpu_capability()
        torch.ops.xsoftmax.cpu_products()
    except OSError as error:
        if other_cuda := _other_cuda(library):
            raise ImportError(other_cuda) from error
        # Torch's own error names the library alone; its cause says what the loader missed.
        raise ImportError(
            f"xsoftmax: cannot load {library}: {error.__cause__ or error}. {remedy}") from error
    except AttributeError as error:
        raise ImportError(f"xsoftmax: {library} has no operators of xsoftmax. {remedy}") from error
    return library


path = _load()
