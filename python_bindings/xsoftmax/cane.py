"""CANE: candidates against noises, over a plain class table."""

from typing import Dict, List, Optional, Union

import torch
from torch import Tensor
from torch.types import Device

from ._checks import check_bool, check_count
from ._memory import device_of_values
from .losses import CandidateLoss, different_ids
from .samplers import CandidateSet, Sampler, StreamingCounts
from .samplers.complement import noise_outside

NOISE_REDUCTIONS = {"mean_of_logs": "cane", "log_of_mean": "cane_log_of_mean"}


def estimator_of(owner: str, noise_reduction: str) -> str:
    """The estimator of ``xsoftmax::candidate_loss``."""
    if noise_reduction not in NOISE_REDUCTIONS:
        raise ValueError(f"{owner}: expected noise_reduction to be \"mean_of_logs\" or \"log_of_mean\", got {noise_reduction!r}")
    return NOISE_REDUCTIONS[noise_reduction]


class CaneLoss(CandidateLoss):
    r"""Candidates against noises (Han et al., 2018, Algorithm 1) in train(); the exact loss in eval().

    For each query, a set C of candidates that is found without looking at the target y; n noises from a distribution q over the classes
    outside C. With s the scores::

        y in C:    loss = mean_j log(sum_C e^s + e^{s_j} / q_j) - s_y          j the noises        (Eq. 2)
        else:      loss = log(sum_C e^s + e^{s_y} / q_y) - s_y                 y is its own noise  (Eq. 3)

    Its optimum is the softmax for any C that holds something, q and n >= 1; the more targets C covers, the nearer its variance is to that of
    the exact loss. A query without candidates has a constant loss: it teaches nothing.

    Args:
        in_features: D, the width of a query.
        num_classes: N.
        candidates: where C comes from:
            an int h: the classes 0 .. h - 1, the most frequent ones where classes are sorted by falling frequency;
            an int64 tensor of different class ids: those, for all queries;
            a :class:`xsoftmax.samplers.Sampler`: what it draws, as a set (a MIDX sampler: what is near each query);
            None: each call says, ``loss(input, target, candidates)``.
        num_noises: n >= 0, for each query. With 0 all that is outside C counts as nothing, but a target there, as its own noise: not
            consistent.
        noise_sampler: the name of a sampler that draws every class outside C; or a Sampler of private independent draws, num_samples =
            tries * num_noises for each query: a noise has so many tries to be outside C, and is uniform over the classes outside where none is
            (see :class:`xsoftmax.samplers.ComplementSampler`; a name has four tries, "uniform" needs one). Where C is always the same the
            draws are those of q renormalised.
        noise_reduction: "mean_of_logs", as above; or "log_of_mean": all noises in one denominator, with weights 1 / (n q_j), where a target
            outside C takes the place of the first. Less variance for n > 1, at the same cost.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        positives: what several of a query come to; in train() "mean" alone.
        sparse_grad: as in :class:`SampledSoftmaxLoss`.

    Shape: input [*, D], target [*] or [*, T] int64; candidates [C] for all queries, or [*, C] of their own, int64, -1 where there is none; a class
    that stands twice counts once. A scalar, or [*] with reduction="none".
    """

    def __init__(self, in_features: int, num_classes: int, *, candidates: Union[int, Tensor, Sampler, None] = None, num_noises: int = 1,
                 noise_sampler: Union[Sampler, str] = "uniform", noise_reduction: str = "mean_of_logs", bias: bool = False,
                 weight: Optional[Tensor] = None, reduction: str = "mean", ignore_index: int = -100, positives: str = "mean", sparse_grad: bool = True,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index, positives=positives,
                         device=device, dtype=dtype)
        name = self._name
        num_noises = check_count(name, "num_noises", num_noises, 0)
        self._init_options(estimator=estimator_of(name, noise_reduction), remove_accidental_hits=True, sparse_grad=check_bool(name, "sparse_grad", sparse_grad))
        device = device_of_values(device)
        self.candidate_sampler = None
        ids: Optional[Tensor] = None
        if isinstance(candidates, str):
            raise TypeError(f"{name}: expected candidates as a number, a tensor of ids, a Sampler or None, got the str {candidates!r}: give a "
                            f"sampler of them as a module")
        if isinstance(candidates, Sampler):
            if candidates.num_classes != num_classes:
                raise ValueError(f"{name}: expected a sampler of {num_classes} classes for candidates, got one of {candidates.num_classes}")
            if candidates.num_samples < 1:
                raise ValueError(f"{name}: expected a sampler that draws at least one class as candidates, got {candidates}")
            if any(isinstance(part, StreamingCounts) for part in candidates.modules()):
                raise ValueError(f"{name}: expected candidates that do not look at the target, got a {type(candidates).__name__} that counts targets")
            if candidates is noise_sampler:
                raise ValueError(f"{name}: expected two samplers for candidates and noise, got one for both: build a second one")
            if candidates._owner:  # before the noise is claimed
                candidates._claim(name)
            self.candidate_sampler = candidates.to(device)
        elif candidates is not None:
            ids = different_ids(name, "candidates", candidates, num_classes, device)
            if ids.numel() == 0:
                raise ValueError(f"{name}: expected at least one of candidates, without which there is nothing to learn, got none")
        self.noise = noise_outside(name, noise_sampler, num_noises, num_classes, in_features, bias, ids).to(device)
        self.noise._claim(name)
        if self.candidate_sampler is not None:
            self.candidate_sampler._claim(name)
        self.register_buffer("candidates", ids, persistent=False)

    def _samplers(self) -> List[Sampler]:
        return [self.noise] + ([] if self.candidate_sampler is None else [self.candidate_sampler])

    def _fixed_ids(self) -> Dict[str, Tensor]:
        return {} if self.candidates is None else {"candidates": self.candidates}

    def forward(self, input: Tensor, target: Tensor, candidates: Optional[Tensor] = None,
                generator: Optional[torch.Generator] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        queries, counted = self._counted(input, target)
        found = self._candidates(queries, counted, list(input.shape[:-1]), candidates, generator)
        self.noise.prepare(self.linear.weight, self.linear.bias, generator)
        noise = self.noise.sample_outside(queries, found, counted, generator)
        ids, log_count = torch.ops.xsoftmax.present_set(found)
        return self._candidate_loss(input, target, [CandidateSet(ids, log_count, None, True), noise], None)

    def _candidates(self, queries: Tensor, target: Tensor, batch: List[int], given: Optional[Tensor],
                    generator: Optional[torch.Generator]) -> Tensor:
        """[C] or [Q, C], -1 where there is none."""
        sampler, fixed = self.candidate_sampler, self.candidates
        if given is not None:
            if sampler is not None or fixed is not None:
                raise ValueError(f"{self._name}: expected candidates with the call of a loss that was built with candidates=None alone")
            if not torch.jit.is_scripting() and not isinstance(given, Tensor):
                raise TypeError(f"{self._name}: expected candidates as an int64 tensor, got {type(given).__name__}")
            if given.dtype != torch.int64:
                raise TypeError(f"{self._name}: expected candidates of dtype torch.int64, got {given.dtype}")
            if given.dim() == 0 or (given.dim() != 1 and list(given.shape[:-1]) != batch):
                raise ValueError(f"{self._name}: expected candidates of shape [C] or {batch} + [C], the shape of target and one more, got "
                                 f"{list(given.shape)}")
            return torch.ops.xsoftmax.candidate_set(given if given.dim() <= 2 else given.flatten(0, -2), self.num_classes)
        if fixed is not None:
            return fixed
        if sampler is None:
            raise ValueError(f"{self._name}: expected candidates, which a loss built with candidates=None takes with each call, got none")
        sampler.prepare(self.linear.weight, self.linear.bias, generator)
        # Candidates must not look at the target: it says no more than which queries count.
        sets = sampler.sample(queries, target.clamp(max=0), generator)
        return torch.ops.xsoftmax.drawn_candidates([part.ids for part in sets], [part.distinct for part in sets], queries.size(0), self.num_classes)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_noises={self.noise.num_samples}"
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        if self.candidates is not None:
            text += f", candidates={self.candidates.numel()}"
        return text
