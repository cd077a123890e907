"""Support for row-sparse gradients in Hugging Face Accelerate."""

from typing import Any, Iterable, Union

import accelerate
import torch

from .._core.public import public_names
from ..optim.clip_grad import clip_grad_norm_
from .clipping import has_rows, refuse_clip_by_value

__all__ = ["Accelerator"]
__dir__ = public_names(__all__)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose gradient clipping supports row-sparse gradients. Everything
    else is inherited unchanged.

    With several processes, call :func:`xsoftmax.distributed.replicate` on the model before
    `prepare`.
    """
    def clip_grad_norm_(self, parameters: Union[torch.Tensor, Iterable[torch.Tensor]],
                        max_norm: float, norm_type: float = 2) -> Any:
        """Clips the total norm of all gradients, dense and row-sparse, as
        :func:`xsoftmax.clip_grad_norm_` does. Returns that norm."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not has_rows(parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Union[torch.Tensor, Iterable[torch.Tensor]],
                         clip_value: float) -> None:
        """Clips dense gradients by value. Raises a TypeError if a gradient is row-sparse."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_clip_by_value(parameters)
        super().clip_grad_value_(parameters, clip_value)
