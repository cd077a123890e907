"""What every sampler is: a module that proposes classes and says how often it would."""

from typing import Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .._memory import moved_table


class Proposal(NamedTuple):
    """Classes to score, and the expected count of each: how often it would be drawn on average.

    A candidate weighs ``1 / expected count`` in an estimate of a sum over all classes.
    """

    ids: Tensor
    """int64, ``[M]`` shared by the batch or ``[Q, M]`` private to each query."""
    log_count: Tensor
    """float32, the shape of ``ids``: ``log(M q)`` of independent draws, ``log pi`` of distinct ones, pi the inclusion probability."""
    target_log_count: Optional[Tensor]
    """float32 ``[Q]``, the same for the targets; None where none were given."""
    distinct: bool
    """Whether no class stands twice in a set."""
    shared_ids: Optional[Tensor]
    """int64 ``[S]``: classes for all queries beside private ``ids``; only of a union."""
    shared_log_count: Optional[Tensor]
    """float32 ``[S]`` or ``[Q, S]``, their log counts."""
    shared_distinct: int
    """How many of the first ``shared_ids`` are drawn without replacement."""
    target_log_draws: Optional[Tensor]
    """float32 ``[Q]``: of a union, the targets' log counts among independent draws alone; ``target_log_count`` is that among all."""


def one_set(ids: Tensor, log_count: Tensor, target_log_count: Optional[Tensor], distinct: bool) -> Proposal:
    """The proposal of any sampler but a union."""
    return Proposal(ids, log_count, target_log_count, distinct, None, None, 0, None)


def draw_seed(input: Tensor, generator: Optional[torch.Generator]) -> Tensor:
    """One int64 from the torch generator (the default one of ``input``'s device where None is given), 0-dim, on that device."""
    if not torch.jit.is_scripting():
        if generator is not None and generator.device.type != input.device.type:
            raise ValueError(f"sample: expected a generator on input's device {input.device}, got one on {generator.device}")
    return torch.randint(0, 9223372036854775807, [], dtype=torch.int64, device=input.device, generator=generator)


class Sampler(nn.Module):
    """Base of all samplers.

    A sampler defines ``sample`` and ``log_prob``; one that adapts to the class table also defines ``refresh``.

    Attributes:
        num_classes: N.
        shared_by_default: whether draws are best shared by the batch.
        proposes_targets: the candidates are the targets themselves. ``sample`` then takes -1 for a target that does not count, and gives it
            a log count of +inf: no candidate.
        learns: there is an ``auxiliary_loss``.
        renormalises: where draws that hit a target are dropped, the others may be renormalised by how many are left: all independent draws
            come from one distribution.
    """

    num_classes: int
    shared_by_default: bool
    proposes_targets: bool
    counts_beside: bool
    learns: bool
    renormalises: bool

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.shared_by_default = True
        self.proposes_targets = False
        self.counts_beside = False
        self.learns = False
        self.renormalises = True

    def excluding(self, exclude: Union[int, Tensor]) -> "Sampler":
        """A sampler like this one that never draws the classes ``exclude``: the ids below an int, or those of an int64 tensor."""
        raise TypeError(f"{type(self).__name__} cannot leave classes out, so it does not go with head_classes")

    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """Draws ``num_samples`` classes for the batch (``shared``) or for each query.

        Args:
            input: queries ``[Q, D]``.
            target: int64 ``[Q]``, valid ids only. Given, the proposal holds their expected counts as well. Where ``counts_beside``, and draws
                are private, also ``[Q, T]``, several for each query; then ``target_log_count`` is of that shape.
            generator: on ``input``'s device. None: torch's default one, which ``torch.manual_seed`` governs. One int64 is drawn a call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of any class ids for the queries ``input [Q, D]``: float32; -inf for a class that is never drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not define log_prob")

    def for_table(self, dim: int, bias: bool) -> "Sampler":
        """A sampler like this one for a class table of width ``dim``, with or without a bias: what a loss takes in place of it."""
        return self

    def draws_distinct(self, shared: bool) -> bool:
        """Whether a set, shared or private, holds no class twice."""
        return False

    def draws_by_kind(self, num_samples: int, shared: bool) -> Tuple[int, int]:
        """How many of ``num_samples`` are distinct ones, and how many independent."""
        return (num_samples, 0) if self.draws_distinct(shared) else (0, num_samples)

    def num_drawable(self) -> int:
        """How many classes are ever drawn."""
        return self.num_classes

    def check_num_samples(self, num_samples: int, shared: bool) -> None:
        """Raises ValueError where a set of ``num_samples`` different classes cannot be drawn: what a loss asks when it is built."""
        if self.draws_distinct(shared) and num_samples > self.num_drawable():
            raise ValueError(f"{type(self).__name__}: expected num_samples of at most {self.num_drawable()}, the classes that are not excluded "
                             f"and of which each is drawn once, got {num_samples}")

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        """The log expected count of any ``ids`` in the draws that :meth:`sample` makes: of ``ids``' shape, or ``[Q, S]`` for ``ids [S]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define log_count")

    @torch.jit.export
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Adapts the sampler to the class table ``weight [N, D]``, ``bias [N]``, and returns statistics. A static one has nothing to do."""
        stats: Dict[str, float] = {}
        return stats

    @torch.jit.export
    def prepare(self, weight: Tensor, bias: Optional[Tensor], generator: Optional[torch.Generator] = None) -> None:
        """What a loss calls before it draws in train(): an adaptive sampler refreshes itself here when its time has come."""
        pass

    @torch.jit.export
    def auxiliary_loss(self, input: Tensor, weight: Tensor, bias: Optional[Tensor],
                       generator: Optional[torch.Generator] = None) -> Optional[Tensor]:
        """What a sampler that learns would minimise, a scalar; a loss adds its gradient, not its value, in train(). Queries that do not count
        are zeros in ``input``."""
        return None

    @torch.jit.export
    def note(self, ids: Tensor) -> None:
        """What a loss calls with the classes whose rows a step changes, int64 of any shape."""
        pass

    def _apply(self, fn, recurse=True):
        # model.half() casts every floating tensor, to_empty() drops its values. Those of a sampler stay: only their device moves.
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        learnt = {name: table.detach() for name, table in self._parameters.items() if table is not None}
        super()._apply(fn, recurse)
        for name, table in tables.items():
            self._buffers[name] = moved_table(type(self).__name__, table, self._buffers[name])
        for name, table in learnt.items():
            parameter = self._parameters[name]
            parameter.data = moved_table(type(self).__name__, table, parameter.detach())
            parameter.grad = None if parameter.grad is None else parameter.grad.to(table.dtype)
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # The index of another sampler, or none: a checkpoint's class table loads into any loss.
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(prefix)]
        if not any(prefix + name in state_dict for name in (*self._buffers, *self._parameters)):
            missing_keys[:] = [key for key in missing_keys if not key.startswith(prefix)]
