"""Losses over a class table: used like torch.nn.LinearCrossEntropyLoss, with the same constructor order and the same `.linear`."""

import math
import warnings
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor, nn

from ._checks import check_class_weights, check_count, check_reduction
from ._memory import advise_huge_pages, device_of_values, moved_table
from .samplers import ADAPTIVE, AdaptiveSampler, ComplementSampler, InBatchSampler, Sampler, UnionSampler, make_sampler

def _reduction_code(reduction: str) -> int:
    """The code that ops take."""
    if reduction == "none":
        return 0
    if reduction == "mean":
        return 1
    if reduction != "sum":
        raise ValueError(f"expected reduction to be \"mean\", \"sum\" or \"none\", got {reduction}")
    return 2


def reduced_loss(loss: Tensor, target: Tensor, weight: Optional[Tensor], reduction: str, ignore_index: int) -> Tensor:
    """The losses of queries, [Q], as torch.nn.CrossEntropyLoss puts them together; those of targets [*] that do not count are dropped."""
    counts = target.reshape(-1) != ignore_index
    share = counts.to(loss.dtype)
    if weight is not None:
        share = torch.where(counts, weight[torch.where(counts, target.reshape(-1), 0)].to(loss.dtype), 0.0)
    loss = torch.where(counts, loss, 0.0) * share
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() / share.sum() if reduction == "mean" else loss.sum()


def flat_queries(owner: str, in_features: int, input: Tensor, target: Optional[Tensor]) -> Tensor:
    """input [*, D] as [Q, D], after its shape and target's have been checked."""
    if not torch.jit.is_scripting():
        for name, tensor in (("input", input), ("target", target)):
            if not isinstance(tensor, Tensor) and (name == "input" or tensor is not None):
                raise TypeError(f"{owner}: expected {name} as a tensor, got {type(tensor).__name__}")
    if input.dim() < 1 or input.shape[-1] != in_features:
        raise ValueError(f"{owner}: expected input of shape [*, {in_features}], got {list(input.shape)}")
    if target is not None:
        if input.shape[:-1] != target.shape:
            raise ValueError(f"{owner}: expected target of shape {list(input.shape[:-1])}, input's without its last dimension, "
                             f"got {list(target.shape)}")
    return input.unsqueeze(0).flatten(0, -2)  # reshape(-1, D) knows no -1 where D = 0


def with_gradient_of(loss: Tensor, auxiliary: Optional[Tensor]) -> Tensor:
    """A loss, a scalar or [*], whose gradient has that of a scalar beside it, once; its value is left as it is."""
    return loss if auxiliary is None else loss + (auxiliary - auxiliary.detach()) / max(loss.numel(), 1)


