"""Loads the native library, or says what was tried and why it failed."""

import os
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_NAME = "libxsoftmax.so"


def _built_for(library: Path) -> str:
    """The torch minor release that the installed CMake package was made for, or ""."""
    config = library.parent.parent / "share" / "cmake" / "xsoftmax" / "torch_minor.txt"
    return config.read_text().strip() if config.is_file() else ""


def _load() -> Path:
    override = os.environ.get("XSOFTMAX_LIBRARY")
    candidates = [Path(override)] if override else [_FOLDER / "lib" / _NAME]
    tried = []
    for library in candidates:
        if not library.is_file():
            tried.append(f"{library}: no such file")
            continue
        wanted, running = _built_for(library), ".".join(torch.__version__.split(".")[:2])
        if wanted and wanted != running:
            tried.append(f"{library}: built for torch {wanted}, but torch {torch.__version__} is running")
            continue
        try:
            torch.ops.load_library(str(library))
            torch.ops.xsoftmax.cpu_capability()  # an XSOFTMAX_CPU that this CPU cannot follow is an error here, not in the first step,
            torch.ops.xsoftmax.cpu_products()  # and so is XSOFTMAX_PRODUCTS
            return library
        except OSError as error:
            tried.append(f"{library}: {error}")
    raise ImportError(
        "xsoftmax: the native library could not be loaded. Tried:\n  " + "\n  ".join(tried) +
        "\nBuild it against the torch of this environment: pip install --no-build-isolation . "
        "(in a checkout, XSOFTMAX_LIBRARY may name the library that CMake built)")


path = _load()
