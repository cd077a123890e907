"""CANE, candidates against noises, over a class table."""

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.types import Device

from .._core.checks import check_count, check_generator, check_tensor, distinct_ids
from .._core.memory import device_of_values
from .._core.typing import Numbers
from .candidate_loss import CandidateLoss
from ..samplers import CandidateSet, Sampler, StreamingCounts
from ..samplers.complement import make_noise_sampler

NOISE_REDUCTIONS = {"mean_of_logs": "cane", "log_of_mean": "cane_log_of_mean"}


def check_cane_estimator(owner: str, name: str) -> None:
    if name not in NOISE_REDUCTIONS.values():
        raise ValueError(f"{owner}: expected estimator to be one of "
                         f"{[*NOISE_REDUCTIONS.values()]}, got {name!r}")


def estimator_of(owner: str, noise_reduction: str) -> str:
    """Returns the estimator of ``xsoftmax::candidate_loss`` for a noise_reduction."""
    if noise_reduction not in NOISE_REDUCTIONS:
        raise ValueError(f"{owner}: expected noise_reduction to be \"mean_of_logs\" or "
                         f"\"log_of_mean\", got {noise_reduction!r}")
    return NOISE_REDUCTIONS[noise_reduction]


class CaneLoss(CandidateLoss):
    r"""CANE, candidates against noises (Han et al., 2018, Algorithm 1), in train(); the exact cross
    entropy in eval().

    Each query has a set C of candidate classes, chosen without looking at the target y, and n noise
    classes, sampled from a distribution q over the classes outside C. With scores s, the loss of a
    query is::

        y in C:    loss = mean_j log(sum_C e^s + e^{s_j} / q_j) - s_y      over noises j  (Eq. 2)
        otherwise: loss = log(sum_C e^s + e^{s_y} / q_y) - s_y             y is the noise (Eq. 3)

    Equivalent, for `candidates` [C] and `noise` [Q, n], to::

        s_c = F.linear(input, linear.weight[candidates]).logsumexp(1, keepdim=True)     # [Q, 1]
        s_n = (input[:, None] * linear.weight[noise]).sum(2) - q[noise].log()           # [Q, n]
        s_y = (input * linear.weight[target]).sum(1)                                    # [Q]
        inside = torch.logaddexp(s_c, s_n).mean(1) - s_y
        outside = torch.logaddexp(s_c[:, 0], s_y - q[target].log()) - s_y
        loss = torch.where(torch.isin(target, candidates), inside, outside)

    The optimum of the loss is the softmax for any non-empty C, any q > 0 and n >= 1. The more
    targets C covers, the closer is the variance to that of the exact loss. The loss of a query
    without candidates is constant, so it has no gradient.

    In eval() the loss is :meth:`exact`, as in :class:`LinearCrossEntropyLoss`.

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        candidates: the source of C.

            - An int h >= 1: classes 0 .. h - 1, the most frequent ones if classes are sorted by
              descending frequency.
            - Distinct class ids, an int64 tensor [C], an array or a list: the same candidates for
              all queries.
            - A :class:`xsoftmax.samplers.Sampler`: the classes it draws, as a set; with a MIDX
              sampler, classes near each query. It must not count targets.
            - None: each call passes them, ``loss(input, target, candidates)``.

        num_noises: n >= 0, per query. With 0, classes outside C do not contribute, except a target
            outside C, which is its own noise. The loss is then not consistent.
        noise_sampler: q: the name of a sampler that can draw every class outside C, or a
            :class:`xsoftmax.samplers.Sampler` that draws tries * num_noises classes with
            replacement for each query. A noise is drawn up to `tries` times, until it is outside C;
            if every try fails, it is uniform over the classes outside C (see
            :class:`xsoftmax.samplers.ComplementSampler`). A sampler given by name has four tries;
            "uniform" needs one. If C is always the same, noises follow q renormalised to the
            classes outside C.
        noise_reduction: "mean_of_logs": the formula above. "log_of_mean": all noises share one
            denominator, with weights 1 / (n q_j), and a target outside C takes the place of the
            first one. This has a lower variance for n > 1, at the same cost.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        positives: as in :class:`LinearCrossEntropyLoss`; only "mean" in train().
        logit_scale, softcap, z_loss: as in :class:`SampledSoftmaxLoss`. In train() the log
            normaliser of `z_loss` is the first term of the formulas above; with "mean_of_logs", its
            mean over the noises.
        sparse_grad: as in :class:`SampledSoftmaxLoss`.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    Shape:
        - input: [*, D], in the dtype of the table.
        - target: int64 [*] in [0, N) or ignore_index, or [*, T].
        - candidates: int64 [C] for all queries, or [*, C] per query, in [0, N), with -1 as padding.
          A repeated class counts once.
        - output: a scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.
          If no query counts (an empty batch, or all targets ignored), "sum" is 0 and "mean" is NaN,
          as in torch.

    Raises:
        ValueError: an option is out of range; there are no candidates; a sampler has another number
            of classes, belongs to another loss, or serves both candidates and noise; noise_sampler
            shares its draws, samples without replacement, never draws a class outside C, or its
            num_samples is not a multiple of num_noises; a shape does not fit; candidates are passed
            to a loss that has its own, or missing from a call of one that has none; positives="sum"
            in train().
        TypeError: an option has another type; an argument is not a dense tensor; the dtype or
            device of `input` differs from the table's; `target` or candidates are not int64.
        IndexError: a target is neither in [0, N) nor ignore_index, or a candidate is not in [0, N)
            (checked on the CPU only).
        RuntimeError: same as :class:`SampledSoftmaxLoss`.
    """

    _fixed_options = ("num_noises", "noise_reduction")

    def __init__(self, in_features: int, num_classes: int, *,
                 candidates: Union[int, Numbers, Sampler, None] = None, num_noises: int = 1,
                 noise_sampler: Union[Sampler,
                                      str] = "uniform", noise_reduction: str = "mean_of_logs",
                 bias: bool = False, weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, positives: str = "mean", logit_scale: float = 1.0,
                 softcap: Optional[float] = None, z_loss: float = 0.0,
                 sparse_grad: Optional[bool] = None, device: Device = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction,
                         ignore_index=ignore_index, positives=positives, logit_scale=logit_scale,
                         softcap=softcap, z_loss=z_loss, device=device, dtype=dtype)
        name = self._name
        num_noises = check_count(name, "num_noises", num_noises, 0)
        self._init_options(estimator=estimator_of(name, noise_reduction),
                           remove_accidental_hits=True, sparse_grad=sparse_grad)
        device = device_of_values(device)
        self.candidate_sampler = None
        ids: Optional[Tensor] = None
        if isinstance(candidates, str):
            raise TypeError(f"{name}: expected candidates as a number, a tensor of ids, a Sampler "
                            f"or None, got the str {candidates!r}: pass a Sampler object, not its "
                            "name")
        if isinstance(candidates, Sampler):
            if candidates.num_classes != num_classes:
                raise ValueError(f"{name}: expected a sampler of {num_classes} classes for "
                                 f"candidates, got one of {candidates.num_classes}")
            if candidates.num_samples < 1:
                raise ValueError(f"{name}: expected a sampler that draws at least one class as "
                                 f"candidates, got {candidates}")
            if any(isinstance(part, StreamingCounts) for part in candidates.modules()):
                raise ValueError(f"{name}: expected candidates that do not depend on the target, "
                                 f"got a {type(candidates).__name__} that counts targets")
            if candidates is noise_sampler:
                raise ValueError(f"{name}: expected two samplers for candidates and noise, got one "
                                 "for both: make a second one")
            if candidates._owner:  # raises, before the noise is claimed
                candidates._claim(name)
            self.candidate_sampler = candidates.to(device)
        elif candidates is not None:
            ids = distinct_ids(name, "candidates", candidates, num_classes, device)
            if ids.numel() == 0:
                raise ValueError(f"{name}: expected at least one class as candidates, got none")
        self.noise = make_noise_sampler(name, noise_sampler, num_noises, num_classes, in_features,
                                        bias, ids).to(device)
        self.noise._claim(name)
        if self.candidate_sampler is not None:
            self.candidate_sampler._claim(name)
        self.register_buffer("candidates", ids, persistent=False)

    def _check_option(self, name: str, value: Any) -> Any:
        if name == "estimator":
            check_cane_estimator(self._name, value)
        return super()._check_option(name, value)

    def _samplers(self) -> List[Sampler]:
        return [self.noise] + ([] if self.candidate_sampler is None else [self.candidate_sampler])

    def _fixed_ids(self) -> Dict[str, Tensor]:
        return {} if self.candidates is None else {"candidates": self.candidates}

    def forward(self, input: Tensor, target: Tensor, candidates: Optional[Tensor] = None,
                generator: Optional[torch.Generator] = None,
                target_prob: Optional[Tensor] = None) -> Tensor:
        """Computes the CANE loss in train(), and the exact loss in eval().

        Args:
            input: [*, D], in the dtype of the table.
            target: int64 [*] or [*, T], in [0, N) or ignore_index.
            candidates: int64 [C] or [*, C], in [0, N), with -1 as padding. Required in train() if
                the loss was constructed with candidates=None, not allowed otherwise. Ignored in
                eval().
            generator: a generator on the device of `input`. None: torch's default generator.
            target_prob: must be None, since this loss only takes hard targets.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: same as :class:`CaneLoss`.
        """
        if target_prob is not None:
            raise ValueError(f"{self._name}: expected hard targets, got target_prob: "
                             "LinearCrossEntropyLoss, SampledSoftmaxLoss and "
                             "exact(input, target, target_prob) take it")
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
            if candidates is not None:
                check_tensor(self._name, "candidates", candidates)
                if candidates.dtype != torch.int64:  # possibly meant as another argument
                    hint = ("class weights are an argument of the constructor, weight=..."
                            if candidates.is_floating_point() else "use candidates.long()")
                    raise TypeError(f"{self._name}: expected candidates of dtype int64, got "
                                    f"{str(candidates.dtype).removeprefix('torch.')}: {hint}")
        if not self.training:
            return self.exact(input, target, None)
        call_candidates = self._check_candidates(input, candidates)
        description, state = self._describe(call_candidates)
        if description != "":
            optional_tensors: List[Optional[Tensor]] = []
            if self.weight is not None:
                optional_tensors = [self.weight, None, None, None, None]
            return self._run_step(input, target, state, description, generator, self.noise.training,
                                  True, optional_tensors)
        queries, sampler_target = self._prepare_sampling(input, target)
        if self.candidate_sampler is not None:
            self.candidate_sampler.prepare(self.linear.weight, self.linear.bias, generator)
        self.noise.prepare(self.linear.weight, self.linear.bias, generator)
        candidate_ids = self._candidates(queries, sampler_target, call_candidates, generator)
        noise = self.noise.sample_outside(queries, candidate_ids, sampler_target, generator)
        ids, log_count = torch.ops.xsoftmax.always_scored_set(candidate_ids)
        return self._candidate_loss(input, target,
                                    [CandidateSet(ids, log_count, None, True), noise], None)

    def _check_candidates(self, input: Tensor, candidates: Optional[Tensor]) -> Optional[Tensor]:
        """Returns the caller's candidates, int64 [C] or [Q, C], or None if the loss has its own."""
        has_candidates = self.candidate_sampler is not None or self.candidates is not None
        if candidates is None:
            if not has_candidates:
                raise ValueError(f"{self._name}: expected candidates in each call of a loss that "
                                 "was "
                                 "made with candidates=None, got none")
            return None
        if has_candidates:
            raise ValueError(f"{self._name}: expected no candidates in the call of a loss that "
                             "has its own, got some: make it with candidates=None")
        if candidates.dim() == 0 or (candidates.dim() != 1
                                     and list(candidates.shape[:-1]) != list(input.shape[:-1])):
            raise ValueError(f"{self._name}: expected candidates of shape [C], or that of "
                             f"target with one more dimension, got {list(candidates.shape)}")
        return candidates if candidates.dim() <= 2 else candidates.flatten(0, -2)

    def _describe(self, call_candidates: Optional[Tensor]) -> Tuple[str, List[Tensor]]:
        """Returns candidates and noise in the form that operators take: a description and its
        tensors.

        The description is empty if either is written in Python, and in a step that refreshes a
        sampler, which runs separately so that Ctrl-C can interrupt it and a progress bar can follow
        it.
        """
        sampler, fixed, noise = self.candidate_sampler, self.candidates, self.noise.describe()
        if noise == "" or self._refresh_due():
            return "", []
        state = self.noise.state_tensors()
        if call_candidates is not None:
            return "cane:0:[given:1:;" + noise + "]", [call_candidates] + state
        if fixed is not None:
            return "cane:0:[head:1:;" + noise + "]", [fixed] + state
        assert sampler is not None
        description = sampler.describe()
        if description != "":
            description = "cane:0:[" + description + ";" + noise + "]"
        return description, sampler.state_tensors() + state

    def _candidates(self, queries: Tensor, target: Tensor, call_candidates: Optional[Tensor],
                    generator: Optional[torch.Generator]) -> Tensor:
        """Returns the candidates, int64 [C] or [Q, C], with -1 as padding."""
        sampler, fixed = self.candidate_sampler, self.candidates
        if call_candidates is not None:
            return torch.ops.xsoftmax.candidate_set(call_candidates, self.num_classes)
        if fixed is not None:
            return fixed
        assert sampler is not None
        # Candidates must not depend on the target, so the sampler only sees which queries count.
        sets = sampler.sample(queries, target.clamp(max=0), generator)
        return torch.ops.xsoftmax.drawn_candidates([part.ids for part in sets],
                                                   [part.distinct for part in sets],
                                                   queries.size(0), self.num_classes)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_noises={self.noise.num_samples}"
        text += ", noise_reduction='log_of_mean'" if self.estimator == "cane_log_of_mean" else ""
        if self.candidates is not None:
            text += f", candidates={self.candidates.numel()}"
        return text
