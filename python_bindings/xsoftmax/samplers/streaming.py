"""How often ids stand in a stream of batches."""

import numbers
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from .._checks import check_count, check_tensor
from .._memory import device_of_values
from .._options import option_text, read_options
from .._ranks import ALONE
from .sampler import KeepsTables

STATE = ("count", "total", "last", "seen")


def _number(owner: str, argument: str, value: Optional[float]) -> Optional[float]:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{owner}: expected {argument} as a number or None, got {type(value).__name__}")
    return None if value is None else float(value)


class StreamingCounts(KeepsTables):
    """Estimates the probability of ids in a stream of batches, with more weight on recent batches.

    **Dense ids** in [0, N): an exact decayed count of each. After a batch of B ids all counts fall by ``2^(-B / half_life)``, and those of its ids rise
    by 1 a time: ``count_i = sum_b n_ib 2^(-(ids after batch b) / half_life)`` with ``n_ib`` the times that i stands in batch b, ``total = sum_i count_i`` and
    ``q_i = count_i / total``. A batch touches the rows of its ids alone, whatever N is: 16 bytes each (8 without a half-life). Where the distribution
    does not change, an estimate has the relative standard deviation ``sqrt(ln 2 / (2 half_life q))``: 5 % where an id is seen 139 times in a half-life.

    **Open ids**, ``num_ids=None``: any int64, in memory that is fixed, ``16 hashes buckets`` bytes. A bucket keeps the number of ids seen up to its last
    sighting, A, and a smoothed gap between sightings, B, in ids; ``q = 1 / B`` (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019, Algorithm 2). In the paper a step is a batch, and 1 / B is the probability that a batch holds the id. Here a step is an id,
    so that 1 / B is the probability of one draw, as ``q`` of dense ids is, also for ids that stand in a batch several times: n sightings in a batch, with ``t``
    ids seen, are n gaps of ``(t - A) / n`` each, whatever the order in the batch::

        B <- B + w ((t - A) / n - B),   A <- t,   w = n B / (n B + min(A, half_life / ln 2))

    ``w`` is the share that n gaps of length B have in a window of ``half_life / ln 2`` ids, so a sighting counts half after ``half_life`` ids, frequent or
    rare; while less than that was seen (and always without a half-life), ``1 / B`` is sightings over ids at the id's last sighting. ``alpha`` gives the paper's
    weight of a gap in its place, ``w = 1 - (1 - alpha)^n``: half of an estimate is forgotten in ``ln 2 / alpha`` sightings of the id. The first estimate is n /
    t. Ids that share a bucket shorten its gaps, so of several hash functions the longest gap counts. An estimate changes only when its id is seen: what is not
    seen any more keeps its last one, and estimates do not sum to 1. Where ids are dense, their counts are the better estimate.

    Collisions: of 100,000 to 10,000,000 ids by Zipf's law in 2^20 buckets, the 1,000 most frequent had a q at most 2.2 % too high with two hash functions,
    0.8 % with four; with one, 6 to 18 of them were more than 5 % too high (``benchmarks/streaming_counts.py --only collisions``).

    A new id has a q at its first batch; one that was never seen has q = 0. In eval() nothing is counted.

    Args:
        num_ids: N >= 1, or None for open ids.
        half_life: in ids seen, above 0. None: nothing is forgotten; counts of dense ids are then int64.
        alpha: of open ids, in (0, 1], in the place of ``half_life``.
        buckets, hashes: of open ids, the buckets of each hash function and how many functions there are (at most 64). Take more buckets than there are
            frequent ids: where two ids share all their buckets, each has the q of both.

    Buffers, all in the state dict: ``count`` ([N], int64 without a half-life, else float64; of open ids the gaps, [hashes, buckets]) and ``total``; but for
    int64 counts ``last``, int64 of count's shape, and ``seen``, int64: the ids seen up to a row's last sighting, and altogether.

    Threads of a program may share counts in memory of the CPU. A process counts what it is given.
    :func:`xsoftmax.distributed.share_counts` has it count the ids of all ranks.

    Raises:
        ValueError: an option out of range; alpha of dense ids, or beside half_life.
        TypeError: an option of another type; ids that are not int64; a mask that is not bool.
        IndexError: a dense id is not in [0, N) and not -1 (checked on the CPU).
    """

    num_ids: Optional[int]
    options: str
    _ranks = ALONE  # whose ids are counted

    def __init__(self, num_ids: Optional[int], *, half_life: Optional[float] = None, alpha: Optional[float] = None, buckets: int = 2**20, hashes: int = 2):
        super().__init__()
        owner = type(self).__name__
        self.num_ids = None if num_ids is None else check_count(owner, "num_ids", num_ids, 1)
        self.options = option_text(num_ids=self.num_ids, half_life=_number(owner, "half_life", half_life), alpha=_number(owner, "alpha", alpha),
                                   buckets=check_count(owner, "buckets", buckets, 1), hashes=check_count(owner, "hashes", hashes, 1))
        device = device_of_values(None)
        state = torch.ops.xsoftmax.streaming_counts(owner, self.options)
        for name, table in zip(STATE, state):
            self.register_buffer(name, table.to(device), persistent=name in ("count", "total") or state[0].is_floating_point())

    def __getstate__(self) -> Dict[str, Any]:
        # A copy counts by itself, as that of a replicated table trains by itself.
        return {name: value for name, value in self.__dict__.items() if name != "_ranks"}

    def extra_repr(self) -> str:
        text = f"num_ids={self.num_ids}"
        shown = [f"{name}={value}" for name, value in read_options(self.options).items()
                 if value != "none" and (name == "half_life" or (self.num_ids is None and name != "num_ids"))]
        return ", ".join([text, *shown])

    def forward(self, ids: Tensor) -> Tensor:
        """Counts a batch and gives its probabilities: ``log_prob(ids)`` after ``update(ids)``. In train() each of the ids has a q above 0.

        ids int64 [*] -> float32 [*]. Errors as :meth:`update`.
        """
        self.update(ids, None)
        return self.log_prob(ids)

    @torch.jit.export
    def update(self, ids: Tensor, mask: Optional[Tensor] = None) -> None:
        """Counts a batch, in train() mode.

        Args:
            ids: int64, any shape; dense ones in [0, num_ids), or -1 for what does not count.
            mask: bool, the shape of ``ids``: which of them count. None: all.

        Raises:
            TypeError, ValueError, IndexError: ids of another dtype or outside the range, a mask of another shape; nothing is counted then
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
            if mask is not None:
                check_tensor(type(self).__name__, "mask", mask)
        if self.training:
            if not torch.jit.is_scripting():
                if not self._ranks.alone:
                    ids, mask = self._of_all_ranks(ids if mask is None else ids[mask]), None
            torch.ops.xsoftmax.streaming_update_(ids, mask, self.count, self.total, self.last, self.seen, self.options)

    @torch.jit.unused
    def _of_all_ranks(self, ids: Tensor) -> Tensor:
        """The ids of all ranks whose counts these are."""
        if self._ranks.alone:
            return ids
        if ids.dtype != torch.int64:
            raise TypeError(f"StreamingCounts: expected ids of dtype int64, got {ids.dtype}")
        return self._ranks.gather(ids.reshape(-1))

    @torch.jit.unused
    def resize(self, num_ids: int) -> None:
        """Counts ``num_ids`` dense ids from now on: new ids were never seen, and the counts of those that are gone leave ``total``. Open ids have no number:
        nothing happens.

        A call costs O(the ids that come or go), averaged over many.

        Raises:
            ValueError: num_ids below 1.
            TypeError: num_ids is not an int.
        """
        num_ids = check_count("StreamingCounts", "num_ids", num_ids, 1)
        self.options = torch.ops.xsoftmax.streaming_resize_(self.count, self.total, self.last, self.seen, num_ids, self.options)
        self.num_ids = None if self.num_ids is None else num_ids

    @torch.jit.export
    def forget(self, ids: Tensor) -> None:
        """Forgets the counts of dense ids (int64 [*] in [0, num_ids)), in train() and eval() alike, as if they had never been seen.

        It is for ids that stand for something else from now on. ``total`` is then that of the other ids.

        Raises:
            TypeError, ValueError, IndexError: ids of another dtype or outside the range, or counts of open ids; nothing is forgotten then
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        torch.ops.xsoftmax.streaming_forget_(ids, self.count, self.total, self.last, self.seen, self.options)

    @torch.jit.export
    def counts(self, ids: Tensor) -> Tensor:
        """The decayed counts: ids int64 [*] -> float64 [*]. Of open ids ``total q``, with ``total`` the decayed number of all ids (with ``alpha`` their
        number).

        Raises:
            TypeError, IndexError: as :meth:`update`
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        return torch.ops.xsoftmax.streaming_count(ids, self.count, self.total, self.last, self.seen, self.options)

    @torch.jit.export
    def log_prob(self, ids: Tensor) -> Tensor:
        """log q: ids int64 [*] -> float32 [*]. It is -inf for an id that was never seen, and for a dense id of -1.

        Raises:
            TypeError, IndexError: as :meth:`update`
        """
        if not torch.jit.is_scripting():
            check_tensor(type(self).__name__, "ids", ids)
        return torch.ops.xsoftmax.streaming_log_prob(ids, self.count, self.total, self.last, self.seen, self.options).float()
