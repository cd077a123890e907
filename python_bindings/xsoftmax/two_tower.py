"""Losses over vectors that a network has just made: an item tower in the place of a class table."""

import math
import numbers
from typing import List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import check_bool, check_count, check_reduction
from ._memory import device_of_values, moved_table
from ._options import option_text
from .estimators import check_estimator, has_noise, is_registered
from .samplers import CandidateSet, StreamingCounts, columns_of

SIMILARITIES = ("dot", "cosine")


class TwoTowerLoss(nn.Module):
    r"""Retrieval by two towers: each query against its item, with the items of the batch as candidates.

    With s the similarity of a query and an item over the temperature, y the query's item, C the different items among the candidates, and c_j how often
    item j would be among them on average::

        loss = log(e^{s_y} + sum_{j in C, j != y} e^{s_j} / c_j) - s_y                       estimator "sampled_softmax"

    an estimate of the softmax over all items. Candidates are the other items of the batch; those of ``negatives``, a second batch that is drawn uniformly
    (mixed negative sampling, Yang et al., 2020); and the last ``memory`` items of past batches (cross-batch memory, Wang et al., 2020). An item that stands
    among them several times is a candidate once (the vector of the batch, or the newest in memory), an item equal to the query's is none, both by id. So c_j is
    the probability that j is among them at all, ``1 - (1 - p_j)^k (1 - 1 / num_items)^S``, for k other items of batch and memory, p_j the frequency of item j
    in the stream (the "logQ correction" of Yi et al., 2019), and S uniform negatives. Items that the caller gives to a query (hard negatives) are always there:
    1 is added to their count.

    Which form corrects what: "sampled_softmax" weighs candidates alone. Its positive is in the sum because the softmax has it there, not because it was
    drawn, and its gradient is that of Khrylchenko et al. ("Correcting the LogQ Correction", RecSys 2025), ``(1 - P_y)`` times that of ``log sum_{j != y}
    e^{s_j} / c_j - s_y`` with P_y the estimated probability of y. "ranking" lowers s_y by ``log c_y`` as well, as Yi et al. do.

    Args:
        num_items: N, how many items there are. None: any int64 is an id, and frequencies are kept by hashing; uniform negatives then need ``counts`` and
            num_items.
        estimator: as in :class:`SampledSoftmaxLoss`, but for CANE and estimators that are written in Python.
        temperature: above 0: similarities are divided by it. A 0-dim :class:`torch.nn.Parameter` is trained.
        similarity: "dot", or "cosine", of vectors that are normalised here.
        counts: a :class:`xsoftmax.samplers.StreamingCounts` that keeps the frequencies of items, updated by each call in train(). None: one for num_items,
            which never forgets. False: no correction, all c are 1.
        remove_accidental_hits: items equal to the query's are no candidates, as far as the estimator can do without them.
        memory: how many items of past batches are candidates too, without gradient.
        dim: width of the vectors in memory. Needed beside memory.
        memory_warmup: how many calls in train() come before memory takes part: items of a tower that moves fast do not stay good candidates.
        reduction: "mean", "sum" or "none".

    Shape: query [Q, D] and item [Q, D] of floating dtypes, item_id [Q] int64; a scalar, or [Q] for "none", in float32 or float64. Without a query it is 0;
    a query alone in its batch has a loss of 0. A NaN among the vectors makes the loss NaN, and that of each step whose memory has it.

    Buffers: memory [M, D], memory_id [M], memory_state [2] (items and calls so far), and those of ``counts``. In eval() the loss is the same of the
    batch, and neither counts nor memory change; items that were never counted are then no candidates.

    Under :func:`xsoftmax.distributed.share_candidates` the candidates are the items of all ranks.
    """

    num_items: Optional[int]
    similarity: str
    memory_warmup: int

    def __init__(self, num_items: Optional[int] = None, *, estimator: str = "sampled_softmax", temperature: Union[float, Tensor] = 1.0,
                 similarity: str = "dot", counts: Union[StreamingCounts, bool, None] = None, remove_accidental_hits: bool = True, memory: int = 0,
                 dim: Optional[int] = None, memory_warmup: int = 0, reduction: str = "mean", device=None) -> None:
        super().__init__()
        name = self._name = type(self).__name__
        self.num_items = None if num_items is None else check_count(name, "num_items", num_items, 1)
        check_estimator(name, estimator, 0.0)
        if has_noise(estimator) or is_registered(estimator):
            raise ValueError(f"{name}: expected an estimator of the library without noise, got {estimator!r}")
        if similarity not in SIMILARITIES:
            raise ValueError(f"{name}: expected similarity to be one of {SIMILARITIES}, got {similarity!r}")
        check_reduction(name, reduction)
        if isinstance(temperature, Tensor):
            if temperature.dim() != 0 or not temperature.is_floating_point():
                raise ValueError(f"{name}: expected temperature as a number or a 0-dim floating tensor, got shape {list(temperature.shape)} of "
                                 f"{temperature.dtype}")
            if temperature.requires_grad and not isinstance(temperature, nn.Parameter):
                raise ValueError(f"{name}: expected a torch.nn.Parameter as temperature that is trained, got another tensor that requires a gradient")
        elif isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
            raise ValueError(f"{name}: expected temperature above 0, got {temperature!r}")
        value = float(temperature.detach() if isinstance(temperature, Tensor) else temperature)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected temperature above 0, got {value}")
        if counts is True or not (counts is None or counts is False or isinstance(counts, StreamingCounts)):
            raise TypeError(f"{name}: expected counts as a StreamingCounts, None or False, got {counts!r}")
        if isinstance(counts, StreamingCounts) and num_items is not None and counts.num_ids not in (None, num_items):
            raise ValueError(f"{name}: expected counts of {num_items} ids, got those of {counts.num_ids}")
        memory = check_count(name, "memory", memory, 0)
        if memory > 0 and dim is None:
            raise ValueError(f"{name}: expected dim, the width of the vectors, beside memory={memory}, got none")
        device = device_of_values(device)
        self.estimator, self.similarity, self.reduction = estimator, similarity, reduction
        self.memory_warmup = check_count(name, "memory_warmup", memory_warmup, 0)
        if isinstance(temperature, nn.Parameter):
            self.temperature = temperature
        else:
            self.register_buffer("temperature", torch.tensor(value, dtype=torch.float64, device=device), persistent=False)
        self.counts = (StreamingCounts(num_items) if counts is None else None if counts is False else counts)
        known = num_items if self.counts is None else self.counts.num_ids
        self._known_ids = 0 if known is None else known  # ids are below; 0: any are known
        if self.counts is not None:
            self.counts.to(device)
        width = 0 if dim is None else check_count(name, "dim", dim, 1)
        self.register_buffer("memory", torch.zeros(memory, width, device=device))
        self.register_buffer("memory_id", torch.zeros(memory, dtype=torch.int64, device=device))
        self.register_buffer("memory_state", torch.zeros(2, dtype=torch.int64, device=device))
        self._options = option_text(estimator=estimator, remove_accidental_hits=check_bool(name, "remove_accidental_hits", remove_accidental_hits),
                                    reduction=reduction)

    def forward(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: Optional[Tuple[Tensor, Tensor]] = None,
                weight: Optional[Tensor] = None) -> Tensor:
        """
        Args:
            query, item: ``[Q, D]``, each query beside its item.
            item_id: int64 ``[Q]``; in [0, num_items) where that is given, unless ``counts`` are of open ids.
            negatives: vectors and ids of more items: ``([S, D], [S])``, drawn uniformly from all num_items, for all queries; or ``([Q, P, D], [Q, P])``, hard
                negatives of each query.
            weight: ``[Q]`` of the losses, whose mean is weighted by it. It takes no gradient.

        Raises:
            ValueError: shapes that do not fit together, uniform negatives without num_items; TypeError: dtypes and devices; IndexError: an id out of range,
                on the CPU. Nothing is counted or remembered then.
        """
        self._check(query, item, item_id, negatives, weight)
        # A number, not a tensor of query's dtype, which would round it; the quotient has that dtype.
        query, item = self._similar(query) / self.temperature, self._similar(item)
        sets: List[CandidateSet] = []
        vectors: List[Tensor] = []
        items, ids = self._of_all(item, item_id)
        ids = self._known(ids, "item_id")
        drawn = 0
        shared, shared_ids = [items], [ids]
        hard: Optional[Tensor] = None
        hard_ids: Optional[Tensor] = None
        if negatives is not None:
            more, more_ids = negatives
            if more.dim() == 3:
                hard, hard_ids = self._similar(more), self._known(more_ids, "ids of negatives")
            else:
                all_more, all_more_ids = self._of_all(self._similar(more), more_ids)
                shared.append(all_more)
                shared_ids.append(self._known(all_more_ids, "ids of negatives"))
                drawn = all_more_ids.size(0)
        if self.training and self.counts is not None:
            self.counts.update(ids)
        draws = torch.full([], ids.size(0) - 1, dtype=torch.int64, device=ids.device)
        places = torch.ones([ids.size(0) + drawn], dtype=torch.bool, device=ids.device)
        if self.memory.size(0) > 0:  # behind all others: what is in the batch, too, has a gradient there
            seen, calls = self.memory_state[0], self.memory_state[1]
            filled = torch.where(calls >= self.memory_warmup, seen.clamp(max=self.memory.size(0)), 0)
            age = torch.arange(self.memory.size(0), device=ids.device)
            newest = (seen - 1 - age) % self.memory.size(0)  # first, so that of an item's vectors the newest is a candidate
            shared.append(self.memory.index_select(0, newest).to(item.dtype))
            shared_ids.append(self.memory_id.index_select(0, newest))
            places = torch.cat([places, age < filled])
            draws = draws + filled
        all_ids = torch.cat(shared_ids)
        log_count, of_target = self._log_count(all_ids, draws, drawn), self._log_count(item_id, draws, drawn)
        takes_part = torch.ops.xsoftmax.first_occurrences(all_ids) & places & ~log_count.isneginf()
        if hard is not None and hard_ids is not None:
            of_hard = torch.logaddexp(self._log_count(hard_ids, draws, drawn), torch.zeros([], device=ids.device))
            of_hard = of_hard.masked_fill(~torch.ops.xsoftmax.first_occurrences(hard_ids), math.inf)
            there = torch.ops.xsoftmax.listed(all_ids, hard_ids)  # beside the hard negatives of a query
            log_count = torch.logaddexp(log_count, torch.where(there, 0.0, -math.inf))
            of_hard_target = torch.where(torch.ops.xsoftmax.listed(item_id.unsqueeze(1), hard_ids).squeeze(1), 0.0, -math.inf)
            sets.append(CandidateSet(hard_ids, of_hard, of_hard_target, True))
            vectors.append(hard)
        sets.append(CandidateSet(all_ids, log_count.masked_fill(~takes_part, math.inf), of_target, True))
        vectors.append(torch.cat(shared))
        set_ids, set_counts, target_counts, distinct = columns_of(sets)
        loss = torch.ops.xsoftmax.tower_loss(query, item, item_id, vectors, set_ids, set_counts, target_counts, distinct, weight, self._options)
        if self.training and self.memory.size(0) > 0:
            self._remember(items, ids)
        return loss

    def extra_repr(self) -> str:
        text = f"num_items={self.num_items}, {self._options.replace(',', ', ')}, similarity={self.similarity}"
        return text + (f", memory={self.memory.size(0)}, memory_warmup={self.memory_warmup}" if self.memory.size(0) > 0 else "")

    def _apply(self, fn, recurse=True):
        before = self.temperature
        super()._apply(fn, recurse)
        if not isinstance(before, nn.Parameter):
            self.temperature = moved_table(self._name, before, self.temperature)
        return self

    def _check(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: Optional[Tuple[Tensor, Tensor]], weight: Optional[Tensor]) -> None:
        name = self._name
        if not torch.jit.is_scripting():
            if negatives is not None and not (isinstance(negatives, tuple) and len(negatives) == 2):
                raise TypeError(f"{name}: expected negatives as (vectors, ids), got {type(negatives).__name__}")
            for argument, tensor in (("query", query), ("item", item), ("item_id", item_id)) + (() if negatives is None else tuple(zip(
                    ("the vectors of negatives", "the ids of negatives"), negatives))):
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{name}: expected {argument} as a tensor, got {type(tensor).__name__}")
        if query.dim() != 2 or item.shape != query.shape:
            raise ValueError(f"{name}: expected query and item of one shape [Q, D], got {list(query.shape)} and {list(item.shape)}")
        self._check_vectors(query, "query", query)
        self._check_vectors(item, "item", query)
        self._check_ids(item_id, "item_id", list(query.shape[:1]), query)
        if weight is not None:
            self._check_vectors(weight, "weight", query)
            if list(weight.shape) != list(query.shape[:1]):
                raise ValueError(f"{name}: expected weight of shape {list(query.shape[:1])}, got {list(weight.shape)}")
        if self.memory.size(0) > 0 and self.memory.size(1) != query.size(1):
            raise ValueError(f"{name}: expected vectors of the width of memory, {self.memory.size(1)}, got {query.size(1)}")
        if negatives is not None:
            vectors, ids = negatives
            shared = vectors.dim() == 2 and vectors.size(1) == query.size(1)
            private = vectors.dim() == 3 and vectors.size(0) == query.size(0) and vectors.size(2) == query.size(1)
            if not shared and not private:
                raise ValueError(f"{name}: expected vectors of negatives of shape [S, {query.size(1)}] or [{query.size(0)}, P, {query.size(1)}], "
                                 f"got {list(vectors.shape)}")
            self._check_vectors(vectors, "vectors of negatives", query)
            self._check_ids(ids, "ids of negatives", list(vectors.shape[:-1]), query)
            if shared and self.num_items is None and self.counts is not None:
                raise ValueError(f"{name}: expected num_items, from which negatives [S, D] are drawn uniformly, got none")

    def _check_vectors(self, vectors: Tensor, argument: str, query: Tensor) -> None:
        if not vectors.is_floating_point():
            raise TypeError(f"{self._name}: expected {argument} of a floating dtype, got {vectors.dtype}")
        self._check_place(vectors, argument, query)

    def _check_place(self, tensor: Tensor, argument: str, query: Tensor) -> None:
        if tensor.device != query.device:
            raise TypeError(f"{self._name}: expected {argument} on query's device {query.device}, got {tensor.device}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{self._name}: expected {argument} of strided layout, got another")

    def _check_ids(self, ids: Tensor, argument: str, shape: List[int], query: Tensor) -> None:
        self._check_place(ids, argument, query)
        if ids.dtype != torch.int64:
            raise TypeError(f"{self._name}: expected {argument} of dtype torch.int64, got {ids.dtype}")
        if list(ids.shape) != shape:
            raise ValueError(f"{self._name}: expected {argument} of shape {shape}, got {list(ids.shape)}")

    def _known(self, ids: Tensor, argument: str) -> Tensor:
        return torch.ops.xsoftmax.known_ids(ids, self._known_ids, self._name, argument)

    def _similar(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1) if self.similarity == "cosine" else vectors

    def _log_count(self, ids: Tensor, draws: Tensor, drawn: int) -> Tensor:
        """How often ids are among the candidates that all queries share."""
        counts = self.counts
        if counts is None:
            return torch.zeros_like(ids, dtype=torch.float32)
        num_items = self.num_items
        return torch.ops.xsoftmax.inclusion_log_count(counts.log_prob(ids), draws, drawn, 0 if num_items is None else num_items)

    def _of_all(self, vectors: Tensor, ids: Tensor) -> Tuple[Tensor, Tensor]:
        """Of all processes: this one."""
        return vectors, ids

    def _remember(self, vectors: Tensor, ids: Tensor) -> None:
        size = self.memory.size(0)
        count = min(size, ids.size(0))
        first = self.memory_state[0] + (ids.size(0) - count)
        places = (first + torch.arange(count, device=ids.device)) % size
        self.memory.index_copy_(0, places, vectors.detach()[ids.size(0) - count:].to(self.memory.dtype))
        self.memory_id.index_copy_(0, places, ids[ids.size(0) - count:])
        self.memory_state += torch.tensor([ids.size(0), 1], device=ids.device)
