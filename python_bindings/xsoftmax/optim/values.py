"""Checks of option values and of the values of loaded state."""

from typing import Any, Dict

import numpy as np
import torch
from torch import Tensor

_BOOLS = ("maximize", "nesterov", "row_wise", "stochastic_rounding")
_SQUARES = ("exp_avg_sq", "sum")


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_, str, bytes, bytearray)) or getattr(
            getattr(value, "dtype", None), "kind", "f") not in "fiu":
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def check_tensor_rate(owner: str, lr: Any) -> None:
    """Checks a learning rate that is a tensor, once. A step checks CPU tensors again, and does not
    read others on the host.

    Raises:
        TypeError: the tensor is not floating.
        ValueError: the tensor has several elements, or its value is negative or not finite.
    """
    if not isinstance(lr, Tensor):
        return
    if not lr.is_floating_point():
        raise TypeError(f"{owner}: expected lr as a number or a floating tensor, got a tensor of "
                        f"dtype {str(lr.dtype).removeprefix('torch.')}")
    if lr.numel() != 1:
        raise ValueError(f"{owner}: expected lr as a tensor of one element, got shape "
                         f"{list(lr.shape)}")
    if type(lr) in (Tensor, torch.nn.Parameter
                    ) and not lr.is_meta and not 0 <= (value := lr.item()) < np.inf:
        raise ValueError(f"{owner}: expected lr as a finite number of at least 0, got {value}")


def without_tensor_rate(options: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the options that operators take as text: all but a learning rate that is a tensor,
    which is passed as such."""
    return {name: value
            for name, value in options.items()
            if name != "lr"} if isinstance(options["lr"], Tensor) else options


def check_options(owner: str, options: Dict[str, Any]) -> None:
    """Checks the types of options. Operators take options as text, in which a string would pass for
    a number.

    Raises:
        TypeError: an option is not a number, bool or dtype, as its name requires.
    """
    for name, value in options.items():
        if type(value) is float or isinstance(value, Tensor):  # option_text refuses tensors
            continue
        if name in _BOOLS:
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{owner}: expected {name} as True or False, got {value!r}")
        elif name == "state_dtype":
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(f"{owner}: expected state_dtype as a torch.dtype or None, got "
                                f"{value!r}")
        elif not _is_number(value):
            raise TypeError(f"{owner}: expected {name} as a number, got {value!r}")


def two_betas(owner: str, betas: Any) -> Any:
    """Returns betas, after checking that they are a pair.

    Raises:
        TypeError: betas are not a sequence.
        ValueError: betas have another length.
    """
    if isinstance(betas, (str, bytes)) or not (hasattr(betas, "__len__")
                                               and hasattr(betas, "__getitem__")) or getattr(
                                                   betas, "ndim", 1) == 0:
        raise TypeError(f"{owner}: expected betas as two numbers, (beta1, beta2), got {betas!r}")
    if len(betas) != 2:
        raise ValueError(f"{owner}: expected betas as two numbers, got {betas}")
    return betas


def check_state_values(owner: str, number: Any, state: Dict[str, Any]) -> None:
    """Checks the values of a parameter's saved state, in time proportional to its size.

    Args:
        owner: named in errors.
        number: the number of the parameter.
        state: its state, by name.

    Raises:
        TypeError: a tensor has another kind of dtype, such as integer moments.
        ValueError: steps are negative or not finite, squares are negative or NaN, or moments are
            not finite.
    """
    # Skips fake tensors, which have no values.
    readable = {
        name: value
        for name, value in state.items()
        if type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta
    }
    for name, value in readable.items():
        expected = f"{owner}: expected {name} of parameter {number}"
        if name == "step":
            _check_step(expected, value)
        elif name == "last_step":
            _check_last_step(expected, value, readable.get("step"))
        elif name != "pending":
            _check_moments(expected, value, is_square=name in _SQUARES)


def _check_moments(expected: str, moments: Tensor, is_square: bool) -> None:
    """Checks state with a value per element or per row."""
    if not moments.is_floating_point():
        raise TypeError(f"{expected} of a floating dtype, got "
                        f"{str(moments.dtype).removeprefix('torch.')}")
    if moments.layout != torch.strided or moments.numel() == 0:
        return
    low, high = (end.item() for end in torch.aminmax(moments))  # NaN if any value is NaN
    if is_square and not low >= 0:
        raise ValueError(f"{expected}, which adds up squares, with values of at least 0, got {low}")
    if not is_square and not -np.inf < low <= high < np.inf:
        raise ValueError(f"{expected} with finite values, got {low if not low > -np.inf else high}")


def _check_step(expected: str, step: Tensor) -> None:
    if step.dtype == torch.bool or step.is_complex():
        raise TypeError(f"{expected} as a number, got dtype "
                        f"{str(step.dtype).removeprefix('torch.')}")
    if step.dim() > 0:
        raise ValueError(f"{expected} as one number, got shape {list(step.shape)}")
    count = step.item()
    if not 0 <= count < np.inf:
        raise ValueError(f"{expected} as a finite number of at least 0, got {count}")


def _check_last_step(expected: str, last: Tensor, step: Any) -> None:
    """Checks the last step of each row. Dtype and shape are checked with the rest of the row state.
    """
    if last.dtype != torch.int32 or last.numel() == 0 or not isinstance(step, Tensor):
        return
    low, high, limit = int(last.min()), int(last.max()), int(step)
    if low < 0 or high > limit:
        raise ValueError(f"{expected} in [0, {limit}], the steps taken, got "
                         f"{low if low < 0 else high}")
