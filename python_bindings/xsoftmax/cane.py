"""CANE: candidates against noises, over a plain class table."""

import math
from typing import List, Optional, Union

import torch
from torch import Tensor

from ._checks import check_count
from ._memory import device_of_values
from .losses import LinearLoss, _reduction_code, different_ids, with_gradient_of
from .samplers import ADAPTIVE, AdaptiveSampler, ComplementSampler, Sampler, StaticSampler, UniformSampler, UnionSampler, make_sampler

NOISE_REDUCTIONS = {"mean_of_logs": "cane", "log_of_mean": "cane_log_of_mean"}


def estimator_of(owner: str, noise_reduction: str) -> str:
    """The estimator of ``xsoftmax::candidate_loss``."""
    if noise_reduction not in NOISE_REDUCTIONS:
        raise ValueError(f"{owner}: expected noise_reduction to be \"mean_of_logs\" or \"log_of_mean\", got {noise_reduction!r}")
    return NOISE_REDUCTIONS[noise_reduction]


def noise_outside(owner: str, noise_sampler: Union[Sampler, ComplementSampler, str], num_classes: int, device, candidates: Optional[Tensor] = None,
                  **kwargs) -> ComplementSampler:
    """The noise of CANE from what its users give; what is made here is made on `device`. candidates: where they are always the same."""
    options = {}
    if isinstance(noise_sampler, ComplementSampler):
        options["tries"], noise_sampler = max(1, noise_sampler.tries), noise_sampler.sampler
    if isinstance(noise_sampler, str):
        if noise_sampler == "unigram" or noise_sampler in ADAPTIVE and not kwargs:
            what = "counts" if noise_sampler == "unigram" else "a class table, which a tree has none of"
            raise ValueError(f"{owner}: expected noise_sampler as a module or the name of one that needs nothing more, "
                             f"got {noise_sampler!r}, which needs {what}")
        noise_sampler = make_sampler(noise_sampler, num_classes, **kwargs).to(device)
    if not isinstance(noise_sampler, Sampler):
        raise TypeError(f"{owner}: expected noise_sampler to be a Sampler or a name, got {type(noise_sampler).__name__}")
    if noise_sampler.num_classes != num_classes:
        raise ValueError(f"{owner}: expected a noise_sampler of {num_classes} classes, got one of {noise_sampler.num_classes}")
    _check_draws_all(owner, noise_sampler, candidates)
    fixed = candidates is not None and candidates.numel() < num_classes
    if fixed and isinstance(noise_sampler, StaticSampler) and not isinstance(noise_sampler, UniformSampler):
        noise_sampler = noise_sampler.excluding(candidates)  # its draws then are all outside
    return ComplementSampler(noise_sampler, **options)


def _check_draws_all(owner: str, sampler: Sampler, candidates: Optional[Tensor]) -> None:
    """A class that is neither a candidate nor ever drawn would learn nothing of how it compares with the others."""
    if isinstance(sampler, AdaptiveSampler):
        never = sampler._excluded()
    elif isinstance(sampler, StaticSampler):
        never = sampler.log_prob(torch.zeros(0), torch.arange(sampler.num_classes)).isneginf().nonzero().squeeze(1)
    else:
        return
    if never.is_meta or candidates is not None and candidates.is_meta:
        return
    if candidates is not None:
        never = never[~torch.isin(never, candidates.to(never.device))]
    if never.numel() > 0:
        raise ValueError(f"{owner}: expected a noise_sampler that draws every class outside the candidates, got one that never draws "
                         f"{never.numel()} of them, such as {int(never[0])}")


