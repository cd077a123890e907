"""Sampled softmax over a class table."""

import math
import numbers
from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from .._core.checks import check_count, check_generator, check_tensor, distinct_ids
from .._core.memory import device_of_values, move_table
from ..estimators import check_estimator, has_noise, has_normalizer, is_registered, registered_loss
from .candidate_loss import CandidateLoss
from .._core.typing import Numbers
from ..samplers import CandidateSet, FixedSampler, Sampler, UnionSampler, columns_of, make_sampler
from ..samplers.complement import make_noise_sampler, outside_target
from ..samplers.sampler import sampler_names


class SampledSoftmaxLoss(CandidateLoss):
    r"""Sampled softmax: the cross entropy over sampled classes in train(), and the exact cross
    entropy in eval().

    In eval() it is equivalent to::

        F.cross_entropy(loss.linear(input), target, weight, ...)

    computed as by :class:`LinearCrossEntropyLoss`. If gradients are recorded, the forward pass
    computes the exact gradients together with the loss. Evaluate under ``torch.no_grad()``.

    In train() a step scores the target, the `head_classes` and the sampled classes. The forward
    pass reads only these rows of the table, and the gradient of the table is row-sparse. Let s be
    the scores, y the target, and c_j the expected count of class j: M q_j for M samples with
    replacement from q, the inclusion probability for samples without replacement, and 1 for a head
    class. The loss of a query is::

        loss = log(e^{s_y} + sum_{j sampled, j != y} e^{s_j} / c_j) - s_y

    For one set without replacement, shared by the batch, with `ids` [M] and `log_count` [M], it is
    equivalent to::

        s = F.linear(input, linear.weight[ids], linear.bias[ids]) - log_count           # [Q, M]
        s = s.masked_fill(ids == target[:, None], -inf)
        s_y = (input * linear.weight[target]).sum(1) + linear.bias[target]              # [Q]
        loss = F.cross_entropy(torch.cat([s_y[:, None], s], 1), torch.zeros_like(target))

    Samples with replacement are renormalised to the classes other than y: their sum is multiplied
    by (M - c_y) / m, where m of the M samples are not y (Chen et al., 2025, section 3.2).

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        sampler: the proposal. It is available as `loss.sampler`; with head classes that is another
            object than the one passed.

            - A :class:`xsoftmax.samplers.Sampler`, which defines how many classes it draws, for the
              batch or per query. It cannot be shared with another loss.
            - A name: "uniform", "log_uniform" (for classes sorted by descending frequency),
              "in_batch", "midx", "lsh", "sphere", "rff", or one registered with
              :func:`xsoftmax.samplers.register`.
            - None: the candidates are the head classes and the negatives of each call.

        num_samples: for a sampler given by name: the number of samples for the batch (shared) or
            per query. None: the sampler's default; "uniform" and "log_uniform" have none, and
            "in_batch" only takes None.
        shared: for a sampler given by name: True: one set of samples for the whole batch (one
            matrix product); False: one set per query. None: the sampler's default.
        estimator: how scores become a loss. None selects one that suits the sampler: "ranking" if
            all samples are private to a query and with replacement (they are usually few, and the
            optimum of "ranking" is the softmax for any number of them), else "sampled_softmax".

            - "sampled_softmax": the formula above.
            - "ranking": also lowers the target's score by its log expected count, as TensorFlow's
              sampled softmax does. Near the softmax its gradient is about M / (M + 1) times the
              full one. Its value does not estimate the exact loss; use the loss in eval(). With
              head classes, a target outside the head takes the place of a sample.
            - "complementary_sum": "sampled_softmax" with all samples drawn from the classes other
              than the target, private to each query, by
              :class:`xsoftmax.samplers.ComplementSampler` (Botev et al., 2017).
            - "nce" (Gutmann and Hyvärinen, 2012), "negative_sampling" (Mikolov et al., 2013),
              "one_vs_each" (Titsias, 2016), "blackout" (Ji et al., 2016) and "importance" (Bengio
              and Senécal, 2003). These do not estimate the softmax loss.
            - "cane" and "cane_log_of_mean" (Han et al., 2018, Algorithm 1): the candidates are the
              head classes and samples without replacement; the noise is the samples with
              replacement. See :class:`CaneLoss`.
            - A name registered with :func:`xsoftmax.register_estimator`.

            ``xsoftmax::candidate_loss`` in ops.h has the formulas. Only the first two support
            label_smoothing.
        log_z: for "nce": the log normaliser, which is subtracted from all scores. A finite number,
            or "learned": a 0-dim parameter `log_z`, initialised to 0.
        remove_accidental_hits: drop samples that equal the target. False with "sampled_softmax" is
            Eq. 1 of Chen et al. (2025), whose gradient is about 1 / (1 + p_y) times the full one,
            p_y being the probability of the target. "ranking", "nce" and CANE always keep hits
            among samples with replacement: without them their optimum is not the softmax.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        label_smoothing: e in [0, 1]: the loss is (1 - e) times the loss above plus e times (log
            normaliser - mean score of all classes). The mean score is estimated from the target and
            the candidates, with the weights above. Not supported with class weights.
        positives: as in :class:`LinearCrossEntropyLoss`. Samples that hit another positive of the
            query are dropped, and samples with replacement are renormalised to the classes that are
            not positives. "sum" is supported by all estimators except CANE.
        logit_scale, softcap: as in :class:`LinearCrossEntropyLoss`, applied to the scores of the
            target and the candidates. Samplers get queries multiplied by `logit_scale`; they ignore
            the soft cap and do not scale the bias. Expected counts are exact in any case.
        z_loss: as in :class:`LinearCrossEntropyLoss`. In train() the log normaliser is estimated:
            the log of the sum over the target and the weighted candidates. Supported by
            "sampled_softmax", "complementary_sum", "ranking", "importance" and CANE; the other
            estimators have no log normaliser.
        head_classes: classes that are always scored: an int h for the first h classes, or distinct
            ids, an int64 tensor [H], an array or a list. The sampler then draws from the other
            classes. If it cannot exclude classes, the expected counts of head and samples add up.
        sparse_grad: the form of the table's gradient. True: sparse COO with a static number of rows
            R (one for each target, private candidate and shared candidate), for xsoftmax.optim and
            for torch.optim.SGD, Adagrad and SparseAdam. False: dense. None: the cheaper form,
            sparse if R is at most N. Optimizers of xsoftmax.optim take both forms, and so do
            torch.optim.SGD without momentum and Adagrad. The first step of another optimizer of
            torch.optim fixes None to the form it takes: sparse for SparseAdam, dense for most
            others. Assigning None again, or the first step of an optimizer that takes both, undoes
            that.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    Shapes and dtypes: same as :class:`LinearCrossEntropyLoss`: input [*, D], target int64 [*] or
    [*, T]; returns a scalar, or [*] with reduction="none". If no query counts, "sum" is 0 and
    "mean" is NaN.

    Raises:
        ValueError: an option is out of range, or options exclude each other; the name of a sampler
            or an estimator is unknown; a sampler has another number of classes, belongs to another
            loss, or draws more classes without replacement than there are; a shape does not fit; a
            call has no candidates; the table has a NaN or an infinity when a sampler that follows
            it refreshes; the table is parametrized and sparse_grad is not False.
        TypeError: an option has another type; an argument is not a dense tensor; the dtype or
            device of `input` differs from the table's; `target` or ids are not int64.
        IndexError: an id of head_classes is not in [0, N); a target is neither in [0, N) nor
            ignore_index; a negative is neither in [0, N) nor -1 (all checked on the CPU only).
        RuntimeError: a call inside a transform of ``torch.func``, or in a DistributedDataParallel
            model whose table was not prepared by :mod:`xsoftmax.distributed`.
    """
    def __init__(self, in_features: int, num_classes: int, *, sampler: Union[Sampler, str, None],
                 num_samples: Optional[int] = None, shared: Optional[bool] = None,
                 estimator: Optional[str] = None, remove_accidental_hits: bool = True,
                 log_z: Union[float, str] = 0.0, bias: bool = False,
                 weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, label_smoothing: float = 0.0, positives: str = "mean",
                 logit_scale: float = 1.0, softcap: Optional[float] = None, z_loss: float = 0.0,
                 head_classes: Union[int, Numbers] = 0, sparse_grad: Optional[bool] = None,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction,
                         ignore_index=ignore_index, label_smoothing=label_smoothing,
                         positives=positives, logit_scale=logit_scale, softcap=softcap,
                         z_loss=z_loss, device=device, dtype=dtype)
        name = self._name
        outside = estimator == "complementary_sum"
        if not outside and estimator is not None:
            check_estimator(name, estimator, label_smoothing, other_names=("complementary_sum",))
        if weight is not None and label_smoothing != 0.0:
            raise ValueError(f"{name}: expected label_smoothing=0 with class weights, got "
                             f"{label_smoothing}: a sample does not estimate the weighted mean "
                             "over all classes")
        device = device_of_values(device)
        head = distinct_ids(name, "head_classes", head_classes, num_classes, device)
        self.register_buffer("head", head, persistent=False)
        if outside and (shared or head.numel() > 0 or label_smoothing != 0.0):
            raise ValueError(f"{name}: expected shared=False, head_classes=0 and label_smoothing=0 "
                             f"with estimator=\"complementary_sum\", got shared={shared}, "
                             f"{head.numel()} head classes and label_smoothing={label_smoothing}")
        has_no_sampler = sampler is None
        if has_no_sampler and num_samples is None and shared is None:
            sampler = FixedSampler(num_classes, 0)
        if isinstance(sampler, str) and outside:
            sampler = make_noise_sampler(name, sampler, 20 if num_samples is None else num_samples,
                                         num_classes, in_features, bias)
        elif isinstance(sampler, str):
            if shared is None and estimator is not None and has_noise(estimator):
                shared = False  # noise is private to each query
            options = {} if shared is None else {"shared": shared}
            sampler = self._make_named_sampler(sampler, num_samples, bias, options)
        elif not isinstance(sampler, Sampler):
            argument = (f"num_samples={num_samples}"
                        if num_samples is not None else f"shared={shared}")
            suffix, got = (f" with {argument}",
                           "None") if has_no_sampler else ("", type(sampler).__name__)
            raise TypeError(f"{name}: expected sampler as a Sampler or one of "
                            f"{sampler_names()}{suffix}, got {got}")
        elif num_samples is not None or shared is not None:
            argument = (f"num_samples={num_samples}"
                        if num_samples is not None else f"shared={shared}")
            raise ValueError(f"{name}: expected no {argument.split('=')[0]} with a sampler object, "
                             f"got {argument}: pass it to the constructor of the "
                             f"{type(sampler).__name__}, or give the sampler by name")
        if sampler.num_classes != num_classes:
            raise ValueError(f"{name}: expected a sampler of {num_classes} classes, got one of "
                             f"{sampler.num_classes}")
        if sampler.num_samples == 0 and head.numel() == 0 and not has_no_sampler:
            raise ValueError(f"{name}: expected classes to score, got num_samples=0 and "
                             "head_classes=0")
        estimator = ("sampled_softmax"
                     if outside else sampler.default_estimator if estimator is None else estimator)
        self.estimator = estimator
        if self.z_loss != 0.0 and not has_normalizer(estimator):
            raise ValueError(f"{name}: expected z_loss=0 with estimator={estimator!r}, which has "
                             f"no log normaliser, got {self.z_loss}")
        if has_noise(estimator) and not (
            (head.numel() > 0 or sampler.has_distinct) and sampler.has_independent):
            raise ValueError(f"{name}: expected candidates (head classes, or draws without "
                             "replacement) and noise (draws with replacement) with "
                             f"estimator={estimator!r}, got {head.numel()} head classes and "
                             f"{sampler}")
        self._init_options(remove_accidental_hits=remove_accidental_hits, sparse_grad=sparse_grad)
        self._init_log_z(log_z, device)
        if outside:  # this claims the sampler, as the call below does: all checks come before
            sampler = outside_target(sampler)
        elif head.numel() > 0:
            tail_sampler = sampler.excluding(head)
            if tail_sampler is None:
                tail_sampler, self.head = UnionSampler(FixedSampler(num_classes, head),
                                                       sampler), head[:0]
            sampler = tail_sampler
        sampler._claim(name)
        self.sampler = sampler.to(device)

    def _make_named_sampler(self, sampler: str, num_samples: Optional[int], bias: bool,
                            options: Dict[str, bool]) -> Sampler:
        """Creates a sampler by its name."""
        if num_samples is not None:
            check_count(self._name, "num_samples", num_samples, 0)
        try:
            return make_sampler(sampler, self.num_classes, num_samples, dim=self.in_features,
                                bias=bias, **options)
        except ValueError as error:
            if num_samples is None or not self.num_classes < num_samples <= self.in_features:
                raise
            raise ValueError(f"{error}; of in_features={self.in_features} and "
                             f"num_classes={self.num_classes}, in_features comes first") from None

    def _samplers(self) -> List[Sampler]:
        return [self.sampler]

    def _fixed_ids(self) -> Dict[str, Tensor]:
        return {"head_classes": self.head}

    def _init_log_z(self, log_z: Union[float, str], device: Device) -> None:
        is_learned = isinstance(log_z, str) and log_z == "learned"
        if not is_learned and (isinstance(log_z, bool) or not isinstance(log_z, numbers.Real)
                               or not math.isfinite(log_z)):
            raise ValueError("SampledSoftmaxLoss: expected log_z as a finite number or "
                             f"\"learned\", got {log_z!r}")
        if log_z != 0 and self.estimator != "nce":
            raise ValueError("SampledSoftmaxLoss: expected log_z=0 with "
                             f"estimator={self.estimator!r}, which does not use it, got {log_z!r}: "
                             "only \"nce\" does")
        self.fixed_log_z = 0.0 if is_learned else float(log_z)
        self.register_parameter(
            "log_z",
            nn.Parameter(torch.zeros((), device=device)) if is_learned else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        head = self.head
        super()._apply(fn, recurse)
        self.head = move_table(self._name, head, self.head)
        return self

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None,
                negatives: Optional[Tensor] = None, negative_log_count: Optional[Tensor] = None,
                target_prob: Optional[Tensor] = None) -> Tensor:
        """Computes the sampled loss in train(), and the exact loss, :meth:`exact`, in eval().

        Negatives are additional classes from the caller, such as hard negatives, or classes drawn
        by a data loader. Without `negative_log_count`, each negative is always scored: its expected
        count is 1 plus how often the sampler would draw it, and the sampled loss still estimates
        the exact one. With `negative_log_count`, negatives are the caller's samples with
        replacement, with these expected counts. If the sampler can draw the same classes, pass the
        distribution of the negatives as a part of a :class:`xsoftmax.samplers.UnionSampler`
        instead. Negatives are ignored in eval().

        Args:
            input: [*, D], in the dtype of the table.
            target: int64 [*] or [*, T], in [0, N) or ignore_index.
            generator: a generator on the device of `input`. None: torch's default generator.
            negatives: int64 [P] for the batch, or [*, P] per query, in [0, N), with -1 as padding.
            negative_log_count: floating, the shape of `negatives`: the log expected count of each
                negative in the whole proposal, sampler and negatives together.
            target_prob: floating [*, T], the probability of each entry of target [*, T], as in
                :meth:`LinearCrossEntropyLoss.forward`, for distillation from a teacher's best
                classes. The log normaliser is estimated once per query, from the listed classes,
                each with a count of 1, and the candidates not among them. Requires the estimator
                "sampled_softmax" and no label smoothing. None: targets are hard.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: same as :class:`SampledSoftmaxLoss`. An
                error changes nothing.
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        if not self.training:
            return self.exact(input, target, target_prob)
        return self._compute_sampled_loss(input, target, generator, negatives, negative_log_count,
                                          True, target_prob)

    @torch.jit.export
    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None,
                 negatives: Optional[Tensor] = None, negative_log_count: Optional[Tensor] = None,
                 target_prob: Optional[Tensor] = None) -> Tensor:
        """Computes the sampled loss in train() and in eval(), with the current state of the
        sampler: it is not refreshed.

        In eval() the call does not count as a step of the sampler. Arguments, shapes and errors as
        :meth:`forward`.
        """
        if not torch.jit.is_scripting():
            check_generator(self._name, generator)
        return self._compute_sampled_loss(input, target, generator, negatives, negative_log_count,
                                          False, target_prob)

    def _compute_sampled_loss(self, input: Tensor, target: Tensor,
                              generator: Optional[torch.Generator], negatives: Optional[Tensor],
                              negative_log_count: Optional[Tensor], prepares: bool,
                              target_prob: Optional[Tensor] = None) -> Tensor:
        description = self._description(prepares)
        if description != "":
            return self._step(input, target, generator, negatives, negative_log_count, prepares,
                              target_prob, description)
        target_ids = target if target_prob is None else self._merge_soft_targets(
            input, target, target_prob)
        queries, sampler_target = self._prepare_sampling(input, target_ids, target_prob is not None)
        # Before the sampler changes, since it may raise.
        negative_set = self._make_negative_set(input, negatives, negative_log_count)
        self._check_loss(input, target_ids, target_prob is not None)
        if prepares:
            self.sampler.prepare(self.linear.weight, self.linear.bias, generator)
        if negative_set is None:
            sets = self.propose(queries, sampler_target, generator)
        elif negative_set.distinct:
            sets = self._add_head(
                self._draw_with_negatives(negative_set, queries, sampler_target, generator))
        else:
            sets = self.propose(queries, sampler_target, generator) + [negative_set]
        return self._loss(input, target, sets, target_prob)

    def _description(self, prepares: bool) -> str:
        """Returns the description of sampler and head that operators take.

        It is empty if the sampler or the estimator is written in Python, and in a step that
        refreshes the sampler, which runs separately so that Ctrl-C can interrupt it and a progress
        bar can follow it.
        """
        if not torch.jit.is_scripting():
            if is_registered(self.estimator):
                return ""
            if prepares and self._refresh_due():
                return ""
        description = self.sampler.describe()
        return description if description == "" or self.head.numel(
        ) == 0 else "disjoint:0:[head:1:;" + description + "]"

    def _step(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator],
              negatives: Optional[Tensor], negative_log_count: Optional[Tensor], prepares: bool,
              target_prob: Optional[Tensor], description: str) -> Tensor:
        if target_prob is not None:
            self._check_soft_targets(input, target, target_prob)
        if negatives is None and (negative_log_count is not None or self.sampler.num_samples == 0):
            self._make_negative_set(input, negatives, negative_log_count)  # raises
        if not torch.jit.is_scripting():
            self._check_negatives(negatives, negative_log_count)
        state = self.sampler.state_tensors()
        if self.head.numel() > 0:
            state = [self.head] + state
        optional_tensors: List[Optional[Tensor]] = []
        log_z = self._log_z(input)
        if (self.weight is not None or log_z is not None or target_prob is not None
                or negatives is not None):
            optional_tensors = [self.weight, log_z, target_prob, negatives, negative_log_count]
        return self._run_step(input, target, state, description, generator, self.sampler.training,
                              prepares, optional_tensors)

    def _check_loss(self, input: Tensor, target: Tensor, soft: bool) -> None:
        if not torch.jit.is_scripting():
            if is_registered(self.estimator):  # registered_loss makes its own checks
                return
        torch.ops.xsoftmax.check_sampled_loss(input, self.linear.weight, target, self.weight,
                                              self._log_z(input), soft, self._options)

    @torch.jit.unused
    def _check_negatives(self, negatives: Optional[Tensor], log_count: Optional[Tensor]) -> None:
        for name, tensor in (("negatives", negatives), ("negative_log_count", log_count)):
            if tensor is not None:
                check_tensor(self._name, name, tensor)

    def _merge_soft_targets(self, input: Tensor, target: Tensor, target_prob: Tensor) -> Tensor:
        if self.estimator != "sampled_softmax":
            raise ValueError(f"{self._name}: expected estimator=\"sampled_softmax\" with "
                             f"target_prob, got {self.estimator}")
        self._check_soft_targets(input, target, target_prob)
        return torch.ops.xsoftmax.soft_targets(input, target, target_prob, self.ignore_index,
                                               self._name)

    def _make_negative_set(self, input: Tensor, negatives: Optional[Tensor],
                           log_count: Optional[Tensor]) -> Optional[CandidateSet]:
        if negatives is None:
            if log_count is not None:
                raise ValueError(f"{self._name}: expected negatives with negative_log_count, got "
                                 "none")
            if self.sampler.num_samples == 0 and self.head.numel() == 0:
                raise ValueError(f"{self._name}: expected negatives in each call of a loss without "
                                 "a sampler, got none")
            return None
        if not torch.jit.is_scripting():
            self._check_negatives(negatives, log_count)
        ids, counts = torch.ops.xsoftmax.caller_set(negatives, log_count, input, self.head,
                                                    self.num_classes, self._name)
        return CandidateSet(ids, counts, None, log_count is None)

    def _draw_with_negatives(self, negatives: CandidateSet, queries: Tensor, target: Tensor,
                             generator: Optional[torch.Generator]) -> List[CandidateSet]:
        """Returns the sets of classes that are always scored and of the sampler's draws; their
        expected counts add up, as in a union."""
        shared = self.sampler.shared
        sampler_target = target if shared else torch.ops.xsoftmax.union_classes(
            queries, target, [negatives.ids])
        sets = [negatives] + self.sampler.sample(queries, sampler_target, generator)
        ids, log_count, target_log_count, distinct = columns_of(sets)
        negative_target_count = torch.ops.xsoftmax.always_scored_log_count(
            negatives.ids, negatives.log_count,
            target if target.dim() == 2 else target.unsqueeze(1))
        target_log_count[0] = negative_target_count.view_as(target)
        cross_counts = [
            torch.ops.xsoftmax.always_scored_log_count(negatives.ids, negatives.log_count, part)
            for part in ids[1:]
        ]
        set_numbers = [k + 1 for k in range(len(cross_counts))]
        if shared:
            cross_counts.append(self.sampler.log_count(queries, negatives.ids))
            set_numbers.append(0)
        merged_log_count, merged_target_log_count = torch.ops.xsoftmax.union_merge(
            ids, log_count, target_log_count, [int(k > 0) for k in range(len(sets))],
            len(sets) if shared else 1, cross_counts, set_numbers, target)
        proposal: List[CandidateSet] = []
        for k, candidates in enumerate(sets):
            has_target_count = target_log_count[k] is not None
            proposal.append(
                CandidateSet(candidates.ids, merged_log_count[k],
                             merged_target_log_count[k] if has_target_count else None,
                             candidates.distinct))
        return proposal

    def _add_head(self, sets: List[CandidateSet]) -> List[CandidateSet]:
        if self.head.numel() > 0:
            return [
                CandidateSet(self.head, torch.zeros_like(self.head, dtype=torch.float32), None,
                             True)
            ] + sets
        return sets

    @torch.jit.export
    def propose(self, queries: Tensor, target: Tensor,
                generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Returns the candidate sets of one step: the head, and the samples drawn by the sampler.

        Args:
            queries: [Q, D], zeros where a query does not count.
            target: int64 [Q] in [0, N), -1 where a query does not count, or [Q, T]; see
                :meth:`Sampler.sample <xsoftmax.samplers.Sampler.sample>`.
            generator: a generator on the device of `queries`. None: torch's default generator.

        Returns:
            A list of :class:`xsoftmax.samplers.CandidateSet`.

        Raises:
            ValueError, TypeError, IndexError: same as :meth:`Sampler.sample
                <xsoftmax.samplers.Sampler.sample>`.
        """
        return self._add_head(self.sampler.sample(queries, target, generator))

    def _log_z(self, input: Tensor) -> Optional[Tensor]:
        log_z = self.log_z
        if log_z is None and self.fixed_log_z != 0.0:
            return torch.full([], self.fixed_log_z, device=self.linear.weight.device)
        return log_z

    def _loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet],
              target_prob: Optional[Tensor] = None) -> Tensor:
        if not torch.jit.is_scripting():
            loss = registered_loss(self, input, target, sets)
            if loss is not None:
                return loss
        return self._candidate_loss(input, target, sets, self._log_z(input), target_prob)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.head.numel():
            text += f", head_classes={self.head.numel()}"
        if self.estimator != "sampled_softmax":
            text += f", estimator={self.estimator!r}"
        return text
