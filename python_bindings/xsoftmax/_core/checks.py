"""Argument checks of constructors. Errors name the owner, the argument, what was expected and what
was passed."""

import math
import numbers
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from .memory import device_of_values
from .typing import Numbers


def check_count(owner: str, argument: str, value: int, least: Optional[int]) -> int:
    """Returns a Python or numpy int as int, after checking that it is at least `least` (None: no
    bound)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{owner}: expected {argument} of type int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{owner}: expected {argument} of at least {least}, got {value}")
    return int(value)


def check_number(owner: str, argument: str, value: Any, *, positive: bool) -> float:
    """Returns a finite number as float, after checking that it is above 0 (`positive`) or at least
    0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: expected {argument} as a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{owner}: expected {argument} as a finite number "
                         f"{'above' if positive else 'of at least'} 0, got {value}")
    return number


def check_bool(owner: str, argument: str, value: bool) -> bool:
    """Returns a Python or numpy bool as bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{owner}: expected {argument} of type bool, got {type(value).__name__}")
    return bool(value)


def check_tensor(owner: str, argument: str, value: Any) -> None:
    """Raises TypeError unless an argument of a step is a tensor: arrays or lists would be copied in
    every call."""
    if not isinstance(value, Tensor):
        hint = ""
        if isinstance(value, (np.ndarray, np.generic, list, tuple)):
            hint = f": use torch.as_tensor({argument})"
        elif isinstance(value, torch.Generator):
            hint = ": pass it by name, generator=..., to a call that draws"
        raise TypeError(f"{owner}: expected {argument} as a tensor, got "
                        f"{type(value).__name__}{hint}")


def check_target_prob(owner: str, target_prob: Any, target: Tensor, num_classes: int) -> None:
    """Checks target_prob, the third argument of exact losses.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has the shape of class weights.
    """
    if isinstance(target_prob, torch.Generator):
        raise TypeError(f"{owner}: expected target_prob as a tensor or None, got Generator: the "
                        "exact loss draws nothing")
    check_tensor(owner, "target_prob", target_prob)
    if target_prob.shape == (num_classes,) and target_prob.shape != target.shape:
        raise ValueError(f"{owner}: expected target_prob of target's shape {list(target.shape)}, "
                         f"got {list(target_prob.shape)}: class weights are an argument "
                         "of the constructor, weight=...")


def check_generator(owner: str, generator: Any) -> None:
    """Raises TypeError unless ``generator`` is a torch.Generator or None. If it is a tensor, the
    error says which argument may have been meant."""
    if generator is not None and not isinstance(generator, torch.Generator):
        hint = (": class weights are an argument of the constructor, weight=..., and other tensors "
                "are passed by name" if isinstance(generator, Tensor) else "")
        raise TypeError(f"{owner}: expected generator as a torch.Generator or None, "
                        f"got {type(generator).__name__}{hint}")


def as_tensor(owner: str, argument: str, value: Any) -> Tensor:
    """Returns an argument of a constructor as a tensor. Arrays and lists of numbers are copied."""
    if isinstance(value, Tensor):
        return value
    kind = "a tensor, an array or a list of numbers"
    if not isinstance(value, (np.ndarray, list, tuple, range)) and not hasattr(value, "__array__"):
        raise TypeError(f"{owner}: expected {argument} as {kind}, got {type(value).__name__}")
    try:
        numbers = np.asarray(value) if hasattr(value, "__array__") else value
        return torch.tensor(numbers, device=device_of_values(None))
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{owner}: expected {argument} as {kind}, got {type(value).__name__} "
                        f"({error})") from error


def as_ids(owner: str, argument: str, value: Any) -> Tensor:
    """Returns class ids as a tensor, as :func:`as_tensor` does; an empty list becomes an empty
    int64 tensor."""
    ids = as_tensor(owner, argument, value)
    return ids.to(torch.int64) if ids.numel() == 0 and not isinstance(value, Tensor) else ids


def class_weights(owner: str, weight: Any, num_classes: int) -> Optional[Tensor]:
    """Returns class weights as a floating tensor [num_classes], or None."""
    if weight is None:
        return None
    argument, weight = weight, as_tensor(owner, "weight", weight)
    if weight.shape != (num_classes,):
        raise ValueError(f"{owner}: expected weight of shape ({num_classes},), got "
                         f"{tuple(weight.shape)}")
    if argument is not weight and not weight.is_floating_point():
        weight = weight.to(torch.get_default_dtype())
    if not weight.is_floating_point():
        raise TypeError(f"{owner}: expected weight of a floating dtype, got {weight.dtype}: use "
                        "weight.float()")
    return weight


def check_reduction(owner: str, reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{owner}: expected reduction to be \"mean\", \"sum\" or \"none\", got "
                         f"{reduction!r}")
    return reduction


def refuse_assignment(owner: str, name: str) -> None:
    """Raises AttributeError for an option that cannot change because other parts of the loss depend
    on it."""
    raise AttributeError(f"{owner}: expected {name} as an argument of the constructor, got an "
                         "assignment: other parts of the loss were made with it, so make "
                         "another loss")


def distinct_ids(owner: str, argument: str, ids: Union[int, Numbers], num_classes: int,
                 device: Device) -> Tensor:
    """Returns distinct class ids, int64 [H], sorted: the ids below a number, or those of a 1-D
    int64 tensor, array or list."""
    if isinstance(ids, (list, tuple, range, np.ndarray)):
        ids = as_ids(owner, argument, ids)
    if not isinstance(ids, Tensor):
        count = check_count(owner, argument, ids, 0)  # type: ignore[arg-type]
        if count > num_classes:
            raise ValueError(f"{owner}: expected {argument} in [0, {num_classes}], got {count}")
        return torch.arange(count, device=device)
    return torch.ops.xsoftmax.distinct_ids(ids.to(device), num_classes, owner, argument)
