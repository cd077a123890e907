"""Checks of what constructors take, which name owner, argument, expected and got."""

import math
import numbers
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from ._memory import device_of_values
from ._typing import Numbers


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


def check_tensor(owner: str, argument: str, value: Any) -> None:
    """Checks an argument of a step, where an array or a list would be copied in every call."""
    if not isinstance(value, Tensor):
        hint = ""
        if isinstance(value, (np.ndarray, np.generic, list, tuple)):
            hint = f": use torch.as_tensor({argument})"
        elif isinstance(value, torch.Generator):
            hint = ": pass it by name, generator=..., to a call that draws"
        raise TypeError(f"{owner}: expected {argument} as a tensor, got "
                        f"{type(value).__name__}{hint}")


def check_target_prob(owner: str, target_prob: Any, target: Tensor, num_classes: int) -> None:
    """Checks the probabilities of targets, the third argument of exact losses: a tensor, and none that is meant as class weights."""
    if isinstance(target_prob, torch.Generator):
        raise TypeError(f"{owner}: expected target_prob as a tensor or None, got Generator: the exact loss draws nothing")
    check_tensor(owner, "target_prob", target_prob)
    if target_prob.shape == (num_classes,) and target_prob.shape != target.shape:
        raise ValueError(f"{owner}: expected target_prob of target's shape {list(target.shape)}, got {list(target_prob.shape)}: class weights are an argument "
                         "of the constructor, weight=...")


def check_generator(owner: str, generator: Any) -> None:
    """Raises TypeError unless ``generator`` is a torch.Generator or None; for a tensor, says which argument it may be."""
    if generator is not None and not isinstance(generator, torch.Generator):
        hint = (": class weights are an argument of the constructor, weight=..., and other tensors "
                "are passed by name" if isinstance(generator, Tensor) else "")
        raise TypeError(f"{owner}: expected generator as a torch.Generator or None, "
                        f"got {type(generator).__name__}{hint}")


def as_tensor(owner: str, argument: str, value: Any) -> Tensor:
    """Returns an argument of a constructor as a tensor: a tensor as it is; a copy of an array or of
    numbers in lists."""
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
    """Returns :func:`as_tensor` of class ids: an empty list is one of no ids."""
    ids = as_tensor(owner, argument, value)
    return ids.to(torch.int64) if ids.numel() == 0 and not isinstance(value, Tensor) else ids


def class_weights(owner: str, weight: Any, num_classes: int) -> Optional[Tensor]:
    """Returns class weights floating [num_classes] as a tensor, checked, or None."""
    if weight is None:
        return None
    given, weight = weight, as_tensor(owner, "weight", weight)
    if weight.shape != (num_classes,):
        raise ValueError(f"{owner}: expected weight of shape ({num_classes},), got {tuple(weight.shape)}")
    if given is not weight and not weight.is_floating_point():
        weight = weight.to(torch.get_default_dtype())
    if not weight.is_floating_point():
        raise TypeError(f"{owner}: expected weight of a floating dtype, got {weight.dtype}: use "
                        "weight.float()")
    return weight


def check_reduction(owner: str, reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{owner}: expected reduction to be \"mean\", \"sum\" or \"none\", got {reduction!r}")
    return reduction


def refuse_assignment(owner: str, name: str) -> None:
    """Raises for an option that other parts of a loss were made with."""
    raise AttributeError(f"{owner}: expected {name} as an argument of the constructor, got an assignment: other parts of the loss were made with it, so make "
                         "another loss")


def different_ids(owner: str, argument: str, ids: Union[int, Numbers], num_classes: int, device: Device) -> Tensor:
    """Returns a set of classes, sorted int64 [H]: those below a number, or those of a 1-D int64 tensor, an array or a list."""
    if isinstance(ids, (list, tuple, range, np.ndarray)):
        ids = as_ids(owner, argument, ids)
    if not isinstance(ids, Tensor):
        count = check_count(owner, argument, ids, 0)  # type: ignore[arg-type]
        if count > num_classes:
            raise ValueError(f"{owner}: expected {argument} in [0, {num_classes}], got {count}")
        return torch.arange(count, device=device)
    return torch.ops.xsoftmax.different_ids(ids.to(device), num_classes, owner, argument)
