"""Samplers whose distribution does not depend on the query: weights, uniform, log-uniform, unigram,
and fixed classes."""

from typing import Any, Callable, Dict, List, Optional, Union

import numpy as np
import torch
from torch import Tensor

from .._core.checks import as_ids, as_tensor, check_count
from .._core.options import option_text, read_options
from .._core.typing import Numbers
from .candidate_set import CandidateSet, one_set
from .sampler import DescribedSampler, register, unusable_tables
from .streaming import StreamingCounts

Exclude = Union[int, Numbers, None]
# These stay on the CPU when the sampler moves, because every draw reads them.
SCALARS = ("laid_out", "late_weight", "late_log_uniform")
TABLES = ("probability", "bins", "order", "cumulative", *SCALARS)


def _check_option(owner: str, argument: str, value: Optional[bool], default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{owner}: expected {argument} as True, False or None, got {value!r}")
    return default if value is None else value


def _read_ids(owner: str, argument: str, ids: Exclude, num_classes: int) -> Optional[Tensor]:
    """Returns class ids as a tensor; an int h means the ids below h."""
    if ids is None:
        return ids
    if isinstance(ids, (int, np.integer)):
        return torch.arange(min(check_count(owner, argument, ids, 0), num_classes))
    return as_ids(owner, argument, ids)


class StaticSampler(DescribedSampler):
    """Samples classes in proportion to fixed weights: ``q_i = w_i / sum(w)``, for all queries.

    Samples with replacement have the distribution of ``torch.multinomial(weights, num_samples,
    replacement=True)``, drawn from an alias table in O(1) each. The expected count of a class is
    ``M q_i``, with M the number of samples. Samples without replacement are systematic, with the
    inclusion probability ``pi_i = min(1, c q_i)``, where c makes the probabilities sum to M
    (``xsoftmax::systematic_sample``).

    Args:
        weights: ``[N]``, a tensor of any real dtype, an array or a list; finite, not negative, not
            all zero. A class of zero weight is never drawn.
        num_samples: samples for the batch, or per query, at least 0. Without replacement, at most
            the number of classes of positive weight.
        shared: whether the batch shares one set, or each query has its own. None: shared.
        distinct: whether a set is sampled without replacement. None: shared sets are, private ones
            are not.
        exclude: classes never drawn: an int h for the ids below h, or ids, an int64 tensor [E], an
            array or a list.

    Shapes and dtypes: ids int64 [M] (shared) or [Q, M], log counts float32 of that shape; see
    :class:`CandidateSet`.

    Buffers (not in the state dict; of size 0 if not needed): ``probability`` float64 [N],
    normalised; ``bins`` for samples with replacement; ``order`` and ``cumulative`` for samples
    without. Scalars that stay on the CPU when the sampler moves: ``laid_out`` int64, the number of
    classes that the tables cover; ``late_weight`` float64 and ``late_log_uniform`` bool, which
    define the weights of classes added since (:meth:`plan_resize`).

    Raises:
        ValueError: weights, num_samples or exclude violate the conditions above or have another
            dtype or shape, such as more samples without replacement than classes of positive
            weight, or an ``exclude`` that leaves no class.
        TypeError: weights are not numbers of a real dtype, or an option has another type.
        IndexError: an excluded id is not in [0, N).
    """

    _distribution = ""  # set if the weights follow from the number of classes

    def __init__(self, weights: Numbers, num_samples: int, *, shared: Optional[bool] = None,
                 distinct: Optional[bool] = None, exclude: Exclude = None):
        self._init_distribution("table", weights, None, 0, num_samples, shared, distinct, exclude)

    def _init_distribution(self, distribution: str, numbers: Optional[Numbers],
                           power: Optional[float], num_classes: int, num_samples: int,
                           shared: Optional[bool], distinct: Optional[bool],
                           exclude: Exclude) -> None:
        owner = type(self).__name__
        weights: Optional[Tensor] = None
        if distribution != "table":
            num_classes = check_count(owner, "num_classes", num_classes, 1)
        else:
            weights = as_tensor(owner, "weights" if power is None else "counts", numbers)
        classes = _read_ids(owner, "exclude", exclude,
                            num_classes if weights is None else weights.numel())
        shared = _check_option(owner, "shared", shared, True)
        distinct = _check_option(owner, "distinct", distinct, shared)
        self._make(
            weights, power, classes,
            option_text(distribution=distribution, num_classes=num_classes,
                        num_samples=check_count(owner, "num_samples", num_samples,
                                                0), shared=shared, distinct=distinct))

    def _make(self, weights: Optional[Tensor], power: Optional[float], classes: Optional[Tensor],
              options: str) -> None:
        tables, options = torch.ops.xsoftmax.static_tables(
            type(self).__name__, weights, power, classes, options)
        values = read_options(options)
        super().__init__(int(values["num_classes"]), int(values["num_samples"]),
                         shared=values["shared"] == "true", distinct=values["distinct"] == "true")
        self.options = options
        # Not in the state dict, because the constructor's arguments determine the tables, and so
        # that a loss has the keys of torch.nn.LinearCrossEntropyLoss. As buffers they move with
        # .to() and are saved by TorchScript.
        for name, table in zip(TABLES, tables):
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> List[Tensor]:
        return [
            self.probability, self.bins, self.order, self.cumulative, self.laid_out,
            self.late_weight, self.late_log_uniform
        ]

    def _describe(self) -> str:
        return "static:7:" + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        return self._tables()

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        return self._tables()[-len(SCALARS):]

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        """Plans a resize; see :meth:`Sampler.plan_resize`.

        A new class gets the smallest positive weight, or, in a log-uniform distribution, the weight
        of its id. The tables are rebuilt in O(N) if classes are removed other than those added
        since the last rebuild, or once a quarter as many classes have been added. Adding classes
        therefore costs O(1) each, amortised.
        """
        tables, options = torch.ops.xsoftmax.static_resize(
            type(self).__name__, self._tables(), num_classes, self._distribution, self.options)

        def resize() -> None:
            if len(tables) == len(SCALARS):
                torch.ops.xsoftmax.static_grow_(self._tables(), tables, num_classes)
            else:
                for name, table in zip(TABLES, tables):
                    setattr(self, name, table)
            self.num_classes, self.options = num_classes, options

        return resize

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scalars = [getattr(self, name) for name in SCALARS]
        super()._apply(fn, recurse)
        for name, scalar in zip(SCALARS, scalars):
            setattr(self, name, scalar)
        return self

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "StaticSampler":
        sampler = StaticSampler.__new__(type(self))
        sampler._make(self.probability if self.probability.numel() else None, None, ids,
                      self.options)
        return sampler

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool,
                  **options: Any) -> "StaticSampler":
        if num_samples is None:
            raise ValueError(f"make_sampler: expected num_samples for a {cls.__name__}, got None: "
                             "give how many classes to draw")
        return cls(
            num_classes,  # type: ignore[arg-type]  # the constructor is that of a subclass
            num_samples,
            **options)

    def extra_repr(self) -> str:
        return self.options.replace(",", ", ")


