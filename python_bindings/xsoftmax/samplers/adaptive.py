"""What the samplers that know the class table share."""

import math
from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from .._memory import device_of_values
from .sampler import Proposal, Sampler, one_set
from .static import Exclude, _check_exclude, _check_num_classes, _log_of_count


class AdaptiveSampler(Sampler):
    """Base of samplers whose q follows the class table, from an index that a loss brings up to date in train() mode.

    q is exact for what is drawn also while the table moves on: it comes from the index. Draws are private by default.

    Args:
        num_classes: N >= 1.
        dim: D, the width of a query.
        bias: whether the class table has a bias. A loss sets it to what its table has.
        exclude: classes never drawn: an int h means the ids below h, a tensor (int64, one dimension) means those ids.
        refresh_every: steps between two refreshes; 0: never again after step 0.
    """

    step: Tensor
    _kind: str

    def __init__(self, num_classes: int, dim: int, bias: bool, refresh_every: int, least_dim: int = 1):
        name = type(self).__name__
        super().__init__(_check_num_classes(name, num_classes))
        _check_flags(name, bias=bias)
        self._kind = name
        _check_ints(name, (("dim", dim, least_dim), ("refresh_every", refresh_every, 0)))
        self.shared_by_default = False
        self.dim = dim
        self.refresh_every = refresh_every
        self._has_bias = bias
        with device_of_values(None):
            self.register_buffer("step", torch.zeros([], dtype=torch.int64))

    def _begin(self, exclude: Exclude) -> None:
        """The last line of a constructor."""
        low, ids = _check_exclude(type(self).__name__, exclude, self.num_classes)
        with device_of_values(None):
            self._make_index(torch.arange(low) if ids is None else ids.cpu())

    def _make_index(self, excluded: Tensor) -> None:
        """Registers the buffers of an index that knows nothing of the table yet."""
        raise NotImplementedError

    def _excluded(self) -> Tensor:
        """The classes that are never drawn."""
        raise NotImplementedError

    def num_drawable(self) -> int:
        return self.num_classes - len(self._excluded())

    def _options(self) -> Dict[str, Any]:
        """What the constructor took beside num_classes, dim, bias and exclude."""
        raise NotImplementedError

    def _like(self, excluded: Tensor, bias: bool) -> "AdaptiveSampler":
        return type(self)(self.num_classes, self.dim, bias=bias, exclude=excluded, **self._options()).to(self.step.device)

    def excluding(self, exclude: Union[int, Tensor]) -> "AdaptiveSampler":
        low, ids = _check_exclude(type(self).__name__, exclude, self.num_classes)
        more = torch.arange(low) if ids is None else ids.cpu()
        return self._like(torch.cat([self._excluded().cpu(), more]).unique(), self._has_bias)

    def for_table(self, dim: int, bias: bool) -> "AdaptiveSampler":
        if dim != self.dim:
            raise ValueError(f"{type(self).__name__}: expected a table of width {self.dim}, got {dim}")
        return self if bias == self._has_bias else self._like(self._excluded().cpu(), bias)

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        if shared:
            raise ValueError("expected private draws of a sampler that looks at the query, got shared ones")
        return self.log_prob(input, ids) + _log_of_count(num_samples, ids).to(torch.float32)

    def check_num_samples(self, num_samples: int, shared: bool) -> None:
        if shared and not self._shares():
            raise ValueError(f"{type(self).__name__}: expected shared=False, got True: it draws for each query")
        super().check_num_samples(num_samples, shared)

    def _checked(self, input: Tensor) -> Tensor:
        """Queries, without their gradient: what a sampler says of them is a constant."""
        if input.dim() != 2 or input.size(1) != self.dim:
            raise ValueError(f"{self._kind}: expected input of shape [Q, {self.dim}], got {list(input.shape)}")
        return input.detach()

    def _check_table(self, weight: Tensor, bias: Optional[Tensor]) -> None:
        if weight.dim() != 2 or weight.size(0) != self.num_classes or weight.size(1) != self.dim:
            raise ValueError(f"{self._kind}: expected weight of shape [{self.num_classes}, {self.dim}], got {list(weight.shape)}")
        if (bias is not None) != self._has_bias:
            raise ValueError(f"{self._kind}: expected {'a bias' if self._has_bias else 'no bias'}, as it was built with "
                             f"bias={self._has_bias}, got {'one' if bias is not None else 'none'}")

    def _shares(self) -> bool:
        """Whether it can draw one set for the batch."""
        return False

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        # An index that is not there, or that is one of other options or of another head, is built anew by the next step.
        tables = {name: table for name, table in (*self._buffers.items(), *self._parameters.items()) if table is not None}
        fits = all(prefix + name in state_dict and state_dict[prefix + name].shape == table.shape for name, table in tables.items())
        if not fits:
            self.step.zero_()
            return
        excluded = self._excluded().cpu()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not torch.equal(self._excluded().cpu(), excluded):
            fresh = self._like(excluded, self._has_bias)
            with torch.no_grad():
                for name, table in tables.items():
                    table.copy_(fresh.get_buffer(name) if name in self._buffers else fresh.get_parameter(name))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, dim={self.dim}, refresh_every={self.refresh_every}"


def _check_ints(name: str, arguments) -> None:
    for argument, value, least in arguments:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected {argument} of type int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected {argument} of at least {least}, got {value}")


def _check_flags(name: str, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected {argument} as True or False, got {value!r}")


def _check_number(name: str, argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {argument} as a number, got {value!r}")
    return float(value)


def _check_positive(name: str, argument: str, value: Any) -> float:
    if not 0 < _check_number(name, argument, value) < math.inf:
        raise ValueError(f"{name}: expected {argument} as a finite number above 0, got {value}")
    return float(value)


def _detached(tensor: Optional[Tensor]) -> Optional[Tensor]:
    return None if tensor is None else tensor.detach()


def _target_or_first(target: Optional[Tensor], input: Tensor) -> Tensor:
    """The ops look up the counts of targets: without any, those of class 0."""
    return torch.zeros([input.size(0)], dtype=torch.int64, device=input.device) if target is None else target


def _proposal(draws: Tuple[Tensor, Tensor, Tensor], target: Optional[Tensor], distinct: bool) -> Proposal:
    """What such an op returned, the counts of targets where there are any."""
    known: Optional[Tensor] = None
    if target is not None:
        known = draws[2]
    return one_set(draws[0], draws[1], known, distinct)
