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
from ._table import TableModule, check_linear, flat_queries, make_linear, refuse_parametrized
from .estimators import check_estimator, has_noise, registered_loss
from .samplers import CandidateSet, FixedSampler, Sampler, UnionSampler, columns_of, make_sampler
from .samplers.complement import noise_outside

Loss = TypeVar("Loss", bound="LinearLoss")


class LinearLoss(TableModule):
    """Base of losses over a class table: the table as `.linear`, the exact loss, and prediction.

    The table is an ``nn.Linear`` with a row for each class: `linear.weight` [N, D] and, where there is a bias, `linear.bias` [N]. A subclass defines
    ``forward``.

    The state dict holds `linear.weight`, `linear.bias` and, where class weights were given, `weight`. These are the keys of
    :class:`torch.nn.LinearCrossEntropyLoss`: its checkpoints load here, and the other way round (with strict=False where a sampler keeps state).

    Args, shapes, dtypes and errors as :class:`LinearCrossEntropyLoss`.
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
        """Makes the loss over the classes of an existing ``nn.Linear``, and shares its parameters: `loss.linear is linear`.

        Args:
            linear: an ``nn.Linear`` with `weight` [N, D] and `bias` [N] or None. Its rows are the classes; its device and dtype are those of the loss.
            **kwargs: the other arguments of the constructor, without in_features, num_classes, bias, device and dtype, which `linear` gives.

        Raises:
            TypeError: `linear` is no ``nn.Linear``, or is a lazy one whose sizes are not known, or `kwargs` has an argument that `linear` gives.
            ValueError: as the constructor; a hook computes the weight (``torch.nn.utils.weight_norm``, ``spectral_norm``, ``prune``); or a parametrization
                does, beside sparse_grad=True.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        if given := {"in_features", "num_classes", "bias", "device", "dtype"} & set(kwargs):
            raise TypeError(f"{cls.__name__}.from_linear: expected arguments that the linear layer does not give, got {', '.join(sorted(given))}")
        # The table made by the constructor would be thrown away: on the meta device it costs nothing.
        loss = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta", **kwargs)
        loss.linear = linear
        if loss._row_gradients():
            refuse_parametrized(loss)
        loss.to(linear.weight.device)
        return loss

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.linear.weight, self.linear.bias]
        return tables

    def resize_classes(self, num_classes: int, *, weight: Optional[Tensor] = None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Gives the loss another number of classes, in place. New classes stand behind the others; classes past the end are gone.

        The parameters of ``linear`` stay the same objects, so optimizers and modules that share them go on. The rows of the first ``min(N, num_classes)``
        classes stay, with what optimizers keep for them. New rows begin as ``nn.Linear.reset_parameters()`` makes them (uniform in ``1 / sqrt(D)``, whatever
        the number of classes is, by torch's default generator), and as before their first step. An error changes nothing, except where there is no memory for a
        sampler: then the tables may be resized, and the loss refuses them until this is called again.

        A call costs O(the new rows), averaged over many: the memory of a table grows by quarters, and the first call copies the table. ``state_dict()``,
        ``torch.save``, pickle and deepcopy hold the rows alone. Where a table is copied, tensors that shared its memory without being the parameter (``.data``,
        ``detach()``, a view, numpy, a mapped file, shared memory, a CUDA graph) keep the old one.

        - Row optimizers (:mod:`xsoftmax.optim`) that have taken a step for the parameters are found by the library. The steps that rows owe (lazy updates) stay
          owed, or are applied.
        - Optimizers of ``torch.optim`` are not found: give them as ``optimizers``. One that was not given, and has state, raises at its next step: call this
          again with it.
        - Samplers follow (:meth:`Sampler.resize <xsoftmax.samplers.Sampler.resize>`). Expected counts stay exact, and classes that are gone are never drawn.
          New classes cost O(1) each, averaged over many: those of a static distribution have their weight at once; an index that follows the table knows their
          places, and draws them evenly until it is next laid out
          (:meth:`xsoftmax.samplers.AdaptiveSampler.plan_growth`). Three cases cost O(N) a call: the tables of a static distribution, and an index, where
          other classes go than those that have come since the last layout; and an index of distinct draws where classes come.
        - ``.grad`` of the parameters, which has the former size, becomes None: call this after ``step()``. A backward pass of an earlier forward pass is
          refused. A call with the present number of classes changes neither.
        - ``num_embeddings`` of an nn.Embedding that is tied to ``linear.weight`` is not known here: set it.
        - A scripted loss keeps its number of classes, and refuses the table. Wrap the model in DistributedDataParallel anew.

        Args:
            num_classes: at least 1, and above the head classes and the candidates that the loss was given.
            weight: class weights floating [num_classes - N] of new classes, where the loss has some. None: 1.
            optimizers: of ``torch.optim``: SGD, Adagrad, Adadelta, RMSprop and the Adams.

        Raises:
            ValueError: a class that is always scored would be gone; too few classes for a sampler's distinct draws; a weight of another shape, or one for a
                loss without class weights.
            TypeError: a parametrized table, a sampler that does not define ``plan_resize``, another optimizer, or num_classes that is not an int.
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
        """The exact loss, in train() and in eval(): what `forward` gives in eval().

        It equals ``F.cross_entropy(self.linear(input), target, self.weight, reduction=..., ignore_index=..., label_smoothing=...)`` and never holds the [Q, N]
        logits. Where gradients are recorded, they are computed together with the loss: evaluate under torch.no_grad(). :class:`LinearCrossEntropyLoss` has the
        formula for several positives of a query, target [*, T].

        Args:
            input: [*, D], in the dtype of the table.
            target: int64, [*] or [*, T], in [0, N) or ignore_index.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError: as :class:`LinearCrossEntropyLoss`
        """
        if self._given(input, target).dim() == input.dim():
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
        """The log-probabilities of all classes, ``F.log_softmax(self.linear(input), -1)``, with the whole result in memory.

        Args:
            input: [*, D], in the dtype of the table.

        Returns:
            [*, N], in the dtype of the table.

        Raises:
            ValueError: `input` is not of shape [*, D].
            TypeError: `input` is not a dense tensor.
            RuntimeError: `input` is of another dtype than the table.
        """
        self._table_queries(input, None)
        return torch.log_softmax(self.linear(input), dim=-1)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, index: Optional[str] = None, recall: Optional[float] = None,
             max_cells: Optional[int] = None, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each query, ``self.log_prob(input).topk(k)``, best first, without [*, N] in memory.

        Equal scores: the lower id comes first. The result has no gradient. With index="midx" the classes come from :meth:`search`. The values are then scores,
        not log-probabilities, since the normaliser takes all classes.

        Args:
            input: [*, D], in the dtype of the table.
            k: in [0, N].
            index, recall, max_cells: None, or as in :meth:`search`.
            exclude: int64 [*, E]: the ids that each query does not want, such as items already seen, in any order; -1 for none. The best k of all other classes
                are returned, exactly. Log-probabilities stay those among all classes. Where fewer than k classes are left, the last places are -inf and -1.

        Returns:
            (log-probabilities, class ids), both [*, k]: float64 for a float64 table, else float32; and int64.

        Raises:
            ValueError: k is not in [0, N], `input` is not of shape [*, D], or `exclude` is not of shape [*, E]; recall or max_cells without an index.
            TypeError: k is not an int, `input` is of another dtype than the table, or `exclude` is not int64.
            IndexError: an id of `exclude` is not in [0, N) or -1 (checked on the CPU).
        """
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
        """The best k classes of each query, ``self.linear(input).topk(k)``, without scoring most of the classes.

        An index sorts the classes into cells. A copy of the table in 8 bits bounds the scores of a cell and of its classes, and the classes that may be among
        the best are scored from the table. Equal scores: the lower id comes first. The result has no gradient.

        The index is the one that :meth:`search_index` made. Where the table has changed since, a new one is made, without the queries and the codewords that
        were given. Some writes to the table are not noticed: through ``.data``, through numpy, and to tables made in ``torch.inference_mode()``. Call
        :meth:`search_index` after them.

        Args:
            input: [*, D], in the dtype of the table. A query with a NaN or an infinity has scores of NaN at the first classes, and is not certified.
            k: in [0, N].
            index: "midx".
            recall: None: certified, the k best of all classes, exactly. In (0, 1): the cells are read in the order of how likely they hold one of the best. As
                many are read as 256 example queries needed to find this share of their best k: a target for queries like them, and no guarantee for each. The
                example queries are those that :meth:`search_index` was given, or the first of the calls, which until then are certified. 1: as None.
            max_cells: at least 1: this many cells are read, or as many as hold k classes. A query may be certified all the same. Not beside recall.
            exclude: int64 [*, E], as in :meth:`topk`.

        Returns:
            :class:`SearchResult <xsoftmax.SearchResult>`: (scores [*, k], ids int64 [*, k], cells_read int64 [*], certified bool [*]). Scores are float64 for a
            float64 table, else float32.

        Raises:
            ValueError: an argument out of its range or of another shape; a table that is not on the CPU, or holds numbers that are not finite or not below
                2^100.
            TypeError: `input` is of another dtype than the table; k or max_cells is not an int.
            IndexError: an id of `exclude` is not in [0, N) or -1.
        """
        return retrieval.search(self, input, k, index, recall, max_cells, exclude)

    def search_index(self, queries: Optional[Tensor] = None, *, codewords: Optional[int] = None) -> retrieval.SearchIndex:
        """Makes the index of :meth:`search` from the table as it is now, and keeps it with the loss. It takes 0.3 of the memory of a float32 table of width
        64.

        Args:
            queries: [*, D], some hundreds like those to come: they say how many cells a recall takes.
            codewords: K in [1, 1024], for K x K cells of a residual quantizer that K-means makes. None: those of the loss's MIDX sampler, where it has one that
                has been refreshed and whose cells hold 32 classes on average; else sqrt(N / 256), at most 256.

        Returns:
            The :class:`SearchIndex <xsoftmax.SearchIndex>`.

        Raises:
            ValueError: `queries` is not of shape [*, D]; codewords out of range; a table that is not on the CPU, or holds numbers that are not finite or not
                below 2^100.
            TypeError: codewords is not an int.
        """
        return retrieval.build_index(self, queries, codewords)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each query, ``self.log_prob(input).argmax(-1)``: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None, None, None, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", label_smoothing={self.label_smoothing}" if self.label_smoothing != 0.0 else "")


class LinearCrossEntropyLoss(LinearLoss):
    r"""The exact cross entropy of a linear layer and a softmax over its outputs, computed without the logits in memory.

    ``loss(input, target) == F.cross_entropy(loss.linear(input), target, weight, reduction=..., ignore_index=..., label_smoothing=...)``. The loss and its
    gradients are computed over chunks of classes. Gradients of the table are dense.

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        bias: the classes have a bias.
        weight: floating [N], rescales the loss of each class, as in :class:`torch.nn.CrossEntropyLoss`.
        reduction: "mean" (weighted, over targets that are not ignored), "sum" or "none".
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: in [0, 1]. 0 with several positives.
        positives: how the loss combines several positives of a query, target [*, T]. "mean": the mean, over its positives y, of -log of the softmax of s_y over
            y and the classes that are no positive of the query; class weights are those of the positives. "sum": -log of the sum of the positives'
            probabilities; no class weights. Entries of ignore_index are padding. A class that stands twice counts once. A query whose entries are all padding
            is ignored.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    Shape:
        - input: [*, D], in the dtype of the table; under autocast also in a 16-bit one.
        - target: int64 [*] in [0, N) or ignore_index; or [*, T] with T below N. One-hot targets [*, N] are a ValueError.
        - output: a scalar, or [*] with reduction="none"; float64 for a float64 table, else float32. Over no query "mean" is NaN, as in torch.

    Raises:
        ValueError: an option out of range; a shape that does not fit; label_smoothing with several positives; class weights with several positives and
            positives="sum".
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype or device than the table; `target` not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU). The message names its place.
        RuntimeError: a call inside a transform of ``torch.func``.
    """

    def _row_gradients(self) -> bool:
        return False

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The exact loss, as :meth:`exact` gives it: input [*, D] and target int64 [*] or [*, T] -> a scalar, or [*] with reduction="none"."""
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
        self._queries(input, self._given(input, target))
        self._check_step()
        return torch.ops.xsoftmax.counted_queries(input, target, self.linear.weight, self.ignore_index)

    def _candidate_loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet], log_z: Optional[Tensor]) -> Tensor:
        ids, log_count, target_log_count, distinct = columns_of(sets)
        return torch.ops.xsoftmax.sampled_softmax_loss(input, self.linear.weight, self.linear.bias, target, ids, log_count, target_log_count,
                                                       distinct, self.weight, log_z, self._options)


