"""Streaming estimates of the frequency of ids."""

import numbers
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from .._core.checks import check_count, check_tensor
from .._core.memory import device_of_values
from .._core.options import option_text, read_options
from .._core.ranks import SINGLE_PROCESS
from .sampler import TableBuffers

STATE = ("count", "total", "last", "seen")


def _check_optional_number(owner: str, argument: str, value: Optional[float]) -> Optional[float]:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{owner}: expected {argument} as a number or None, got "
                        f"{type(value).__name__}")
    return None if value is None else float(value)


class StreamingCounts(TableBuffers):
    """Estimates the probability of ids in a stream of batches, optionally with more weight on
    recent batches.

    In train() a new id has q > 0 from its first batch on; an id that was never seen has q = 0. In
    eval() nothing is counted.

    **Dense ids** in [0, N): exact decayed counts. After a batch of B ids, all counts are multiplied
    by ``2^(-B / half_life)``, and each occurrence of an id adds 1: ``count_i = sum_b n_ib 2^(-(ids
    after batch b) / half_life)``, where ``n_ib`` is the number of occurrences of i in batch b,
    ``total = sum_i count_i`` and ``q_i = count_i / total``. A batch touches only the rows of its
    ids, for any N: 16 bytes each (8 without a half-life). For a stationary distribution, an
    estimate has the relative standard deviation ``sqrt(ln 2 / (2 half_life q))``: 5 % if an id is
    seen 139 times per half-life.

    **Open ids**, ``num_ids=None``: any int64, in a fixed amount of memory, ``16 hashes buckets``
    bytes. A bucket keeps A, the number of ids seen up to its last sighting, and B, a smoothed gap
    between sightings, in ids; ``q = 1 / B`` (Yi et al., "Sampling-Bias-Corrected Neural Modeling
    for Large Corpus Item Recommendations", RecSys 2019, Algorithm 2). In the paper a step is a
    batch, and 1 / B is the probability that a batch contains the id. Here a step is an id, so that
    1 / B is the probability of a single draw, like ``q`` of dense ids, also for ids that occur
    several times in a batch: n sightings in a batch, with ``t`` ids seen, are n gaps of ``(t - A) /
    n`` each, regardless of their order in the batch::

        B <- B + w ((t - A) / n - B),   A <- t,   w = n B / (n B + min(A, half_life / ln 2))

    ``w`` is the share of n gaps of length B in a window of ``half_life / ln 2`` ids, so the weight
    of a sighting halves after ``half_life`` ids, for frequent and rare ids. While fewer ids were
    seen (and always without a half-life), ``1 / B`` is the number of sightings divided by the
    number of ids at the id's last sighting. With ``alpha``, the weight of a gap is that of the
    paper, ``w = 1 - (1 - alpha)^n``: half of an estimate is forgotten after ``ln 2 / alpha``
    sightings of the id. The first estimate of B is t / n. Ids that share a bucket shorten its gaps,
    so the longest gap over the hash functions is used. An estimate changes only when its id is
    seen: ids that stop occurring keep their last estimate, and estimates do not sum to 1. If ids
    are dense, prefer dense counts.

    Collisions: for 100,000 to 10,000,000 Zipf-distributed ids in 2^20 buckets, q of the 1,000 most
    frequent ids was at most 2.2 % too high with two hash functions and 0.8 % with four; with one, 6
    to 18 of them were more than 5 % too high (``benchmarks/streaming_counts.py --only
    collisions``).

    Threads of a program may share counts in CPU memory. A process counts only its own ids, unless
    :func:`xsoftmax.distributed.share_counts` makes it count those of all ranks.

    Args:
        num_ids: N >= 1, or None for open ids.
        half_life: in ids seen, above 0. None: nothing is forgotten, and counts of dense ids are
            int64.
        alpha: for open ids: in (0, 1], instead of ``half_life``.
        buckets: for open ids: the number of buckets per hash function. Use more buckets than there
            are frequent ids: ids that share all their buckets both get the sum of their q.
        hashes: for open ids: the number of hash functions, at most 64.

    Buffers, all in the state dict: ``count`` [N], int64 without a half-life, else float64 (open
    ids: the gaps, [hashes, buckets]), and ``total``. Except with int64 counts also ``last``, int64
    of the shape of count, the number of ids seen up to a row's last sighting, and ``seen``, int64,
    the number of all ids seen.

    Raises:
        ValueError: an option is out of range; alpha with dense ids, or together with half_life.
        TypeError: an option has another type; ids are not int64; a mask is not bool.
        IndexError: a dense id is neither in [0, N) nor -1 (checked on the CPU only).
    """

    num_ids: Optional[int]
    options: str
    _ranks = SINGLE_PROCESS  # the ranks whose ids are counted

    def __init__(self, num_ids: Optional[int], *, half_life: Optional[float] = None,
                 alpha: Optional[float] = None, buckets: int = 2**20, hashes: int = 2):
        super().__init__()
        owner = type(self).__name__
        self.num_ids = None if num_ids is None else check_count(owner, "num_ids", num_ids, 1)
        self.options = option_text(num_ids=self.num_ids,
                                   half_life=_check_optional_number(owner, "half_life", half_life),
                                   alpha=_check_optional_number(owner, "alpha", alpha),
                                   buckets=check_count(owner, "buckets", buckets, 1),
                                   hashes=check_count(owner, "hashes", hashes, 1))
        device = device_of_values(None)
        state = torch.ops.xsoftmax.streaming_counts(owner, self.options)
        for name, table in zip(STATE, state):
            self.register_buffer(
                name, table.to(device), persistent=name in ("count", "total")
                or state[0].is_floating_point())

    def __getstate__(self) -> Dict[str, Any]:
        # A copy counts only its own ids, just as a copy of a replicated table trains on its own.
        return {name: value for name, value in self.__dict__.items() if name != "_ranks"}

    def extra_repr(self) -> str:
        text = f"num_ids={self.num_ids}"
        option_parts = [
            f"{name}={value}"
            for name, value in read_options(self.options).items() if value != "none" and (
                name == "half_life" or (self.num_ids is None and name != "num_ids"))
        ]
        return ", ".join([text, *option_parts])

    def forward(self, ids: Tensor) -> Tensor:
        """Counts a batch and returns the log-probabilities of its ids: ``update(ids)``, then
        ``log_prob(ids)``. In train() each of the ids has q > 0.

        ids int64 [*] -> float32 [*]. Errors as :meth:`update`.
        """
        self.update(ids, None)
        return self.log_prob(ids)

    @torch.jit.export
    def update(self, ids: Tensor, mask: Optional[Tensor] = None) -> None:
        """Counts a batch, in train() mode only.

        Args:
            ids: int64, any shape; dense ids in [0, num_ids), or -1 for entries to skip.
            mask: bool, the shape of ``ids``: which of them count. None: all.

        Raises:
            TypeError, ValueError, IndexError: ids have another dtype or are out of range, or a mask
                has another shape. An error counts nothing.
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
            if mask is not None:
                check_tensor(type(self).__name__, "mask", mask)
        if self.training:
            if not torch.jit.is_scripting():
                if not self._ranks.is_single:
                    ids, mask = self._gather_ids(ids if mask is None else ids[mask]), None
            torch.ops.xsoftmax.streaming_update_(ids, mask, self.count, self.total, self.last,
                                                 self.seen, self.options)

    @torch.jit.unused
    def _gather_ids(self, ids: Tensor) -> Tensor:
        """Returns the ids of all ranks that share the counts."""
        if self._ranks.is_single:
            return ids
        if ids.dtype != torch.int64:
            raise TypeError(f"StreamingCounts: expected ids of dtype int64, got {ids.dtype}")
        return self._ranks.gather(ids.reshape(-1))

    @torch.jit.unused
    def resize(self, num_ids: int) -> None:
        """Changes the number of dense ids. New ids start as never seen, and the counts of removed
        ids are subtracted from ``total``. With open ids it does nothing.

        A call costs O(ids added or removed), amortised.

        Raises:
            ValueError: num_ids is below 1.
            TypeError: num_ids is not an int.
        """
        num_ids = check_count("StreamingCounts", "num_ids", num_ids, 1)
        self.options = torch.ops.xsoftmax.streaming_resize_(self.count, self.total, self.last,
                                                            self.seen, num_ids, self.options)
        self.num_ids = None if self.num_ids is None else num_ids

    @torch.jit.export
    def forget(self, ids: Tensor) -> None:
        """Resets the counts of dense ids, as if they had never been seen, in train() and in eval().
        ``total`` becomes that of the other ids.

        Use it for ids that are reused for something else.

        Args:
            ids: int64 [*] in [0, num_ids).

        Raises:
            TypeError, ValueError, IndexError: ids have another dtype or are out of range, or the
                counts are of open ids. An error changes nothing.
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        torch.ops.xsoftmax.streaming_forget_(ids, self.count, self.total, self.last, self.seen,
                                             self.options)

    @torch.jit.export
    def counts(self, ids: Tensor) -> Tensor:
        """Returns the decayed counts: ids int64 [*] -> float64 [*].

        For open ids it is ``total q``, where ``total`` is the decayed number of all ids (with
        ``alpha``, their number).

        Raises:
            TypeError, IndexError: same as :meth:`update`.
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        return torch.ops.xsoftmax.streaming_count(ids, self.count, self.total, self.last, self.seen,
                                                  self.options)

    @torch.jit.export
    def log_prob(self, ids: Tensor) -> Tensor:
        """Returns log q: ids int64 [*] -> float32 [*].

        It is -inf for an id that was never seen, and for a dense id of -1.

        Raises:
            TypeError, IndexError: same as :meth:`update`.
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        return torch.ops.xsoftmax.streaming_log_prob(ids, self.count, self.total, self.last,
                                                     self.seen, self.options).float()