class CaneLoss(LinearLoss):
    r"""Candidates against noises (CANE paper, Algorithm 1) in train(); the exact loss in eval().

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
            a :class:`xsoftmax.samplers.Sampler`: `num_candidates` draws, as a set (a MIDX sampler: what is near each query);
            None: each call says, ``loss(input, target, candidates)``.
        num_candidates: how many draws, where a sampler gives the candidates.
        shared: where a sampler gives them, one set for the batch, or one for each query. None: as suits the sampler.
        num_noises: n >= 0, for each query. With 0 all that is outside C counts as nothing, but a target there, as its own noise: not
            consistent.
        noise_sampler: a Sampler, or its name, which draws every class outside C; restricted to those by
            :class:`xsoftmax.samplers.ComplementSampler` (or such a sampler with `tries` of your own). Where C is always the same the draws are
            those of q renormalised.
        noise_reduction: "mean_of_logs", as above; or "log_of_mean": all noises in one denominator, with weights 1 / (n q_j), where a target
            outside C takes the place of the first. Less variance for n > 1, at the same cost.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        sparse_grad: as in :class:`SampledSoftmaxLoss`.

    Shape: input [*, D], target [*] int64; candidates [C] for all queries, or [*, C] of their own, int64, -1 where there is none; a class
    that stands twice counts once. A scalar, or [*] with reduction="none".
    """

    def __init__(self, in_features: int, num_classes: int, *, candidates: Union[int, Tensor, Sampler, None] = None, num_candidates: int = 0,
                 shared: Optional[bool] = None, num_noises: int = 1, noise_sampler: Union[Sampler, str] = "uniform",
                 noise_reduction: str = "mean_of_logs", bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, sparse_grad: bool = True, device=None, dtype=None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index, device=device,
                         dtype=dtype)
        name = self._name
        self.num_candidates = check_count(name, "num_candidates", num_candidates, 0)
        self.num_noises = check_count(name, "num_noises", num_noises, 0)
        self.estimator = estimator_of(name, noise_reduction)
        self.sparse_grad = sparse_grad
        device = device_of_values(device)
        self.candidate_sampler: Optional[Sampler] = None
        self.shared = True
        ids: Optional[Tensor] = None
        if isinstance(candidates, str):
            raise TypeError(f"{name}: expected candidates as a number, a tensor of ids, a Sampler or None, got the str {candidates!r}: give a "
                            f"sampler of them as a module")
        if isinstance(candidates, Sampler):
            if candidates.num_classes != num_classes:
                raise ValueError(f"{name}: expected a sampler of {num_classes} classes for candidates, got one of {candidates.num_classes}")
            if candidates.proposes_targets or isinstance(candidates, UnionSampler):
                raise ValueError(f"{name}: expected one sampler of candidates, which does not depend on the targets, "
                                 f"got {type(candidates).__name__}")
            if num_candidates < 1:
                raise ValueError(f"{name}: expected num_candidates of at least 1 beside a sampler that gives the candidates, got {num_candidates}")
            self.candidate_sampler = candidates.for_table(in_features, bias)
            self.shared = bool(candidates.shared_by_default if shared is None else shared)
            self.candidate_sampler.check_num_samples(num_candidates, self.shared)
        elif shared is not None or num_candidates != 0:
            raise ValueError(f"{name}: expected num_candidates and shared beside a sampler that gives the candidates, got "
                             f"{num_candidates} and {shared} beside {type(candidates).__name__}")
        elif candidates is not None:
            ids = different_ids(name, "candidates", candidates, num_classes, device)
            if ids.numel() == 0:
                raise ValueError(f"{name}: expected at least one of candidates, without which there is nothing to learn, got none")
        kwargs = {"dim": in_features, "bias": bias} if isinstance(noise_sampler, str) and noise_sampler in ADAPTIVE else {}
        self.noise = noise_outside(name, noise_sampler, num_classes, device, ids, **kwargs)
        self.noise.sampler = self.noise.sampler.for_table(in_features, bias)
        self._one_sampler = self.candidate_sampler is self.noise.sampler  # which then takes each step once
        self.register_buffer("candidates", ids, persistent=False)

    def forward(self, input: Tensor, target: Tensor, candidates: Optional[Tensor] = None,
                generator: Optional[torch.Generator] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        queries = self._queries(input, target)
        counted = torch.where(target == self.ignore_index, 0, target).reshape(-1)
        weight, bias = self.linear.weight, self.linear.bias
        self.noise.sampler.prepare(weight, bias, generator)
        found = self._candidates(queries, list(target.shape), candidates, generator)
        noise = self.noise.sample(queries.detach(), self.num_noises, found, counted, generator)
        absent = found < 0
        log_count = torch.zeros(found.shape, device=found.device).masked_fill(absent, math.inf)
        found = found.clamp(min=0)
        shared_ids: Optional[Tensor] = None
        shared_log_count: Optional[Tensor] = None
        private_ids, private_log_count = noise.ids, noise.log_count
        fixed_private, fixed_shared = 0, 0
        if found.dim() == 1:
            shared_ids, shared_log_count, fixed_shared = found, log_count, found.size(0)
        else:
            private_ids, private_log_count = torch.cat([found, noise.ids], 1), torch.cat([log_count, noise.log_count], 1)
            fixed_private = found.size(1)
        self._note(found)
        self._note(noise.ids)
        self._note(counted)
        loss = torch.ops.xsoftmax.sampled_softmax_loss(
            input, weight, bias, target, private_ids, shared_ids, private_log_count, shared_log_count, noise.target_log_count, self.weight,
            self.estimator, True, fixed_private, fixed_shared, _reduction_code(self.reduction), self.ignore_index, 0.0, self.sparse_grad)
        counts = (target != self.ignore_index).reshape(-1, 1)
        if self.noise.sampler.learns:
            loss = with_gradient_of(loss, self.noise.sampler.auxiliary_loss(torch.where(counts, queries, 0.0), weight, bias, generator))
        sampler = self.candidate_sampler
        if sampler is not None and not self._one_sampler:
            if sampler.learns:
                loss = with_gradient_of(loss, sampler.auxiliary_loss(torch.where(counts, queries, 0.0), weight, bias, generator))
        return loss

    def _note(self, ids: Tensor) -> None:
        self.noise.sampler.note(ids)
        sampler = self.candidate_sampler
        if sampler is not None and not self._one_sampler:
            sampler.note(ids)

    def _candidates(self, queries: Tensor, batch: List[int], given: Optional[Tensor], generator: Optional[torch.Generator]) -> Tensor:
        """[C] or [Q, C], -1 where there is none."""
        sampler, fixed = self.candidate_sampler, self.candidates
        if given is not None:
            if sampler is not None or fixed is not None:
                raise ValueError(f"{self._name}: expected candidates with the call of a loss that was built with candidates=None alone")
            if not torch.jit.is_scripting() and not isinstance(given, Tensor):
                raise TypeError(f"{self._name}: expected candidates as an int64 tensor, got {type(given).__name__}")
            if given.dtype != torch.int64:
                raise TypeError(f"{self._name}: expected candidates of dtype torch.int64, got {given.dtype}")
            if given.dim() != 1 and list(given.shape[:-1]) != batch:
                raise ValueError(f"{self._name}: expected candidates of shape [C] or {batch} + [C], the shape of target and one more, got "
                                 f"{list(given.shape)}")
            return torch.ops.xsoftmax.candidate_set(given if given.dim() <= 2 else given.flatten(0, -2), self.num_classes)
        if fixed is not None:
            return fixed
        if sampler is not None:
            if not self._one_sampler:
                sampler.prepare(self.linear.weight, self.linear.bias, generator)
            drawn = sampler.sample(queries.detach(), self.num_candidates, self.shared, None, generator)
            return drawn.ids if drawn.distinct else torch.ops.xsoftmax.candidate_set(drawn.ids, self.num_classes)
        raise ValueError(f"{self._name}: expected candidates, which a loss built with candidates=None takes with each call, got none")

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_noises={self.num_noises}"
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        if self.candidates is not None:
            text += f", candidates={self.candidates.numel()}"
        if self.candidate_sampler is not None:
            text += f", num_candidates={self.num_candidates}, shared={self.shared}"
        return text
