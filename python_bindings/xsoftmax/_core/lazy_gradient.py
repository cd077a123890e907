"""Parameters whose row-sparse gradient is materialised only when it is read."""

import sys
from typing import Any, List, Optional

import torch
from torch import Tensor

_GRAD: Any = torch._C.TensorBase.grad
_MAKE_PARAMETER = torch.nn.Parameter.__new__.__code__


class LazyGradParameter(torch.nn.Parameter):
    """A parameter whose gradient a loss may leave in the form of terms (csrc/table/row_terms.h).
    Reading ``grad`` materialises it."""
    @property
    def grad(self) -> Optional[Tensor]:
        torch.ops.xsoftmax.write_row_terms(self)
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Optional[Tensor]) -> None:
        torch.ops.xsoftmax.drop_row_terms(self)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def detach(self) -> Tensor:
        """Returns a plain tensor, as every parameter does. ``torch.nn.Parameter(table)`` refuses
        tensors whose detach() has another type: it gets one of this class, without terms."""
        tensor = super().detach()
        if torch.compiler.is_compiling() or sys._getframe(1).f_code is not _MAKE_PARAMETER:
            return tensor
        return tensor.as_subclass(LazyGradParameter)


# Plain tensor types, which hold real values: no DTensor, FakeTensor or other subclass.
PLAIN = (torch.Tensor, torch.nn.Parameter, LazyGradParameter)


def make_lazy(param: Tensor) -> None:
    """Allows losses to leave the gradient of a table [N, D] in the form of terms."""
    if type(param) is torch.nn.Parameter and param.dim() == 2:
        param.__class__ = LazyGradParameter
    if isinstance(param, LazyGradParameter):
        torch.ops.xsoftmax.accept_row_terms(param)


def terms_of(param: Tensor) -> List[Tensor]:
    """Returns the pending terms if they are the whole gradient, else an empty list."""
    if not isinstance(param, LazyGradParameter) or _GRAD.__get__(param) is not None:
        return []
    return list(torch.ops.xsoftmax.pending_row_terms(param))


def drop_terms(param: Tensor) -> None:
    if isinstance(param, LazyGradParameter):
        torch.ops.xsoftmax.drop_row_terms(param)
