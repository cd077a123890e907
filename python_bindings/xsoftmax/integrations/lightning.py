"""Lightning with row-sparse gradients."""

from typing import Any, Union

import torch

from .._public import public_names
from ..clip_grad import clip_grad_norm_
from ..optim._base import RowOptimizer
from ._clipping import has_rows, refuse_clip_by_value

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # the same under its older name

__all__ = ["RowGradients"]
__dir__ = public_names(__all__)


class RowGradients(Callback):
    """Gives a Lightning Trainer what row-sparse gradients need: `Trainer(callbacks=[xs.integrations.lightning.RowGradients()], gradient_clip_val=1.0)`.

    Clipping by norm is :func:`xsoftmax.clip_grad_norm_`; clipping by value says that it cannot. When training ends, rows that row optimizers owe steps to are
    brought up to date, so that whatever reads a table then, such as weights averaged or exported, reads it as it is. Checkpoints need no help: state dicts of
    losses and row optimizers bring rows up to date.

    Manual optimization calls `self.clip_gradients` in vain, as everywhere in Lightning: call :func:`xsoftmax.clip_grad_norm_`.
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
