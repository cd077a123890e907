"""What every sampler is: a module that proposes classes and says how often it would."""

from typing import Dict, NamedTuple, Optional, Union

import torch
from torch import Tensor, nn


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
    """

    num_classes: int
    shared_by_default: bool
    proposes_targets: bool

    def __init__(self, num_classes: int):
        super().__init__()
        self.num_classes = num_classes
        self.shared_by_default = True
        self.proposes_targets = False

    def excluding(self, exclude: Union[int, Tensor]) -> "Sampler":
        """A sampler like this one that never draws the classes ``exclude``: the ids below an int, or those of an int64 tensor."""
        raise TypeError(f"{type(self).__name__} cannot leave classes out, so it does not go with head_classes")

    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """Draws ``num_samples`` classes for the batch (``shared``) or for each query.

        Args:
            input: queries ``[Q, D]``.
            target: int64 ``[Q]``, valid ids only. Given, the proposal holds their expected counts as well.
            generator: on ``input``'s device. None: torch's default one, which ``torch.manual_seed`` governs. One int64 is drawn a call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of any class ids for the queries ``input [Q, D]``: float32; -inf for a class that is never drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not define log_prob")

    @torch.jit.export
    def refresh(self, weight: Tensor) -> Dict[str, float]:
        """Adapts the sampler to the class table ``weight [N, D]`` and returns statistics. A static sampler has nothing to do."""
        stats: Dict[str, float] = {}
        return stats
