"""Samplers whose distribution does not depend on the query: weight tables, uniform, log-uniform, unigram."""

import math
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from .._memory import table_empty
from .sampler import Proposal, Sampler, draw_seed, one_set

Exclude = Union[int, Tensor, None]


def _check_num_classes(name: str, num_classes: int) -> int:
    if isinstance(num_classes, bool) or not isinstance(num_classes, int):
        raise TypeError(f"{name}: expected num_classes of type int, got {type(num_classes).__name__}")
    if num_classes < 1:
        raise ValueError(f"{name}: expected num_classes of at least 1, got {num_classes}")
    return num_classes


def _check_exclude(name: str, exclude: Exclude, num_classes: int) -> Tuple[int, Optional[Tensor]]:
    """``(h, None)`` where the classes below h are excluded, else ``(0, ids)``."""
    if exclude is None:
        return 0, None
    if isinstance(exclude, Tensor):
        if exclude.dtype != torch.int64 or exclude.dim() != 1:
            raise ValueError(f"{name}: expected exclude as int64 ids with 1 dimension, got {exclude.dtype} of shape {list(exclude.shape)}")
        ids = exclude.unique()
        if ids.numel() > 0 and (ids[0] < 0 or ids[-1] >= num_classes):
            raise IndexError(f"{name}: expected exclude in [0, {num_classes}), got ids from {ids[0]} to {ids[-1]}")
        count = ids.numel()
        prefix = count == 0 or int(ids[-1]) == count - 1
    elif isinstance(exclude, int) and not isinstance(exclude, bool):
        if exclude < 0:
            raise ValueError(f"{name}: expected exclude of at least 0, got {exclude}")
        ids, count, prefix = None, exclude, True
    else:
        raise TypeError(f"{name}: expected exclude as an int, a tensor or None, got {type(exclude).__name__}")
    if count >= num_classes:
        raise ValueError(f"{name}: expected exclude to leave a class of {num_classes}, got all of them")
    return (count, None) if prefix else (0, ids)


