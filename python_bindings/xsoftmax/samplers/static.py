"""Samplers whose distribution does not depend on the query: weight tables, uniform, log-uniform, unigram, fixed classes."""

from typing import Any, Callable, Dict, List, Optional, Union

import numpy as np
import torch
from torch import Tensor

from .._checks import as_ids, as_tensor, check_count
from .._options import option_text, read_options
from .._typing import Numbers
from .sampler import CandidateSet, DescribedSampler, one_set, register, unusable_tables
from .streaming import StreamingCounts

Exclude = Union[int, Numbers, None]
SCALARS = ("laid_out", "late_weight", "late_log_uniform")  # on the CPU wherever the sampler moves: every draw reads them
TABLES = ("probability", "bins", "order", "cumulative", *SCALARS)


def _bool(owner: str, argument: str, value: Optional[bool], default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{owner}: expected {argument} as True, False or None, got {value!r}")
    return default if value is None else value


def _ids(owner: str, argument: str, ids: Exclude, num_classes: int) -> Optional[Tensor]:
    """An int h stands for the classes below h."""
    if ids is None:
        return ids
    if isinstance(ids, (int, np.integer)):
        return torch.arange(min(check_count(owner, argument, ids, 0), num_classes))
    return as_ids(owner, argument, ids)


class StaticSampler(DescribedSampler):
    """Draws classes in proportion to fixed weights: ``q_i = w_i / sum(w)``, whatever the queries are.

    Independent draws have the distribution of ``torch.multinomial(weights, num_samples, replacement=True)``, by an alias table (O(1) each). The expected count
    of a class is ``M q_i``, M the number of draws. Distinct draws are systematic, with inclusion probability ``pi_i = min(1, c q_i)``, where c makes the
    probabilities sum to M (``xsoftmax::systematic_sample``).

    Args:
        weights: ``[N]``, a tensor of any real dtype, an array or a list, finite, not negative, not
            all zero. A class of zero weight is never drawn.
        num_samples: draws for the batch, or for each query, at least 0. Distinct draws are at most as many as the classes of positive weight.
        shared: one set for the batch, or one for each query. None: one for the batch.
        distinct: whether a set holds no class twice. None: shared sets are distinct, private ones independent.
        exclude: classes never drawn: an int h means the ids below h, an int64 tensor [E] (or an
            array or a list) means those ids.

    Shapes and dtypes of draws: ids int64 [M] (shared) or [Q, M], log counts float32 of that shape; see :class:`CandidateSet`.

    Buffers (not in the state dict; size 0 where not needed): ``probability`` float64 [N], over its sum; ``bins`` of independent draws; ``order``,
    ``cumulative`` of distinct ones. Scalars that stay on the CPU wherever the sampler moves: ``laid_out`` int64, how
    many classes the tables are laid out for; ``late_weight`` float64 and ``late_log_uniform`` bool, the weight of
    those behind them (:meth:`plan_resize`).

    Raises:
        ValueError: weights, num_samples or exclude that are not as above, such as more distinct draws than classes of positive weight, an ``exclude`` that
            leaves no class, or one of another dtype or shape.
        TypeError: weights are not numbers of a real dtype, or an option is of another type.
        IndexError: an excluded id is not in [0, N).
    """

    _law = ""  # where weights follow from the number of classes

    def __init__(self, weights: Numbers, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("table", weights, None, 0, num_samples, shared, distinct, exclude)

    def _draw_from(self, law: str, given: Optional[Numbers], power: Optional[float], num_classes: int, num_samples: int,
                   shared: Optional[bool], distinct: Optional[bool], exclude: Exclude) -> None:
        owner = type(self).__name__
        weights: Optional[Tensor] = None
        if law != "table":
            num_classes = check_count(owner, "num_classes", num_classes, 1)
        else:
            weights = as_tensor(owner, "weights" if power is None else "counts", given)
        classes = _ids(owner, "exclude", exclude, num_classes if weights is None else weights.numel())
        shared = _bool(owner, "shared", shared, True)
        distinct = _bool(owner, "distinct", distinct, shared)
        self._make(weights, power, classes, option_text(
            law=law, num_classes=num_classes, num_samples=check_count(owner, "num_samples", num_samples, 0), shared=shared, distinct=distinct))

    def _make(self, weights: Optional[Tensor], power: Optional[float], classes: Optional[Tensor], options: str) -> None:
        tables, options = torch.ops.xsoftmax.static_tables(type(self).__name__, weights, power, classes, options)
        made = read_options(options)
        super().__init__(int(made["num_classes"]), int(made["num_samples"]), shared=made["shared"] == "true",
                         distinct=made["distinct"] == "true")
        self.options = options
        # The constructor's arguments say all there is in the tables, so they stay out of the state dict, and a loss keeps the keys of
        # torch.nn.LinearCrossEntropyLoss. TorchScript saves them, .to() moves them.
        for name, table in zip(TABLES, tables):
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> List[Tensor]:
        return [self.probability, self.bins, self.order, self.cumulative, self.laid_out, self.late_weight, self.late_log_uniform]

    def _describe(self) -> str:
        return "static:7:" + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        return self._tables()

    @torch.jit.unused
    def _host_numbers(self) -> List[Tensor]:
        return self._tables()[-len(SCALARS):]

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Callable[[], None]:
        """New classes weigh as much as the lightest one that is drawn; in a log-uniform law what it gives their ids. Tables are laid out anew, O(N), where
        classes go that have not come since the last time, and where a quarter as many have come: so classes that come cost O(1) each, averaged over many."""
        tables, options = torch.ops.xsoftmax.static_resize(type(self).__name__, self._tables(), num_classes, self._law, self.options)

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
        other = StaticSampler.__new__(type(self))
        other._make(self.probability if self.probability.numel() else None, None, ids, self.options)
        return other

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool, **options: Any) -> "StaticSampler":
        if num_samples is None:
            raise ValueError(f"make_sampler: expected num_samples for a {cls.__name__}, got None: "
                             "give how many classes to draw")
        return cls(num_classes, num_samples, **options)  # type: ignore[arg-type]  # the constructor is that of a subclass

    def extra_repr(self) -> str:
        return self.options.replace(",", ", ")


@register("uniform")
class UniformSampler(StaticSampler):
    """Draws every class alike: ``q_i = 1 / n`` over the n classes that are not excluded.

    Needs no tables, whatever ``num_classes`` is, unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``. Distinct draws then have ``pi_i = M / n``
    exactly.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.

    Shapes, dtypes and errors as :class:`StaticSampler`.
    """

    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("uniform", None, None, num_classes, num_samples, shared, distinct, exclude)


@register("log_uniform")
class LogUniformSampler(StaticSampler):
    """Draws classes by Zipf's law, for classes that are sorted by falling frequency.

    ``q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1))`` for i in [h, N), h the number of excluded classes. It is the distribution of TensorFlow's
    ``log_uniform_candidate_sampler``.

    Independent draws need no tables unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``; distinct ones do.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.

    Shapes, dtypes and errors as :class:`StaticSampler`.
    """

    _law = "log_uniform"

    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("log_uniform", None, None, num_classes, num_samples, shared, distinct, exclude)


@register("unigram")
class UnigramSampler(StaticSampler):
    """Draws classes by their frequency: ``q_i = counts_i^power / sum_j counts_j^power``.

    With a :class:`StreamingCounts`, q follows a stream: ``q_i = (1 - u) counts_i^power / sum_j counts_j^power + u / n``, u the ``uniform_share`` and n the
    number of classes that are not excluded, so that a class which was never seen can be drawn. Each :meth:`sample` in train() counts the targets. Of several
    positives of a query it counts the first, which of a loss is that of the greatest id. ``counts`` is the submodule ``streaming``, and nothing else may update
    it.

    The tables are rebuilt, in O(N) (O(N log N) for distinct draws), at step 0, then ever less often up to step ``refresh_every``, and then at its multiples.
    Expected counts are exact at any time: they are those of the tables that the classes are drawn from. The tables and ``step``, int64 on the CPU, are then in
    the state dict. Tables of other excluded classes, or for other draws, do not load, and the next step rebuilds them.

    Args:
        counts: ``[N]``, a tensor of any real dtype, an array or a list, finite, not negative, not
            all zero. A class of zero count is never drawn. Or a :class:`StreamingCounts` of dense
            ids.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.
        power: finite and at least 0. 0.75 flattens the frequencies (Mikolov et al., 2013); 0 draws all seen classes alike.
        refresh_every: of counts of a stream, steps between two rebuilds of the tables; 0: never again after step 0.
        uniform_share: of counts of a stream, in (0, 1].

    Shapes and dtypes as :class:`StaticSampler`.

    Raises:
        ValueError: power, refresh_every or uniform_share out of range; a :class:`StreamingCounts` of open ids; and as :class:`StaticSampler`.
        TypeError, IndexError: as :class:`StaticSampler`
    """

    def __init__(self, counts: Union[Numbers, StreamingCounts], num_samples: int, *, power: float = 0.75, shared: Optional[bool] = None,
                 distinct: Optional[bool] = None, exclude: Exclude = None, refresh_every: int = 1000, uniform_share: float = 0.01):
        if not isinstance(counts, StreamingCounts):
            self._draw_from("table", counts, float(power), 0, num_samples, shared, distinct, exclude)
            return
        if counts.num_ids is None:
            raise ValueError("UnigramSampler: expected counts of dense ids, got those of open ids")
        self._draw_from("table", torch.ones(counts.num_ids, device=counts.count.device), None, 0, num_samples, shared, distinct, exclude)
        self.follow_options = torch.ops.xsoftmax.follow_options("UnigramSampler", option_text(
            power=float(power), uniform_share=float(uniform_share), refresh_every=check_count("UnigramSampler", "refresh_every", refresh_every, 0),
            distinct=self.distinct))
        self._follow_every = int(refresh_every)
        self.streaming = counts
        self.register_buffer("excluded", (self.probability == 0).nonzero().squeeze(1), persistent=False)
        for name in TABLES:
            if getattr(self, name).numel() > 0:
                self.register_buffer(name, getattr(self, name))  # in the state dict
        self.register_buffer("step", torch.zeros([], dtype=torch.int64, device="cpu"))

    def _make(self, weights: Optional[Tensor], power: Optional[float], classes: Optional[Tensor], options: str) -> None:
        super()._make(weights, power, classes, options)
        self.streaming = None  # type: ignore[assignment]

    def _describe(self) -> str:
        if self.streaming is not None:
            if not torch.jit.is_scripting() and self._counts_ranks():
                return ""
            return "unigram:13:" + self.options + "|" + self.streaming.options + "|" + self.follow_options
        return "static:7:" + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        if self.streaming is not None:
            return self._tables() + [self.excluded, self.step, self.streaming.count, self.streaming.total, self.streaming.last, self.streaming.seen]
        return self._tables()

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        if not torch.jit.is_scripting() and self._counts_ranks():
            return self._sample_with_ranks(queries, target, generator)
        return self._draw(queries, target, generator)

    @torch.jit.unused
    def _eager_step_due(self) -> bool:
        return self.streaming is not None and torch.ops.xsoftmax.refresh_is_due(int(self.step), self._follow_every)

    @torch.jit.unused
    def _host_counters(self) -> List[Tensor]:
        return [] if self.streaming is None else [self.step]

    @torch.jit.unused
    def _counts_ranks(self) -> bool:
        """Whether the targets of other processes count as well."""
        return self.streaming is not None and not self.streaming._ranks.alone

    @torch.jit.unused
    def _sample_with_ranks(self, queries: Tensor, target: Optional[Tensor], generator: Optional[torch.Generator]) -> List[CandidateSet]:
        if self.training and target is not None:
            counted = self.streaming._of_all_ranks(target[:, 0] if target.dim() == 2 else target)
            torch.ops.xsoftmax.static_follow_(target, counted, self.excluded, self.step, self.streaming.count, self.streaming.total, self.streaming.last,
                                              self.streaming.seen, self._tables(), self.streaming.options, self.follow_options)
        drawn = torch.ops.xsoftmax.static_sample(self._seed(queries, generator), queries, target, self._tables(), self.options)
        return one_set(drawn, target, self.distinct)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.static_log_count(ids, self._tables(), self.options)

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "UnigramSampler":
        if self.streaming is None:
            return super().excluding(ids)
        follow = read_options(self.follow_options)
        return UnigramSampler(self.streaming, self.num_samples, power=float(follow["power"]), shared=self.shared, distinct=self.distinct,
                              exclude=torch.cat([self.excluded, ids.to(self.excluded.device)]), refresh_every=int(follow["refresh_every"]),
                              uniform_share=float(follow["uniform_share"]))

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor], bias: Optional[Tensor]) -> Callable[[], None]:
        """As of :class:`StaticSampler`; of counts of a stream, new ones have a count of 0, and weigh like that with the next rebuild."""
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
            self.step = self.step.cpu()  # type: ignore[has-type]  # which every step of training reads: it stays on the host
        return self

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, local_metadata: Dict[str, Any], strict: bool, missing_keys: List[str],
                              unexpected_keys: List[str], error_msgs: List[str]) -> None:
        if self.streaming is not None:
            tables = {name: getattr(self, name) for name in (*TABLES, "step") if getattr(self, name).numel() > 0}
            saved = {name: state_dict[prefix + name] for name in tables if prefix + name in state_dict}
            if unusable := unusable_tables(type(self).__name__, prefix, saved, may_be_infinite=SCALARS):
                error_msgs.extend(unusable)
                return
            missing = [prefix + name for name in tables if prefix + name not in state_dict]
            fits = all(table.shape == tables[name].shape for name, table in saved.items())
            probability = state_dict.get(prefix + "probability")
            same = fits and probability is not None and torch.equal(probability.cpu() == 0, self.probability.cpu() == 0)
            if missing or not same:
                if same:  # a part of these tables, not those of another sampler
                    missing_keys.extend(missing)
                self.step.zero_()
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if self.streaming is not None:
            for name in ("step", *SCALARS):
                setattr(self, name, getattr(self, name).cpu())  # load_state_dict(assign=True) takes tensors as they are

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.streaming is None else ", " + self.follow_options.replace(",", ", "))

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool,
                  counts: Union[Numbers, StreamingCounts, None] = None, **options: Any) -> Any:
        size = counts.num_ids if isinstance(counts, StreamingCounts) else None if counts is None else len(counts)
        if size != num_classes:
            more = ": use xs.samplers.UnigramSampler(counts, num_samples) instead of the name, or counts= of make_sampler" if size is None else ""
            raise ValueError(f"make_sampler: expected counts of {num_classes} classes for \"unigram\", got {'none' if size is None else size}{more}")
        return super().for_table(counts, num_samples, dim=dim, bias=bias, **options)  # type: ignore[arg-type]  # counts stand first


class FixedSampler(StaticSampler):
    """Proposes the same classes for all queries, each once, with ``log_count`` 0. It is a part of a :class:`UnionSampler` where some classes are to be scored
    in any case.

    Args:
        num_classes: N >= 1.
        ids: the classes: an int h means those below h, an int64 tensor [M] (or an array or a list)
            means those ids, in any order.

    Shapes and dtypes as :class:`StaticSampler`: ids int64 [M], shared and distinct.

    Raises:
        ValueError: num_classes below 1, h below 0, or a tensor of another dtype or shape.
        TypeError: num_classes or ids of another type.
        IndexError: an id is not in [0, N).
    """

    def __init__(self, num_classes: int, ids: Union[int, Numbers]):
        owner = type(self).__name__
        num_classes = check_count(owner, "num_classes", num_classes, 1)
        self._make(None, None, _ids(owner, "ids", ids, num_classes), option_text(law="fixed", num_classes=num_classes))

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "FixedSampler":
        return FixedSampler(self.num_classes, self.order[~torch.isin(self.order, ids)])
