"""The MIDX sampler for a class table that is sharded over ranks."""

from typing import Any, Callable, Dict, List, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .._core import ranks
from .._core.options import read_options
from ..optim.catch_up import catch_up
from ..samplers import CandidateSet, MidxSampler, Sampler, UnionSampler
from ..samplers.candidate_set import one_set
from ..samplers.sampler import draw_seed
from .exchange import ClassShards, Requests, same_generator, find_unique
from .state import rows_of_all, rows_of_rank


def check_sampler(owner: str, sampler: Sampler) -> None:
    """Raises an error unless a sampler can draw from a sharded table."""
    if isinstance(sampler, UnionSampler):
        for part in sampler.parts:
            check_sampler(owner, part)
    elif sampler.follows_table:
        if type(sampler) is not MidxSampler or sampler.log_weight.numel() > 0:
            raise ValueError(f"{owner}: expected a sampler that does not follow the class table, "
                             f"or a MidxSampler without a bias, got {sampler}")


def split_sampler(sampler: Sampler, shards: ClassShards, may_fetch: bool) -> Sampler:
    """Returns a sampler for the classes of this rank if it follows the table, else `sampler`."""
    if isinstance(sampler, UnionSampler):
        for i, part in enumerate(sampler.parts):
            sampler.parts[i] = split_sampler(part, shards, may_fetch)
        return sampler
    return ShardedMidxSampler(
        sampler, shards, may_fetch) if sampler.follows_table else sampler  # type: ignore[arg-type]


def fetch_from_owners(sampler: Sampler, fetches: bool) -> None:
    """Sets whether the next draws fetch classes from other ranks, or know only this rank's."""
    for part in sampler.modules():
        if isinstance(part, ShardedMidxSampler):
            part.fetches = fetches


