"""Options of operators, as text."""

import operator
from typing import Any, Dict, Optional

import torch


def _constant(value: Any) -> Any:
    """Returns the value of a number that torch.compile traces as a symbol, and guards on it."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar
    return guard_scalar(value)


def _value_text(name: str, value: Any) -> str:
    if torch.compiler.is_compiling() and isinstance(value, (int, float)):
        value = _constant(value)
    if type(value) is float:
        return repr(value)
    if value is None:
        return "none"
    if isinstance(value, str):
        if "," in value or "=" in value:
            raise ValueError(f"expected {name} without ',' and '=', got {value!r}")
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        raise TypeError(f"expected {name} as a number, got a tensor")
    # numpy.bool_ is not a subclass of bool.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return "true" if value else "false"
    try:
        return repr(operator.index(value))
    except TypeError:
        return repr(float(value))


def logit_options(logit_scale: float, softcap: Optional[float]) -> Dict[str, float]:
    """Returns the options of operators that transform logits; empty if logits equal scores."""
    if logit_scale == 1.0 and softcap is None:
        return {}
    return {"logit_scale": logit_scale, "softcap": 0.0 if softcap is None else softcap}


def option_text(**values: Any) -> str:
    """Returns options as text, such as "lr=0.001,nesterov=true", for csrc/op/options.h. Numbers
    round-trip exactly.

    Args:
        values: None, Python or numpy numbers, bools, dtypes, and strings without ',' and '='.
    """
    return ",".join([f"{name}={_value_text(name, value)}" for name, value in values.items()])


def read_options(text: str) -> Dict[str, str]:
    """Parses the text of options. Returns the text of each value, by name."""
    return dict(option.split("=") for option in text.split(",") if option)
