"""A stand-in for a model's logits: it records what the forward pass does to them, and computes
nothing."""

import math
from typing import Any, Callable, NoReturn, Optional, Tuple

import torch
from torch import Tensor


class UnsupportedHeadError(TypeError):
    """Raised by `replace_head` for a model whose training objective it cannot reproduce.

    The message names the model's class and the reason.
    """


class NoLogits:
    """A placeholder for `outputs.logits` after a call with labels. Raises an error when used."""
    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise AttributeError(
            "a model whose head xs.replace_head replaced computes its loss without the logits: "
            "call it without labels for logits (xs.integrations.transformers.Trainer does so "
            "where compute_metrics is given)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __getitem__ = __len__ = __iter__ = __array__ = _refuse
    __add__ = __mul__ = __truediv__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        return cls()._refuse()

    def __repr__(self) -> str:
        return "NoLogits()"


def is_vector_parameter(bias: Tensor) -> bool:
    """Returns whether a loss can train this bias directly: a parameter of shape [N]."""
    return isinstance(bias, torch.nn.Parameter) and bias.dim() == 1


def explain_untrainable_bias(bias: Tensor) -> str:
    """Returns why a loss cannot train a bias that requires a gradient; "" if there is no
    problem."""
    if not bias.requires_grad or is_vector_parameter(bias):
        return ""
    kind = "a parameter" if isinstance(bias, torch.nn.Parameter) else "a computed tensor"
    return (f"expected a bias after the head that is a parameter of shape [{bias.shape[-1]}] or "
            f"does not train, got {kind} of shape {list(bias.shape)} that requires a gradient")


def _indexed_dimensions(place: Any) -> int:
    """Returns how many dimensions one entry of an index consumes; 0 for None, bools and `...`."""
    if place is None or place is Ellipsis or isinstance(place, bool):
        return 0
    return place.dim() if isinstance(place, Tensor) and place.dtype == torch.bool else 1


def _refuse_operation(operation: str) -> Callable[..., Any]:
    return lambda self, *_, **__: self._refuse(operation)


class Logits:
    """A stand-in for the logits [*, N] of a head during one forward pass with labels.

    It holds the hidden states [*, D] and records how the model transforms the logits. Reshaping and
    indexing are applied to the hidden states. A bias, a scale and a soft cap are recorded as
    ``outer_scale * tanh(inner_scale * (linear(hidden) + bias))``, without the tanh unless
    ``is_capped``.
    ``F.cross_entropy`` on it calls the loss of the head. Any other operation raises
    :class:`UnsupportedHeadError`, so that a different objective is never computed silently.
    """
    def __init__(self, tap: Any, hidden: Tensor, bias: Optional[Tensor] = None,
                 inner_scale: float = 1.0, outer_scale: float = 1.0,
                 is_capped: bool = False) -> None:
        self._tap, self.hidden, self.bias = tap, hidden, bias
        self._inner_scale, self._outer_scale, self._is_capped = inner_scale, outer_scale, is_capped

    def _replace(self, **changes: Any) -> "Logits":
        attributes = dict(hidden=self.hidden, bias=self.bias, inner_scale=self._inner_scale,
                          outer_scale=self._outer_scale, is_capped=self._is_capped)
        return Logits(self._tap, **{**attributes, **changes})

    def _refuse(self, operation: str) -> NoReturn:
        raise UnsupportedHeadError(
            f"replace_head of {self._tap.owner}: expected the loss to be the cross entropy of the "
            "head's logits, changed at most by a bias, a scale and a soft cap, got "
            f"{operation} of them")

    def transform(self) -> Tuple[float, Optional[float]]:
        """Returns (logit_scale, softcap) of ``softcap * tanh(logit_scale * (Wx + b) /
        softcap)``."""
        if self._is_capped:
            return self._inner_scale * self._outer_scale, self._outer_scale
        return self._inner_scale, None

    # ---- shape and device
    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self._tap.num_classes])

    ndim = property(lambda self: self.hidden.dim())
    device = property(lambda self: self.hidden.device)
    dtype = property(lambda self: self.hidden.dtype)
    requires_grad = property(lambda self: self.hidden.requires_grad)

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: Optional[int] = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, *shape: Any) -> "Logits":
        dimensions = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        sizes, width = list(dimensions), self._tap.num_classes
        if sizes and sizes[-1] == -1 and math.prod(sizes[:-1]) == math.prod(self.shape[:-1]):
            sizes[-1] = width
        if not sizes or sizes[-1] != width:
            self._refuse(f"a view of shape {sizes}, whose last dimension is not the classes',")
        return self._replace(hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Logits":
        if end_dim % self.ndim == self.ndim - 1 and start_dim % self.ndim != self.ndim - 1:
            self._refuse("flatten over the classes")
        return self._replace(hidden=self.hidden.flatten(start_dim, end_dim))

    def transpose(self, first: int, second: int) -> "Logits":
        if self.ndim - 1 in (first % self.ndim, second % self.ndim):
            self._refuse("transpose of the classes")
        return self._replace(hidden=self.hidden.transpose(first, second))

    def gather(self, dim: int, index: Tensor) -> "Logits":
        is_of_rows = self.ndim == index.dim() == 2 and index.shape[1:] == self.shape[1:]
        if dim != 0 or not is_of_rows or index.stride(1) != 0:
            self._refuse("gather of other places than whole rows")
        return self._replace(hidden=self.hidden[index[:, 0]])

    def __getitem__(self, index: Any) -> "Logits":
        """Returns the logits of the rows that `index` picks; all of their classes must be kept."""
        places = list(index) if isinstance(index, tuple) else [index]
        count = self.ndim - sum(_indexed_dimensions(place) for place in places)
        ellipsis = next((k for k, place in enumerate(places) if place is Ellipsis), len(places))
        places[ellipsis:ellipsis + 1] = [slice(None)] * count
        if not places or places[-1] is None:
            self._refuse("a dimension behind the classes")
        # Now every dimension has an index, and the last one is that of the classes.
        last, width = places[-1], self._tap.num_classes
        if not isinstance(last, slice) or last.indices(width) != (0, width, 1):
            self._refuse("a choice of classes")
        places[-1] = slice(None)
        return self._replace(hidden=self.hidden[tuple(places)])

    # ---- bias, scale, soft cap
    def __add__(self, other: Any) -> "Logits":
        width = self._tap.num_classes
        is_bias = isinstance(
            other, Tensor) and other.dim() > 0 and (other.numel() == other.shape[-1] == width)
        if not is_bias or self.bias is not None or self._is_capped or self._inner_scale != 1.0:
            self._refuse("a sum with more than one bias, before any scale,")
        if reason := explain_untrainable_bias(other):
            self._tap.refuse(reason)
        return self._replace(bias=other)

    def _scale(self, factor: Any, operation: str) -> "Logits":
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not 0 < factor < math.inf:
            got = factor if is_number else f"a {type(factor).__name__}"
            self._refuse(f"a {operation} with {got} in place of a positive number")
        if self._is_capped:
            return self._replace(outer_scale=self._outer_scale * factor)
        return self._replace(inner_scale=self._inner_scale * factor)

    def __mul__(self, other: Any) -> "Logits":
        return self._scale(other, "product")

    def __truediv__(self, other: Any) -> "Logits":
        is_number = isinstance(other, (int, float)) and other != 0
        return self._scale(1.0 / other if is_number else other, "quotient")

    def tanh(self) -> "Logits":
        if self._is_capped:
            self._refuse("a second tanh")
        return self._replace(is_capped=True)

    def _ignore_cast(self, *_: Any, **__: Any) -> "Logits":
        """Ignores casts and moves: the loss computes on its input's device, and sums in float32."""
        return self

    def add(self, other: Any, **options: Any) -> "Logits":
        return self._refuse(f"add with {', '.join(options)}") if options else self + other

    def div(self, other: Any, **options: Any) -> "Logits":
        return self._refuse(f"div with {', '.join(options)}") if options else self / other

    __radd__ = __add__
    __rmul__ = mul = multiply = __mul__
    true_divide = div
    contiguous = clone = to = cpu = cuda = _ignore_cast
    float = half = bfloat16 = double = type = type_as = _ignore_cast

    # ---- unsupported operations
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    __setitem__ = _refuse_operation("an assignment to a part")
    __sub__ = __rsub__ = __neg__ = __rtruediv__ = __pow__ = _refuse_operation("arithmetic")
    __matmul__ = __rmatmul__ = _refuse_operation("a matrix product")
    __lt__ = __gt__ = __le__ = __ge__ = _refuse_operation("a comparison")
    __iter__ = __bool__ = __float__ = __int__ = __array__ = _refuse_operation("the values")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        logits = next(argument
                      for argument in (*args, *kwargs.values()) if isinstance(argument, Logits))
        is_first = len(args) > 0 and args[0] is logits
        if function is torch.nn.functional.cross_entropy and (is_first
                                                              or kwargs.get("input") is logits):
            return logits._tap.cross_entropy(*args, **kwargs)
        if name in _COMMUTATIVE and len(args) == 2 and not kwargs:
            return getattr(logits, _COMMUTATIVE[name])(args[1] if is_first else args[0])
        if name in _FUNCTIONS and is_first:
            return getattr(logits, name)(*args[1:], **kwargs)
        return logits._refuse(name)

    def __repr__(self) -> str:
        return f"Logits(shape={list(self.shape)})"


_COMMUTATIVE = {
    "add": "__add__", "__add__": "__add__", "__radd__": "__add__", "mul": "__mul__",
    "__mul__": "__mul__", "__rmul__": "__mul__", "multiply": "__mul__"
}
_FUNCTIONS = ("tanh", "div", "true_divide", "reshape", "flatten", "transpose", "gather", "clone")