class StaticSampler(Sampler):
    """Draws classes in proportion to fixed weights.

    ``q_i = w_i / sum(w)``. Independent draws take an alias table (O(1) each) and may repeat; distinct ones are systematic, with
    inclusion probability ``pi_i = min(1, c q_i)`` where c makes them sum to M (``xsoftmax::systematic_sample``).

    Args:
        weights: ``[N]`` of any real dtype, finite, not negative, not all zero; a class of zero weight is never drawn.
        distinct: whether a set holds no class twice. None: shared sets are distinct, private ones independent.
        exclude: classes never drawn: an int h means the ids below h, a tensor (int64, one dimension) means those ids.

    Buffers (not in the state dict): ``probability`` float64 [N]; ``threshold``, ``alias`` unless ``distinct`` is True; ``order``,
    ``cumulative`` unless it is False.

    Sampling more distinct classes than have a weight above zero raises ValueError.
    """

    distinct: Optional[bool]

    def __init__(self, weights: Tensor, distinct: Optional[bool] = None, exclude: Exclude = None):
        name = type(self).__name__
        if not isinstance(weights, Tensor) or weights.dim() != 1 or weights.numel() < 1:
            got = f"shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"{name}: expected weights as a tensor [num_classes], got {got}")
        low, ids = _check_exclude(name, exclude, weights.numel())
        weights = _real(name, "weights", weights).detach().to(torch.float64, copy=True)
        _check_weights(name, "weights", weights)
        weights[:low] = 0
        if ids is not None:
            weights[ids.to(weights.device)] = 0
        if not bool((weights > 0).any()):
            raise ValueError(f"{name}: expected a class of positive weight that is not excluded, got none")
        self._init_static(weights.numel(), distinct)
        self._init_tables(weights, with_alias=distinct is not True, with_systematic=distinct is not False)

    def _init_static(self, num_classes: int, distinct: Optional[bool]) -> None:
        if distinct is not None and not isinstance(distinct, bool):
            raise TypeError(f"{type(self).__name__}: expected distinct as True, False or None, got {distinct!r}")
        super().__init__(num_classes)
        self.distinct = distinct
        # The constructor's arguments say all there is in the tables, so they stay out of the state dict, and a loss keeps the keys of
        # torch.nn.LinearCrossEntropyLoss. TorchScript saves them, .to() moves them.
        for table in ("probability", "threshold", "alias", "order", "cumulative"):
            self.register_buffer(table, None, persistent=False)

    def _init_tables(self, weights: Tensor, with_alias: bool, with_systematic: bool) -> None:
        weights = weights / weights.max()  # so that the sum stays finite
        self.probability = torch.div(weights, weights.sum(), out=table_empty(weights.numel(), dtype=weights.dtype, device=weights.device))
        if with_alias:
            self.threshold, self.alias = torch.ops.xsoftmax.alias_table(self.probability)
        if with_systematic:
            self.order, self.cumulative = torch.ops.xsoftmax.systematic_table(self.probability)

    def num_drawable(self) -> int:
        probability = self.probability
        return self.num_classes - self.low if probability is None else int(torch.count_nonzero(probability))

    def excluding(self, exclude: Union[int, Tensor]) -> "StaticSampler":
        weights = self.probability
        if weights is None:
            weights = self._log_q(torch.arange(self.num_classes)).exp()
        return StaticSampler(weights, self.distinct, exclude)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, distinct={self.distinct}"

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """See :meth:`Sampler.sample`. Of ``input`` only the number of queries and the device matter."""
        distinct = self.draws_distinct(shared)
        num_queries: Optional[int] = None
        if not shared:
            num_queries = input.size(0)
        ids, log_scale = self._draw(draw_seed(input, generator), num_queries, num_samples, distinct)
        target_log_count: Optional[Tensor] = None
        if target is not None:
            target_log_count = self._log_count(target, log_scale, distinct)
        return one_set(ids, self._log_count(ids, log_scale, distinct), target_log_count, distinct)

    def draws_distinct(self, shared: bool) -> bool:
        distinct = self.distinct
        return shared if distinct is None else distinct

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        distinct = self.draws_distinct(shared)
        # A draw for no query: what is wanted is its scale.
        log_scale = self._draw(torch.zeros([], dtype=torch.int64, device=ids.device), 0, num_samples, distinct)[1]
        return self._log_count(ids, log_scale, distinct)

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log q`` of ``ids`` (int64, any shape): float32 of that shape; -inf for a class that is never drawn."""
        if ids.dtype != torch.int64:
            raise TypeError(f"log_prob: expected ids of dtype torch.int64, got {ids.dtype}")
        return self._log_q(ids).to(torch.float32)

    def _log_count(self, ids: Tensor, log_scale: Tensor, distinct: bool) -> Tensor:
        """log(c q), and of distinct draws min(1, c q) in place of c q. float64 up to here: log c and log q nearly cancel."""
        log_count = log_scale + self._log_q(ids)
        if distinct:
            log_count = log_count.clamp(max=0.0)
        return log_count.to(torch.float32)

    def _draw(self, seed: Tensor, num_queries: Optional[int], num_samples: int, distinct: bool) -> Tuple[Tensor, Tensor]:
        """ids, and log c (float64, 0-dim) where a class's expected count is c q."""
        return self._draw_from_tables(seed, num_queries, num_samples, distinct)

    def _log_q(self, ids: Tensor) -> Tensor:
        return self._log_q_from_tables(ids)

    def _draw_from_tables(self, seed: Tensor, num_queries: Optional[int], num_samples: int, distinct: bool) -> Tuple[Tensor, Tensor]:
        # The tables that a sampler was built without are None, and known to be so where TorchScript compiles this.
        probability, order, cumulative, threshold, alias = self.probability, self.order, self.cumulative, self.threshold, self.alias
        if distinct:
            if probability is not None and order is not None and cumulative is not None:
                return torch.ops.xsoftmax.systematic_sample(seed, probability, order, cumulative, num_queries, num_samples)
        else:
            if threshold is not None and alias is not None:
                ids = torch.ops.xsoftmax.alias_sample(seed, threshold, alias, num_queries, num_samples)
                return ids, _log_of_count(num_samples, seed)
        raise RuntimeError("sample: the tables for these draws were not built")

    def _log_q_from_tables(self, ids: Tensor) -> Tensor:
        probability = self.probability
        if probability is not None:
            return torch.ops.xsoftmax.table_log_prob(probability, ids)
        raise RuntimeError("log_prob: the tables for these classes were not built")


def _log_of_count(num_samples: int, like: Tensor) -> Tensor:
    """log M, -inf for M = 0."""
    return torch.full([], num_samples, dtype=torch.float64, device=like.device).log()


def _real(owner: str, argument: str, weights: Tensor) -> Tensor:
    if weights.is_complex():
        raise TypeError(f"{owner}: expected {argument} of a real dtype, got {weights.dtype}")
    return weights


def _check_weights(owner: str, argument: str, weights: Tensor) -> None:
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(f"{owner}: expected {argument} that are finite and not negative, got {weights[at].item()} at [{at}]")
    if not bool((weights > 0).any()):
        raise ValueError(f"{owner}: expected {argument} that are not all zero, got only zeros")


