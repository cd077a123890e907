"""Values of options and of loaded state: row optimizers refuse those that no step can use."""

from typing import Any, Dict

import numpy as np
import torch
from torch import Tensor

_BOOLS = ("maximize", "nesterov", "row_wise", "stochastic_rounding")
_SQUARES = ("exp_avg_sq", "sum")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_, str, bytes, bytearray)) or getattr(getattr(value, "dtype", None), "kind", "f") not in "fiu":
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def check_tensor_rate(owner: str, lr: Any) -> None:
    """Checks a learning rate that is a tensor, once; a step checks those on the CPU again, and reads no other.

    Raises:
        TypeError: a tensor of another dtype
        ValueError: a tensor of several elements, or one whose value is negative or not finite
    """
    if not isinstance(lr, Tensor):
        return
    if not lr.is_floating_point():
        raise TypeError(f"{owner}: expected lr as a number or a floating tensor, got a tensor of dtype {str(lr.dtype).removeprefix('torch.')}")
    if lr.numel() != 1:
        raise ValueError(f"{owner}: expected lr as a tensor of one element, got shape {list(lr.shape)}")
    if type(lr) in (Tensor, torch.nn.Parameter) and not lr.is_meta and not 0 <= (value := lr.item()) < np.inf:
        raise ValueError(f"{owner}: expected lr as a finite number of at least 0, got {value}")


def without_tensor_rate(options: Dict[str, Any]) -> Dict[str, Any]:
    """The options that operators take as text: a learning rate that is a tensor goes to them as such."""
    return {name: value for name, value in options.items() if name != "lr"} if isinstance(options["lr"], Tensor) else options


def check_options(owner: str, options: Dict[str, Any]) -> None:
    """Checks the types of options, which operators take as text: a string would read as a number.

    Raises:
        TypeError: an option that is no number, bool or dtype, whichever its name asks for
    """
    for name, value in options.items():
        if type(value) is float or isinstance(value, Tensor):  # option_text refuses tensors
            continue
        if name in _BOOLS:
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{owner}: expected {name} as True or False, got {value!r}")
        elif name == "state_dtype":
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(f"{owner}: expected state_dtype as a torch.dtype or None, got {value!r}")
        elif not _is_number(value):
            raise TypeError(f"{owner}: expected {name} as a number, got {value!r}")


def two_betas(owner: str, betas: Any) -> Any:
    """Returns betas, after they were found to be a pair.

    Raises:
        TypeError: no sequence. ValueError: one of another length.
    """
    if isinstance(betas, (str, bytes)) or not (hasattr(betas, "__len__") and hasattr(betas, "__getitem__")) or getattr(betas, "ndim", 1) == 0:
        raise TypeError(f"{owner}: expected betas as two numbers, (beta1, beta2), got {betas!r}")
    if len(betas) != 2:
        raise ValueError(f"{owner}: expected betas as two numbers, got {betas}")
    return betas


def check_state_values(owner: str, number: Any, state: Dict[str, Any]) -> None:
    """Checks the values of a parameter's saved state, in time proportional to it.

    Args:
        owner: named in errors
        number: of the parameter
        state: its tensors by name

    Raises:
        TypeError: a tensor of another kind of dtype, such as moments of integers
        ValueError: steps that are negative or not finite, squares that are negative or NaN, and
            moments that are not finite
    """
    readable = {name: value for name, value in state.items() if type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta}  # no fake tensor
    for name, value in readable.items():
        expected = f"{owner}: expected {name} of parameter {number}"
        if name == "step":
            _check_step(expected, value)
        elif name == "last_step":
            _check_last_step(expected, value, readable.get("step"))
        elif name != "owed":
            _check_moments(expected, value, is_square=name in _SQUARES)


def _check_moments(expected: str, moments: Tensor, is_square: bool) -> None:
    """Checks state with a number for each element or row."""
    if not moments.is_floating_point():
        raise TypeError(f"{expected} of a floating dtype, got {str(moments.dtype).removeprefix('torch.')}")
    if moments.layout != torch.strided or moments.numel() == 0:
        return
    low, high = (end.item() for end in torch.aminmax(moments))  # NaN where there is one
    if is_square and not low >= 0:
        raise ValueError(f"{expected}, which adds up squares, with values of at least 0, got {low}")
    if not is_square and not -np.inf < low <= high < np.inf:
        raise ValueError(f"{expected} with finite values, got {low if not low > -np.inf else high}")


def _check_step(expected: str, step: Tensor) -> None:
    if step.dtype == torch.bool or step.is_complex():
        raise TypeError(f"{expected} as a number, got dtype {str(step.dtype).removeprefix('torch.')}")
    if step.dim() > 0:
        raise ValueError(f"{expected} as one number, got shape {list(step.shape)}")
    count = step.item()
    if not 0 <= count < np.inf:
        raise ValueError(f"{expected} as a finite number of at least 0, got {count}")


def _check_last_step(expected: str, last: Tensor, step: Any) -> None:
    """Checks the last step of each row; dtype and shape are checked with the state of rows."""
    if last.dtype != torch.int32 or last.numel() == 0 or not isinstance(step, Tensor):
        return
    low, high, limit = int(last.min()), int(last.max()), int(step)
    if low < 0 or high > limit:
        raise ValueError(f"{expected} in [0, {limit}], the steps taken, got {low if low < 0 else high}")
