"""Losses over vectors that a network has just made: an item tower in the place of a class table."""

import numbers
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from ._checks import check_bool, check_count, check_reduction, check_tensor, refuse_assignment
from ._memory import device_of_values, fill_empty, moved_table
from ._options import option_text, read_options
from ._placement import LOCAL
from ._typing import Module
from .samplers import StreamingCounts


class TwoTowerLoss(Module):
    r"""The loss of two towers for retrieval: each query against its item, with the items of the batch as candidates.

    Let s be the similarity of a query and an item, divided by the temperature; y the query's item; C the different items among the candidates; and c_j the
    expected count of item j, how often it would be among them on average. The loss of a query is an estimate of the cross entropy over all items::

        loss = log(e^{s_y} + sum_{j in C, j != y} e^{s_j} / c_j) - s_y                       estimator "sampled_softmax"

    :func:`xsoftmax.functional.tower_loss` has it as a PyTorch expression. The candidates are:

    - the other items of the batch;
    - those of ``negatives``, a second batch that is drawn uniformly (mixed negative sampling; Yang et al., 2020);
    - the last ``memory`` items of past batches (cross-batch memory; Wang et al., 2020).

    Items are compared by id. An item that stands among the candidates several times is a candidate once, with the vector of the batch, or the newest in memory.
    An item equal to the query's is no candidate. So c_j is the probability that j is among the candidates at all, ``1 - (1 - p_j)^k (1 - 1 / num_items)^S``: k
    is the number of other items of batch and memory, p_j the frequency of item j in the stream (the "logQ correction" of Yi et al., 2019), and S the number of
    uniform negatives. Items that the caller gives to a query (hard negatives) are always there: 1 is added to their count.

    The estimator says what is corrected. "sampled_softmax" weighs the candidates alone: the positive is in the sum because the softmax has it there, not
    because it was drawn. Its gradient is that of Khrylchenko et al. (2025), ``(1 - P_y)`` times that of ``log sum_{j != y} e^{s_j} / c_j - s_y``, with P_y the
    estimated probability of y. "ranking" lowers s_y by ``log c_y`` as well, as Yi et al. (2019) do.

    Args:
        num_items: N, how many items there are; :meth:`resize_classes` changes it. None: any int64 is an id, and frequencies are kept by hashing. Uniform
            negatives need num_items: where any int64 is an id, give it with ``counts=StreamingCounts(None)``.
        estimator: as in :class:`SampledSoftmaxLoss`, but for CANE and estimators that are written in Python.
        temperature: above 0: similarities are divided by it. A 0-dim :class:`torch.nn.Parameter` is trained.
        similarity: "dot", or "cosine", of vectors that are normalised here.
        counts: a :class:`xsoftmax.samplers.StreamingCounts` that keeps the frequencies of items, updated by each call in train(). None: one for num_items,
            which never forgets. False: no correction, all c are 1 (InfoNCE where estimator is "sampled_softmax"). An item that is a negative of a query
            and a candidate of all queries is one of the latter.
        remove_accidental_hits: items equal to the query's are no candidates, as far as the estimator can do without them.
        memory: how many items of past batches are candidates too, without gradient.
        dim: width of the vectors in memory. Needed beside memory.
        memory_warmup: how many calls in train() come before memory takes part: items of a tower that moves fast do not stay good candidates.
        reduction: "mean", "sum" or "none".

    Shape:
        - query, item: [Q, D], float32, float64, bfloat16 or float16. Vectors of another dtype are cast to that of query.
        - item_id: int64 [Q].
        - output: a scalar, or [Q] with reduction="none"; float64 for float64 query, else float32. Without a query "sum" is 0 and "mean" NaN, as in torch. A
          query alone in its batch has a loss of 0. A NaN among the vectors makes the loss NaN, and that of each step whose memory has it.

    Buffers: memory [M, D], memory_id [M], memory_state [2] (items and calls so far), and those of ``counts``. In eval() the loss is the same of the
    batch, and neither counts nor memory change; items that were never counted are then no candidates.

    Under :func:`xsoftmax.distributed.share_candidates` the candidates are the items of all ranks.

    Raises:
        ValueError: an option out of range; CANE or an estimator that is written in Python; memory without dim; counts of another number of ids; and as
            :meth:`forward`.
        TypeError: an option of another type; and as :meth:`forward`.
        IndexError: as :meth:`forward`.
    """

    reduction: str
    _class_table = LOCAL

    def __init__(self, num_items: Optional[int] = None, *, estimator: str = "sampled_softmax", temperature: Union[float, Tensor] = 1.0,
                 similarity: str = "dot", counts: Union[StreamingCounts, bool, None] = None, remove_accidental_hits: bool = True, memory: int = 0,
                 dim: Optional[int] = None, memory_warmup: int = 0, reduction: str = "mean", device: Device = None) -> None:
        super().__init__()
        name = self._name = type(self).__name__
        if isinstance(temperature, Tensor):
            if temperature.dim() != 0 or not temperature.is_floating_point():
                raise ValueError(f"{name}: expected temperature as a number or a 0-dim floating tensor, got shape {list(temperature.shape)} of "
                                 f"{temperature.dtype}")
            if temperature.requires_grad and not isinstance(temperature, nn.Parameter):
                raise ValueError(f"{name}: expected temperature as a torch.nn.Parameter to train "
                                 "it, got another tensor that requires a gradient")
        elif isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
            raise ValueError(f"{name}: expected temperature above 0, got {temperature!r}")
        if counts is True or not (counts is None or counts is False or isinstance(counts, StreamingCounts)):
            hint = ": the loss counts the items of the batches itself" if counts is not True else ""
            raise TypeError(f"{name}: expected counts as a StreamingCounts, None or False, got "
                            f"{True if counts is True else type(counts).__name__}{hint}")
        self._options = option_text(
            num_items=None if num_items is None else check_count(name, "num_items", num_items, 1), estimator=estimator,
            temperature=float(temperature.detach() if isinstance(temperature, Tensor) else temperature), similarity=similarity,
            remove_accidental_hits=check_bool(name, "remove_accidental_hits", remove_accidental_hits), memory=check_count(name, "memory", memory, 0),
            dim=None if dim is None else check_count(name, "dim", dim, 1), memory_warmup=check_count(name, "memory_warmup", memory_warmup, 0),
            reduction=reduction)
        self.reduction = check_reduction(name, reduction)
        value, *memories = torch.ops.xsoftmax.two_tower_state(name, self._options, counts.num_ids if isinstance(counts, StreamingCounts) else None)
        device = device_of_values(device)
        if isinstance(temperature, nn.Parameter):
            self.temperature = temperature
        else:
            self.register_buffer("temperature", value.to(device), persistent=False)
        self.counts = (StreamingCounts(num_items) if counts is None else None if counts is False else counts)
        if self.counts is not None:
            self.counts.to(device)
        for buffer, table in zip(("memory", "memory_id", "memory_state"), memories):
            self.register_buffer(buffer, table.to(device))
        self._shared = False  # whether candidates are those of several ranks, which TorchScript refuses

    def __setattr__(self, name: str, value: Any) -> None:
        made = "_shared" in self.__dict__
        if made and name in ("num_items", "estimator", "similarity", "remove_accidental_hits", "dim", "memory_warmup"):
            refuse_assignment(self._name, name)
        if made and name == "reduction":
            self._options = option_text(**{**read_options(self._options), "reduction": check_reduction(self._name, value)})
        super().__setattr__(name, value)

    def forward(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: Optional[Tuple[Tensor, Tensor]] = None,
                weight: Optional[Tensor] = None) -> Tensor:
        """The loss. In train() the call counts the items of the batch, and remembers them where there is a memory.

        Args:
            query, item: floating ``[Q, D]``, each query beside its item.
            item_id: int64 ``[Q]``; in [0, num_items) where that is given, unless ``counts`` are of open ids.
            negatives: vectors and ids of more items: ``([S, D], [S])``, drawn uniformly from all num_items, for all queries; or ``([Q, P, D], [Q, P])``, hard
                negatives of each query.
            weight: floating ``[Q]``, multiplies the losses, or None. The mean is weighted by it. It takes no gradient.

        Returns:
            A scalar, or ``[Q]`` with reduction="none"; float64 for float64 query, else float32.

        Raises:
            ValueError: shapes that do not fit together; uniform negatives without num_items, unless counts=False.
            TypeError: vectors or weight of no floating dtype, ids that are not int64, tensors on different devices, negatives that are no tuple.
            IndexError: an id is not in [0, num_items) (checked on the CPU). After an error nothing is counted or remembered.
        """
        more: List[Tensor] = []
        if not torch.jit.is_scripting():
            for name, tensor in (("query", query), ("item", item), ("item_id", item_id)):
                check_tensor(self._name, name, tensor)
            if weight is not None:
                check_tensor(self._name, "weight", weight)
        if negatives is not None:
            if not torch.jit.is_scripting() and not (isinstance(negatives, tuple) and len(negatives) == 2):
                raise TypeError(f"{self._name}: expected negatives as (vectors, ids), got {type(negatives).__name__}"
                                + (": weights of the queries are passed by name, weight=..." if isinstance(negatives, Tensor) else ""))
            more = [negatives[0], negatives[1]]
        if self._shared:
            return self._of_ranks(query, item, item_id, more, weight)
        if not torch.jit.is_scripting():
            if self.counts is not None and not self.counts._ranks.alone:
                return self._with_counts_of_ranks(query, item, item_id, more, weight)
        return self._step(query, item, item_id, more, [], weight, True, self._options)

    def _step(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: List[Tensor], everyone: List[Tensor], weight: Optional[Tensor], counting: bool,
              options: str) -> Tensor:
        counts, state, how = self.counts, torch.jit.annotate(List[Tensor], []), ""
        if counts is not None:
            state, how, counting = [counts.count, counts.total, counts.last, counts.seen], counts.options, counting and counts.training
        return torch.ops.xsoftmax.two_tower_loss_(query, item, item_id, negatives, everyone, weight, self.temperature, state, self._memories(),
                                                  [self.training and counting, self.training], how, options)

    @torch.jit.export
    def topk(self, query: Tensor, item_vectors: Tensor, k: int, exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k most probable items of each query among ``item_vectors``, best first, without [*, N] in memory.

        Equivalent to::

            if similarity == "cosine":
                query, item_vectors = F.normalize(query, dim=-1), F.normalize(item_vectors, dim=-1)
            torch.log_softmax(query @ item_vectors.T / temperature, -1).topk(k)      # equal scores: the lower row first

        Scores are computed in float32 (float64 where a tensor is float64), under autocast as well. A copy of ``item_vectors``
        is in memory where they are normalised or of another dtype. The result has no gradient. Counts are not used: these
        are the probabilities that the loss estimates, and no expected counts correct them.

        Args:
            query: floating ``[*, D]``.
            item_vectors: floating ``[N, D]``, such as the item tower's vectors of the whole catalog.
            k: in [0, N].
            exclude: int64 ``[*, E]``: the rows that each query does not want, such as items already seen, in any order; -1 for
                none. The best k of all other items are returned, exactly. Log-probabilities stay those among all items. Where
                fewer than k items are left, the last places are -inf and -1.

        Returns:
            (log-probabilities, rows of ``item_vectors``), both ``[*, k]``: float64 where a tensor is float64, else float32; and
            int64. The rows are the items' ids where the vectors are in the order of the ids.

        Raises:
            ValueError: shapes that do not fit together; k is not in [0, N].
            TypeError: vectors of no floating dtype, tensors on different devices, exclude that is not int64, k that is no int.
            IndexError: an id of `exclude` is not in [0, N) or -1 (checked on the CPU).
        """
        if not torch.jit.is_scripting():
            if not torch.compiler.is_compiling():
                check_count(self._name, "k", k, None)
        return torch.ops.xsoftmax.two_tower_topk(query, item_vectors, self.temperature, k, exclude, self._options)

    def resize_classes(self, num_items: int) -> None:
        """Gives the loss another number of items, in place. New items stand behind the others; items past the end are gone.

        Counts follow (:meth:`StreamingCounts.resize <xsoftmax.samplers.StreamingCounts.resize>`): new items were never seen,
        and the counts of items that are gone leave the total. Counts that the caller made are resized too, also where other
        losses share them. Items that are gone leave the memory as well. Nothing happens where any
        int64 is an id. With counts of open ids, only num_items changes. With counts=False,
        num_items and memory change.

        Call it on each rank where candidates or counts are shared. A scripted loss keeps its number of items.

        Args:
            num_items: at least 1.

        Raises:
            ValueError: num_items below 1.
            TypeError: num_items is not an int. An error changes nothing.
        """
        num_items = check_count(self._name, "num_items", num_items, 1)
        open_ids = not self._has_num_items() if self.counts is None else self.counts.num_ids is None
        after, options = torch.ops.xsoftmax.two_tower_resized(self._name, self._memories(), num_items, open_ids, self._options)
        if self.counts is not None:
            self.counts.resize(num_items)
        with torch.no_grad():
            for table, resized in zip(self._memories(), after):
                table.copy_(resized)
        self._options = options

    def _has_num_items(self) -> bool:
        return not self._options.startswith("num_items=none")

    def _memories(self) -> List[Tensor]:
        return [self.memory, self.memory_id, self.memory_state]

    @torch.jit.unused
    def _of_ranks(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        return self._class_table.tower_step(self, query, item, item_id, negatives, weight)

    @torch.jit.unused
    def _with_counts_of_ranks(self, query: Tensor, item: Tensor, item_id: Tensor,
                              negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        """The step of a batch whose candidates are its own, beside counts of all ranks' items."""
        counts: Any = self.counts
        torch.ops.xsoftmax.check_two_tower(query, item, item_id, negatives, weight,
                                           self._memories(), True, self._options)
        if self.training and counts.training:
            named = [("item_id", item_id)]
            named += [("ids of negatives", ids) for ids in negatives[1:]]
            for name, ids in named:
                torch.ops.xsoftmax.known_ids(ids, counts.num_ids or 0, self._name, name,
                                             self._has_num_items())
            counts.update(item_id)
        return self._step(query, item, item_id, negatives, [], weight, False, self._options)

    def extra_repr(self) -> str:
        return self._options.replace(",", ", ")

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        fill_empty(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.temperature
        super()._apply(fn, recurse)
        if not isinstance(before, nn.Parameter):
            self.temperature = moved_table(self._name, before, self.temperature)
        return self
