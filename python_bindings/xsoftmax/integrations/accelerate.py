"""Hugging Face Accelerate with row-sparse gradients."""

from typing import Any, Iterable, Union

import accelerate
import torch

from .._public import public_names
from ..clip_grad import clip_grad_norm_
from ._clipping import has_rows, refuse_clip_by_value

__all__ = ["Accelerator"]
__dir__ = public_names(__all__)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose clipping takes row-sparse gradients: :func:`xsoftmax.clip_grad_norm_`. Everything else is that of Accelerate.

    Several processes: call :func:`xsoftmax.distributed.replicate` with the model before `prepare`.
    """

    def clip_grad_norm_(self, parameters: Union[torch.Tensor, Iterable[torch.Tensor]], max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's; the norm is over dense and row-sparse gradients together. Returns it."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not has_rows(parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Union[torch.Tensor, Iterable[torch.Tensor]], clip_value: float) -> None:
        """As Accelerate's, for dense gradients. A row-sparse one raises TypeError."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_clip_by_value(parameters)
        super().clip_grad_value_(parameters, clip_value)
