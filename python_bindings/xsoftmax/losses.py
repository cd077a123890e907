"""Losses over a class table: used like torch.nn.LinearCrossEntropyLoss, with the same constructor order and the same `.linear`."""

import math
import numbers
from typing import Any, Callable, Dict, Iterable, List, Optional, Type, TypeVar, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from . import retrieval
from ._checks import check_bool, check_count
from ._memory import device_of_values, moved_table
from ._resize import resize_classes
from ._table import TableModule, flat_queries, make_linear
from .estimators import check_estimator, has_noise, registered_loss
from .samplers import CandidateSet, FixedSampler, Sampler, UnionSampler, columns_of, make_sampler
from .samplers.complement import noise_outside

Loss = TypeVar("Loss", bound="LinearLoss")


class LinearLoss(TableModule):
    """Base of losses over a plain class table: the table as `.linear`, the exact loss, and prediction.

    The state dict holds `linear.weight`, `linear.bias` and, where class weights were given, `weight`: the keys of
    :class:`torch.nn.LinearCrossEntropyLoss`, whose checkpoints load here, and the other way round (with strict=False where a sampler keeps state).
    """

    # What a sampler kept, or a log Z, is of no use to a loss without one, and stays as it is where a checkpoint has none.
    _optional_state = ("sampler.", "noise.", "candidate_sampler.", "log_z")

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False, weight: Optional[Tensor] = None,
                 reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, positives: str = "mean", device: Device = None,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        self.positives = positives
        self._init_table(in_features, num_classes, reduction=reduction, weight=weight, ignore_index=ignore_index)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{self._name}: expected label_smoothing in [0, 1], got {label_smoothing}")
        self.label_smoothing = float(label_smoothing)
        if positives not in ("mean", "sum"):
            raise ValueError(f"{self._name}: expected positives to be \"mean\" or \"sum\", got {positives!r}")
        self.linear = make_linear(self.in_features, self.num_classes, bias, device, dtype)

    @classmethod
    def from_linear(cls: Type[Loss], linear: nn.Linear, **kwargs: Any) -> Loss:
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

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.linear.weight, self.linear.bias]
        return tables

    def resize_classes(self, num_classes: int, *, weight: Optional[Tensor] = None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Gives the loss another number of classes, in place: classes come behind the others, and those past the end go.

        The parameters of ``linear`` stay the same objects, so optimizers and modules that share them go on. The rows of the first ``min(N, num_classes)``
        classes and what optimizers keep for them stay; new ones begin as ``nn.Linear.reset_parameters()`` makes them (uniform in ``1 / sqrt(D)``, whatever the
        number of classes is, by torch's default generator), and as before their first step. An error changes nothing, but where there is no memory for a
        sampler: then the tables may be resized, and the loss refuses them until this is called again.

        A call costs the new rows, averaged over many: the memory of a table grows by quarters, and the first call copies the table. ``state_dict()``,
        ``torch.save``, pickle and deepcopy hold the rows alone. Where a table is copied, what shared its memory without being the parameter (``.data``,
        ``detach()``, a view, numpy, a mapped file, shared memory, a CUDA graph) keeps the old one.

        - Row optimizers (:mod:`xsoftmax.optim`) that have stepped the parameters are found, whoever holds them; what rows owe stays owed, or is made up.
        - Optimizers of ``torch.optim`` are not: give them as ``optimizers``. One that was not given, and has state, raises at its next step:
          call this again with it.
        - Samplers follow (:meth:`Sampler.resize <xsoftmax.samplers.Sampler.resize>`): expected counts stay exact, what is gone is never drawn. New classes cost
          themselves alone, averaged over many: those of a static law have their weight at once; an index that follows the table knows their places, and
          draws them evenly until it is next laid out (:meth:`AdaptiveSampler.plan_growth <xsoftmax.samplers.adaptive.AdaptiveSampler.plan_growth>`). O(N) a
          call are the tables of a static law and an index where other classes go than those that have come since the last layout, and where classes come an
          index of distinct draws.
        - ``.grad`` of the parameters, which is of the former size, becomes None: call this after ``step()``. A backward pass of an earlier forward pass is
          refused. The number that the loss has already changes neither.
        - ``num_embeddings`` of an nn.Embedding that is tied to ``linear.weight`` is not known here: set it.
        - A scripted loss keeps its number of classes and says so; wrap the model in DistributedDataParallel anew.

        Args:
            num_classes: at least 1, and above the head classes and the candidates that the loss was given.
            weight: class weights [num_classes - N] of new classes, where the loss has some. None: 1.
            optimizers: of ``torch.optim``: SGD, Adagrad, Adadelta, RMSprop and the Adams.

        Raises:
            ValueError: a class that is always scored would be gone; too few classes for a sampler's distinct draws; a weight of another shape.
            TypeError: a parametrized table, a sampler that does not define ``plan_resize``, another optimizer.
            RuntimeError: a table that is split or replicated over ranks.
        """
        resize_classes(self, num_classes, weight, optimizers)

    def _samplers(self) -> List[Sampler]:
        """Those that resize with the table."""
        return []

    def _fixed_ids(self) -> Dict[str, Tensor]:
        """Classes that must stay, by the argument that named them."""
        return {}

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        if self.linear.weight.shape[0] != self.num_classes:
            raise ValueError(f"{self._name}: expected linear.weight with a row for each of {self.num_classes} classes, "
                             f"got shape {list(self.linear.weight.shape)}")
        return flat_queries(self._name, self.in_features, input, target, several=True)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        """`F.cross_entropy(self.linear(input), target, ...)` without the [Q, N] logits; what `forward` gives in eval().

        Where gradients are recorded they are made together with the loss: evaluate under torch.no_grad(). Of several positives, target [*, T],
        see :class:`LinearCrossEntropyLoss`.
        """
        if self._given(target).dim() == input.dim():
            return self._exact_of_several(input, target)
        loss = torch.ops.xsoftmax.linear_cross_entropy(
            self._table_queries(input, target), self.linear.weight, self.linear.bias, target.reshape(-1), self.weight,
            ["none", "mean", "sum"].index(self.reduction), self.ignore_index, self.label_smoothing)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def _exact_of_several(self, input: Tensor, target: Tensor) -> Tensor:
        self._table_queries(input, target)
        if self.label_smoothing != 0.0:
            raise ValueError(f"{self._name}: expected label_smoothing=0 with several positives of a query, got {self.label_smoothing}")
        options = "reduction=" + self.reduction + ",ignore_index=" + str(self.ignore_index) + ",positives=" + self.positives
        return torch.ops.xsoftmax.linear_positives_loss(input, self.linear.weight, self.linear.bias, target, self.weight, options)

    @torch.jit.export
    def log_prob(self, input: Tensor) -> Tensor:
        """`F.log_softmax(self.linear(input), -1)`: [*, D] -> [*, N]. This one is as large as it looks."""
        self._table_queries(input, None)
        return torch.log_softmax(self.linear(input), dim=-1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, index: Optional[str] = None, recall: Optional[float] = None,
             max_cells: Optional[int] = None, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """`self.log_prob(input).topk(k)`: (log-probabilities, class ids), both [*, k], best first, without [*, N] in memory;
        log-probabilities in float32 for 16-bit tables.

        With index="midx", see :meth:`search`, whose scores and ids it gives: not log-probabilities, since their normaliser takes all classes.

        exclude: [*, E], int64: the ids that each query does not want, such as items already seen, in any order; -1 for none. The best k of all others come
        back, exactly; log-probabilities stay those among all classes. -inf and -1 behind the last of fewer than k."""
        k = self._best(k)
        if index is not None or recall is not None or max_cells is not None:
            if torch.jit.is_scripting():
                raise ValueError(f"{self._name}: expected topk without index in TorchScript: torch.ops.xsoftmax.search_topk takes a SearchIndex's tensors")
            else:
                found = retrieval.search(self, input, k, index, recall, max_cells, exclude)
                return found.scores, found.ids
        values, indices = torch.ops.xsoftmax.linear_topk(
            self._table_queries(input, None), self.linear.weight, self.linear.bias, self._with_excluded(k, input, exclude))
        return self._without_excluded(values, indices, k, input, exclude)

    def search(self, input: Tensor, k: int, *, index: str = "midx", recall: Optional[float] = None,
               max_cells: Optional[int] = None, exclude: Optional[Tensor] = None) -> retrieval.SearchResult:
        """`self.linear(input).topk(k)` without most of the classes: (scores, ids, cells_read, certified); equal scores: the lower id first.

        Classes stand in cells, a copy of the table in 8 bits bounds the scores of a cell and of its classes, and classes that may be among the best are
        scored from the table. The index is that of :meth:`search_index`; where the table has changed since, it is made anew and knows neither
        queries nor codewords given. Writes that no version counts go unseen, by ``.data``, numpy or to tables made in ``torch.inference_mode()``: call
        :meth:`search_index` then. A table on CPU, of finite numbers below 2^100; no gradient.

        Args:
            input: [*, D], in the dtype of the table. A query with a NaN or an infinity has scores of NaN at the first classes, and is not certified.
            k: in [0, N].
            index: "midx".
            recall: none: certified, the k best of all classes, exactly. In (0, 1): cells are read in the order of how likely they hold one of the
                best, as many as made 256 queries find this share of their best k: a target for queries like them, no guarantee for each. They are those that
                search_index was given, or the first of the calls, which until then are certified.
            max_cells: reads so many cells, or as many as hold k classes; a query may be certified all the same.
        """
        return retrieval.search(self, input, k, index, recall, max_cells, exclude)

    def search_index(self, queries: Optional[Tensor] = None, *, codewords: Optional[int] = None) -> retrieval.SearchIndex:
        """Makes the index of :meth:`search` from the table as it is now, and keeps it: 0.3 of the memory of a float32 table of width 64.

        Args:
            queries: [*, D], some hundreds like those to come: they say how many cells a recall takes.
            codewords: K, for K x K cells of a residual quantizer that K-means makes; none: those of the loss's MIDX sampler, where it has one
                that has been refreshed and whose cells hold 32 classes on average, or else sqrt(N / 256) and at most 256.
        """
        return retrieval.build_index(self, queries, codewords)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """`self.log_prob(input).argmax(-1)`: the best class of each query, [*, D] -> [*]."""
        return self.topk(input, 1, None, None, None, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", label_smoothing={self.label_smoothing}" if self.label_smoothing != 0.0 else "")


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
        positives: what several of a query come to, target [*, T]. "mean": the mean over its positives y of -log of the softmax of s_y over y and the
            classes that are no positive of the query; class weights are those of the positives. "sum": -log of the sum of the positives'
            probabilities; no class weights. Entries of ignore_index are padding, a class that stands twice counts once, and a query whose entries are
            all padding is ignored. No label smoothing.

    Shape: input [*, D] (float32, float64, bfloat16, float16), target [*] int64 in [0, N), or [*, T] with T below N: [*, N], as one-hot targets are, is a
    ValueError. Returns a scalar, or [*] for "none"; in float32 for 16-bit inputs.

    Errors: ValueError for shapes, TypeError for dtypes, IndexError for a target out of range, naming its place.
    """

    def _row_gradients(self) -> bool:
        return False

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.exact(input, target)


def check_loss_class(owner: str, loss_class: Any) -> None:
    """What takes the place of a Linear: a class that has :meth:`LinearLoss.from_linear`."""
    if not (isinstance(loss_class, type) and issubclass(loss_class, LinearLoss)):
        got = loss_class.__name__ if isinstance(loss_class, type) else f"an instance of {type(loss_class).__name__}"
        raise TypeError(f"{owner}: expected one of the classes SampledSoftmaxLoss, CaneLoss and LinearCrossEntropyLoss, with its arguments beside it, "
                        f"got {got}")


class CandidateLoss(LinearLoss):
    """What losses share that score candidates in train() and are exact in eval()."""

    _option_names = ("estimator", "remove_accidental_hits", "label_smoothing", "reduction", "ignore_index", "positives", "sparse_grad")

    def _counted(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What samplers are shown: queries [Q, D] and targets [Q], zeros and -1 where a target is ignored; of several positives [Q, T]."""
        self._queries(input, self._given(target))
        self._check_step()
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

    ``loss(input, target, negatives=ids)`` scores further classes, ``ids [P]`` for the batch or ``[*, P]`` for each query (int64, -1 where there is
    none): hard negatives, or those that a data loader drew. They are always there, each once: their expected count is 1, and what the sampler would
    draw of them is added, so that the sampled loss is that of the exact normaliser still. With ``negative_log_count``, of their shape, they are
    independent draws of yours, and it is the log of how often all that the step proposes would hold each of them: where the sampler draws the same
    classes, give it the law of your negatives instead, as a part of a :class:`xsoftmax.samplers.UnionSampler`. In eval() negatives take no part.

    Args:
        in_features: D, the width of a query.
        num_classes: N.
        sampler: None: candidates are the head and the negatives of each call. Or a :class:`xsoftmax.samplers.Sampler`, which says how many classes it draws,
            for the batch or for each query; or the name of one: "uniform", "log_uniform" (classes sorted by falling frequency), "in_batch", "midx", "lsh",
            "sphere", "rff", or one that :func:`xsoftmax.samplers.register` was given. It is found as `loss.sampler`, which beside a head is another than the
            one given. It belongs to this loss.
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
        positives: as there. Draws that hit another positive of the query take no part; independent draws of one set are renormalised to the classes
            outside. "sum" goes with all estimators but CANE.
        label_smoothing: e: (1 - e) of the loss, and e of (log normaliser - mean score of all classes), that mean estimated from the target
            and the candidates with the weights above. Not beside class weights.
        head_classes: classes that are always scored: how many of the first ids, or a 1-D tensor of ids. The sampler draws from the
            others, or, where it cannot leave classes out, the counts add up.
        sparse_grad: the gradient of the table is sparse COO with a static number of rows (for xsoftmax.optim, or torch.optim.SGD, Adagrad,
            SparseAdam); False: dense.

    Shape: as :class:`LinearCrossEntropyLoss`.
    """

    def __init__(self, in_features: int, num_classes: int, *, sampler: Union[Sampler, str, None], num_samples: Optional[int] = None,
                 shared: Optional[bool] = None, estimator: Optional[str] = None, remove_accidental_hits: bool = True,
                 log_z: Union[float, str] = 0.0, bias: bool = False, weight: Optional[Tensor] = None, reduction: str = "mean",
                 ignore_index: int = -100, label_smoothing: float = 0.0, positives: str = "mean", head_classes: Union[int, Tensor] = 0,
                 sparse_grad: bool = True, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__(in_features, num_classes, bias=bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
                         label_smoothing=label_smoothing, positives=positives, device=device, dtype=dtype)
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
        none = sampler is None
        if none and num_samples is None and shared is None:
            sampler = FixedSampler(num_classes, 0)
        if isinstance(sampler, str) and outside:
            sampler = noise_outside(name, sampler, 20 if num_samples is None else num_samples, num_classes, in_features, bias)
        elif isinstance(sampler, str):
            if shared is None and estimator is not None and has_noise(estimator):
                shared = False  # draws that stand for what others leave out are each query's
            options = {} if shared is None else {"shared": shared}
            sampler = make_sampler(sampler, num_classes, num_samples, dim=in_features, bias=bias, **options)
        elif not isinstance(sampler, Sampler):
            raise TypeError(f"{name}: expected sampler to be a Sampler or a name, got {type(sampler).__name__}")
        elif num_samples is not None or shared is not None:
            raise ValueError(f"{name}: expected num_samples and shared beside the name of a sampler, since a {type(sampler).__name__} says itself "
                             f"how it draws, got {num_samples} and {shared}")
        if sampler.num_classes != num_classes:
            raise ValueError(f"{name}: expected a sampler of {num_classes} classes, got one of {sampler.num_classes}")
        if sampler.num_samples == 0 and head.numel() == 0 and not none:
            raise ValueError(f"{name}: expected candidates to learn from, got num_samples=0 and head_classes=0")
        estimator = "sampled_softmax" if outside else sampler.default_estimator if estimator is None else estimator
        check_estimator(name, estimator, label_smoothing)
        if has_noise(estimator) and not ((head.numel() > 0 or sampler.has_distinct) and sampler.has_independent):
            raise ValueError(f"{name}: expected a head or a sampler of distinct classes as candidates, and independent draws as noise, with "
                             f"estimator={estimator!r}, got {head.numel()} head classes and {sampler}")
        self._init_options(estimator=estimator, remove_accidental_hits=check_bool(name, "remove_accidental_hits", remove_accidental_hits),
                           sparse_grad=check_bool(name, "sparse_grad", sparse_grad))
        self._init_log_z(log_z, device)
        if outside:  # the sampler is claimed below: all other checks come before
            sampler = sampler.outside_target()
        elif head.numel() > 0:
            left = sampler.excluding(head)
            if left is None:
                left, self.head = UnionSampler(FixedSampler(num_classes, head), sampler), head[:0]
            sampler = left
        sampler._claim(name)
        self.sampler = sampler.to(device)

    def _samplers(self) -> List[Sampler]:
        return [self.sampler]

    def _fixed_ids(self) -> Dict[str, Tensor]:
        return {"head_classes": self.head}

    def _init_log_z(self, log_z: Union[float, str], device: Device) -> None:
        learned = isinstance(log_z, str) and log_z == "learned"
        if not learned and (isinstance(log_z, bool) or not isinstance(log_z, numbers.Real) or not math.isfinite(log_z)):
            raise ValueError(f"SampledSoftmaxLoss: expected log_z as a finite number or \"learned\", got {log_z!r}")
        if log_z != 0 and self.estimator != "nce":
            raise ValueError(f"SampledSoftmaxLoss: expected log_z=0 with estimator={self.estimator!r}, which knows no log Z, got {log_z!r}")
        self.fixed_log_z = 0.0 if learned else float(log_z)
        self.register_parameter("log_z", nn.Parameter(torch.zeros((), device=device)) if learned else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        head = self.head
        super()._apply(fn, recurse)
        self.head = moved_table(self._name, head, self.head)
        return self

    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None, negatives: Optional[Tensor] = None,
                negative_log_count: Optional[Tensor] = None) -> Tensor:
        if not self.training:
            return self.exact(input, target)
        return self._sampled(input, target, generator, negatives, negative_log_count, True)

    @torch.jit.export
    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None, negatives: Optional[Tensor] = None,
                 negative_log_count: Optional[Tensor] = None) -> Tensor:
        """The sampled loss, also in eval(), from the sampler as it is, without a refresh. In eval() nothing counts as a step."""
        return self._sampled(input, target, generator, negatives, negative_log_count, False)

    def _sampled(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator], negatives: Optional[Tensor],
                 negative_log_count: Optional[Tensor], prepares: bool) -> Tensor:
        queries, counted = self._counted(input, target)
        given = self._given_set(input, negatives, negative_log_count)  # before the sampler changes
        if prepares:
            self.sampler.prepare(self.linear.weight, self.linear.bias, generator)
        if given is None:
            sets = self.propose(queries, counted, generator)
        elif given.distinct:
            sets = self._with_head(self._beside(given, queries, counted, generator))
        else:
            sets = self.propose(queries, counted, generator) + [given]
        return self._loss(input, target, sets)

    def _given_set(self, input: Tensor, negatives: Optional[Tensor], log_count: Optional[Tensor]) -> Optional[CandidateSet]:
        if negatives is None:
            if log_count is not None:
                raise ValueError(f"{self._name}: expected negatives beside negative_log_count, got none")
            if self.sampler.num_samples == 0 and self.head.numel() == 0:
                raise ValueError(f"{self._name}: expected negatives with each call of a loss without a sampler, got none")
            return None
        if not torch.jit.is_scripting():
            for name, tensor in (("negatives", negatives), ("negative_log_count", log_count)):
                if tensor is not None and not isinstance(tensor, Tensor):
                    raise TypeError(f"{self._name}: expected {name} as a tensor, got {type(tensor).__name__}")
        ids, counts = torch.ops.xsoftmax.given_set(negatives, log_count, input, self.head, self.num_classes, self._name)
        return CandidateSet(ids, counts, None, log_count is None)

    def _beside(self, given: CandidateSet, queries: Tensor, target: Tensor, generator: Optional[torch.Generator]) -> List[CandidateSet]:
        """Classes that are always there beside what the sampler draws: the counts add up, as those of the parts of a union."""
        shared = self.sampler.shared
        shown = target if shared else torch.ops.xsoftmax.union_classes(queries, target, [given.ids])
        sets = [given] + self.sampler.sample(queries, shown, generator)
        ids, log_count, target_log_count, distinct = columns_of(sets)
        of_target = torch.ops.xsoftmax.present_log_count(given.ids, given.log_count, target if target.dim() == 2 else target.unsqueeze(1))
        target_log_count[0] = of_target.view_as(target)
        asked = [torch.ops.xsoftmax.present_log_count(given.ids, given.log_count, part) for part in ids[1:]]
        of_set = [k + 1 for k in range(len(asked))]
        if shared:
            asked.append(self.sampler.log_count(queries, given.ids))
            of_set.append(0)
        merged, of_targets = torch.ops.xsoftmax.union_merge(ids, log_count, target_log_count, [int(k > 0) for k in range(len(sets))],
                                                            len(sets) if shared else 1, asked, of_set, target)
        proposal: List[CandidateSet] = []
        for k, one in enumerate(sets):
            known = target_log_count[k] is not None
            proposal.append(CandidateSet(one.ids, merged[k], of_targets[k] if known else None, one.distinct))
        return proposal

    def _with_head(self, sets: List[CandidateSet]) -> List[CandidateSet]:
        if self.head.numel() > 0:
            return [CandidateSet(self.head, torch.zeros_like(self.head, dtype=torch.float32), None, True)] + sets
        return sets

    @torch.jit.export
    def propose(self, queries: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """One draw: the head and what the sampler proposes, for ``queries [Q, D]`` and ``target [Q]`` as a sampler takes them."""
        return self._with_head(self.sampler.sample(queries, target, generator))

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


def different_ids(owner: str, argument: str, ids: Union[int, Tensor], num_classes: int, device: Device) -> Tensor:
    """A set of classes, the first so many or those of a 1-D int64 tensor: sorted, int64; checked."""
    if not isinstance(ids, Tensor):
        count = check_count(owner, argument, ids, 0)
        if count > num_classes:
            raise ValueError(f"{owner}: expected {argument} in [0, {num_classes}], got {count}")
        return torch.arange(count, device=device)
    return torch.ops.xsoftmax.different_ids(ids.to(device), num_classes, owner, argument)
