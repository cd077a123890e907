"""Glue to packages that train models, each imported with its first use: :mod:`transformers`, :mod:`lightning`, :mod:`accelerate`, :mod:`recbole`,
:mod:`torchmetrics`.

The package needs none of them. Versions that the tests run with stand in the extra `integrations`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .._public import public_names

if TYPE_CHECKING:
    from . import accelerate, lightning, recbole, torchmetrics, transformers

__all__ = ["accelerate", "lightning", "recbole", "torchmetrics", "transformers"]
__dir__ = public_names(__all__)


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
