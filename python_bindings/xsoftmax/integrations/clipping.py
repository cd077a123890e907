"""Gradient clipping helpers shared by the integrations."""

from typing import Iterable

import torch


def has_rows(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any gradient is row-sparse."""
    return any(parameter.grad is not None and parameter.grad.layout != torch.strided
               for parameter in parameters)


def refuse_clip_by_value(parameters: Iterable[torch.Tensor]) -> None:
    if has_rows(parameters):
        raise TypeError("clipping by value: expected dense gradients, got row-sparse ones: clip by "
                        "norm, or make the loss with sparse_grad=False")