class UniformSampler(StaticSampler):
    """Every class alike: ``q_i = 1 / n`` over the n classes that are not excluded.

    Needs no tables, whatever ``num_classes`` is, unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``. Distinct draws then
    have ``pi_i = M / n`` exactly.

    Args:
        num_classes: N >= 1.
        distinct, exclude: see :class:`StaticSampler`.
    """

    def __init__(self, num_classes: int, distinct: Optional[bool] = None, exclude: Exclude = None):
        name = type(self).__name__
        low, ids = _check_exclude(name, exclude, _check_num_classes(name, num_classes))
        self._init_static(num_classes, distinct)
        self.low = low
        self.from_tables = ids is not None
        if ids is not None:
            weights = torch.ones(num_classes, dtype=torch.float64, device=ids.device).index_fill_(0, ids, 0.0)
            self._init_tables(weights, with_alias=distinct is not True, with_systematic=distinct is not False)

    def excluding(self, exclude: Union[int, Tensor]) -> "StaticSampler":
        if self.from_tables or self.low > 0:
            return super().excluding(exclude)
        return UniformSampler(self.num_classes, self.distinct, exclude)

    def _draw(self, seed: Tensor, num_queries: Optional[int], num_samples: int, distinct: bool) -> Tuple[Tensor, Tensor]:
        if self.from_tables:
            return self._draw_from_tables(seed, num_queries, num_samples, distinct)
        ids = torch.ops.xsoftmax.uniform_sample(seed, self.low, self.num_classes, num_queries, num_samples, distinct)
        return ids, _log_of_count(num_samples, seed)

    def _log_q(self, ids: Tensor) -> Tensor:
        if self.from_tables:
            return self._log_q_from_tables(ids)
        log_q = torch.full_like(ids, -math.log(self.num_classes - self.low), dtype=torch.float64)
        return log_q.masked_fill((ids < self.low) | (ids >= self.num_classes), -math.inf)


class LogUniformSampler(StaticSampler):
    """Zipf's law for classes sorted by falling frequency.

    ``q_i = (ln(i + 2) - ln(i + 1)) / (ln(N + 1) - ln(h + 1))`` for i in [h, N), h the number of excluded classes.

    Independent draws need no tables unless ``exclude`` is a tensor other than ``0, 1, ..., h - 1``; distinct ones do, so
    ``distinct=False`` saves memory.

    Args:
        num_classes: N >= 1.
        distinct, exclude: see :class:`StaticSampler`.
    """

    def __init__(self, num_classes: int, distinct: Optional[bool] = None, exclude: Exclude = None):
        name = type(self).__name__
        low, ids = _check_exclude(name, exclude, _check_num_classes(name, num_classes))
        self._init_static(num_classes, distinct)
        self.low = low
        self.from_tables = ids is not None
        if ids is not None or distinct is not False:
            weights = torch.arange(1, num_classes + 1, dtype=torch.float64, device=None if ids is None else ids.device)
            weights = weights.reciprocal_().log1p_()
            weights[:low] = 0
            if ids is not None:
                weights[ids] = 0
            self._init_tables(weights, with_alias=ids is not None and distinct is not True, with_systematic=distinct is not False)

    def _draw(self, seed: Tensor, num_queries: Optional[int], num_samples: int, distinct: bool) -> Tuple[Tensor, Tensor]:
        if self.from_tables or distinct:
            return self._draw_from_tables(seed, num_queries, num_samples, distinct)
        ids = torch.ops.xsoftmax.log_uniform_sample(seed, self.low, self.num_classes, num_queries, num_samples)
        return ids, _log_of_count(num_samples, seed)

    def _log_q(self, ids: Tensor) -> Tensor:
        if self.from_tables:
            return self._log_q_from_tables(ids)
        outside = (ids < self.low) | (ids >= self.num_classes)
        share = (ids.to(torch.float64).clamp(min=0.0) + 1).reciprocal().log1p()
        log_q = share.log() - math.log(math.log1p(self.num_classes) - math.log1p(self.low))
        return log_q.masked_fill(outside, -math.inf)


class UnigramSampler(StaticSampler):
    """Classes by their frequency: ``q_i = counts_i^power / sum_j counts_j^power``.

    Args:
        counts: ``[N]`` of any real dtype, finite, not negative, not all zero. A class of zero count is never drawn.
        power: finite and at least 0. 0.75 flattens the frequencies, 0 draws all seen classes alike.
        distinct, exclude: see :class:`StaticSampler`.
    """

    def __init__(self, counts: Tensor, power: float = 0.75, distinct: Optional[bool] = None, exclude: Exclude = None):
        name = type(self).__name__
        if isinstance(power, bool) or not isinstance(power, (int, float)) or not 0 <= power < math.inf:
            raise ValueError(f"{name}: expected power as a finite number of at least 0, got {power!r}")
        if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.numel() < 1:
            got = f"shape {list(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
            raise ValueError(f"{name}: expected counts as a tensor [num_classes], got {got}")
        counts = _real(name, "counts", counts).detach().to(torch.float64)
        _check_weights(name, "counts", counts)
        # 0^0 is 1, but a class that was never seen stays one that is never drawn.
        weights = (counts / counts.max()).pow(power).masked_fill(counts == 0, 0.0)
        super().__init__(weights, distinct, exclude)
        self.power = float(power)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power}"
