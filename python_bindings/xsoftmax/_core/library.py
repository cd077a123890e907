"""Loads the native library, or raises ImportError with the reason."""

import json
import os
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent.parent
_NAME = "libxsoftmax.so"
_OLDEST = (2, 11)  # release of torch


def _built_for(library: Path) -> dict[str, str]:
    """Returns what the installed CMake package says of its build: "torch", a minor release; "cuda",
    a major version, or "" without kernels. Empty for a library in a build folder."""
    note = library.parent.parent / "share" / "cmake" / "xsoftmax" / "built_for.json"
    return json.loads(note.read_text()) if note.is_file() else {}


def _other_torch(library: Path) -> str:
    """Returns the error for a torch of another release or CUDA than the library's, or ""."""
    built, minor = _built_for(library), ".".join(torch.__version__.split(".")[:2])
    needed, cuda = built.get("cuda"), torch.version.cuda or ""
    if built and built["torch"] != minor:
        too_old = tuple(map(int, minor.split("."))) < _OLDEST
        return (f"xsoftmax: {library} was built for torch {built['torch']}, but torch "
                f"{torch.__version__} is running: pip install 'torch=={built['torch']}.*'" +
                (f". xsoftmax needs torch {'.'.join(map(str, _OLDEST))} or later" if too_old else
                 f", or a wheel of xsoftmax whose version has +torch{minor}, or build it from its "
                 "source: pip install --no-build-isolation ."))
    # Two CUDA runtimes in a process would not know of each other's memory and streams.
    if needed and cuda.split(".")[0] != needed:
        return (f"xsoftmax: {library} has CUDA kernels and needs a build of torch for CUDA "
                f"{needed}, but torch {torch.__version__} is built for "
                f"{f'CUDA {cuda}' if cuda else 'the CPU'}: take the wheel of xsoftmax whose "
                f"version has +torch{minor}.cpu, or a build of torch {minor} for CUDA {needed}")
    return ""


def _load() -> Path:
    library = Path(os.environ.get("XSOFTMAX_LIBRARY") or _FOLDER / "lib" / _NAME)
    remedy = ("Build it against the torch of this environment: pip install --no-build-isolation . "
              "(in a checkout, XSOFTMAX_LIBRARY may name the library that CMake built" +
              ("; it is set)" if os.environ.get("XSOFTMAX_LIBRARY") else ")"))
    if not library.is_file():
        raise ImportError(f"xsoftmax: cannot load {library}: no such file. {remedy}")
    if other := _other_torch(library):
        raise ImportError(other)
    try:
        torch.ops.load_library(str(library))
        # Values of XSOFTMAX_CPU, XSOFTMAX_PRODUCTS and XSOFTMAX_FLOAT32_PRODUCTS that this CPU does
        # not support raise here, not in the first step.
        torch.ops.xsoftmax.cpu_capability()
        torch.ops.xsoftmax.cpu_products()
    except OSError as error:
        # Torch's own error names the library alone; its cause says what the loader missed.
        raise ImportError(
            f"xsoftmax: cannot load {library}: {error.__cause__ or error}. {remedy}") from error
    except AttributeError as error:
        raise ImportError(f"xsoftmax: {library} has no operators of xsoftmax. {remedy}") from error
    return library


path = _load()