class ShardedMidxSampler(Sampler):
    """The MidxSampler of a loss after :func:`shard_classes`. All ranks hold the codewords; each
    holds the cells of its classes.

    In one process, the classes of a cell are ordered by id, and therefore by rank. A draw thus
    needs only the number of classes that each rank has in each cell, K^2 numbers per rank. Every
    rank draws the same samples as one process would for all queries. It draws them as slots:
    positions in a list of all classes, cell after cell. It then knows which slots hold its own
    classes. A slot of another rank is represented by any class of another rank, with the correct
    log count. Expected counts of given ids (``log_count``, ``target_log_count``) are known for the
    classes of this rank and are -inf for others.

    If ``fetches`` is set, this rank fetches the rows of its queries' candidates, so it requests the
    classes of slots, and the cells of classes, from the ranks that own them. All ranks draw
    together, each for its own queries.
    """

    # derived from `cell` of all ranks
    _derived_names = ("order", "begins", "first", "start", "mass", "runs")

    def __init__(self, sampler: MidxSampler, shards: ClassShards, may_fetch: bool):
        super().__init__(sampler.num_classes, sampler.num_samples, shared=sampler.shared,
                         distinct=sampler.distinct)
        self._owner, self.default_estimator = sampler._owner, sampler.default_estimator
        self.follows_table = True
        self._shards, self.dim, self._text = shards, sampler.dim, sampler.options
        self._may_fetch, self.fetches = may_fetch, False
        values = read_options(sampler.options)
        self.refresh_every, self.update_every, self.iterations = (int(values[name])
                                                                  for name in ("refresh_every",
                                                                               "update_every",
                                                                               "iterations"))
        self.codewords = int(values["codewords"])
        self.train_points = 256 * self.codewords if values["train_points"] == "none" else int(
            values["train_points"])
        for name in ("codewords1", "codewords2"):
            self.register_buffer(name, getattr(sampler, name))
        for name in ("cell", "touched"):
            self.register_buffer(name, shards.local(getattr(sampler, name)).clone())
        self.register_buffer("step", sampler.step)
        self.slots = sampler.order.numel()
        values |= {"slots": str(self.slots), "update_every": "0"}
        self.options = ",".join(f"{name}={value}" for name, value in values.items())
        self._lay_out()
        self._register_state_dict_hook(_as_dtensors)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        # A checkpoint of another kind of sampler: the next step builds a new index.
        if f"{prefix}cell" not in state_dict:
            self.step.zero_()
            return
        for name in ("cell", "touched"):
            key = prefix + name
            if key in state_dict and (name == "cell" or self.update_every > 0):
                state_dict[key] = rows_of_rank(
                    type(self).__name__, key, state_dict[key], self._shards)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._lay_out()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        step = self.step  # type: ignore[has-type]
        super()._apply(fn, recurse)
        self.step = step  # stays on the CPU, because every training step reads it
        return self

    def _lay_out(self) -> None:
        shards = self._shards
        num_drawn = int((self.cell >= 0).sum())
        order, begins, *_ = torch.ops.xsoftmax.midx_cells(self.cell, None, self.codewords,
                                                          num_drawn)
        counts = begins.diff()
        counts_of_ranks = counts.new_empty(shards.size * counts.numel())
        ranks.all_gather(counts_of_ranks, counts, group=shards.group)
        counts_of_ranks = counts_of_ranks.view(shards.size, -1)
        total_counts = counts_of_ranks.sum(0)
        start = torch.cat([total_counts.new_zeros(1), total_counts.cumsum(0)])
        # Where the slots of each rank begin within each cell, cell after cell.
        runs = (start[:-1] + counts_of_ranks.cumsum(0) -
                counts_of_ranks).t().reshape(-1) if self._may_fetch else total_counts.new_empty(0)
        tables = order, begins, start[:-1] + counts_of_ranks[:shards.rank].sum(
            0), start, total_counts.double().view(self.codewords, -1), runs
        for name, table in zip(self._derived_names, tables):
            self.register_buffer(name, table, persistent=False)

    def _index(self) -> List[Tensor]:
        def make_empty(dtype: torch.dtype) -> Tensor:
            return self.start.new_empty(0, dtype=dtype)

        return [
            self.codewords1, self.codewords2,
            make_empty(torch.int32),
            make_empty(torch.int64), self.start, self.mass,
            make_empty(torch.float32),
            make_empty(torch.float64),
            make_empty(torch.float64),
            make_empty(torch.bool),
            torch.zeros_like(self.step), self.step
        ]

    def _rows(self, slots: Tensor) -> Tensor:
        """Returns the local rows of the classes in slots; -1 for classes of other ranks."""
        cell = torch.searchsorted(self.start, slots, right=True) - 1
        place = slots - self.first[cell]
        is_local = (place >= 0) & (place < self.begins[cell + 1] - self.begins[cell])
        if self.order.numel() == 0:
            return torch.full_like(slots, -1)
        return torch.where(is_local, self.order[torch.where(is_local, self.begins[cell] + place,
                                                            0)], -1)

    def _classes(self, slots: Tensor, touched: Optional[Tensor]) -> Tensor:
        """Returns the classes in slots and marks those selected by `touched` as touched. Without
        ``fetches``, a slot of another rank gives any class of another rank."""
        if self.fetches:
            return self._fetch(
                slots, touched, lambda slots:
                (torch.searchsorted(self.runs, slots, right=True) - 1) % self._shards.size,
                self._rows, lambda rows: rows + self._shards.begin)
        rows = self._rows(slots)
        self._mark_touched(rows, touched)
        return torch.where(rows >= 0, rows + self._shards.begin, self._find_foreign_class())

    def _fetch(self, numbers: Tensor, touched: Optional[Tensor], owners: Callable[[Tensor], Tensor],
               find_rows: Callable[[Tensor], Tensor], compute_answers: Callable[[Tensor],
                                                                                Tensor]) -> Tensor:
        """Returns ``compute_answers(find_rows(numbers))``, computed by the ranks that own the
        numbers. The owners mark those selected by `touched` as touched."""
        unique_numbers, (places,) = find_unique([numbers])
        owner_ranks, order = owners(unique_numbers).sort(stable=True)
        touches = torch.zeros_like(unique_numbers, dtype=torch.bool)
        if touched is not None:
            touches[places[touched]] = True
        requests = Requests(
            torch.where(touches, unique_numbers, ~unique_numbers)[order], owner_ranks,
            self._shards.group)
        is_touch = requests.numbers >= 0
        rows = find_rows(torch.where(is_touch, requests.numbers, ~requests.numbers))
        self._mark_touched(rows, is_touch)
        result = requests.answer(compute_answers(rows))
        return torch.empty_like(result).index_copy_(0, order, result)[places]

    def _find_foreign_class(self) -> int:
        return self._shards.begin - 1 if self._shards.begin > 0 else min(
            self._shards.end, self.num_classes - 1)

    def _cells(self, classes: Tensor, touched: Optional[Tensor]) -> Tensor:
        """Returns the cell of each class; -1 if it is never drawn, is not a class or, without
        ``fetches``, belongs to another rank."""
        shards = self._shards
        if self.fetches:
            cells, is_class = torch.full_like(classes, -1), classes >= 0
            cells[is_class] = self._fetch(classes[is_class],
                                          None if touched is None else touched[is_class],
                                          shards.owners, lambda classes: classes - shards.begin,
                                          lambda rows: self.cell[rows].to(torch.int64))
            return cells
        is_local = shards.contains(classes)
        rows = torch.where(is_local, classes - shards.begin, -1)
        self._mark_touched(rows, touched)
        if shards.begin == shards.end:
            return rows
        return torch.where(is_local, self.cell[rows.clamp(min=0)].to(torch.int64), -1)

    def _mark_touched(self, rows: Tensor, touched: Optional[Tensor]) -> None:
        """Marks local rows that a step touches; -1 (a class of another rank) is ignored."""
        if touched is not None:
            self.touched[rows[touched & (rows >= 0)]] = True

    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        marks_touched = self.training and self.update_every > 0
        cells, slot_target, counts = None, None, None
        if target is not None:
            counts = (target if target.dim() == 2 else target.unsqueeze(1))[:, :1] >= 0
            cells = self._cells(
                target, (counts if target.dim() == 2 else counts.squeeze(1)).expand_as(target)
                if marks_touched else None)
            # All classes of a cell have the same count, so pass the first slot of the cell. For a
            # class of another rank only the sign matters: it says whether its query counts.
            slot_target = torch.where(target >= 0,
                                      self.start[cells.clamp(min=0)].clamp(max=self.slots - 1), -1)
        slots, log_count, target_log_count = torch.ops.xsoftmax.adaptive_sample(
            "midx", self._seed(queries, generator), queries, slot_target, self._index(),
            self.options)
        all_count = counts is None or slots.dim() == 1
        touched = torch.ones_like(
            slots, dtype=torch.bool) if all_count else counts.expand_as(  # type: ignore[union-attr]
                slots)
        ids = self._classes(slots, touched if marks_touched else None)
        if target is not None:
            assert cells is not None
            target_log_count = torch.where(cells >= 0, target_log_count, -torch.inf)
        return one_set((ids, log_count, target_log_count), target, self.distinct)

    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        cells = self._cells(ids, None)
        slots = self.start[cells.clamp(min=0)].clamp(max=self.slots - 1)
        return torch.where(
            cells >= 0,
            torch.ops.xsoftmax.adaptive_log_count("midx", queries, slots, self._index(),
                                                  self.options), -torch.inf)

    @torch.no_grad()
    def prepare(self, weight: Tensor, bias: Optional[Tensor],
                generator: Optional[torch.Generator] = None) -> None:
        step, state = int(self.step), None if generator is None else generator.get_state()
        try:
            self._refresh_if_due(weight, generator, step)
        except ValueError:
            if generator is not None:
                generator.set_state(state)  # type: ignore[arg-type]
            raise
        self.step += 1

    def _refresh_if_due(self, weight: Tensor, generator: Optional[torch.Generator],
                        step: int) -> None:
        if torch.ops.xsoftmax.refresh_is_due(step, self.refresh_every):
            self._refresh(weight, generator)
        elif self.update_every > 0 and step % self.update_every == 0:
            self._encode_rows(weight,
                              self.touched.nonzero().squeeze(1), self.codewords1, self.codewords2)

    @torch.no_grad()
    def refresh(self, weight: Tensor, bias: Optional[Tensor] = None) -> Dict[str, float]:
        """Rebuilds the index from this rank's rows. All ranks must call it together."""
        stats = self._refresh(weight, same_generator(None, weight.device, self._shards.group))
        self.step.clamp_(min=1)
        return stats

    def _refresh(self, weight: Tensor, generator: Optional[torch.Generator]) -> Dict[str, float]:
        catch_up(weight)
        group = self._shards.group
        seed = draw_seed(weight, generator)
        # Use the training rows that one process would use, sent by their owners, so that K-means
        # gives the same result everywhere.
        rows = self._rows(
            torch.ops.xsoftmax.midx_training_slots(seed, self.slots, self.train_points))
        is_local = rows >= 0
        points = weight.new_zeros(len(rows), self.dim, dtype=torch.float32)
        points[is_local] = weight[rows[is_local]].float()
        dist.all_reduce(points, group=group)
        self._check_finite(points)
        first, second, *inertia = torch.ops.xsoftmax.midx_codebooks(seed, points, self.codewords1,
                                                                    self.codewords2,
                                                                    self.iterations,
                                                                    int(self.step) > 0)
        error = self._encode_rows(weight.detach(), slice(None), first, second)
        distortion = torch.stack([error.double().sum(), (self.cell >= 0).sum().double()])
        dist.all_reduce(distortion, group=group)
        return {
            "distortion": float(distortion[0] / distortion[1]),
            "mean_square": float(points.square().sum(1).double().mean()),
            "inertia1": float(inertia[0]), "inertia2": float(inertia[1]), "cells": float(
                (self.mass > 0).sum())
        }

    def _encode_rows(self, weight: Tensor, rows: Union[Tensor, slice], first: Tensor,
                     second: Tensor) -> Tensor:
        """Assigns rows to the given codewords, which become the codewords of the index. Returns
        squared distances to them; 0 for classes that are never drawn."""
        cell, error = torch.ops.xsoftmax.midx_encode(weight[rows], first, second)
        self._check_finite(error)
        old_cell = self.cell[rows]
        error = torch.where(old_cell < 0, 0.0, error)
        self.cell[rows] = torch.where(old_cell < 0, old_cell, cell)
        self.codewords1.copy_(first)
        self.codewords2.copy_(second)
        self.touched.zero_()
        self._lay_out()
        return error

    def _check_finite(self, values: Tensor) -> None:
        """Raises a ValueError on all ranks if a value is not finite on any rank."""
        is_invalid = (~values.isfinite().all()).to(torch.int64)
        dist.all_reduce(is_invalid, dist.ReduceOp.MAX, group=self._shards.group)
        if is_invalid:
            raise ValueError("prepare: expected weight with finite values, got an infinity or NaN "
                             "on one of the ranks")

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, dim={self.dim}, " + self._text.replace(",", ", ")


def _as_dtensors(sampler: ShardedMidxSampler, state: Dict[str, Any], prefix: str,
                 local_metadata: Dict[str, Any]) -> None:
    for name in ("cell", "touched"):
        key = prefix + name
        if name == "cell" or sampler.update_every > 0:
            state[key] = rows_of_all(state[key], sampler._shards)
