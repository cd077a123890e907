"""Tensors that claim to be on "cuda", while operators of torch compute their values on the CPU.

Operators of the library run their composites, as on a device without kernels. So results can be
compared without a GPU, and host code that reads device memory fails. Needs
tests/cpp/cuda_stand_in.cpp.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import xsoftmax  # noqa: F401

# Replaces the storage of tables, which these tensors do not have.
OF_MEMORY = {torch.ops.xsoftmax.resize_tables_.default}
CPU, COMPOSITE = torch.device("cpu"), torch._C.DispatchKey.CompositeExplicitAutograd


class Elsewhere(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(),
                                                     storage_offset=inner.storage_offset(),
                                                     dtype=inner.dtype, device="cuda:0")
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with Device():
            return func(*args, **(kwargs or {}))


class Device(TorchDispatchMode):
    """Runs operators on `Elsewhere` tensors within the context."""
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        here = [t for t in tensors_in([args, kwargs]) if isinstance(t, Elsewhere)]
        if func.namespace == "xsoftmax" and here and func not in OF_MEMORY:
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        device = next(
            (value for value in [*args, kwargs.get("device")] if isinstance(value, torch.device)),
            None)
        inner_args, inner_kwargs = tree_map_only(
            torch.device, lambda _: CPU, tree_map_only(Elsewhere, lambda t: t.inner,
                                                       (args, kwargs)))
        result = func(*inner_args, **inner_kwargs)
        if device is not None and device.type == "cpu":  # a copy from the device
            return tree_map_only(torch.Tensor, torch.clone, result) if here else result
        if device is None and not here or here and all(
                isinstance(t, torch.Tensor) and not isinstance(t, Elsewhere) for t in args[:1]):
            return result
        given = {id(t.inner): t for t in here}
        return tree_map_only(torch.Tensor, lambda t: given.get(id(t))
                             if id(t) in given else Elsewhere(t), result)


def tensors_in(value):
    found = []
    tree_map_only(torch.Tensor, found.append, value)
    return found


def moved(value):
    """Returns a copy of arguments with `Elsewhere` tensors."""
    return tree_map_only(torch.Tensor, lambda t: Elsewhere(t.clone()), value)


def returned(value):
    """Returns the tensors of results as plain CPU tensors."""
    return [t.inner if isinstance(t, Elsewhere) else t for t in tensors_in(value)]