@register("uniform")
class UniformSampler(StaticSampler):
    """Samples classes uniformly: ``q_i = 1 / n`` over the n classes that are not excluded.

    Needs no tables, for any ``num_classes``, unless ``exclude`` is a tensor other than ``0, 1, ...,
    h - 1``. Samples without replacement have ``pi_i = M / n`` exactly.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.

    Shapes, dtypes and errors: same as :class:`StaticSampler`.
    """
    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None,
                 distinct: Optional[bool] = None, exclude: Exclude = None):
        self._init_distribution("uniform", None, None, num_classes, num_samples, shared, distinct,
                                exclude)


@register("log_uniform")
class LogUniformSampler(StaticSampler):
    """Samples from a Zipf distribution, for classes sorted by descending frequency.

    ``q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1))`` for i in [h, N), where h is the
    number of excluded classes: the distribution of TensorFlow's ``log_uniform_candidate_sampler``.

    Samples with replacement need no tables unless ``exclude`` is a tensor other than ``0, 1, ..., h
    - 1``; samples without replacement do.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.

    Shapes, dtypes and errors: same as :class:`StaticSampler`.
    """

    _distribution = "log_uniform"

    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None,
                 distinct: Optional[bool] = None, exclude: Exclude = None):
        self._init_distribution("log_uniform", None, None, num_classes, num_samples, shared,
                                distinct, exclude)


