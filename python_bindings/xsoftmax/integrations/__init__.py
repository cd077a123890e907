"""Integrations with training libraries: :mod:`transformers`, :mod:`lightning`, :mod:`accelerate`
and :mod:`torchmetrics`. Each is imported on first use.

None of these libraries is required. The optional dependency group `integrations` lists the versions
that are tested.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .._core.public import public_names

if TYPE_CHECKING:
    from . import accelerate, lightning, torchmetrics, transformers

__all__ = ["accelerate", "lightning", "torchmetrics", "transformers"]
__dir__ = public_names(__all__)


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
