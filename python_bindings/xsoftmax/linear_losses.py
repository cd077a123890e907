"""Losses over a class table: used like torch.nn.LinearCrossEntropyLoss, with the same constructor order and the same `.linear`."""

import numbers
from typing import Any, Dict, Iterable, List, Optional, Type, TypeVar

import torch
from torch import Tensor, nn
from torch.types import Device

from . import retrieval
from ._checks import check_count, check_number, check_target_prob
from ._options import logit_options, option_text
from ._resize import resize_classes
from ._table import TableModule, check_linear, check_queries, flattened, make_linear, refuse_parametrized
from ._typing import Numbers
from .estimators import check_estimator
from .samplers import CandidateSet, Sampler, columns_of

Loss = TypeVar("Loss", bound="LinearLoss")
_EXACT_OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "workspace_mb")
_ALL_EXACT_OPTIONS = (*_EXACT_OPTIONS, "logit_scale", "softcap")


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

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False, weight: Optional[Numbers] = None,
                 reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, positives: str = "mean", logit_scale: float = 1.0,
                 softcap: Optional[float] = None, z_loss: float = 0.0, device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        self._init_table(in_features, num_classes, reduction=reduction, weight=weight, ignore_index=ignore_index)
        self.label_smoothing = label_smoothing
        self.logit_scale, self.softcap, self.z_loss = logit_scale, softcap, z_loss
        self.positives = positives
        self.workspace_mb = 512
        self._set_exact_options()
        self.linear = make_linear(self._name, self.in_features, self.num_classes, bias, device, dtype)

    def _set_exact_options(self) -> None:
        """The texts of options of the exact operators, which follow what is assigned."""
        logits = logit_options(self.logit_scale, self.softcap)
        self._logit_options = option_text(**logits)
        self._exact_options = option_text(**{name: getattr(self, name) for name in _EXACT_OPTIONS}, **logits)

    def _check_option(self, name: str, value: Any) -> Any:
        if name in ("logit_scale", "z_loss") or (name == "softcap" and value is not None):
            return check_number(self._name, name, value, positive=name != "z_loss")
        if name == "workspace_mb":
            return check_count(self._name, name, value, 1)
        if name == "label_smoothing":
            return self._check_label_smoothing(value)
        if name == "positives" and value not in ("mean", "sum"):
            raise ValueError(f"{self._name}: expected positives to be \"mean\" or \"sum\", "
                             f"got {value!r}")
        return super()._check_option(name, value)

    def _check_label_smoothing(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{self._name}: expected label_smoothing as a number, "
                            f"got {type(value).__name__}")
        label_smoothing = float(value)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"{self._name}: expected label_smoothing in [0, 1], got {value}")
        if "estimator" in self.__dict__:
            check_estimator(self._name, self.estimator, label_smoothing)
        return label_smoothing

    def _is_option(self, name: str) -> bool:
        return name == "positives" or name in _ALL_EXACT_OPTIONS or super()._is_option(name)

    def _update_texts(self, name: str) -> None:
        if name in _ALL_EXACT_OPTIONS and "_exact_options" in self.__dict__:
            self._set_exact_options()
        super()._update_texts(name)

    def _with_reduction(self: Loss, reduction: str) -> Loss:
        """Returns a shallow copy of a loss of reduction "mean", for one call with another one.

        It shares all tensors and modules, so threads may call it and the loss at once.
        """
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.__dict__.pop("_compiled_call_impl", None)  # that of the loss itself
        copied.__dict__["reduction"] = reduction
        for name in {"_options", "_exact_options"} & self.__dict__.keys():
            text = self.__dict__[name].replace("reduction=mean", f"reduction={reduction}")
            copied.__dict__[name] = text
        return copied

    @classmethod
    def from_linear(cls: Type[Loss], linear: nn.Linear, **kwargs: Any) -> Loss:
        """Makes the loss over the classes of an existing ``nn.Linear``, and shares its parameters: `loss.linear is linear`.

        Args:
            linear: an ``nn.Linear`` with `weight` [N, D] and `bias` [N] or None. Its rows are the classes; its device and dtype are those of the loss.
            **kwargs: the other arguments of the constructor, without in_features, num_classes, bias, device and dtype, which `linear` gives.

        Raises:
            TypeError: `linear` is no ``nn.Linear``, is of a subclass with another forward pass, or is a lazy one whose sizes are not known; or `kwargs` has an
                argument that `linear` gives.
            ValueError: as the constructor; a hook computes the weight (``torch.nn.utils.weight_norm``, ``spectral_norm``, ``prune``); or a parametrization
                does, unless sparse_grad=False.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        if given := {"in_features", "num_classes", "bias", "device", "dtype"} & set(kwargs):
            raise TypeError(f"{cls.__name__}.from_linear: expected arguments other than those of "
                            f"the linear layer, got {', '.join(sorted(given))}")
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

    def _other_table(self, state_dict: Dict[str, Any], prefix: str) -> List[str]:
        saved, rows = state_dict.get(prefix + "linear.weight"), self.linear.weight
        if not isinstance(saved, Tensor) or saved.shape[1:] != rows.shape[1:] or saved.shape == rows.shape:
            return []
        hint = (f"call resize_classes({len(saved)}) before load_state_dict, and give the loss its "
                "former number by resize_classes after it")
        got = f"expected a checkpoint of {len(rows)} classes, got one of {len(saved)}"
        return [f"{self._name}: {got}: {hint}"]

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

    def _check_queries(self, input: Tensor, target: Optional[Tensor]) -> None:
        """Checks the shapes of the table, of input [*, D] and of target [*] or [*, T]."""
        if self.linear.weight.shape[0] != self.num_classes:
            raise ValueError(f"{self._name}: expected linear.weight with a row for each of {self.num_classes} classes, "
                             f"got shape {list(self.linear.weight.shape)}")
        check_queries(self._name, self.in_features, input, target, several=True, num_classes=self.num_classes)

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        self._check_queries(input, target)
        return flattened(input)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor, target_prob: Optional[Tensor] = None) -> Tensor:
        """The exact loss, in train() and in eval(): what `forward` gives in eval().

        It equals ``F.cross_entropy(self.linear(input), target, self.weight, reduction=..., ignore_index=..., label_smoothing=...)`` and never holds the [Q, N]
        logits. Where gradients are recorded, they are computed together with the loss: evaluate under torch.no_grad(). :class:`LinearCrossEntropyLoss` has the
        formula with `logit_scale`, `softcap` and `z_loss`, and for several positives of a query, target [*, T].

        Args:
            input: [*, D], in the dtype of the table.
            target: int64, [*] or [*, T], in [0, N) or ignore_index.
            target_prob: floating [*, T] or None, as in :meth:`LinearCrossEntropyLoss.forward`.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError: as :class:`LinearCrossEntropyLoss`
        """
        if target_prob is not None:
            return self._exact_of_soft(input, target, target_prob)
        if self._given(input, target).dim() == input.dim():
            return self._exact_of_several(input, target)
        loss = torch.ops.xsoftmax.linear_cross_entropy(
            self._table_queries(input, target), self.linear.weight, self.linear.bias, target.reshape(-1), self.weight, self._exact_options)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def _exact_of_soft(self, input: Tensor, target: Tensor, target_prob: Tensor) -> Tensor:
        self._check_soft(input, target, target_prob)
        self._table_queries(input, target)
        return torch.ops.xsoftmax.linear_soft_loss(input, self.linear.weight, self.linear.bias, target, target_prob,
                                                   self.weight, self._exact_options)

    def _check_soft(self, input: Tensor, target: Tensor, target_prob: Tensor) -> None:
        """Checks of a soft target that come before those of the operator."""
        self._given(input, target)
        if not torch.jit.is_scripting():
            check_target_prob(self._name, target_prob, target, self.num_classes)
        if self.label_smoothing != 0.0:
            raise ValueError(f"{self._name}: expected label_smoothing=0 with target_prob, got {self.label_smoothing}")

    def _exact_of_several(self, input: Tensor, target: Tensor) -> Tensor:
        self._table_queries(input, target)
        if self.label_smoothing != 0.0:
            raise ValueError(f"{self._name}: expected label_smoothing=0 with several positives of a query, got {self.label_smoothing}")
        options = self._exact_options + ",positives=" + self.positives
        return torch.ops.xsoftmax.linear_positives_loss(input, self.linear.weight, self.linear.bias, target, self.weight, options)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Optional[Tensor] = None) -> Tensor:
        """The log-probabilities of classes, ``F.log_softmax(self.linear(input), -1)``, or ``.gather(-1, ids)`` of it. With `logit_scale` or `softcap`,
        the log-softmax of the logits that they make.

        With `ids` nothing of size [*, N] is in memory, forward or backward: the log-likelihoods of given tokens, as
        preference training (DPO, GRPO) needs them. Differentiable in the input and the table, whose gradient is dense.

        Args:
            input: [*, D], in the dtype of the table.
            ids: int64 [*] or [*, K] in [0, N), repeats allowed. None: all classes.

        Returns:
            The shape of `ids`, or [*, N]; float64 for a float64 table, else float32.

        Raises:
            ValueError: `input` is not of shape [*, D], or `ids` not of shape [*] or [*, K].
            TypeError: `input` is not a dense tensor, or of another dtype than the table; `ids` is not int64.
            IndexError: an id is not in [0, N) (checked on the CPU).
        """
        self._table_queries(input, None)
        return torch.ops.xsoftmax.linear_log_prob(input, self.linear.weight, self.linear.bias, ids, self._logit_options)

    @torch.jit.export
    def entropy(self, input: Tensor) -> Tensor:
        """The entropy of the softmax over all classes: ``-(log_p.exp() * log_p).sum(-1)`` of ``log_p = self.log_prob(input)``.

        Nothing of size [*, N] is in memory, forward or backward. Differentiable in the input and the table, whose
        gradient is dense.

        Args:
            input: [*, D], in the dtype of the table.

        Returns:
            [*], in nats; float64 for a float64 table, else float32.

        Raises:
            ValueError: `input` is not of shape [*, D].
            TypeError: `input` is not a dense tensor, or of another dtype than the table.
        """
        self._table_queries(input, None)
        return torch.ops.xsoftmax.linear_entropy(input, self.linear.weight, self.linear.bias, self._logit_options)

    def _logits(self, scores: Tensor) -> Tensor:
        """The logits of scores ``linear(input)``."""
        return scores if self._logit_options == "" else torch.ops.xsoftmax.transform_logits(scores, self._logit_options)

    @torch.jit.export
    def topk(self, input: Tensor, k: int, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each query, ``self.log_prob(input).topk(k)``, best first, without [*, N] in memory.

        It scores all classes; :meth:`search` finds the same ids from a few of them, with scores
        ``linear(input)`` in the place of log-probabilities. Equal scores: the lower id comes first.
        The result has no gradient. `logit_scale` and `softcap` change log-probabilities and leave
        the order of classes as it is.

        Args:
            input: [*, D], in the dtype of the table. A query with a NaN or an infinity has values
                of NaN at the first classes; under ``torch.autograd.detect_anomaly()`` it is a
                ValueError.
            k: in [0, N].
            exclude: int64 [*, E]: the ids that each query does not want, such as items already seen, in any order; -1 for none. The best k of all other classes
                are returned, exactly. Log-probabilities stay those among all classes. Where fewer than k classes are left, the last places are -inf and -1.

        Returns:
            (log-probabilities, class ids), both [*, k]: float64 for a float64 table, else float32; and int64.

        Raises:
            ValueError: k is not in [0, N], `input` is not of shape [*, D], or `exclude` is not of
                shape [*, E].
            TypeError: k is not an int, `input` is of another dtype than the table, or `exclude` is not int64.
            IndexError: an id of `exclude` is not in [0, N) or -1 (checked on the CPU).
        """
        k = self._best(k)
        values, indices = torch.ops.xsoftmax.linear_topk(
            self._table_queries(input, None), self.linear.weight, self.linear.bias, self._with_excluded(k, input, exclude), self._logit_options)
        return self._without_excluded(values, indices, k, input, exclude)

    def search(self, input: Tensor, k: int, *, index: str = "midx", recall: Optional[float] = None,
               max_cells: Optional[int] = None, exclude: Optional[Tensor] = None) -> retrieval.SearchResult:
        """The best k classes of each query with their scores, ``self.linear(input).topk(k)``, without scoring most of the classes.

        The values are scores, not the log-probabilities of :meth:`topk`, whose normaliser takes
        all classes.

        An index sorts the classes into cells. A copy of the table in 8 bits bounds the scores of a cell and of its classes, and the classes that may be among
        the best are scored from the table. Equal scores: the lower id comes first. The result has no gradient.

        Scores are those of ``linear``, without `logit_scale` and `softcap`, which change no order.

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
            ValueError: an argument out of its range or of another shape; a table without values (meta), or with numbers that are not finite or not below
                2^100.
            TypeError: `input` is of another dtype than the table, or on another device; k or max_cells is not an int.
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
            ValueError: `queries` is not of shape [*, D]; codewords out of range; a table without values (meta), or with numbers that are not finite or not
                below 2^100.
            TypeError: codewords is not an int.
        """
        return retrieval.build_index(self, queries, codewords)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """The most probable class of each query, ``self.log_prob(input).argmax(-1)``: input [*, D] -> int64 [*]. Errors as :meth:`topk`."""
        return self.topk(input, 1, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name, default in (("label_smoothing", 0.0), ("logit_scale", 1.0), ("softcap", None), ("z_loss", 0.0)):
            value = getattr(self, name)
            text += "" if value == default else f", {name}={value}"
        return text


class LinearCrossEntropyLoss(LinearLoss):
    r"""The exact cross entropy of a linear layer and a softmax over its outputs, computed without the logits in memory.

    ``loss(input, target) == F.cross_entropy(loss.linear(input), target, weight, reduction=..., ignore_index=..., label_smoothing=...)``. The loss and its
    gradients are computed over chunks of classes. Gradients of the table are dense.

    With `logit_scale`, `softcap` and `z_loss`, in PyTorch, without class weights::

        t = loss.linear(input) * logit_scale
        t = softcap * (t / softcap).tanh()                                       # where there is a cap
        F.cross_entropy(t, target, ...) + z_loss * t.logsumexp(-1).square().mean()

    Args:
        in_features: D, the width of a query; at least 0.
        num_classes: N, at least 1.
        bias: the classes have a bias.
        weight: floating [N], a tensor, an array or a list: rescales the loss of each class, as in
            :class:`torch.nn.CrossEntropyLoss`.
        reduction: "mean" (weighted, over targets that are not ignored), "sum" or "none".
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: in [0, 1]. 0 with several positives.
        positives: how the loss combines several positives of a query, target [*, T]. "mean": the mean, over its positives y, of -log of the softmax of s_y over
            y and the classes that are no positive of the query; class weights are those of the positives. "sum": -log of the sum of the positives'
            probabilities; no class weights. Entries of ignore_index are padding. A class that stands twice counts once. A query whose entries are all padding
            is ignored.
        logit_scale: a finite number above 0, by which scores ``linear(input)`` are multiplied, as in Cohere's models.
        softcap: a finite number above 0: logits are ``softcap * tanh(logit_scale * linear(input) / softcap)``, as in Gemma 2. None: no cap.
        z_loss: a finite number of at least 0: the loss of each query gets ``z_loss * log_normaliser ** 2`` (Chowdhery et al., 2022), weighted by its
            class weight and reduced as the loss is. The log normaliser is the logsumexp of all logits; with positives="mean", of each of several positives, the
            logsumexp of its logit and those of the classes that are no positive.
        device, dtype: of the table. The dtype is float32, float64, bfloat16 or float16.

    On CUDA the attribute ``workspace_mb``, 512 and assignable, bounds the memory of a training step, beside the gradients: so many MB of logits exist at once.
    On the CPU they are a few MB.

    Shape:
        - input: [*, D], in the dtype of the table; under autocast also in a 16-bit one.
        - target: int64 [*] in [0, N) or ignore_index; or [*, T] with T below N. One-hot targets [*, N] are a ValueError.
        - output: a scalar, or [*] with reduction="none"; float64 for a float64 table, else
          float32. Over no query (an empty batch, or all targets ignored)
          "sum" is 0 and "mean" NaN, as in torch.

    Raises:
        ValueError: an option out of range; a shape that does not fit; label_smoothing with several positives; class weights with several positives and
            positives="sum".
        TypeError: an option of another type; an argument that is not a dense tensor; `input` of another dtype or device than the table; `target` not int64.
        IndexError: a target is not in [0, N) and not ignore_index (checked on the CPU). The message names its place.
        RuntimeError: a call inside a transform of ``torch.func``.
    """

    def _row_gradients(self) -> bool:
        return False

    def forward(self, input: Tensor, target: Tensor, target_prob: Optional[Tensor] = None) -> Tensor:
        """The exact loss, as :meth:`exact` gives it: input [*, D] and target int64 [*] or [*, T] -> a scalar, or [*] with reduction="none".

        With `target_prob` the target is soft: each query's loss is
        ``-(target_prob * log_prob.gather(-1, target)).sum(-1)``, what ``F.cross_entropy`` gives with probabilities
        [*, N] that are 0 outside the classes listed. The probabilities need not sum to 1, and take no gradient. Entries
        of ignore_index or -1 are padding; those and entries of probability 0 add nothing; repeats add up. `z_loss` adds
        ``z_loss * log_normaliser ** 2``, multiplied by the sum of the query's probabilities. "mean" is
        over the queries with an entry that is no padding, also beside class weights, as in torch.

        Args:
            input: [*, D], in the dtype of the table.
            target: int64 [*] or [*, T], in [0, N) or ignore_index.
            target_prob: floating [*, T], the probability of each entry of target [*, T]. None: targets are hard.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError: as :class:`LinearCrossEntropyLoss`; ValueError also for a target_prob of
                another shape than target, or beside label_smoothing.
        """
        return self.exact(input, target, target_prob)


def check_loss_class(owner: str, loss_class: Any) -> None:
    """Raises TypeError unless `loss_class` derives from LinearLoss."""
    if not (isinstance(loss_class, type) and issubclass(loss_class, LinearLoss)):
        got = loss_class.__name__ if isinstance(loss_class, type) else f"an instance of {type(loss_class).__name__}"
        raise TypeError(f"{owner}: expected one of the classes SampledSoftmaxLoss, CaneLoss and "
                        f"LinearCrossEntropyLoss, followed by its arguments, got {got}")


class CandidateLoss(LinearLoss):
    """Base of losses that score candidates in train() and are exact in eval()."""

    _option_names = ("estimator", "remove_accidental_hits", "label_smoothing", "reduction", "ignore_index", "positives", "sparse_grad", "z_loss")

    def _option_text(self) -> str:
        return option_text(**{name: getattr(self, name) for name in self._option_names}, **logit_options(self.logit_scale, self.softcap))

    def _counted(self, input: Tensor, target: Tensor, soft: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the queries and targets passed to the sampler.

        Queries are [Q, D], multiplied by `logit_scale`, and zeros where a target is ignored.
        Targets are [Q], or [Q, T] with several positives, and -1 where they are ignored.
        """
        self._queries(input, self._given(input, target))
        self._check_step()
        queries, counted = torch.ops.xsoftmax.counted_queries(input, target, self.linear.weight, self.ignore_index, soft)
        return queries if self.logit_scale == 1.0 else queries * self.logit_scale, counted

    def _refresh_due(self) -> bool:
        """Whether a sampler follows the table anew in the next step, which Ctrl-C stops and a bar follows."""
        if torch.jit.is_scripting():
            return False
        return not torch.compiler.is_compiling() and any(sampler.follows_table and sampler.refresh_due() for sampler in self._samplers())

    def _one_step(self, input: Tensor, target: Tensor, state: List[Tensor], sampler: str, generator: Optional[torch.Generator], training: bool,
                  prepares: bool, others: List[Optional[Tensor]]) -> Tensor:
        """A step in one operator, from the hidden states to the reduced loss."""
        self._check_queries(input, self._given(input, target))
        self._check_step()
        return torch.ops.xsoftmax.sampled_step(input, self.linear.weight, self.linear.bias, target, state, sampler, self._options, generator,
                                               training, prepares, others)

    def _candidate_loss(self, input: Tensor, target: Tensor, sets: List[CandidateSet], log_z: Optional[Tensor],
                        target_prob: Optional[Tensor] = None) -> Tensor:
        ids, log_count, target_log_count, distinct = columns_of(sets)
        return torch.ops.xsoftmax.sampled_softmax_loss(input, self.linear.weight, self.linear.bias, target, ids, log_count, target_log_count,
                                                       distinct, self.weight, log_z, self._options, target_prob)
