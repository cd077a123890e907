"""Decompositions of exported programs, for runtimes that do not load xsoftmax."""

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.options import read_options


def decompositions() -> Dict[Any, Callable[..., Any]]:
    """Returns decompositions of the operators of an exact ``topk`` into ATen calls, for
    :meth:`torch.export.ExportedProgram.run_decompositions`. Runtimes can then run the program
    without xsoftmax. Example::

        dynamic_shapes = ({0: torch.export.Dim("Q")},)
        program = torch.export.export(model.eval(), (input,), dynamic_shapes=dynamic_shapes)
        torch.onnx.export(program.run_decompositions(xs.decompositions()), f="model.onnx")

    They cover ``topk`` and ``predict`` of losses over a class table (:class:`LinearLoss`), with and
    without ``exclude``. ``topk`` becomes ``linear(input).topk(k)`` minus the logsumexp of the
    scores, in float32 for 16-bit tables, with all scores [Q, N] in memory. The order of equal
    scores is that of the runtime's topk; ONNX puts the lower id first, as xsoftmax does. Ids of
    ``exclude`` that are out of range exclude nothing and raise no error.

    Tree operators have no decomposition: torch.onnx.export raises an error that names the operator.
    """
    return {
        torch.ops.xsoftmax.linear_topk.default: _linear_topk,
        torch.ops.xsoftmax.exclude_topk.default: _exclude_topk
    }


def _linear_topk(input: Tensor, weight: Tensor, bias: Optional[Tensor], k: int,
                 options: str = "") -> Tuple[Tensor, Tensor]:
    dtype = torch.promote_types(input.dtype, torch.float32)
    scores = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    transform = read_options(options)
    scale, cap = float(transform.get("logit_scale", 1)), float(transform.get("softcap", 0))

    def logits(scores: Tensor) -> Tensor:
        if cap != 0:
            return cap * torch.tanh(scores * (scale / cap))
        return scores if scale == 1 else scores * scale

    normaliser = logits(scores).logsumexp(1, keepdim=True)
    best, ids = scores.topk(k, 1)
    values = logits(best)
    # a query with a NaN or an infinity gives NaN for the first k classes, as the operator does
    undefined = ~(normaliser < float("inf"))
    return (values - normaliser).masked_fill(undefined, float("nan")), torch.where(
        undefined, torch.arange(k, device=ids.device), ids)


def _exclude_topk(values: Tensor, ids: Tensor, exclude: Tensor, num_classes: int,
                  k: int) -> Tuple[Tensor, Tensor]:
    count = values.shape[1]
    is_excluded = (ids.unsqueeze(2) == exclude.unsqueeze(1)).any(2)
    # excluded entries are placed after all others
    place = torch.arange(count, device=ids.device) + count * is_excluded.to(torch.int64)
    first = place.topk(k, 1, largest=False).indices
    is_empty = is_excluded.gather(1, first)
    return values.gather(1, first).masked_fill(is_empty,
                                               float("-inf")), ids.gather(1, first).masked_fill(
                                                   is_empty, -1)
