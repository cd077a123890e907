"""The text in which operators take their options."""

import operator
from typing import Any, Dict, Optional

import torch


def _constant(value: Any) -> Any:
    """A number that torch.compile holds as a symbol, as it is in this graph."""
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
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # numpy's are no subclass
        return "true" if value else "false"
    try:
        return repr(operator.index(value))
    except TypeError:
        return repr(float(value))


def logit_options(logit_scale: float, softcap: Optional[float]) -> Dict[str, float]:
    """Options of operators that transform logits; none where logits are scores."""
    if logit_scale == 1.0 and softcap is None:
        return {}
    return {"logit_scale": logit_scale, "softcap": 0.0 if softcap is None else softcap}


def option_text(**values: Any) -> str:
    """ "lr=0.001,nesterov=true": what csrc/core/options.h reads, number by number exactly. Values are None, numbers (numpy's as well),
    bools, dtypes and strings without ',' and '='."""
    return ",".join([f"{name}={_value_text(name, value)}" for name, value in values.items()])


def read_options(text: str) -> Dict[str, str]:
    """Parses the text of options into the texts of their values, by name."""
    return dict(option.split("=") for option in text.split(",") if option)