@register("unigram")
class UnigramSampler(StaticSampler):
    """Samples classes by their frequency: ``q_i = counts_i^power / sum_j counts_j^power``.

    With a :class:`StreamingCounts`, q follows a stream: ``q_i = (1 - u) counts_i^power / sum_j
    counts_j^power + u / n``, where u is ``uniform_share`` and n the number of classes that are not
    excluded, so that classes never seen can be drawn. In train(), each :meth:`sample` counts the
    targets; for multiple positives, it counts the first one of each query (a loss passes them in
    descending order of id). ``counts`` becomes the submodule ``streaming``, and nothing else may
    update it.

    The tables are then rebuilt in O(N) (O(N log N) for samples without replacement) at step 0, at
    growing intervals up to step ``refresh_every``, and then at its multiples. Expected counts are
    always exact, because they are computed from the tables that classes are drawn from. The tables
    and ``step``, int64 on the CPU, are in the state dict. Tables for other excluded classes or
    options do not load; the next step rebuilds them.

    Args:
        counts: ``[N]``, a tensor of any real dtype, an array or a list; finite, not negative, not
            all zero. A class of zero count is never drawn. Or a :class:`StreamingCounts` of dense
            ids.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.
        power: finite and at least 0. 0.75 flattens the frequencies (Mikolov et al., 2013); 0 draws
            all classes that were seen uniformly.
        refresh_every: with a :class:`StreamingCounts`: steps between two rebuilds of the tables; 0:
            never again after step 0.
        uniform_share: with a :class:`StreamingCounts`: u, in (0, 1].

    Shapes and dtypes: same as :class:`StaticSampler`.

    Raises:
        ValueError: power, refresh_every or uniform_share is out of range; a
            :class:`StreamingCounts` has open ids; and same as :class:`StaticSampler`.
        TypeError, IndexError: same as :class:`StaticSampler`.
    """
    def __init__(self, counts: Union[Numbers,
                                     StreamingCounts], num_samples: int, *, power: float = 0.75,
                 shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None, refresh_every: int = 1000, uniform_share: float = 0.01):
        if not isinstance(counts, StreamingCounts):
            self._init_distribution("table", counts, float(power), 0, num_samples, shared, distinct,
                                    exclude)
            return
        if counts.num_ids is None:
            raise ValueError("UnigramSampler: expected counts of dense ids, got those of open ids")
        self._init_distribution("table", torch.ones(counts.num_ids, device=counts.count.device),
                                None, 0, num_samples, shared, distinct, exclude)
        self.follow_options = torch.ops.xsoftmax.follow_options(
            "UnigramSampler",
            option_text(
                power=float(power), uniform_share=float(uniform_share),
                refresh_every=check_count("UnigramSampler", "refresh_every", refresh_every,
                                          0), distinct=self.distinct))
        self._follow_every = int(refresh_every)
        self.streaming = counts
        self.register_buffer("excluded", (self.probability == 0).nonzero().squeeze(1),
                             persistent=False)
        for name in TABLES:
            if getattr(self, name).numel() > 0:
                self.register_buffer(name, getattr(self, name))  # in the state dict
        self.register_buffer("step", torch.zeros([], dtype=torch.int64, device="cpu"))

    def _make(self, weights: Optional[Tensor], power: Optional[float], classes: Optional[Tensor],
              options: str) -> None:
        super()._make(weights, power, classes, options)
        self.streaming = None  # type: ignore[assignment]

    def _describe(self) -> str:
        if self.streaming is not None:
            if not torch.jit.is_scripting() and self._counts_ranks():
                return ""
            return ("unigram:13:" + self.options + "|" + self.streaming.options + "|" +
                    self.follow_options)
        return "static:7:" + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        if self.streaming is not None:
            return self._tables() + [
                self.excluded, self.step, self.streaming.count, self.streaming.total,
                self.streaming.last, self.streaming.seen
            ]
        return self._tables()

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        if not torch.jit.is_scripting() and self._counts_ranks():
            return self._sample_with_ranks(queries, target, generator)
        return self._draw(queries, target, generator)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        return self.streaming is not None and torch.ops.xsoftmax.refresh_is_due(
            int(self.step), self._follow_every)

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        return [] if self.streaming is None else [self.step]

    @torch.jit.unused
    def _counts_ranks(self) -> bool:
        """Returns whether targets of other ranks are counted too."""
        return self.streaming is not None and not self.streaming._ranks.is_single

    @torch.jit.unused
    def _sample_with_ranks(self, queries: Tensor, target: Optional[Tensor],
                           generator: Optional[torch.Generator]) -> List[CandidateSet]:
        if self.training and target is not None:
            ids_of_ranks = self.streaming._gather_ids(target[:, 0] if target.dim() == 2 else target)
            torch.ops.xsoftmax.static_follow_(target, ids_of_ranks, self.excluded, self.step,
                                              self.streaming.count, self.streaming.total,
                                              self.streaming.last, self.streaming.seen,
                                              self._tables(), self.streaming.options,
                                              self.follow_options)
        tensors = torch.ops.xsoftmax.static_sample(self._seed(queries, generator), queries, target,
                                                   self._tables(), self.options)
        return one_set(tensors, target, self.distinct)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.static_log_count(ids, self._tables(), self.options)

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "UnigramSampler":
        if self.streaming is None:
            return super().excluding(ids)
        follow = read_options(self.follow_options)
        return UnigramSampler(self.streaming, self.num_samples, power=float(follow["power"]),
                              shared=self.shared, distinct=self.distinct,
                              exclude=torch.cat([self.excluded,
                                                 ids.to(self.excluded.device)]),
                              refresh_every=int(follow["refresh_every"]),
                              uniform_share=float(follow["uniform_share"]))

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        """Plans a resize, as :class:`StaticSampler` does. With a :class:`StreamingCounts`, new
        classes start with a count of 0, and get the corresponding weight at the next rebuild."""
        resize_tables = super().plan_resize(num_classes, rows, bias)

        def resize() -> None:
            resize_tables()
            if self.streaming is not None:
                self.excluded = self.excluded[self.excluded < num_classes]  # type: ignore[has-type]
                self.streaming.resize(num_classes)

        return resize

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.streaming is not None:
            # Every training step reads it, so it stays on the host.
            self.step = self.step.cpu()  # type: ignore[has-type]
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str,
                              local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        if self.streaming is not None:
            tables = {
                name: getattr(self, name)
                for name in (*TABLES, "step") if getattr(self, name).numel() > 0
            }
            saved_tables = {
                name: state_dict[prefix + name]
                for name in tables if prefix + name in state_dict
            }
            if messages := unusable_tables(
                    type(self).__name__, prefix, saved_tables, may_be_infinite=SCALARS):
                error_msgs.extend(messages)
                return
            missing_names = [prefix + name for name in tables if prefix + name not in state_dict]
            fits = all(table.shape == tables[name].shape for name, table in saved_tables.items())
            probability = state_dict.get(prefix + "probability")
            excludes_same = fits and probability is not None and torch.equal(
                probability.cpu() == 0,
                self.probability.cpu() == 0)
            if missing_names or not excludes_same:
                if excludes_same:  # a subset of these tables, not those of another sampler
                    missing_keys.extend(missing_names)
                self.step.zero_()
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        if self.streaming is not None:
            for name in ("step", *SCALARS):
                # load_state_dict(assign=True) may have placed them on a device.
                setattr(self, name, getattr(self, name).cpu())

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.streaming is None else ", " +
                                       self.follow_options.replace(",", ", "))

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool,
                  counts: Union[Numbers, StreamingCounts, None] = None, **options: Any) -> Any:
        size = counts.num_ids if isinstance(
            counts, StreamingCounts) else None if counts is None else len(counts)
        if size != num_classes:
            hint = (": use xs.samplers.UnigramSampler(counts, num_samples) instead of the name, or "
                    "counts= of make_sampler" if size is None else "")
            raise ValueError(f"make_sampler: expected counts of {num_classes} classes for "
                             f"\"unigram\", got {'none' if size is None else size}{hint}")
        return super().for_table(
            counts,  # type: ignore[arg-type]  # counts stand first
            num_samples,
            dim=dim,
            bias=bias,
            **options)


class FixedSampler(StaticSampler):
    """Proposes the same classes for all queries, each once, with ``log_count`` 0.

    Use it as a part of a :class:`UnionSampler`, for classes that are always scored.

    Args:
        num_classes: N >= 1.
        ids: the classes: an int h for the ids below h, or ids, an int64 tensor [M], an array or a
            list, in any order.

    Shapes and dtypes: same as :class:`StaticSampler`: ids int64 [M], shared and distinct.

    Raises:
        ValueError: num_classes is below 1, h is below 0, or a tensor has another dtype or shape.
        TypeError: num_classes or ids has another type.
        IndexError: an id is not in [0, N).
    """
    def __init__(self, num_classes: int, ids: Union[int, Numbers]):
        owner = type(self).__name__
        num_classes = check_count(owner, "num_classes", num_classes, 1)
        self._make(None, None, _read_ids(owner, "ids", ids, num_classes),
                   option_text(distribution="fixed", num_classes=num_classes))

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "FixedSampler":
        return FixedSampler(self.num_classes, self.order[~torch.isin(self.order, ids)])
