"""Samplers whose distribution does not depend on the query: weight tables, uniform, log-uniform, unigram, fixed classes."""

from typing import List, Optional, Union

import torch
from torch import Tensor

from .._checks import check_count
from .._options import option_text
from .sampler import CandidateSet, Sampler, one_set, register

Exclude = Union[int, Tensor, None]
TABLES = ("probability", "bins", "order", "cumulative")


def _bool(owner: str, argument: str, value: Optional[bool], default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{owner}: expected {argument} as True, False or None, got {value!r}")
    return default if value is None else value


def _ids(owner: str, argument: str, ids: Exclude, num_classes: int) -> Optional[Tensor]:
    """An int h stands for the classes below h."""
    if ids is None or isinstance(ids, Tensor):
        return ids
    return torch.arange(min(check_count(owner, argument, ids, 0), num_classes))


class StaticSampler(Sampler):
    """Draws classes in proportion to fixed weights.

    ``q_i = w_i / sum(w)``. Independent draws take an alias table (O(1) each) and may repeat: a class's expected count is ``M q_i``, M the
    number of draws. Distinct ones are systematic, with inclusion probability ``pi_i = min(1, c q_i)`` where c makes them sum to M
    (``xsoftmax::systematic_sample``). The queries do not matter, but for their number.

    Args:
        weights: ``[N]`` of any real dtype, finite, not negative, not all zero; a class of zero weight is never drawn.
        num_samples: draws for the batch, or for each query; distinct ones are at most as many as there are classes of positive weight.
        shared: one set for the batch, or one for each query. None: one for the batch.
        distinct: whether a set holds no class twice. None: shared sets are distinct, private ones independent.
        exclude: classes never drawn: an int h means the ids below h, a tensor (int64, one dimension) means those ids.

    Buffers (not in the state dict; size 0 where not needed): ``probability`` float64 [N]; ``bins`` of independent draws;
    ``order``, ``cumulative`` of distinct ones.
    """

    def __init__(self, weights: Tensor, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("table", weights, None, 0, num_samples, shared, distinct, exclude)

    def _draw_from(self, law: str, weights: Optional[Tensor], power: Optional[float], num_classes: int, num_samples: int,
                   shared: Optional[bool], distinct: Optional[bool], exclude: Exclude) -> None:
        owner = type(self).__name__
        if law != "table":
            num_classes = check_count(owner, "num_classes", num_classes, 1)
        elif not isinstance(weights, Tensor):
            what = "weights" if power is None else "counts"
            raise TypeError(f"{owner}: expected {what} as a tensor [num_classes], got {type(weights).__name__}")
        classes = _ids(owner, "exclude", exclude, num_classes if weights is None else weights.numel())
        shared = _bool(owner, "shared", shared, True)
        distinct = _bool(owner, "distinct", distinct, shared)
        self._make(weights, power, classes, option_text(
            law=law, num_classes=num_classes, num_samples=check_count(owner, "num_samples", num_samples, 0), shared=shared, distinct=distinct))

    def _make(self, weights: Optional[Tensor], power: Optional[float], classes: Optional[Tensor], options: str) -> None:
        tables, options = torch.ops.xsoftmax.static_tables(type(self).__name__, weights, power, classes, options)
        made = dict(option.split("=") for option in options.split(","))
        super().__init__(int(made["num_classes"]), int(made["num_samples"]), shared=made["shared"] == "true",
                         distinct=made["distinct"] == "true")
        self.options = options
        # The constructor's arguments say all there is in the tables, so they stay out of the state dict, and a loss keeps the keys of
        # torch.nn.LinearCrossEntropyLoss. TorchScript saves them, .to() moves them.
        for name, table in zip(TABLES, tables):
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> List[Tensor]:
        return [self.probability, self.bins, self.order, self.cumulative]

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        drawn = torch.ops.xsoftmax.static_sample(self._seed(queries, generator), queries, target, self._tables(), self.options)
        return one_set(drawn, target, self.distinct)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.static_log_count(ids, self._tables(), self.options)

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "StaticSampler":
        other = StaticSampler.__new__(type(self))
        other._make(self.probability if self.probability.numel() else None, None, ids, self.options)
        return other

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool, **options) -> "StaticSampler":
        if num_samples is None:
            raise ValueError(f"make_sampler: expected num_samples for a {cls.__name__}, got None")
        return cls(num_classes, num_samples, **options)

    def extra_repr(self) -> str:
        return self.options.replace(",", ", ")


@register("uniform")
class UniformSampler(StaticSampler):
    """Every class alike: ``q_i = 1 / n`` over the n classes that are not excluded.

    Needs no tables, whatever ``num_classes`` is, unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``. Distinct draws then
    have ``pi_i = M / n`` exactly.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.
    """

    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("uniform", None, None, num_classes, num_samples, shared, distinct, exclude)


@register("log_uniform")
class LogUniformSampler(StaticSampler):
    """Zipf's law for classes sorted by falling frequency.

    ``q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1))`` for i in [h, N), h the number of excluded classes.

    Independent draws need no tables unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``; distinct ones do.

    Args:
        num_classes: N >= 1.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.
    """

    def __init__(self, num_classes: int, num_samples: int, *, shared: Optional[bool] = None, distinct: Optional[bool] = None,
                 exclude: Exclude = None):
        self._draw_from("log_uniform", None, None, num_classes, num_samples, shared, distinct, exclude)


@register("unigram")
class UnigramSampler(StaticSampler):
    """Classes by their frequency: ``q_i = counts_i^power / sum_j counts_j^power``.

    Args:
        counts: ``[N]`` of any real dtype, finite, not negative, not all zero. A class of zero count is never drawn.
        num_samples, shared, distinct, exclude: see :class:`StaticSampler`.
        power: finite and at least 0. 0.75 flattens the frequencies, 0 draws all seen classes alike.
    """

    def __init__(self, counts: Tensor, num_samples: int, *, power: float = 0.75, shared: Optional[bool] = None,
                 distinct: Optional[bool] = None, exclude: Exclude = None):
        self._draw_from("table", counts, float(power), 0, num_samples, shared, distinct, exclude)

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool, counts: Optional[Tensor] = None,
                  **options) -> "UnigramSampler":
        if counts is None or len(counts) != num_classes:
            raise ValueError(f"make_sampler: expected counts of {num_classes} classes for \"unigram\", got "
                             f"{'none' if counts is None else len(counts)}")
        return super().for_table(counts, num_samples, dim=dim, bias=bias, **options)


class FixedSampler(StaticSampler):
    """Classes that are always there, each once, for all queries: ``log_count`` 0. What stands beside a sampler in a :class:`UnionSampler` where
    some classes are to be scored in any case.

    Args:
        num_classes: N >= 1.
        ids: the classes: an int h means those below h, a tensor (int64, one dimension) means those ids, in any order.
    """

    def __init__(self, num_classes: int, ids: Union[int, Tensor]):
        owner = type(self).__name__
        num_classes = check_count(owner, "num_classes", num_classes, 1)
        self._make(None, None, _ids(owner, "ids", ids, num_classes), option_text(law="fixed", num_classes=num_classes))

    @torch.jit.unused
    def excluding(self, ids: Tensor) -> "FixedSampler":
        return FixedSampler(self.num_classes, self.order[~torch.isin(self.order, ids)])
