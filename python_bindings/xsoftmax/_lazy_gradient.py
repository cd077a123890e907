"""Tables whose row-sparse gradient is written out where it is read."""

from typing import Any, List, Optional

import torch
from torch import Tensor

_GRAD: Any = torch._C.TensorBase.grad


class LazyGradParameter(torch.nn.Parameter):
    """A parameter whose gradient a loss may have left as terms (csrc/scores/row_terms.h): reading ``grad`` writes it out first."""

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


# Tensors that hold what they show: no DTensor, no fake tensor, none of another subclass.
PLAIN = (torch.Tensor, torch.nn.Parameter, LazyGradParameter)


def make_lazy(param: Tensor) -> None:
    """Lets losses leave the gradient of a table [N, D] as terms."""
    if type(param) is torch.nn.Parameter and param.dim() == 2:
        param.__class__ = LazyGradParameter
    if isinstance(param, LazyGradParameter):
        torch.ops.xsoftmax.accept_row_terms(param)


def terms_of(param: Tensor) -> List[Tensor]:
    """The terms that wait, where they are all of the gradient; none otherwise."""
    if not isinstance(param, LazyGradParameter) or _GRAD.__get__(param) is not None:
        return []
    return list(torch.ops.xsoftmax.pending_row_terms(param))


def drop_terms(param: Tensor) -> None:
    if isinstance(param, LazyGradParameter):
        torch.ops.xsoftmax.drop_row_terms(param)
