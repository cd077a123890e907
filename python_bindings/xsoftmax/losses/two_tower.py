"""Losses over vectors that a network has just computed: an item tower instead of a class table."""

import numbers
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.types import Device

from .._core.checks import check_bool, check_count, check_reduction, check_tensor, refuse_assignment
from .._core.memory import device_of_values, fill_empty, move_table
from .._core.options import option_text, read_options
from .._core.placement import LOCAL
from .._core.typing import Module
from ..samplers import StreamingCounts


class TwoTowerLoss(Module):
    r"""Two-tower retrieval loss: scores each query against its item, with the items of the batch as
    candidates.

    Let s be the similarity of a query and an item divided by the temperature, y the query's item, C
    the distinct items among the candidates, and c_j the expected count of item j: how often it
    would be among the candidates on average. With the estimator "sampled_softmax", the loss of a
    query estimates the cross entropy over all items::

        loss = log(e^{s_y} + sum_{j in C, j != y} e^{s_j} / c_j) - s_y

    :func:`xsoftmax.functional.tower_loss` gives it as a PyTorch expression. The candidates are:

    - the other items of the batch;
    - the items of ``negatives``, a second batch sampled uniformly (mixed negative sampling; Yang et
      al., 2020);
    - the last ``memory`` items of past batches (cross-batch memory; Wang et al., 2020).

    Items are compared by id. An item that appears several times is one candidate, with the vector
    of the batch, or else the newest in memory. Items equal to the query's are not candidates.
    Therefore c_j is the probability that j is among the candidates at all, ``1 - (1 - p_j)^k (1 - 1
    / num_items)^S``, where k is the number of other items in the batch and the memory, p_j the
    frequency of item j in the stream (the "logQ correction" of Yi et al., 2019), and S the number
    of uniform negatives. Hard negatives of a query, passed by the caller, are always scored: 1 is
    added to their expected count.

    The estimator decides what is corrected. "sampled_softmax" weights only the candidates: the
    positive is in the sum because it is in the softmax, not because it was sampled. Its gradient is
    that of Khrylchenko et al. (2025), ``(1 - P_y)`` times that of ``log sum_{j != y} e^{s_j} / c_j
    - s_y``, with P_y the estimated probability of y. "ranking" also lowers s_y by ``log c_y``, as
    Yi et al. (2019) do.

    In eval() the loss of the batch is the same, but neither counts nor memory change, and items
    that were never counted are not candidates. Under :func:`xsoftmax.distributed.share_candidates`
    the candidates are the items of all ranks.

    Args:
        num_items: N, the number of items; :meth:`resize_classes` changes it. None: ids are any
            int64, and frequencies are kept by hashing. Uniform negatives require num_items; if ids
            are any int64, pass it together with ``counts=StreamingCounts(None)``.
        estimator: as in :class:`SampledSoftmaxLoss`, except CANE and estimators written in Python.
        temperature: above 0: divides the similarities. A 0-dim :class:`torch.nn.Parameter` is
            trained.
        similarity: "dot", or "cosine", which normalises the vectors.
        counts: a :class:`xsoftmax.samplers.StreamingCounts` of item frequencies, updated by each
            call in train(). None: one for num_items ids, without a half-life. False: no correction,
            all c are 1 (InfoNCE with "sampled_softmax"); an item that is both a query's hard
            negative and a shared candidate then counts as the shared candidate only.
        remove_accidental_hits: drop candidates equal to the query's item, where the estimator
            permits it.
        memory: the number of items of past batches that are candidates too, without gradients.
        dim: width of the vectors in memory; required with memory.
        memory_warmup: the number of calls in train() before the memory is used: vectors of a tower
            that still changes fast are soon out of date.
        reduction: "mean", "sum" or "none".
        device: of the buffers.

    Shape:
        - query, item: [Q, D], float32, float64, bfloat16 or float16. Vectors of another dtype are
          cast to that of query.
        - item_id: int64 [Q].
        - output: a scalar, or [Q] with reduction="none"; float64 for float64 query, else float32.
          For an empty batch "sum" is 0 and "mean" is NaN, as in torch. The loss of a single query
          without other candidates is 0. A NaN in a vector makes the loss NaN, as long as the vector
          is in the batch or in memory.

    Buffers: ``memory`` [M, D], ``memory_id`` [M], ``memory_state`` [2] (items and calls so far),
    and those of ``counts``.

    Raises:
        ValueError: an option is out of range; CANE or an estimator written in Python; memory
            without dim; counts of another number of ids; and same as :meth:`forward`.
        TypeError: an option has another type; and same as :meth:`forward`.
        IndexError: same as :meth:`forward`.
    """

    reduction: str
    _class_table = LOCAL

    def __init__(self, num_items: Optional[int] = None, *, estimator: str = "sampled_softmax",
                 temperature: Union[float, Tensor] = 1.0, similarity: str = "dot",
                 counts: Union[StreamingCounts, bool, None] = None,
                 remove_accidental_hits: bool = True, memory: int = 0, dim: Optional[int] = None,
                 memory_warmup: int = 0, reduction: str = "mean", device: Device = None) -> None:
        super().__init__()
        name = self._name = type(self).__name__
        if isinstance(temperature, Tensor):
            if temperature.dim() != 0 or not temperature.is_floating_point():
                raise ValueError(f"{name}: expected temperature as a number or a 0-dim floating "
                                 f"tensor, got shape {list(temperature.shape)} of "
                                 f"{temperature.dtype}")
            if temperature.requires_grad and not isinstance(temperature, nn.Parameter):
                raise ValueError(f"{name}: expected temperature as a torch.nn.Parameter to train "
                                 "it, got another tensor that requires a gradient")
        elif isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
            raise ValueError(f"{name}: expected temperature above 0, got {temperature!r}")
        if counts is True or not (counts is None or counts is False
                                  or isinstance(counts, StreamingCounts)):
            hint = ": the loss counts the items of the batches itself" if counts is not True else ""
            raise TypeError(f"{name}: expected counts as a StreamingCounts, None or False, got "
                            f"{True if counts is True else type(counts).__name__}{hint}")
        self._options = option_text(
            num_items=None if num_items is None else check_count(name, "num_items", num_items, 1),
            estimator=estimator, temperature=float(
                temperature.detach() if isinstance(temperature, Tensor) else temperature),
            similarity=similarity, remove_accidental_hits=check_bool(name, "remove_accidental_hits",
                                                                     remove_accidental_hits),
            memory=check_count(name, "memory", memory,
                               0), dim=None if dim is None else check_count(name, "dim", dim, 1),
            memory_warmup=check_count(name, "memory_warmup", memory_warmup, 0), reduction=reduction)
        self.reduction = check_reduction(name, reduction)
        value, *memories = torch.ops.xsoftmax.two_tower_state(
            name, self._options, counts.num_ids if isinstance(counts, StreamingCounts) else None)
        device = device_of_values(device)
        if isinstance(temperature, nn.Parameter):
            self.temperature = temperature
        else:
            self.register_buffer("temperature", value.to(device), persistent=False)
        self.counts = (StreamingCounts(num_items)
                       if counts is None else None if counts is False else counts)
        if self.counts is not None:
            self.counts.to(device)
        for buffer, table in zip(("memory", "memory_id", "memory_state"), memories):
            self.register_buffer(buffer, table.to(device))
        # Whether several ranks share candidates; not supported in TorchScript.
        self._shared = False

    def __setattr__(self, name: str, value: Any) -> None:
        is_initialized = "_shared" in self.__dict__
        if is_initialized and name in ("num_items", "estimator", "similarity",
                                       "remove_accidental_hits", "dim", "memory_warmup"):
            refuse_assignment(self._name, name)
        if is_initialized and name == "reduction":
            self._options = option_text(
                **{**read_options(self._options), "reduction": check_reduction(self._name, value)})
        super().__setattr__(name, value)

    def forward(self, query: Tensor, item: Tensor, item_id: Tensor,
                negatives: Optional[Tuple[Tensor, Tensor]] = None,
                weight: Optional[Tensor] = None) -> Tensor:
        """Computes the loss. In train() the call also counts the items of the batch and adds them
        to the memory, if there is one.

        Args:
            query, item: floating ``[Q, D]``: each query and its item.
            item_id: int64 ``[Q]``; in [0, num_items) if that is set, unless ``counts`` has open
                ids.
            negatives: vectors and ids of more items: ``([S, D], [S])``, sampled uniformly from all
                num_items, for all queries; or ``([Q, P, D], [Q, P])``, hard negatives of each
                query.
            weight: floating ``[Q]``, or None: multiplies the losses; the mean is weighted by it. It
                gets no gradient.

        Returns:
            A scalar, or ``[Q]`` with reduction="none"; float64 for float64 query, else float32.

        Raises:
            ValueError: shapes do not fit together; uniform negatives without num_items, unless
                counts=False.
            TypeError: vectors or weight are not floating, ids are not int64, tensors are on
                different devices, or negatives is not a tuple.
            IndexError: an id is not in [0, num_items) (checked on the CPU only). After an error
                nothing is counted or added to the memory.
        """
        negative_tensors: List[Tensor] = []
        if not torch.jit.is_scripting():
            for name, tensor in (("query", query), ("item", item), ("item_id", item_id)):
                check_tensor(self._name, name, tensor)
            if weight is not None:
                check_tensor(self._name, "weight", weight)
        if negatives is not None:
            if not torch.jit.is_scripting() and not (isinstance(negatives, tuple)
                                                     and len(negatives) == 2):
                raise TypeError(f"{self._name}: expected negatives as (vectors, ids), got "
                                f"{type(negatives).__name__}" +
                                (": weights of the queries are passed by name, weight=..."
                                 if isinstance(negatives, Tensor) else ""))
            negative_tensors = [negatives[0], negatives[1]]
        if self._shared:
            return self._step_with_shared_items(query, item, item_id, negative_tensors, weight)
        if not torch.jit.is_scripting():
            if self.counts is not None and not self.counts._ranks.is_single:
                return self._step_with_shared_counts(query, item, item_id, negative_tensors, weight)
        return self._step(query, item, item_id, negative_tensors, [], weight, True, self._options)

    def _step(self, query: Tensor, item: Tensor, item_id: Tensor, negatives: List[Tensor],
              shared_items: List[Tensor], weight: Optional[Tensor], counting: bool,
              options: str) -> Tensor:
        counts, state, count_options = self.counts, torch.jit.annotate(List[Tensor], []), ""
        if counts is not None:
            state, count_options, counting = [counts.count, counts.total, counts.last, counts.seen
                                              ], counts.options, counting and counts.training
        return torch.ops.xsoftmax.two_tower_loss_(query, item, item_id, negatives, shared_items,
                                                  weight, self.temperature, state, self._memories(),
                                                  [self.training and counting, self.training],
                                                  count_options, options)

    @torch.jit.export
    def topk(self, query: Tensor, item_vectors: Tensor, k: int,
             exclude: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Returns the k most probable items of each query among ``item_vectors``, best first,
        without [*, N] in memory.

        Equivalent to::

            if similarity == "cosine":
                query, item_vectors = F.normalize(query, dim=-1), F.normalize(item_vectors, dim=-1)
            torch.log_softmax(query @ item_vectors.T / temperature, -1).topk(k)

        Of equal scores, the lower row comes first. Scores are computed in float32 (float64 if a
        tensor is float64), also under autocast. ``item_vectors`` is copied if it is normalised or
        of another dtype. The result has no gradient. Counts are not used, because these are the
        probabilities that the corrected loss estimates.

        Args:
            query: floating ``[*, D]``.
            item_vectors: floating ``[N, D]``, such as the item tower's vectors of the whole
                catalog.
            k: in [0, N].
            exclude: int64 ``[*, E]``: rows to leave out per query, such as items already seen, in
                any order, with -1 as padding. The result is exact for the remaining items.
                Log-probabilities are still normalised over all items. If fewer than k items remain,
                the last entries have the value -inf and the row -1.

        Returns:
            (log-probabilities, rows of ``item_vectors``), both ``[*, k]``. Log-probabilities are
            float64 if a tensor is float64, else float32; rows are int64. Rows are item ids if the
            vectors are in the order of the ids.

        Raises:
            ValueError: shapes do not fit together; k is not in [0, N].
            TypeError: vectors are not floating, tensors are on different devices, exclude is not
                int64, or k is not an int.
            IndexError: an id of `exclude` is neither in [0, N) nor -1 (checked on the CPU only).
        """
        if not torch.jit.is_scripting():
            if not torch.compiler.is_compiling():
                check_count(self._name, "k", k, None)
        return torch.ops.xsoftmax.two_tower_topk(query, item_vectors, self.temperature, k, exclude,
                                                 self._options)

    def resize_classes(self, num_items: int) -> None:
        """Changes the number of items in place. New items are appended; items past the new end are
        removed.

        Counts are resized too (:meth:`StreamingCounts.resize
        <xsoftmax.samplers.StreamingCounts.resize>`): new items start as never seen, and the counts
        of removed items leave the total. This includes counts created by the caller, also if other
        losses share them. Removed items also leave the memory. If ids are any int64, nothing
        happens. With counts of open ids, only num_items changes. With counts=False, num_items and
        memory change.

        If candidates or counts are shared between ranks, call it on each rank. A scripted loss
        keeps its number of items.

        Args:
            num_items: at least 1.

        Raises:
            ValueError: num_items is below 1.
            TypeError: num_items is not an int. An error changes nothing.
        """
        num_items = check_count(self._name, "num_items", num_items, 1)
        open_ids = not self._has_num_items() if self.counts is None else self.counts.num_ids is None
        new_tables, options = torch.ops.xsoftmax.two_tower_resized(self._name, self._memories(),
                                                                   num_items, open_ids,
                                                                   self._options)
        if self.counts is not None:
            self.counts.resize(num_items)
        with torch.no_grad():
            for table, new_table in zip(self._memories(), new_tables):
                table.copy_(new_table)
        self._options = options

    def _has_num_items(self) -> bool:
        return not self._options.startswith("num_items=none")

    def _memories(self) -> List[Tensor]:
        return [self.memory, self.memory_id, self.memory_state]

    @torch.jit.unused
    def _step_with_shared_items(self, query: Tensor, item: Tensor, item_id: Tensor,
                                negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        return self._class_table.tower_step(self, query, item, item_id, negatives, weight)

    @torch.jit.unused
    def _step_with_shared_counts(self, query: Tensor, item: Tensor, item_id: Tensor,
                                 negatives: List[Tensor], weight: Optional[Tensor]) -> Tensor:
        """Runs a step whose candidates are those of the local batch, with counts of the items of
        all ranks."""
        counts: Any = self.counts
        torch.ops.xsoftmax.check_two_tower(query, item, item_id, negatives, weight,
                                           self._memories(), True, self._options)
        if self.training and counts.training:
            named_ids = [("item_id", item_id)]
            named_ids += [("ids of negatives", ids) for ids in negatives[1:]]
            for name, ids in named_ids:
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
        temperature = self.temperature
        super()._apply(fn, recurse)
        if not isinstance(temperature, nn.Parameter):
            self.temperature = move_table(self._name, temperature, self.temperature)
        return self
