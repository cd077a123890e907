"""In-batch sampling: the targets of the batch as candidates."""

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from .._core.memory import device_of_values
from .._core.options import option_text
from .candidate_set import CandidateSet, one_set
from .sampler import OF_BATCH, DescribedSampler, register
from .streaming import StreamingCounts


@register("in_batch")
class InBatchSampler(DescribedSampler):
    """Uses the targets of the other queries in the batch as the candidates of each query.

    ``log_count [Q, Q] = log((n - 1) p_i)``, where n is the number of queries that count and ``p_i =
    counts_i / total`` is counted over the training batches (the logQ correction of in-batch sampled
    softmax; Yi et al., 2019). In train(), ``sample`` first adds the batch's targets to the counts,
    so targets always have p > 0. (With activation checkpointing, which runs the forward pass twice,
    a batch is counted twice, as in BatchNorm.) For each query, its own column and those of queries
    that do not count are +inf, so they are left out. Unlike for the other samplers, this expected
    count is an estimate, which converges to the frequency of a class in the training data. In
    eval() nothing is counted, and a class that was never seen has a log count of -inf.

    Candidates are samples with replacement from the data (a class may repeat): ``ids [Q]``, shared
    by the batch, 0 for a target of -1. The batch determines the candidates, so classes cannot be
    excluded. :meth:`log_count` of any ids refers to the last batch.

    If a query has multiple positives, target ``[Q, T]``, only the first one is counted and used as
    a candidate; a loss passes positives in descending order of id.

    Args:
        num_classes: N >= 1.
        counts: a :class:`StreamingCounts` of N ids, or of open ids, so that recent batches weigh
            more. It becomes the submodule ``streaming``, and nothing else may update it. None: all
            batches weigh the same.

    Shapes and dtypes: target int64 [Q] or [Q, T]; ids int64 [Q], log counts float32 [Q, Q].

    Buffers: without ``counts``: ``counts`` int64 [N] and ``total`` int64. Not in the state dict:
    ``drawn`` int64, the number of queries of the last batch that count.

    Raises:
        ValueError: num_classes is below 1, counts have another number of ids, or a draw has no
            target.
        TypeError: num_classes or counts has another type; targets or ids are not int64.
        IndexError: a target or an id is neither in [0, N) nor -1 (checked on the CPU only).
    """
    def __init__(self, num_classes: int, *, counts: Optional[StreamingCounts] = None):
        super().__init__(num_classes, OF_BATCH)
        if counts is not None:
            if not isinstance(counts, StreamingCounts):
                raise TypeError("InBatchSampler: expected counts as a StreamingCounts or None, "
                                f"got {type(counts).__name__}")
            if counts.num_ids not in (None, self.num_classes):
                raise ValueError(f"InBatchSampler: expected counts of {self.num_classes} ids or of "
                                 f"open ones, got {counts.num_ids}")
        self.streaming = counts
        self.options = option_text(num_ids=self.num_classes) if counts is None else counts.options
        if counts is None:
            for name, table in zip(
                ("counts", "total", "last", "seen"),
                    torch.ops.xsoftmax.streaming_counts("InBatchSampler", self.options)):
                self.register_buffer(name, table.to(device_of_values(None)), persistent=name
                                     in ("counts", "total"))
        self.register_buffer("drawn", torch.zeros([], dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}"

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """Draws the targets of the batch; see :meth:`Sampler.sample`. ``target`` is required;
        ``generator`` is not used."""
        if not torch.jit.is_scripting() and self._counts_ranks():
            return self._sample_with_ranks(target)
        return self._draw(queries, target, generator)

    @torch.jit.unused
    def _counts_ranks(self) -> bool:
        """Returns whether targets of other ranks are counted too."""
        return self.streaming is not None and not self.streaming._ranks.is_single

    @torch.jit.unused
    def _sample_with_ranks(self, target: Optional[Tensor]) -> List[CandidateSet]:
        if target is None:
            raise ValueError("InBatchSampler: expected target, whose classes are the candidates, "
                             "got None")
        ids_of_ranks: Optional[Tensor] = None
        if self.training:
            ids_of_ranks = self.streaming._gather_ids(  # type: ignore[union-attr]
                target[:, 0] if target.dim() == 2 else target)
        count, total, last, seen = self._counts()
        return one_set(
            torch.ops.xsoftmax.in_batch_sample(target, ids_of_ranks, count, total, last, seen,
                                               self.drawn, self.options), target, False)

    def _describe(self) -> str:
        if not torch.jit.is_scripting() and self._counts_ranks():
            return ""
        return "in_batch:5:" + self.options

    @torch.jit.export
    def state_tensors(self) -> List[Tensor]:
        count, total, last, seen = self._counts()
        return [count, total, last, seen, self.drawn]

    @torch.jit.unused
    def plan_resize(self, num_classes: int, rows: Optional[Tensor],
                    bias: Optional[Tensor]) -> Callable[[], None]:
        def resize() -> None:
            if self.streaming is None:
                self.options = torch.ops.xsoftmax.streaming_resize_(self.counts, self.total,
                                                                    self.last, self.seen,
                                                                    num_classes, self.options)
            else:
                self.streaming.resize(num_classes)
                self.options = self.streaming.options
            self.num_classes = num_classes

        return resize

    def _counts(self) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.streaming is not None:
            return (self.streaming.count, self.streaming.total, self.streaming.last,
                    self.streaming.seen)
        else:
            return self.counts, self.total, self.last, self.seen

    @torch.jit.export
    def forget(self, ids: Tensor) -> None:
        """Discards the counts of classes, as :meth:`StreamingCounts.forget` does."""
        count, total, last, seen = self._counts()
        torch.ops.xsoftmax.streaming_forget_(ids, count, total, last, seen, self.options)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        count, total, last, seen = self._counts()
        return torch.ops.xsoftmax.in_batch_log_count(ids, count, total, last, seen, self.drawn,
                                                     self.options)

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool,
                  **options: Any) -> "InBatchSampler":
        if num_samples is not None:
            raise ValueError("make_sampler: expected no num_samples for \"in_batch\", whose "
                             f"candidates are the targets of the batch, got {num_samples}")
        return cls(num_classes, **options)
