"""Checks of what constructors take, which name owner, argument, expected and got."""

import math
import numbers
from typing import Any, Optional

import numpy as np
from torch import Tensor


def check_count(owner: str, argument: str, value: int, least: Optional[int]) -> int:
    """An int, numpy's or Python's, of at least that, where it is not None."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{owner}: expected {argument} of type int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{owner}: expected {argument} of at least {least}, got {value}")
    return int(value)


def check_number(owner: str, argument: str, value: Any, *, positive: bool) -> float:
    """A finite number, above 0 or at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: expected {argument} as a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{owner}: expected {argument} as a finite number {'above' if positive else 'of at least'} 0, got {value}")
    return number


def check_bool(owner: str, argument: str, value: bool) -> bool:
    """True or False, numpy's or Python's."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{owner}: expected {argument} of type bool, got {type(value).__name__}")
    return bool(value)


def check_class_weights(owner: str, weight: Optional[Tensor], num_classes: int) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{owner}: expected weight as a tensor, got {type(weight).__name__}")
    if weight.shape != (num_classes,):
        raise ValueError(f"{owner}: expected weight of shape ({num_classes},), got {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise TypeError(f"{owner}: expected weight of a floating dtype, got {weight.dtype}")


def check_reduction(owner: str, reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{owner}: expected reduction to be \"mean\", \"sum\" or \"none\", got {reduction!r}")
    return reduction
