"""Losses over a class table: used like torch.nn.LinearCrossEntropyLoss, with the same constructor order and the same `.linear`."""

import math
import numbers
import warnings
from typing import List, Optional, Union

import torch
from torch import Tensor, nn

from ._checks import check_class_weights, check_count, check_reduction
from ._memory import advise_huge_pages, device_of_values, moved_table
from ._options import option_text
from .optim.settle import settle
from .estimators import check_estimator, has_noise, registered_loss
from .samplers import CandidateSet, ComplementSampler, FixedSampler, Sampler, UnionSampler, columns_of, make_sampler

_REDUCTIONS = ("none", "mean", "sum")  # by at::Reduction
_OPTIONS = ("estimator", "remove_accidental_hits", "label_smoothing", "reduction", "ignore_index", "sparse_grad")  # of sampled_softmax_loss


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


def settle_before(module: nn.Module, *_) -> None:
    """A state-dict hook: rows that a row optimizer owes steps to are brought up to date first."""
    module.settle()


def refuse_data_parallel(owner: str, table: Tensor) -> None:
    """DistributedDataParallel cannot reduce a row-sparse gradient of ours, and dies in the backward pass."""
    active = nn.parallel.DistributedDataParallel._active_ddp_module if torch.distributed.is_available() else None
    if active is not None and any(parameter is table for parameter in active._module_parameters):
        raise RuntimeError(f"{owner}: expected sparse_grad=False under DistributedDataParallel, whose reducer does not know the row-sparse "
                           "gradient of a class table, got sparse_grad=True")


class LinearLoss(nn.Module):
    """What every loss over a plain class table shares: the table as `.linear`, the exact loss, and prediction.

    The state dict holds `linear.weight`, `linear.bias` and, where class weights were given, `weight`: the keys of
    :class:`torch.nn.LinearCrossEntropyLoss`, so that a checkpoint of either loads into the other.
    """

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False, weight: Optional[Tensor] = None,
                 reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, device=None, dtype=None) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        self.in_features = check_count(name, "in_features", in_features, 0)
        self.num_classes = check_count(name, "num_classes", num_classes, 1)
        check_class_weights(name, weight, num_classes)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{name}: expected label_smoothing in [0, 1], got {label_smoothing}")
        self.reduction = reduction
        self.ignore_index = check_count(name, "ignore_index", ignore_index, None)
        self.label_smoothing = float(label_smoothing)
        self.linear = make_linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)
        self.register_state_dict_pre_hook(settle_before)

    def __setattr__(self, name: str, value) -> None:
        if name == "reduction":
            super().__setattr__("_reduction", _REDUCTIONS.index(check_reduction(self._name, value)))
        super().__setattr__(name, value)

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

    @torch.jit.export
    def settle(self) -> None:
        """Brings the table up to date: applies the steps that a row optimizer owes its rows. What reads all of it, `eval()`, `exact`, `topk`,
        `predict`, `log_prob` and `state_dict`, does so by itself."""
        settle(self.linear.weight)
        settle(self.linear.bias)

    def train(self, mode: bool = True) -> "LinearLoss":
        if not mode:
            self.settle()
        return super().train(mode)

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """input [*, D] as [Q, D], checked, and the table as well."""
        if self.linear.weight.shape[0] != self.num_classes:
            raise ValueError(f"{self._name}: expected linear.weight with a row for each of {self.num_classes} classes, "
                             f"got shape {list(self.linear.weight.shape)}")
        return flat_queries(self._name, self.in_features, input, target)

    def _table_queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """The same for what reads the whole table."""
        queries = self._queries(input, target)
        self.settle()
        return queries

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        self.settle()  # steps that are owed to the old table must not move the new one
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # What a sampler kept, or a log Z, is of no use to a loss without one, and stays as it is where a checkpoint has none.
        foreign = tuple(prefix + name for name in ("sampler.", "noise.", "candidate_sampler.", "log_z"))
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(foreign)]
        missing_keys[:] = [key for key in missing_keys if not key.startswith(foreign)]

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """`F.cross_entropy(self.linear(input), target, ...)` without the [Q, N] logits; what `forward` gives in eval().

        Where gradients are recorded they are made together with the loss: evaluate under torch.no_grad().
        """
        loss = torch.ops.xsoftmax.linear_cross_entropy(
            self._table_queries(input, target), self.linear.weight, self.linear.bias, target.reshape(-1), self.weight,
            self._reduction, self.ignore_index, self.label_smoothing)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """`F.log_softmax(self.linear(input), -1)`: [*, D] -> [*, N]. This one is as large as it looks."""
        self.settle()
        return torch.log_softmax(self.linear(input), dim=-1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`self.log_prob(input).topk(k)`: (log-probabilities, class ids), both [*, k], best first, without [*, N] in memory;
        log-probabilities in float32 for 16-bit tables."""
        values, indices = torch.ops.xsoftmax.linear_topk(
            self._table_queries(input, None), self.linear.weight, self.linear.bias, k)
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


class CandidateLoss(LinearLoss):
    """What losses share that score candidates in train() and are exact in eval()."""

    def _init_options(self, estimator: str, remove_accidental_hits: bool, sparse_grad: bool) -> None:
        self.estimator = estimator
        self.remove_accidental_hits = remove_accidental_hits
        self.sparse_grad = sparse_grad
        self._options = self._option_text()

    def _option_text(self) -> str:
        return option_text(**{name: getattr(self, name) for name in _OPTIONS})

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name in _OPTIONS and "_options" in self.__dict__:
            self._options = self._option_text()

    def _counted(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What samplers are shown: queries [Q, D] and targets [Q], zeros and -1 where a target is ignored."""
        self._queries(input, target)
        if not torch.jit.is_scripting():
            if self.sparse_grad and not torch.compiler.is_compiling():
                refuse_data_parallel(self._name, self.linear.weight)
        return torch.ops.xsoftmax.counted_queries(input, target, self.linear.weight, self.ignore_index)

    def _candidate_loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet], log_z: Optional[Tensor]) -> Tensor:
        ids, log_count, target_log_count, distinct = columns_of(sets)
        return torch.ops.xsoftmax.sampled_softmax_loss(input, self.linear.weight, self.linear.bias, target, ids, log_count, target_log_count,
                                                       distinct, self.weight, log_z, self._options)


