"""The base class of losses over a class table, with the interface of
torch.nn.LinearCrossEntropyLoss: the same order of constructor arguments and the same `.linear`."""

import numbers
from typing import Any, Dict, Iterable, List, Optional, Type, TypeVar

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import retrieval
from .._core.checks import check_count, check_number, check_target_prob
from .._core.options import logit_options, option_text
from ..tables.resize import resize_classes
from ..tables.table_module import (TableModule, check_linear, check_queries, flatten_queries,
                                   make_linear, refuse_parametrized)
from .._core.typing import Numbers
from ..estimators import check_estimator
from ..samplers import Sampler

Loss = TypeVar("Loss", bound="LinearLoss")
_EXACT_OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "workspace_mb")
_ALL_EXACT_OPTIONS = (*_EXACT_OPTIONS, "logit_scale", "softcap")


class LinearLoss(TableModule):
    """Base class of losses over a class table. It provides the table as `.linear`, the exact loss,
    and prediction.

    The table is an ``nn.Linear`` with a row for each class: `linear.weight` [N, D] and, with
    bias=True, `linear.bias` [N]. A subclass defines ``forward``.

    The state dict holds `linear.weight`, `linear.bias` and, if class weights were given, `weight`.
    These are the keys of :class:`torch.nn.LinearCrossEntropyLoss`, so checkpoints load in both
    directions (with strict=False if a sampler keeps state).

    Args, shapes, dtypes and errors: same as :class:`LinearCrossEntropyLoss`.
    """

    # State of a sampler, or a log Z: ignored by a loss that has none, and left unchanged if a
    # checkpoint has none.
    _optional_state = ("sampler.", "noise.", "candidate_sampler.", "log_z")

    def __init__(self, in_features: int, num_classes: int, *, bias: bool = False,
                 weight: Optional[Numbers] = None, reduction: str = "mean",
                 ignore_index: int = -100, label_smoothing: float = 0.0, positives: str = "mean",
                 logit_scale: float = 1.0, softcap: Optional[float] = None, z_loss: float = 0.0,
                 device: Device = None, dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        self._init_table(in_features, num_classes, reduction=reduction, weight=weight,
                         ignore_index=ignore_index)
        self.label_smoothing = label_smoothing
        self.logit_scale, self.softcap, self.z_loss = logit_scale, softcap, z_loss
        self.positives = positives
        self.workspace_mb = 512
        self._set_exact_options()
        self.linear = make_linear(self._name, self.in_features, self.num_classes, bias, device,
                                  dtype)
        self._watch_tables()

    def _set_exact_options(self) -> None:
        """Rebuilds the option texts of the exact operators, after an option was assigned."""
        logits = logit_options(self.logit_scale, self.softcap)
        self._logit_options = option_text(**logits)
        self._exact_options = option_text(**{name: getattr(self, name)
                                             for name in _EXACT_OPTIONS}, **logits)

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

    def _copy_with_reduction(self: Loss, reduction: str) -> Loss:
        """Returns a shallow copy of a loss of reduction "mean", with another reduction, for a
        single call.

        It shares all tensors and modules, so threads may call it and the loss at the same time.
        """
        loss = type(self).__new__(type(self))
        loss.__dict__.update(self.__dict__)
        loss.__dict__.pop("_compiled_call_impl", None)  # compiled for the loss itself
        loss.__dict__["reduction"] = reduction
        for name in {"_options", "_exact_options"} & self.__dict__.keys():
            text = self.__dict__[name].replace("reduction=mean", f"reduction={reduction}")
            loss.__dict__[name] = text
        return loss

    @classmethod
    def from_linear(cls: Type[Loss], linear: nn.Linear, **kwargs: Any) -> Loss:
        """Creates the loss over the classes of an existing ``nn.Linear``, whose parameters it
        shares: `loss.linear is linear`.

        Args:
            linear: an ``nn.Linear`` with `weight` [N, D] and `bias` [N] or None. Its rows are the
                classes. The loss has its device and dtype.
            **kwargs: other arguments of the constructor. in_features, num_classes, bias, device and
                dtype are taken from `linear` and not allowed here.

        Raises:
            TypeError: `linear` is not an ``nn.Linear``, is of a subclass with another forward pass,
                or is a lazy one whose sizes are not known; or `kwargs` has an argument that is
                taken from `linear`.
            ValueError: same as the constructor; a hook computes the weight
                (``torch.nn.utils.weight_norm``, ``spectral_norm``, ``prune``), or a parametrization
                does and sparse_grad is not False.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        if layer_arguments := {"in_features", "num_classes", "bias", "device", "dtype"
                               } & set(kwargs):
            raise TypeError(f"{cls.__name__}.from_linear: expected arguments other than those of "
                            f"the linear layer, got {', '.join(sorted(layer_arguments))}")
        # The table of the constructor is discarded. On the meta device it costs nothing.
        loss = cls(linear.in_features, linear.out_features, bias=linear.bias is not None,
                   device="meta", **kwargs)
        loss.linear = linear
        if loss._has_row_gradients():
            refuse_parametrized(loss)
        loss.to(linear.weight.device)
        return loss

    def _tables(self) -> List[Optional[Tensor]]:
        tables: List[Optional[Tensor]] = [self.linear.weight, self.linear.bias]
        return tables

    def _explain_table_size(self, state_dict: Dict[str, Any], prefix: str) -> List[str]:
        saved_rows, rows = state_dict.get(prefix + "linear.weight"), self.linear.weight
        if not isinstance(
                saved_rows,
                Tensor) or saved_rows.shape[1:] != rows.shape[1:] or saved_rows.shape == rows.shape:
            return []
        hint = (f"call resize_classes({len(saved_rows)}) first, then load_state_dict; to keep "
                f"{len(rows)} classes, call resize_classes({len(rows)}) afterwards")
        got = f"expected a checkpoint of {len(rows)} classes, got one of {len(saved_rows)}"
        return [f"{self._name}: {got}: {hint}"]

    def resize_classes(
        self, num_classes: int, *, weight: Optional[Tensor] = None,
        optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Changes the number of classes in place. New classes are appended; classes past the new
        end are removed.

        The parameters of ``linear`` stay the same objects, so optimizers and modules that share
        them keep working. The rows of the first ``min(N, num_classes)`` classes are preserved,
        together with their optimizer state. New rows are initialised as by
        ``nn.Linear.reset_parameters()`` (uniform in ``1 / sqrt(D)`` regardless of the number of
        classes, from torch's default generator), and start with fresh optimizer state. An error
        changes nothing, with one exception: if memory for a sampler runs out, the tables may
        already be resized, and the loss refuses them until this method is called again.

        A call costs O(new rows), amortised: the memory of a table grows by a quarter at a time, and
        the first call copies the table. ``state_dict()``, ``torch.save``, pickle and deepcopy hold
        only the rows in use. When a table is copied, other tensors that shared its memory
        (``.data``, ``detach()``, a view, numpy, a mapped file, shared memory, a CUDA graph) keep
        the old memory.

        - Row optimizers (:mod:`xsoftmax.optim`) that have taken a step for the parameters are found
          automatically. Pending updates of rows stay pending, or are applied.
        - Optimizers of ``torch.optim`` are not found: pass them as ``optimizers``. One that has
          state and was not passed raises at its next step; call this method again with it.
        - Samplers are resized too (:meth:`Sampler.resize <xsoftmax.samplers.Sampler.resize>`).
          Expected counts stay exact, and removed classes are never drawn. New classes cost O(1)
          each, amortised: in a static distribution they get their weight at once; in an index that
          follows the table they are assigned to its cells at once, and drawn uniformly until its
          next rebuild (:meth:`xsoftmax.samplers.AdaptiveSampler.plan_growth`). A call costs O(N) in
          three cases: removing classes from a static distribution, or from an index, other than
          those added since the last rebuild; and adding classes to an index that samples without
          replacement.
        - ``.grad`` of the parameters becomes None, since it has the old size: call this method
          after ``step()``. Backward passes of earlier forward passes raise. A call that does not
          change the number of classes has neither effect.
        - ``num_embeddings`` of an nn.Embedding that is tied to ``linear.weight`` is not updated:
          set it.
        - A scripted loss keeps its number of classes and refuses the resized table.
          DistributedDataParallel must wrap the model anew.

        Args:
            num_classes: at least 1, and above all head classes and candidates of the loss.
            weight: class weights of the new classes, floating [num_classes - N], if the loss has
                class weights. None: 1.
            optimizers: optimizers of ``torch.optim``: SGD, Adagrad, Adadelta, RMSprop and the Adam
                family.

        Raises:
            ValueError: a class that is always scored would be removed; fewer classes remain than a
                sampler draws without replacement; `weight` has another shape, or the loss has no
                class weights.
            TypeError: the table is parametrized, a sampler does not define ``plan_resize``, an
                optimizer is of another class, or num_classes is not an int.
            RuntimeError: the table is sharded or replicated over ranks.
        """
        resize_classes(self, num_classes, weight, optimizers)

    def _samplers(self) -> List[Sampler]:
        """Returns the samplers that are resized together with the table."""
        return []

    def _fixed_ids(self) -> Dict[str, Tensor]:
        """Returns classes that cannot be removed, by the name of the argument they were passed as.
        """
        return {}

    def _check_queries(self, input: Tensor, target: Optional[Tensor]) -> None:
        """Checks the shapes of the table, of input [*, D] and of target [*] or [*, T]."""
        if self.linear.weight.shape[0] != self.num_classes:
            raise ValueError(f"{self._name}: expected linear.weight with a row for each of "
                             f"{self.num_classes} classes, "
                             f"got shape {list(self.linear.weight.shape)}")
        check_queries(self._name, self.in_features, input, target, several=True,
                      num_classes=self.num_classes)

    def _queries(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        self._check_queries(input, target)
        return flatten_queries(input)

    @torch.jit.export
    def exact(self, input: Tensor, target: Tensor, target_prob: Optional[Tensor] = None) -> Tensor:
        """Computes the exact loss, in train() and in eval(). In eval() `forward` returns the same.

        Equivalent to::

            F.cross_entropy(self.linear(input), target, self.weight, reduction=...,
                            ignore_index=..., label_smoothing=...)

        but never holds the logits [Q, N] in memory. :class:`LinearCrossEntropyLoss` has the
        formulas for `logit_scale`, `softcap` and `z_loss`, and for multiple positives, target [*,
        T]. If gradients are recorded, the forward pass computes them together with the loss.
        Evaluate under ``torch.no_grad()``.

        Args:
            input: [*, D], in the dtype of the table.
            target: int64 [*] or [*, T], in [0, N) or ignore_index.
            target_prob: floating [*, T] or None, as in :meth:`LinearCrossEntropyLoss.forward`.

        Returns:
            A scalar, or [*] with reduction="none"; float64 for a float64 table, else float32.

        Raises:
            ValueError, TypeError, IndexError: same as :class:`LinearCrossEntropyLoss`.
        """
        if target_prob is not None:
            return self._compute_soft_loss(input, target, target_prob)
        if self._check_tensors(input, target).dim() == input.dim():
            return self._compute_positives_loss(input, target)
        loss = torch.ops.xsoftmax.linear_cross_entropy(self._table_queries(input, target),
                                                       self.linear.weight, self.linear.bias,
                                                       target.reshape(-1), self.weight,
                                                       self._exact_options)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def _compute_soft_loss(self, input: Tensor, target: Tensor, target_prob: Tensor) -> Tensor:
        self._check_soft_targets(input, target, target_prob)
        self._table_queries(input, target)
        return torch.ops.xsoftmax.linear_soft_loss(input, self.linear.weight, self.linear.bias,
                                                   target, target_prob, self.weight,
                                                   self._exact_options)

    def _check_soft_targets(self, input: Tensor, target: Tensor, target_prob: Tensor) -> None:
        """Makes the checks of a soft target that precede those of the operator."""
        self._check_tensors(input, target)
        if not torch.jit.is_scripting():
            check_target_prob(self._name, target_prob, target, self.num_classes)
        if self.label_smoothing != 0.0:
            raise ValueError(f"{self._name}: expected label_smoothing=0 with target_prob, got "
                             f"{self.label_smoothing}")

    def _compute_positives_loss(self, input: Tensor, target: Tensor) -> Tensor:
        self._table_queries(input, target)
        if self.label_smoothing != 0.0:
            raise ValueError(f"{self._name}: expected label_smoothing=0 with several positives of "
                             f"a query, got {self.label_smoothing}")
        options = self._exact_options + ",positives=" + self.positives
        return torch.ops.xsoftmax.linear_positives_loss(input, self.linear.weight, self.linear.bias,
                                                        target, self.weight, options)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Optional[Tensor] = None) -> Tensor:
        """Computes log-probabilities of classes.

        Equivalent to::

            F.log_softmax(self.linear(input), -1)                       # ids=None
            F.log_softmax(self.linear(input), -1).gather(-1, ids)

        and, with `logit_scale` or `softcap`, to the log-softmax of the transformed logits. With
        `ids`, nothing of size [*, N] is in memory, forward or backward. Preference training (DPO,
        GRPO) needs such log-likelihoods of given tokens. Differentiable with respect to the input
        and the table, whose gradient is dense.

        Args:
            input: [*, D], in the dtype of the table.
            ids: int64 [*] or [*, K] in [0, N); may repeat. None: all classes.

        Returns:
            The shape of `ids`, or [*, N]; float64 for a float64 table, else float32.

        Raises:
            ValueError: the shape of `input` is not [*, D], or that of `ids` neither [*] nor [*, K].
            TypeError: `input` is not a dense tensor, or its dtype differs from the table's; `ids`
                is not int64.
            IndexError: an id is not in [0, N) (checked on the CPU only).
        """
        self._table_queries(input, None)
        return torch.ops.xsoftmax.linear_log_prob(input, self.linear.weight, self.linear.bias, ids,
                                                  self._logit_options)

    @torch.jit.export
    def entropy(self, input: Tensor) -> Tensor:
        """Computes the entropy of the softmax over all classes.

        Equivalent to::

            log_p = self.log_prob(input)
            -(log_p.exp() * log_p).sum(-1)

        but nothing of size [*, N] is in memory, forward or backward. Differentiable with respect to
        the input and the table, whose gradient is dense.

        Args:
            input: [*, D], in the dtype of the table.

        Returns:
            [*], in nats; float64 for a float64 table, else float32.

        Raises:
            ValueError: the shape of `input` is not [*, D].
            TypeError: `input` is not a dense tensor, or its dtype differs from the table's.
        """
        self._table_queries(input, None)
        return torch.ops.xsoftmax.linear_entropy(input, self.linear.weight, self.linear.bias,
                                                 self._logit_options)

    def _logits(self, scores: Tensor) -> Tensor:
        """Returns the logits of scores ``linear(input)``."""
        return scores if self._logit_options == "" else torch.ops.xsoftmax.transform_logits(
            scores, self._logit_options)

    @torch.jit.export
    def topk(self, input: Tensor, k: int,
             exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k most probable classes of each query, best first, without [*, N] in memory.

        Equivalent to::

            self.log_prob(input).topk(k)

        Of equal scores, the lower id comes first. The result has no gradient. All classes are
        scored; :meth:`search` finds the same ids by scoring only a few classes, but returns scores
        ``linear(input)`` instead of log-probabilities. `logit_scale` and `softcap` affect the
        log-probabilities but not the order.

        Args:
            input: [*, D], in the dtype of the table. A query with a NaN or an infinity gets NaN
                values and the first ids; under ``torch.autograd.detect_anomaly()`` it raises
                ValueError.
            k: in [0, N].
            exclude: int64 [*, E]: ids to leave out per query, such as items already seen, in any
                order, with -1 as padding. The result is exact for the remaining classes.
                Log-probabilities are still normalised over all classes. If fewer than k classes
                remain, the last entries have the value -inf and the id -1.

        Returns:
            (log-probabilities, class ids), both [*, k]. Log-probabilities are float64 for a float64
            table, else float32; ids are int64.

        Raises:
            ValueError: k is not in [0, N], the shape of `input` is not [*, D], or that of `exclude`
                is not [*, E].
            TypeError: k is not an int, the dtype of `input` differs from the table's, or `exclude`
                is not int64.
            IndexError: an id of `exclude` is neither in [0, N) nor -1 (checked on the CPU only).
        """
        k = self._check_k(k)
        values, indices = torch.ops.xsoftmax.linear_topk(self._table_queries(input, None),
                                                         self.linear.weight, self.linear.bias,
                                                         self._add_excluded(k, input, exclude),
                                                         self._logit_options)
        return self._drop_excluded(values, indices, k, input, exclude)

    def search(self, input: Tensor, k: int, *, index: str = "midx", recall: Optional[float] = None,
               max_cells: Optional[int] = None,
               exclude: Optional[Tensor] = None) -> retrieval.SearchResult:
        """Returns the best k classes of each query and their scores, without scoring most classes.

        Equivalent to::

            self.linear(input).topk(k)

        Values are scores of ``linear``, without `logit_scale` and `softcap`, which do not change
        the order; the log-probabilities of :meth:`topk` would require scoring all classes. Of equal
        scores, the lower id comes first. The result has no gradient.

        The index groups classes into cells. A copy of the table in 8 bits gives upper bounds on the
        scores of a cell and of its classes, and only the classes that may be among the best are
        scored from the table.

        The search uses the index built by :meth:`search_index`. If the table has changed since, the
        index is rebuilt, without the queries and codewords passed then. Some writes to the table go
        unnoticed: those through ``.data`` or numpy, and those to tables created in
        ``torch.inference_mode()``. Call :meth:`search_index` after them.

        Args:
            input: [*, D], in the dtype of the table. A query with a NaN or an infinity gets NaN
                scores and the first ids, and is not certified.
            k: in [0, N].
            index: "midx".
            recall: None or 1: the k best of all classes, exactly and certified. In (0, 1): cells
                are read in the order of how likely they contain one of the best classes, as many as
                256 example queries needed to find this share of their best k classes. This is a
                target for queries like the examples, not a guarantee for each query. The examples
                are those passed to :meth:`search_index`, or else the first queries that are
                searched, which are certified until there are enough.
            max_cells: at least 1: the number of cells to read, or more if they hold fewer than k
                classes. A query may still be certified. Excludes recall.
            exclude: int64 [*, E], as in :meth:`topk`.

        Returns:
            :class:`SearchResult <xsoftmax.SearchResult>`: (scores [*, k], ids int64 [*, k],
            cells_read int64 [*], certified bool [*]). Scores are float64 for a float64 table, else
            float32.

        Raises:
            ValueError: an argument is out of range or of another shape; the table has no values
                (meta), or has values that are not finite or not below 2^100.
            TypeError: the dtype or device of `input` differs from the table's; k or max_cells is
                not an int.
            IndexError: an id of `exclude` is neither in [0, N) nor -1.
        """
        return retrieval.search(self, input, k, index, recall, max_cells, exclude)

    def search_index(self, queries: Optional[Tensor] = None, *,
                     codewords: Optional[int] = None) -> retrieval.SearchIndex:
        """Builds the index of :meth:`search` from the current table and stores it with the loss.

        The index takes 0.3 times the memory of a float32 table of width 64.

        Args:
            queries: [*, D], some hundred example queries like those to be searched; they determine
                how many cells a recall takes, and the directions that are compared first, which
                makes searches of wide tables faster.
            codewords: K in [1, 1024]: the index has K x K cells of a residual quantizer trained by
                K-means. None: the codewords of the loss's MIDX sampler, if it has one that has been
                refreshed and whose cells hold at least 32 classes on average; else sqrt(N / 256),
                at most 256.

        Returns:
            The :class:`SearchIndex <xsoftmax.SearchIndex>`.

        Raises:
            ValueError: the shape of `queries` is not [*, D]; codewords is out of range; the table
                has no values (meta), or has values that are not finite or not below 2^100.
            TypeError: codewords is not an int.
        """
        return retrieval.build_index(self, queries, codewords)

    @torch.jit.export
    def predict(self, input: Tensor) -> Tensor:
        """Returns the most probable class of each query, ``self.log_prob(input).argmax(-1)``.

        Input [*, D] -> int64 [*]. Errors as :meth:`topk`.
        """
        return self.topk(input, 1, None)[1].squeeze(-1)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name, default in (("label_smoothing", 0.0), ("logit_scale", 1.0), ("softcap", None),
                              ("z_loss", 0.0)):
            value = getattr(self, name)
            text += "" if value == default else f", {name}={value}"
        return text