class SampledSoftmaxLoss(CandidateLoss):
    r"""Sampled softmax: the cross entropy over sampled classes in train(), and the exact cross entropy in eval().

    In eval() ``loss(input, target) == F.cross_entropy(loss.linear(input), target, weight, ...)``, as :class:`LinearCrossEntropyLoss` computes it. Evaluate
    under torch.no_grad(): where gradients are recorded, the exact gradients are computed together with the loss.

    In train() a step scores the target, the `head_classes` and the drawn classes. The forward pass reads no other row of the table, and the gradient of the
    table is row-sparse. Let s be the scores, y the target, and c_j the expected count of class j: M q_j for M independent draws from q, the inclusion
    probability for distinct draws, 1 for a head class. The loss of a query is::

        loss = log(e^{s_y} + sum_{j drawn, j != y} e^{s_j} / c_j) - s_y

    This is, for one set of distinct classes that the batch shares, with `ids` [M] and `log_count` [M]::

        s = F.linear(input, linear.weight[ids], linear.bias[ids]) - log_count                                  # [Q, M]
        s = s.masked_fill(ids == target[:, None], -inf)
        s_y = (input * linear.weight[target]).sum(1) + linear.bias[target]                                      # [Q]
        loss = F.cross_entropy(torch.cat([s_y[:, None], s], 1), torch.zeros_like(target))

    Independent draws are renormalised to the classes other than y: their sum is multiplied by (M - c_y) / m, where m of the M draws are not y (Chen et al.,
    2025, section 3.2).

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        sampler: where the drawn classes come from. The loss has it as `loss.sampler`; beside head classes that is another object than the one given.

            - A :class:`xsoftmax.samplers.Sampler`. It says itself how many classes it draws, for the batch or for each query, and belongs to this loss alone.
            - The name of one: "uniform", "log_uniform" (for classes sorted by falling frequency), "in_batch", "midx", "lsh", "sphere", "rff", or a name that
              :func:`xsoftmax.samplers.register` was given.
            - None: the candidates are the head and the negatives of each call.

        num_samples: of a sampler that is named: how many classes it draws for the batch (shared) or for each query. None: its default; "uniform" and
            "log_uniform" have none, and "in_batch" takes None alone.
        shared: of a sampler that is named: True: one set of draws for the whole batch (one matrix product); False: one for each query. None: as suits it.
        estimator: how the scores become a loss. None takes what suits the sampler: "ranking" where all draws are private, independent and follow the class
            table (there are few of them, near the softmax, and the optimum of "ranking" is the softmax for any number of them), else "sampled_softmax".

            - "sampled_softmax": the formula above.
            - "ranking": lowers the target's score by its log expected count as well, as TensorFlow's sampled softmax does. Near the softmax its gradient is the
              full one times about M / (M + 1). Its value does not estimate that of the exact loss: look at the loss in eval(). With head classes, a target
              outside the head takes the place of a draw.
            - "complementary_sum": "sampled_softmax" with all draws from the classes other than the target, private to each query, by
              :class:`xsoftmax.samplers.ComplementSampler` (Botev et al., 2017).
            - "nce" (Gutmann and Hyvärinen, 2012), "negative_sampling" (Mikolov et al., 2013), "one_vs_each" (Titsias, 2016), "blackout" (Ji et al., 2016) and
              "importance" (Bengio and Senécal, 2003). These do not estimate the softmax loss.
            - "cane" and "cane_log_of_mean" (Han et al., 2018, Algorithm 1): the candidates are the head and distinct draws, and the noise is the independent
              draws; see :class:`CaneLoss`.
            - a name that :func:`xsoftmax.register_estimator` was given.

            ``xsoftmax::candidate_loss`` in ops.h has the formulas. Only the first two take label_smoothing.
        log_z: for "nce": the log normaliser, which is subtracted from all scores. A finite number, or "learned": a 0-dim parameter `log_z` that begins at 0.
        remove_accidental_hits: draws that equal the target are dropped. False with "sampled_softmax" is Eq. 1 of Chen et al. (2025), whose gradient is the full
            one times about 1 / (1 + p_y), p_y the probability of the target. "ranking", "nce" and CANE keep such draws among independent ones in any case:
            without them their optimum is not the softmax.
        bias, weight, reduction, ignore_index: as in :class:`LinearCrossEntropyLoss`.
        label_smoothing: e in [0, 1]: (1 - e) of the loss, and e of (log normaliser - mean score of all classes). That mean is estimated from the target and the
            candidates, with the weights above. Not beside class weights.
        positives: as in :class:`LinearCrossEntropyLoss`. Draws that hit another positive of the query take no part, and independent draws of one set are
            renormalised to the classes that are no positive. "sum" goes with all estimators but CANE.
        head_classes: classes that are always scored: how many of the first ids, or an int64 tensor [H] of different ids. The sampler then draws from the other
            classes. Where it cannot leave classes out, the expected counts of head and draws add up.
        sparse_grad: True: the gradient of the table is sparse COO with a static number of rows, for xsoftmax.optim and for torch.optim.SGD, Adagrad and
            SparseAdam. False: it is dense.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    Shapes and dtypes are those of :class:`LinearCrossEntropyLoss`: input [*, D], target int64 [*] or [*, T]; a scalar, or [*] with reduction="none".

    Raises:
        ValueError: an option out of range, or options that do not go together; a name of a sampler or an estimator that is not known; a sampler of another
            number of classes, or one that belongs to another loss; more distinct draws than classes; a shape that does not fit; a call without candidates; a
            table with a NaN or an infinity when a sampler that follows the table refreshes; a parametrized table beside sparse_grad=True.
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype or device than the table; `target` or ids not
            int64.
        IndexError: an id of head_classes is not in [0, N); a target is not in [0, N) and not ignore_index; a negative is not in [0, N) and not -1 (all checked
            on the CPU).
        RuntimeError: a call inside a transform of ``torch.func``, or in a DistributedDataParallel model whose table was not prepared by
            :mod:`xsoftmax.distributed`.
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
            if none:
                raise TypeError(f"{name}: expected a sampler, or its name, beside num_samples={num_samples} and shared={shared}, got None")
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
        """The sampled loss in train(); the exact loss, :meth:`exact`, in eval().

        Negatives are further classes that the caller has: hard negatives, or classes that a data loader drew. Without `negative_log_count` each of them is
        always there, once: its expected count is 1, and what the sampler would draw of it is added. The sampled loss still estimates the exact one. With
        `negative_log_count` the negatives are independent draws of the caller, with these expected counts. Where the sampler can draw the same classes, give it
        the distribution of the negatives instead, as a part of a :class:`xsoftmax.samplers.UnionSampler`. In eval() negatives are not used.

        Args:
            input: [*, D], in the dtype of the table.
            target: int64, [*] or [*, T], in [0, N) or ignore_index.
            generator: on the device of `input`. None: torch's default generator.
            negatives: int64 [P] for the batch, or [*, P] for each query, in [0, N), -1 where there is none.
            negative_log_count: floating, the shape of `negatives`: the log of how often the whole proposal, sampler and negatives together, would hold each of
                them.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError, RuntimeError: as :class:`SampledSoftmaxLoss`; nothing has changed then
        """
        if not self.training:
            return self.exact(input, target)
        return self._sampled(input, target, generator, negatives, negative_log_count, True)

    @torch.jit.export
    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None, negatives: Optional[Tensor] = None,
                 negative_log_count: Optional[Tensor] = None) -> Tensor:
        """The sampled loss, in train() and in eval(), from the sampler as it is, without a refresh. In eval() the call does not count as a step of the
        sampler.

        Arguments, shapes and errors as :meth:`forward`.
        """
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
        """Draws once: the candidate sets of a step, the head and what the sampler proposes.

        Args:
            queries: [Q, D], zeros where a query does not count.
            target: int64 [Q] in [0, N), -1 where a query does not count, or [Q, T]; see :meth:`Sampler.sample <xsoftmax.samplers.Sampler.sample>`.
            generator: on the device of `queries`. None: torch's default generator.

        Returns:
            A list of :class:`xsoftmax.samplers.CandidateSet`.

        Raises:
            ValueError, TypeError, IndexError: as :meth:`Sampler.sample <xsoftmax.samplers.Sampler.sample>`
        """
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
