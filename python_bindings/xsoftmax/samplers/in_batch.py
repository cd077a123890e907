"""The batch's own targets as candidates."""

from typing import List, Optional

import torch
from torch import Tensor

from .sampler import OF_BATCH, CandidateSet, Sampler, one_set, register


@register("in_batch")
class InBatchSampler(Sampler):
    """The candidates of each query are the targets of the others in the batch.

    ``log_count [Q, Q] = log((n - 1) p_i)``, n the queries that count, with ``p_i = counts_i / total`` streamed over the training batches: each
    ``sample`` in train() mode first adds the batch's targets, so a target always has p > 0 there (as BatchNorm's statistics, the counts so
    take in a batch twice where activation checkpointing runs forward twice). The column of the query itself and those of queries that do not
    count take no part for it: +inf. Unlike that of the other samplers, this expected count is an estimate, which approaches the frequency at
    which the training data shows a class. In eval() mode nothing is counted, and a class never seen has a log count of -inf.

    The draws are independent ones of the data (a class may stand several times), ``ids [Q]`` shared by the batch (0 in the place of a target of
    -1). Which classes stand is up to the batch, so there is nothing to exclude. ``log_count`` of any ids speaks of the last batch.

    Buffers: ``counts`` int64 [N], ``total`` int64; not in the state dict: ``drawn`` int64, how many queries of the last batch count.

    Args:
        num_classes: N >= 1.
    """

    def __init__(self, num_classes: int):
        super().__init__(num_classes, OF_BATCH)
        self.register_buffer("counts", torch.zeros(self.num_classes, dtype=torch.int64))
        self.register_buffer("total", torch.zeros([], dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros([], dtype=torch.int64), persistent=False)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}"

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None, generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        """``target`` is needed; ``generator`` is not used."""
        if target is None:
            raise ValueError("InBatchSampler: expected target, got None")
        drawn = torch.ops.xsoftmax.in_batch_sample(target, self.counts, self.total, self.drawn, self.training)
        return one_set(drawn, target, False)

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.ops.xsoftmax.in_batch_log_count(ids, self.counts, self.total, self.drawn)

    @classmethod
    def for_table(cls, num_classes: int, num_samples: Optional[int] = None, *, dim: int, bias: bool, **options) -> "InBatchSampler":
        if num_samples is not None:
            raise ValueError(f"make_sampler: expected no num_samples for \"in_batch\", whose draws are the batch's targets, got {num_samples}")
        return cls(num_classes, **options)