class LinearLoss(nn.Module):
    """What every loss over a plain class table shares: the table as `.linear`, the exact loss, and prediction.

    The state dict holds `linear.weight`, `linear.bias` and, where class weights were given, `weight`: the keys of
    :class:`torch.nn.LinearCrossEntropyLoss`, so that a checkpoint of either loads into the other.
    """

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False, weight: Optional[Tensor] = None,
                 reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, device=None, dtype=None) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        check_count(name, "in_features", in_features, 0)
        check_count(name, "num_classes", num_classes, 1)
        check_class_weights(name, weight, num_classes)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{name}: expected label_smoothing in [0, 1], got {label_smoothing}")
        self.in_features = in_features
        self.num_classes = num_classes
        self.reduction = check_reduction(name, reduction)
        self.ignore_index = check_count(name, "ignore_index", ignore_index, None)
        self.label_smoothing = float(label_smoothing)
        self.linear = _make_linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **kwargs) -> "LinearLoss":
        """The loss over the classes of an existing Linear, whose parameters it shares: `loss.linear is linear`.

        Args:
            linear: its rows are the classes.
            **kwargs: the constructor's, without in_features, num_classes and bias.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_linear: expected an nn.Linear, got {type(linear).__name__}")
        # The table made by the constructor would be thrown away: on the meta device it costs nothing.
        loss = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", **kwargs)
        loss.linear = linear
        loss.to(linear.weight.device)
        return loss

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """input [*, D] as [Q, D], after its shape and target's have been checked."""
        if self.linear.weight.shape[0] != self.num_classes:
            raise ValueError(f"{self._name}: expected linear.weight with a row for each of {self.num_classes} classes, "
                             f"got shape {list(self.linear.weight.shape)}")
        return flat_queries(self._name, self.in_features, input, target)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # What a sampler kept, or a log Z, is of no use to a loss without one, and stays as it is where a checkpoint has none.
        foreign = tuple(prefix + name for name in ("sampler.", "noise.", "candidate_sampler.", "_complement.", "log_z"))
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(foreign)]
        missing_keys[:] = [key for key in missing_keys if not key.startswith(foreign)]

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """`F.cross_entropy(self.linear(input), target, ...)` without the [Q, N] logits; what `forward` gives in eval().

        Where gradients are recorded they are made together with the loss: evaluate under torch.no_grad().
        """
        loss = torch.ops.xsoftmax.linear_cross_entropy(
            self._queries(input, target), self.linear.weight, self.linear.bias, target.reshape(-1), self.weight,
            _reduction_code(self.reduction), self.ignore_index, self.label_smoothing)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """`F.log_softmax(self.linear(input), -1)`: [*, D] -> [*, N]. This one is as large as it looks."""
        return torch.log_softmax(self.linear(input), dim=-1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`self.log_prob(input).topk(k)`: (log-probabilities, class ids), both [*, k], best first, without [*, N] in memory;
        log-probabilities in float32 for 16-bit tables."""
        values, indices = torch.ops.xsoftmax.linear_topk(
            self._queries(input, None), self.linear.weight, self.linear.bias, k)
        shape = list(input.shape[:-1]) + [k]
        return values.reshape(shape), indices.reshape(shape)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """`self.log_prob(input).argmax(-1)`: the best class of each query, [*, D] -> [*]."""
        return self.topk(input, 1)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, num_classes={self.num_classes}"
        if self.reduction != "mean":
            text += f", reduction={self.reduction!r}"
        if self.ignore_index != -100:
            text += f", ignore_index={self.ignore_index}"
        if self.label_smoothing != 0.0:
            text += f", label_smoothing={self.label_smoothing}"
        return text


class LinearCrossEntropyLoss(LinearLoss):
    r"""The exact loss of a linear layer and a softmax over its outputs, without ever holding the logits.

    ``loss(input, target) == F.cross_entropy(loss.linear(input), target, weight, reduction=..., ignore_index=...,
    label_smoothing=...)``, computed over chunks of classes; gradients too.

    Args:
        in_features: D, the width of a query.
        num_classes: N.
        bias: the classes have a bias.
        weight: [N], rescales the loss of each class, as in :class:`torch.nn.CrossEntropyLoss`.
        reduction: "mean" (weighted, over targets that are not ignored), "sum" or "none".
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: in [0, 1].

    Shape: input [*, D] (float32, float64, bfloat16, float16), target [*] int64 in [0, N). Returns a scalar, or [*] for "none"; in float32
    for 16-bit inputs.

    Errors: ValueError for shapes, TypeError for dtypes, IndexError for a target out of range, naming its place.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.exact(input, target)


class Candidates(NamedTuple):
    """What one step scores beside the targets: the arguments of ``xsoftmax::sampled_softmax_loss``."""

    private_ids: Optional[Tensor]
    """int64 ``[Q, P]``."""
    private_log_count: Optional[Tensor]
    """float32 ``[Q, P]``: logs of expected counts."""
    shared_ids: Tensor
    """int64 ``[S]``, the head first."""
    shared_log_count: Tensor
    """float32 ``[S]`` or ``[Q, S]``."""
    target_log_count: Optional[Tensor]
    """float32 ``[Q]``."""
    fixed_private: int
    """How many of the first private candidates are drawn without replacement."""
    fixed_shared: int
    """How many of the first shared ones are, or are always there."""


class SampledSoftmaxLoss(LinearLoss):
    r"""Cross entropy over sampled classes in train(); the exact loss in eval(), which belongs under torch.no_grad().

    A step scores the target, the `head_classes` and `num_samples` drawn classes, and touches no other row of the table: not in the
    forward pass, and not in the gradient, which is row-sparse. With s the scores, y the target, c_j the expected count of class j
    (M q_j for M independent draws, its inclusion probability for distinct draws, 1 for a head class)::

        loss = log(e^{s_y} + sum_{j drawn, j != y} e^{s_j} / c_j) - s_y

    For independent draws the sum is renormalised to the classes other than y, times (M - c_y) / m where m draws are not y
    (MIDX paper, section 3.2).

    Args:
        in_features: D, the width of a query.
        num_classes: N.
        sampler: a :class:`xsoftmax.samplers.Sampler`, or the name of one: "uniform", "log_uniform" (classes sorted by falling
            frequency), "in_batch", "midx", "lsh", "sphere", "rff". It is found as `loss.sampler`, which is another than the one given, with an
            index yet to be built, where there is a head or the table's bias is not what it was made for.
        num_samples: draws a step (shared) or a query (private). None: 20 of a sampler that follows the class table; beside a UnionSampler, which
            has its own, or "in_batch", there is nothing to say.
        shared: one set of draws for the whole batch (one matrix product), or one for each query. None: as suits the sampler.
        estimator: "sampled_softmax", or "ranking", which lowers the target's score by its log expected count too
            (TensorFlow's form; near the softmax its gradient is the full one times about M / (M + 1), and its value is not that of the
            exact loss, not even about: see it in eval()). Beside a head a target outside it takes the place of a draw. None: "ranking" where
            all draws are private and independent and a sampler follows the class table (they are few and near the softmax, and its optimum
            is the softmax for any number of them), else "sampled_softmax". Or one that is no estimate of the softmax loss:
            "nce", "negative_sampling", "one_vs_each", "blackout", "importance", or CANE, "cane" and "cane_log_of_mean", whose candidates
            are the head, and its noise the draws (see :class:`CaneLoss`). Their formulas stand with ``xsoftmax::candidate_loss`` in ops.h;
            none of them takes label_smoothing. Or "complementary_sum": "sampled_softmax" with all draws from the classes other than the
            target, each query its own, by :class:`xsoftmax.samplers.ComplementSampler` (Botev et al., 2017).
        log_z: of "nce", by which all scores are lowered: a number, or "learned": a parameter of that name, which begins at 0.
        remove_accidental_hits: drop draws that equal the target. False with "sampled_softmax" is Eq. 1 of the MIDX paper, whose gradient
            is the full one times about 1 / (1 + p_y). "ranking", "nce" and CANE keep those among independent draws in any case: without
            them their optimum is not the softmax.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        label_smoothing: e: (1 - e) of the loss, and e of (log normaliser - mean score of all classes), that mean estimated from the target
            and the candidates with the weights above. Not beside class weights.
        head_classes: classes that are always scored: how many of the first ids, or a 1-D tensor of ids. The sampler draws from the
            rest (a sampler given as a module is replaced by `sampler.excluding(head)`).
        sparse_grad: the gradient of the table is sparse COO with a static number of rows (for xsoftmax.optim, or torch.optim.SGD, Adagrad,
            SparseAdam); False: dense.

    Shape: as :class:`LinearCrossEntropyLoss`.
    """

    def __init__(self, in_features: int, num_classes: int, *, sampler: Union[Sampler, str], num_samples: Optional[int] = None,
                 shared: Optional[bool] = None, estimator: Optional[str] = None, remove_accidental_hits: bool = True,
                 log_z: Union[float, str] = 0.0, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, label_smoothing: float = 0.0, head_classes: Union[int, Tensor] = 0, sparse_grad: bool = True, device=None,
                 dtype=None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
                         label_smoothing=label_smoothing, device=device, dtype=dtype)
        if num_samples is None and isinstance(sampler, (UnionSampler, InBatchSampler)):
            num_samples = sum(sampler.counts) if isinstance(sampler, UnionSampler) else 0
        elif num_samples is None and sampler == "in_batch":
            num_samples = 0
        elif num_samples is None and (sampler in ADAPTIVE or isinstance(sampler, AdaptiveSampler)):
            num_samples = 20
        check_count(self._name, "num_samples", num_samples, 0)
        names = [*torch.ops.xsoftmax.estimator_names(), "complementary_sum"]
        if estimator is not None and estimator not in names:
            raise ValueError(f"SampledSoftmaxLoss: expected estimator to be one of {names}, got {estimator!r}")
        automatic, estimator = estimator is None, estimator or "sampled_softmax"
        smooths = estimator == "complementary_sum" or torch.ops.xsoftmax.estimator_smooths(estimator)
        if label_smoothing != 0.0 and not smooths:
            raise ValueError(f"SampledSoftmaxLoss: expected label_smoothing=0 with estimator={estimator!r}, got {label_smoothing}")
        if weight is not None and label_smoothing != 0.0:
            raise ValueError("SampledSoftmaxLoss: expected label_smoothing=0 beside class weights: their weighted mean over all classes "
                             f"cannot be had from a sample; got {label_smoothing}")
        device = device_of_values(device)
        head = different_ids("SampledSoftmaxLoss", "head_classes", head_classes, num_classes, device)
        self.register_buffer("head", head, persistent=False)
        exclude = None if head.numel() == 0 else (head_classes if isinstance(head_classes, int) else head)
        if isinstance(sampler, str):
            kwargs = {} if exclude is None else {"exclude": exclude}
            if sampler == "in_batch" and exclude is not None:
                raise TypeError("SampledSoftmaxLoss: expected head_classes=0 with sampler=\"in_batch\", whose candidates are the targets, "
                                f"got {head.numel()} classes")
            if sampler in ADAPTIVE:
                kwargs |= {"dim": in_features, "bias": bias}
            sampler = make_sampler(sampler, num_classes, **kwargs).to(device)
        elif not isinstance(sampler, Sampler):
            raise TypeError(f"SampledSoftmaxLoss: expected sampler to be a Sampler or a name, got {type(sampler).__name__}")
        elif exclude is not None:
            sampler = sampler.excluding(exclude)
        if sampler.num_classes != num_classes:
            raise ValueError(f"SampledSoftmaxLoss: expected a sampler of {num_classes} classes, got one of {sampler.num_classes}")
        self.sampler = sampler.for_table(in_features, bias)
        self.num_samples = num_samples
        against = estimator != "complementary_sum" and torch.ops.xsoftmax.estimator_has_noise(estimator)
        own = estimator == "complementary_sum" or (against and shared is None)
        self.shared = not own and bool(sampler.shared_by_default if shared is None else shared)
        if shared and isinstance(sampler, UnionSampler):
            raise ValueError("SampledSoftmaxLoss: expected shared=None or False beside a UnionSampler, whose samplers each draw as suits them, "
                             "got True")
        distinct, independent = self.sampler.draws_by_kind(num_samples, self.shared)
        self._adaptive = any(isinstance(part, AdaptiveSampler) for part in self.sampler.modules())
        if automatic and self._adaptive and not self.shared and distinct == 0:
            estimator = "ranking"
        if against and (head.numel() + distinct == 0 or independent == 0):
            raise ValueError(f"SampledSoftmaxLoss: expected candidates, the head or distinct draws, and independent draws as noise with "
                             f"estimator={estimator!r}, got {head.numel()} classes, {distinct} distinct draws and {independent} independent ones: "
                             "see CaneLoss")
        self.sampler.check_num_samples(num_samples, self.shared)
        self.estimator = estimator
        self._complement: Optional[ComplementSampler] = None
        if estimator == "complementary_sum":
            if shared or head.numel() > 0 or label_smoothing != 0.0:
                raise ValueError("SampledSoftmaxLoss: expected private draws, head_classes=0 and label_smoothing=0 beside "
                                 f"estimator=\"complementary_sum\", got shared={shared}, {head.numel()} classes and {label_smoothing}")
            self.estimator = "sampled_softmax"  # of draws among which there is no target
            self._complement = ComplementSampler(self.sampler)
            self.register_state_dict_post_hook(_drop_complement)
            self.register_load_state_dict_pre_hook(_alias_complement)
        self._needs_target_count = torch.ops.xsoftmax.estimator_needs_target_count(self.estimator)
        self._init_log_z(log_z, device)
        self.remove_accidental_hits = remove_accidental_hits
        self.sparse_grad = sparse_grad
        if sampler.proposes_targets and not (self.shared and remove_accidental_hits):
            raise ValueError(f"SampledSoftmaxLoss: expected shared=True and remove_accidental_hits=True for {type(sampler).__name__}, "
                             f"got {self.shared} and {remove_accidental_hits}")

    def _init_log_z(self, log_z: Union[float, str], device) -> None:
        learned = log_z == "learned"
        if not learned and (isinstance(log_z, bool) or not isinstance(log_z, (int, float)) or not math.isfinite(log_z)):
            raise ValueError(f"SampledSoftmaxLoss: expected log_z as a finite number or \"learned\", got {log_z!r}")
        if log_z != 0 and self.estimator != "nce":
            raise ValueError(f"SampledSoftmaxLoss: expected log_z=0 with estimator={self.estimator!r}, which knows no log Z, got {log_z!r}")
        self.fixed_log_z = 0.0 if learned else float(log_z)
        self.register_parameter("log_z", nn.Parameter(torch.zeros((), device=device)) if learned else None)

    def _apply(self, fn, recurse=True):
        head = self.head
        super()._apply(fn, recurse)
        self.head = moved_table(self._name, head, self.head)
        return self

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        weight, bias = self.linear.weight, self.linear.bias
        self.sampler.prepare(weight, bias, generator)
        queries = self._drawn_for(input, target)
        counted = self._counted(target)
        drawn = self.candidates(queries, counted, generator)
        self._note(drawn, counted)
        loss = self._loss(input, target, drawn)
        if self.sampler.learns:
            loss = with_gradient_of(loss, self.sampler.auxiliary_loss(queries, weight, bias, generator))
        return loss

    @torch.jit.export
    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The sampled loss, also in eval(), from the sampler as it is: no refresh, and nothing counts as a step."""
        return self._loss(input, target, self.candidates(self._drawn_for(input, target), self._counted(target), generator))

    @torch.jit.export
    def candidates(self, queries: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Candidates:
        """One draw: the head and what the sampler proposes, for ``queries [Q, D]`` and ``target [Q]``, all of them valid ids."""
        complement = self._complement
        if complement is not None:
            drawn = complement.sample(queries.detach(), self.num_samples, target.unsqueeze(1), target, generator)
            return Candidates(drawn.ids, drawn.log_count, self.head, torch.zeros([0], device=self.head.device), None, 0, 0)
        proposal = self.sampler.sample(queries.detach(), self.num_samples, self.shared, target, generator)
        private_ids: Optional[Tensor] = None
        private_log_count: Optional[Tensor] = None
        shared_ids = self.head
        shared_log_count = torch.zeros(self.head.shape, dtype=proposal.log_count.dtype, device=self.head.device)
        fixed_private = 0
        beside, beside_log_count, beside_distinct = proposal.shared_ids, proposal.shared_log_count, proposal.shared_distinct
        if self.shared:
            beside, beside_log_count = proposal.ids, proposal.log_count
            # The batch's targets hold each query's own: the estimators that keep hits among independent draws must not see it twice.
            apart = proposal.distinct or (self.sampler.proposes_targets and self._needs_target_count)
            beside_distinct = proposal.ids.shape[0] if apart else 0
        else:
            private_ids, private_log_count = proposal.ids, proposal.log_count
            fixed_private = proposal.ids.shape[1] if proposal.distinct else 0
        if beside is not None and beside_log_count is not None:
            if beside_log_count.dim() == 2:
                shared_log_count = shared_log_count.expand(beside_log_count.shape[0], self.head.shape[0])
            shared_ids = torch.cat([shared_ids, beside])
            shared_log_count = torch.cat([shared_log_count, beside_log_count], -1)
        target_log_count = proposal.target_log_count
        if not self._needs_target_count:
            if proposal.target_log_draws is not None:
                target_log_count = proposal.target_log_draws
            if not self.sampler.renormalises:
                target_log_count = None
        return Candidates(private_ids, private_log_count, shared_ids, shared_log_count, target_log_count, fixed_private,
                          self.head.shape[0] + beside_distinct)

    def _drawn_for(self, input: Tensor, target: Tensor) -> Tensor:
        """The queries as a sampler takes them, [Q, D]: ignored ones, which may hold anything, as zeros."""
        queries = self._queries(input, target).detach()
        return torch.where((target != self.ignore_index).reshape(-1, 1), queries, 0.0) if self._adaptive else queries

    def _counted(self, target: Tensor) -> Tensor:
        """The targets as a sampler takes them, [Q]."""
        ignored = -1 if self.sampler.proposes_targets else 0
        return torch.where(target == self.ignore_index, ignored, target).reshape(-1)

    def _note(self, drawn: Candidates, target: Tensor) -> None:
        private_ids = drawn.private_ids
        if private_ids is not None:
            self.sampler.note(private_ids)
        self.sampler.note(drawn.shared_ids)
        self.sampler.note(target)

    def _loss(self, input: Tensor, target: Tensor, drawn: Candidates) -> Tensor:
        private_ids, log_z = drawn.private_ids, self.log_z
        if log_z is None and self.fixed_log_z == 0.0:
            return torch.ops.xsoftmax.sampled_softmax_loss(
                input, self.linear.weight, self.linear.bias, target, private_ids, drawn.shared_ids, drawn.private_log_count,
                drawn.shared_log_count, drawn.target_log_count, self.weight, self.estimator, self.remove_accidental_hits,
                drawn.fixed_private, drawn.fixed_shared, _reduction_code(self.reduction), self.ignore_index, self.label_smoothing,
                self.sparse_grad)
        known = torch.where(target == self.ignore_index, 0, target).reshape(-1)
        own = known.unsqueeze(1)
        if private_ids is not None:
            own = torch.cat([own, private_ids], 1)
        queries = torch.where((target != self.ignore_index).reshape(-1, 1), self._queries(input, target), 0.0)
        scores = torch.ops.xsoftmax.candidate_scores(queries, self.linear.weight, self.linear.bias, own,
                                                     drawn.shared_ids, self.sparse_grad)
        scores = scores - (self.fixed_log_z if log_z is None else log_z)
        loss = torch.ops.xsoftmax.candidate_loss(scores, known, private_ids, drawn.shared_ids, drawn.private_log_count,
                                                 drawn.shared_log_count, drawn.target_log_count, self.estimator, self.remove_accidental_hits,
                                                 drawn.fixed_private, drawn.fixed_shared, self.label_smoothing)
        return reduced_loss(loss, target, self.weight, self.reduction, self.ignore_index)

    def extra_repr(self) -> str:
        text = super().extra_repr() + f", num_samples={self.num_samples}, shared={self.shared}"
        if self.head.numel():
            text += f", head_classes={self.head.numel()}"
        if self.estimator != "sampled_softmax":
            text += f", estimator={self.estimator!r}"
        return text


def _make_linear(in_features: int, num_classes: int, bias: bool, device, dtype) -> nn.Linear:
    """nn.Linear on memory of our choice."""
    device = torch.get_default_device() if device is None else torch.device(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # a tree of one class has no edges
        linear = nn.Linear(in_features, num_classes, bias=bias, device="meta", dtype=dtype)
        if device.type != "meta":
            linear.to_empty(device=device)
            advise_huge_pages(linear.weight.detach())
            linear.reset_parameters()
    return linear


def different_ids(owner: str, argument: str, ids: Union[int, Tensor], num_classes: int, device) -> Tensor:
    """A set of classes, the first so many or those of a 1-D int64 tensor: sorted, int64; checked."""
    if isinstance(ids, bool) or not isinstance(ids, (int, Tensor)):
        raise TypeError(f"{owner}: expected {argument} to be a number or a 1-D int64 tensor of ids, got {type(ids).__name__}")
    if isinstance(ids, int):
        if not 0 <= ids <= num_classes:
            raise ValueError(f"{owner}: expected {argument} in [0, {num_classes}], got {ids}")
        return torch.arange(ids, device=device)
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise TypeError(f"{owner}: expected {argument} to be a number or a 1-D int64 tensor of ids, got {ids.dtype} of shape {list(ids.shape)}")
    ordered = ids.to(device).sort().values
    if ordered.numel() and (int(ordered[0]) < 0 or int(ordered[-1]) >= num_classes):
        raise IndexError(f"{owner}: expected {argument} in [0, {num_classes}), got {int(ordered[0])} .. {int(ordered[-1])}")
    if bool((ordered.diff() == 0).any()):
        raise ValueError(f"{owner}: expected {argument} without repeats")
    return ordered


def _drop_complement(module: nn.Module, state_dict, prefix: str, local_metadata) -> None:
    """A state-dict hook: what draws outside the targets is the loss's sampler, which is there under its own name."""
    for key in [key for key in state_dict if key.startswith(prefix + "_complement.")]:
        del state_dict[key]


def _alias_complement(module: nn.Module, state_dict, prefix: str, *_) -> None:
    """Its counterpart before loading."""
    own = prefix + "sampler."
    for key in [key for key in state_dict if key.startswith(own)]:
        state_dict[f"{prefix}_complement.sampler.{key[len(own):]}"] = state_dict[key]
