"""Gradient norm clipping for models with dense and row-sparse gradients."""

import math
from typing import Any, Dict, Iterable, List, Union

import torch
from torch import Tensor

from .._core.placement import table_of
from .row_optimizer import sparse_rows


def _compute_norms(params: List[Any], norm_type: float, owner: str) -> List[Tensor]:
    split_params = [param for param in params if table_of(param).is_split]
    whole_params = [param for param in params if not table_of(param).is_split]
    norms = [
        _gather_norm(torch.nn.utils.get_total_norm([param.grad for param in part], norm_type))
        for part in _group_by_mesh(whole_params)
    ]
    norms += [
        _compute_norm(param, norm_type, owner)
        for param in whole_params if param.grad.layout != torch.strided
    ]
    return norms + [
        table_of(param).norm(_compute_norm(param, norm_type, owner), norm_type)
        for param in split_params
    ]


def _compute_norm(param: Any, norm_type: float, owner: str) -> Tensor:
    if param.grad.layout == torch.strided:
        return torch.linalg.vector_norm(param.grad, norm_type)
    return torch.ops.xsoftmax.row_norm(*sparse_rows(owner, param, param.grad), norm_type)


def _group_by_mesh(params: List[Any]) -> List[List[Any]]:
    """Groups parameters with dense gradients by device mesh, with plain tensors as one group,
    because no operator takes both DTensors of different meshes and plain tensors."""
    parts: Dict[Any, List[Any]] = {}
    for param in params:
        if param.grad.layout == torch.strided:
            parts.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    return list(parts.values())


def _gather_norm(norm: Tensor) -> Tensor:
    """Returns the norm of the whole gradients, if they are sharded over ranks, as by fully_shard.
    """
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _scale_rows(param: Any, coefficient: Tensor) -> None:
    grad = param.grad
    values = grad._values()
    coefficient = coefficient.to(values.device, values.dtype)
    if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride())):
        # Values that share memory, such as expanded ones, cannot be scaled in place.
        param.grad = torch.sparse_coo_tensor(grad._indices(), values * coefficient, grad.shape,
                                             is_coalesced=grad.is_coalesced(),
                                             check_invariants=False)
    else:
        values.mul_(coefficient)


@torch.no_grad()
def clip_grad_norm_(parameters: Union[Tensor, Iterable[Tensor]], max_norm: float,
                    norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Clips the norm of the gradients of `parameters`, all together, to at most `max_norm`, in
    place.

    Equivalent to the following, without ever building a dense gradient::

        for p in parameters:
            p.grad = p.grad.to_dense()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    A sparse gradient may contain a row several times: the norm is that of the sum. Time and memory
    are proportional to the rows that have a gradient.

    Args:
        parameters: a tensor or an iterable of tensors. Those without a gradient are skipped.
        max_norm: the maximum norm.
        norm_type: p of the p-norm, above 0; float("inf") or "inf" for the maximum norm.
        error_if_nonfinite: raise if the norm is infinite or NaN. If False, gradients are scaled by
            it nevertheless.

    Returns:
        The norm before clipping, a tensor of one element: float32 if there are 16-bit sparse
        gradients.

    Raises:
        TypeError: a module is passed instead of its parameters.
        ValueError: norm_type is not above 0.
        RuntimeError: the norm is not finite, with error_if_nonfinite; a sparse gradient is not
            sparse COO in dimension 0 only.
    """
    owner = "clip_grad_norm_"
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"{owner}: expected norm_type above 0, got {norm_type}")
    candidates: List[Any] = [parameters]
    try:
        candidates = candidates if isinstance(parameters,
                                              (torch.Tensor, torch.nn.Module)) else list(parameters)
        params = [param for param in candidates if param.grad is not None]
    except (AttributeError, TypeError) as error:
        offender = next(
            (candidate for candidate in candidates if not isinstance(candidate, torch.Tensor)),
            parameters)
        hint = ": pass loss.parameters(), or those of your model" if isinstance(
            offender, torch.nn.Module) else ""
        raise TypeError(f"{owner}: expected parameters as a tensor or an iterable of tensors, got "
                        f"{type(offender).__name__}{hint}") from error
    norms = _compute_norms(params, norm_type, owner)
    if not norms:
        return torch.tensor(0.0)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"{owner}: expected gradients with a finite norm, got a norm of "
                           f"{total.item()} (norm_type {norm_type})")
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # Shortcut if no gradient changes. Not on a device, where the host would have to wait for the
    # norm, and not while tracing, where its value is not known.
    if type(
            coefficient
    ) is torch.Tensor and coefficient.device.type == "cpu" and not torch.compiler.is_compiling(
    ) and coefficient == 1:
        return total
    for part in _group_by_mesh(params):
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)
    for param in params:
        if param.grad.layout != torch.strided:
            _scale_rows(param, coefficient)
    return total
