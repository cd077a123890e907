"""The batch's own targets as candidates."""

from typing import Optional

import torch
from torch import Tensor

from .sampler import Proposal, Sampler, one_set
from .static import _check_num_classes


class InBatchSampler(Sampler):
    """The candidates of every query are the targets of the whole batch.

    ``log_count = log(Q p_i)`` with ``p_i = counts_i / total``, streamed over the training batches: each ``sample`` in train() mode first
    adds the batch's targets, so a target always has p > 0 there (as BatchNorm's statistics, the counts so take in a batch twice where
    activation checkpointing runs forward twice). Unlike that of the other samplers, this q is an estimate, which
    approaches the frequency at which the training data shows a class. In eval() mode nothing is counted, and a class never seen has
    log_count -inf.

    The draws are independent ones of the data (a class may stand several times) and always shared; ``num_samples`` and ``generator``
    are ignored. Which classes stand is up to the batch, so there is nothing to exclude.

    Buffers: ``counts`` int64 [N], ``total`` int64.

    Args:
        num_classes: N >= 1.
    """

    def __init__(self, num_classes: int):
        super().__init__(_check_num_classes(type(self).__name__, num_classes))
        self.proposes_targets = True
        self.register_buffer("counts", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("total", torch.zeros([], dtype=torch.int64))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}"

    @torch.jit.export
    def sample(self, input: Tensor, num_samples: int, shared: bool, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> Proposal:
        """``ids`` are ``target`` (int64 ``[Q]``, needed), ``log_count`` and ``target_log_count`` are equal. A target of -1 does not count: it
        stands as class 0 with a log count of +inf."""
        if target is None:
            raise ValueError("InBatchSampler: expected target, got None")
        if not shared:
            raise ValueError("InBatchSampler: expected shared=True, got False: the batch's targets are one set")
        counts = target >= 0
        ids = torch.where(counts, target, 0)
        if self.training:
            self.counts.index_add_(0, ids, counts.to(torch.int64))
            self.total.add_(counts.sum())
        size = torch.full([], target.numel(), dtype=torch.float64, device=target.device)
        log_count = (self._log_q(ids) + size.log()).to(torch.float32).masked_fill(~counts, float("inf"))
        return one_set(ids, log_count, log_count, False)

    def log_count(self, input: Tensor, num_samples: int, shared: bool, ids: Tensor) -> Tensor:
        return self.log_prob(input, ids) + torch.full([], input.size(0), dtype=torch.float32, device=ids.device).log()

    @torch.jit.export
    def log_prob(self, input: Tensor, ids: Tensor) -> Tensor:
        """``log p`` of ``ids`` (int64, any shape): float32 of that shape; -inf for a class that no batch held."""
        return self._log_q(ids).to(torch.float32)

    def _log_q(self, ids: Tensor) -> Tensor:
        # At least 1: before the first batch every class has p = 0, not 0 / 0.
        return self.counts[ids].to(torch.float64).log() - self.total.to(torch.float64).clamp(min=1.0).log()
