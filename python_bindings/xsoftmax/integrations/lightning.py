"""Support for row-sparse gradients in Lightning."""

from typing import Any, Union

import torch

from .._core.public import public_names
from ..optim.clip_grad import clip_grad_norm_
from ..optim.row_optimizer import RowOptimizer
from .clipping import has_rows, refuse_clip_by_value

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # the older name of the package

__all__ = ["RowGradients"]
__dir__ = public_names(__all__)


class RowGradients(Callback):
    """A Lightning callback that makes a Trainer support row-sparse gradients::

        trainer = Trainer(callbacks=[xs.integrations.lightning.RowGradients()],
                          gradient_clip_val=1.0)

    Clipping by norm uses :func:`xsoftmax.clip_grad_norm_`; clipping by value raises a TypeError if
    a gradient is row-sparse. When training ends, pending updates of row optimizers are flushed, so
    that weights are current when they are averaged or exported. Checkpoints need no special
    handling, because the state dicts of losses and row optimizers flush pending updates.

    With manual optimization, call :func:`xsoftmax.clip_grad_norm_` yourself: Lightning's
    `self.clip_gradients` does not apply there.
    """
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        precision = trainer.strategy.precision_plugin
        by_norm, by_value = precision.clip_grad_by_norm, precision.clip_grad_by_value
        if getattr(by_norm, "_takes_rows", False):
            return

        def clip_by_norm(optimizer: torch.optim.Optimizer, clip_val: Union[int, float]) -> None:
            parameters = list(precision.main_params(optimizer))
            if has_rows(parameters):
                clip_grad_norm_(parameters, clip_val)
            else:
                by_norm(optimizer, clip_val)

        def clip_by_value(optimizer: torch.optim.Optimizer, clip_val: Union[int, float]) -> None:
            refuse_clip_by_value(precision.main_params(optimizer))
            by_value(optimizer, clip_val)

        clip_by_norm._takes_rows = True  # type: ignore[attr-defined]
        precision.clip_grad_by_norm, precision.clip_grad_by_value = clip_by_norm, clip_by_value

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, RowOptimizer):
                optimizer.flush()