class SampledSoftmaxLoss(CandidateLoss):
    r"""Cross entropy over sampled classes in train(); the exact loss in eval(), which belongs under torch.no_grad().

    A step scores the target, the `head_classes` and the drawn classes, and touches no other row of the table: not in the
    forward pass, and not in the gradient, which is row-sparse. With s the scores, y the target, c_j the expected count of class j
    (M q_j for M independent draws, its inclusion probability for distinct draws, 1 for a head class)::

        loss = log(e^{s_y} + sum_{j drawn, j != y} e^{s_j} / c_j) - s_y

    For independent draws the sum is renormalised to the classes other than y, times (M - c_y) / m where m draws are not y
    (MIDX paper, section 3.2).

    Args:
        in_features: D, the width of a query.
        num_classes: N.
        sampler: a :class:`xsoftmax.samplers.Sampler`, which says how many classes it draws, for the batch or for each query; or the name of
            one: "uniform", "log_uniform" (classes sorted by falling frequency), "in_batch", "midx", "lsh", "sphere", "rff", or one that
            :func:`xsoftmax.samplers.register` was given. It is found as `loss.sampler`, which beside a head is another than the one given. It
            belongs to this loss.
        num_samples: draws of a sampler that is named: for the batch (shared) or for each query. None: as many as it draws by default.
        shared: of a sampler that is named: one set of draws for the whole batch (one matrix product), or one for each query. None: as suits it.
        estimator: "sampled_softmax", or "ranking", which lowers the target's score by its log expected count too
            (TensorFlow's form; near the softmax its gradient is the full one times about M / (M + 1), and its value is not that of the
            exact loss, not even about: see it in eval()). Beside a head a target outside it takes the place of a draw. None: what suits the
            sampler, "ranking" where all draws are private and independent and follow the class table (they are few and near the softmax, and
            its optimum is the softmax for any number of them), else "sampled_softmax". Or one that is no estimate of the softmax loss:
            "nce", "negative_sampling", "one_vs_each", "blackout", "importance", or CANE, "cane" and "cane_log_of_mean", whose candidates
            are the head and distinct draws, and its noise the independent draws (see :class:`CaneLoss`). Their formulas stand with
            ``xsoftmax::candidate_loss`` in ops.h; none of them takes label_smoothing. Or "complementary_sum": "sampled_softmax" with all
            draws from the classes other than the target, each query its own, by :class:`xsoftmax.samplers.ComplementSampler` (Botev et
            al., 2017). Or one that :func:`xsoftmax.register_estimator` was given.
        log_z: of "nce", by which all scores are lowered: a number, or "learned": a parameter of that name, which begins at 0.
        remove_accidental_hits: drop draws that equal the target. False with "sampled_softmax" is Eq. 1 of the MIDX paper, whose gradient
            is the full one times about 1 / (1 + p_y). "ranking", "nce" and CANE keep those among independent draws in any case: without
            them their optimum is not the softmax.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        label_smoothing: e: (1 - e) of the loss, and e of (log normaliser - mean score of all classes), that mean estimated from the target
            and the candidates with the weights above. Not beside class weights.
        head_classes: classes that are always scored: how many of the first ids, or a 1-D tensor of ids. The sampler draws from the
            others, or, where it cannot leave classes out, the counts add up.
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
        name = self._name
        outside = estimator == "complementary_sum"
        if not outside and estimator is not None:
            check_estimator(name, estimator, label_smoothing, more=("complementary_sum",))
        if weight is not None and label_smoothing != 0.0:
            raise ValueError(f"{name}: expected label_smoothing=0 beside class weights: their weighted mean over all classes "
                             f"cannot be had from a sample; got {label_smoothing}")
        device = device_of_values(device)
        head = different_ids(name, "head_classes", head_classes, num_classes, device)
        self.register_buffer("head", head, persistent=False)
        if outside and (shared or head.numel() > 0 or label_smoothing != 0.0):
            raise ValueError(f"{name}: expected private draws, head_classes=0 and label_smoothing=0 beside "
                             f"estimator=\"complementary_sum\", got shared={shared}, {head.numel()} classes and {label_smoothing}")
        if isinstance(sampler, str) and outside:
            sampler = noise_outside(name, sampler, 20 if num_samples is None else num_samples, num_classes, in_features, bias, device)
        elif isinstance(sampler, str):
            if shared is None and estimator is not None and has_noise(estimator):
                shared = False  # draws that stand for what others leave out are each query's
            options = {} if shared is None else {"shared": shared}
            sampler = make_sampler(sampler, num_classes, num_samples, dim=in_features, bias=bias, **options).to(device)
        elif not isinstance(sampler, Sampler):
            raise TypeError(f"{name}: expected sampler to be a Sampler or a name, got {type(sampler).__name__}")
        elif num_samples is not None or shared is not None:
            raise ValueError(f"{name}: expected num_samples and shared beside the name of a sampler, since a {type(sampler).__name__} says itself "
                             f"how it draws, got {num_samples} and {shared}")
        if sampler.num_classes != num_classes:
            raise ValueError(f"{name}: expected a sampler of {num_classes} classes, got one of {sampler.num_classes}")
        if sampler.num_samples == 0 and head.numel() == 0:
            raise ValueError(f"{name}: expected candidates to learn from, got num_samples=0 and head_classes=0")
        estimator = "sampled_softmax" if outside else sampler.default_estimator if estimator is None else estimator
        check_estimator(name, estimator, label_smoothing)
        self._init_options(estimator, remove_accidental_hits, sparse_grad)
        self._init_log_z(log_z, device)
        if outside:  # from here on the sampler is claimed: nothing but that may fail
            sampler = sampler.outside_target()
        elif head.numel() > 0:
            left = sampler.excluding(head)
            if left is None:
                left, self.head = UnionSampler(FixedSampler(num_classes, head), sampler), head[:0]
            sampler = left
        sampler._claim(name)
        self.sampler = sampler

    def _init_log_z(self, log_z: Union[float, str], device) -> None:
        learned = isinstance(log_z, str) and log_z == "learned"
        if not learned and (isinstance(log_z, bool) or not isinstance(log_z, numbers.Real) or not math.isfinite(log_z)):
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
        queries, counted = self._counted(input, target)
        self.sampler.prepare(self.linear.weight, self.linear.bias, generator)
        return self._loss(input, target, self.propose(queries, counted, generator))

    @torch.jit.export
    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        """The sampled loss, also in eval(), from the sampler as it is: no refresh, and nothing counts as a step."""
        queries, counted = self._counted(input, target)
        return self._loss(input, target, self.propose(queries, counted, generator))

    @torch.jit.export
    def propose(self, queries: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """One draw: the head and what the sampler proposes, for ``queries [Q, D]`` and ``target [Q]`` as a sampler takes them."""
        sets = self.sampler.sample(queries, target, generator)
        if self.head.numel() > 0:
            sets = [CandidateSet(self.head, torch.zeros_like(self.head, dtype=torch.float32), None, True)] + sets
        return sets

    def _loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet]) -> Tensor:
        log_z: Optional[Tensor] = None
        learned = self.log_z
        if learned is not None:
            log_z = learned
        elif self.fixed_log_z != 0.0:
            log_z = torch.full([], self.fixed_log_z, device=input.device)
        if not torch.jit.is_scripting():
            loss = registered_loss(self, input, target, sets)
            if loss is not None:
                return loss
        return self._candidate_loss(input, target, sets, log_z)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.head.numel():
            text += f", head_classes={self.head.numel()}"
        if self.estimator != "sampled_softmax":
            text += f", estimator={self.estimator!r}"
        return text


def make_linear(in_features: int, num_classes: int, bias: bool, device, dtype) -> nn.Linear:
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
    if not isinstance(ids, Tensor):
        count = check_count(owner, argument, ids, 0)
        if count > num_classes:
            raise ValueError(f"{owner}: expected {argument} in [0, {num_classes}], got {count}")
        return torch.arange(count, device=device)
    return torch.ops.xsoftmax.different_ids(ids.to(device), num_classes, owner, argument)


def noise_outside(owner: str, noise: Union[Sampler, str], num_noises: int, num_classes: int, dim: int, bias: bool, device,
                  candidates: Optional[Tensor] = None, follows_table: bool = True) -> ComplementSampler:
    """Draws from outside a set for each query, by what users give.

    Args:
        noise: a sampler of private independent draws, or its name, for a class table of width dim; each noise then has up to four tries.
        candidates: where the set is always the same.
        follows_table: False where there is no class table that a sampler could follow.
    """
    if noise == "uniform":
        return ComplementSampler(None, num_noises, num_classes=num_classes).to(device)
    if isinstance(noise, str):
        noise = make_sampler(noise, num_classes, 4 * max(num_noises, 1), dim=dim, bias=bias, shared=False).to(device)
    if not isinstance(noise, Sampler):
        raise TypeError(f"{owner}: expected noise_sampler to be a Sampler or a name, got {type(noise).__name__}")
    if noise.num_classes != num_classes:
        raise ValueError(f"{owner}: expected a noise_sampler of {num_classes} classes, got one of {noise.num_classes}")
    if not follows_table and noise.follows_table:
        raise ValueError(f"{owner}: expected a noise_sampler that follows no class table, which a tree has none of, got {type(noise).__name__}")
    inside = torch.zeros(0, dtype=torch.int64) if candidates is None or candidates.is_meta else candidates.cpu()
    if 0 < inside.numel() < num_classes:
        noise = noise.excluding(inside) or noise  # whose draws then are all outside
    # A class that is neither a candidate nor ever drawn would learn nothing of how it compares with the others.
    count = noise.log_count(torch.zeros(1, dim, device=device), torch.arange(num_classes, device=device)).reshape(-1)
    never = count.isneginf().nonzero().squeeze(1).cpu()
    never = never[~torch.isin(never, inside)]
    if never.numel() > 0:
        raise ValueError(f"{owner}: expected a noise_sampler that draws every class outside the candidates, got one that never draws "
                         f"{never.numel()} of them, such as {int(never[0])}")
    return ComplementSampler(noise, num_noises)
