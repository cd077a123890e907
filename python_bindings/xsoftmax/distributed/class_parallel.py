"""Class tables sharded over ranks."""

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.types import Device
from torch.distributed.device_mesh import DeviceMesh

from .._core.memory import device_of_values, table_empty
from .._core.options import option_text
from .._core.placement import attach, table_of
from .._core.ranks import Ragged, broadcast, check_equal, group_of
from ..tables.table_module import TableModule, flat_queries, refuse_data_parallel
from ..estimators import is_registered
from ..losses.linear_cross_entropy import LinearCrossEntropyLoss
from ..losses.linear_loss import LinearLoss
from ..losses.sampled_softmax_loss import SampledSoftmaxLoss
from ..samplers import columns_of
from .candidates import (can_draw_for_part, candidate_numbers, draw_for_part, remove_a_draw,
                         restrict_to_rank)
from .exchange import (ClassShards, FetchRows, GatherQueries, ScaleGradient, ScatterShares,
                       ScoresOfAll, SumGradient, SumOverRanks, rank_generator, row_requests,
                       start_same_generator, find_unique)
from .midx import check_sampler, fetch_from_owners, split_sampler
from .models import facts_of, leave_out
from .state import ShardedTable, rows_of_all, rows_of_rank
from .replicate import replicate_tables

EXCHANGES = ("auto", "queries", "rows")
# replaces ignored targets where targets are positions among the classes of a step
NO_CLASS = -100


class ShardedLoss(LinearLoss):
    """A loss after :func:`shard_classes`. All ranks call its methods together."""
    def _shard(self, shards: ClassShards, exchange: str) -> None:
        linear, self._shards, self._exchange = self.linear, shards, exchange
        has_values, sharded_table = not linear.weight.is_meta, ShardedTable(shards)
        attach(sharded_table, self)
        for name, table in list(linear.named_parameters()):
            rows = shards.local(table.detach())
            rows = rows.clone() if has_values else table_empty(*rows.shape, dtype=rows.dtype,
                                                               device=shards.mesh.device_type)
            local = nn.Parameter(rows, requires_grad=table.requires_grad)
            attach(sharded_table, local)
            setattr(linear, name, local)
        linear.out_features = shards.end - shards.begin
        if not has_values:
            with rank_generator(shards), torch.no_grad():
                linear.reset_parameters()
            self.to(linear.weight.device)
        self._register_state_dict_hook(_as_dtensors)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, table in self.linear.named_parameters():
            key = f"{prefix}linear.{name}"
            if key in state_dict:
                state_dict[key] = rows_of_rank(self._name, key, state_dict[key], self._shards)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # ---- batches

    def _batch(self, input: Tensor, target: Optional[Tensor]) -> Tuple[Tensor, Ragged]:
        queries = flat_queries(self._name, self.in_features, input, target)
        refuse_data_parallel(self._name, self._tables())
        return queries, Ragged(len(queries), queries.device, self._shards.group)

    def _counts(self, target: Tensor) -> Tensor:
        """Returns the weight of each query in a mean; 0 if its target is ignored."""
        counts = target != self.ignore_index
        is_invalid = counts & ((target < 0) | (target >= self.num_classes))
        if is_invalid.any():
            raise IndexError(
                f"{self._name}: expected target in [0, {self.num_classes}) or "
                f"ignore_index {self.ignore_index}, got {target[is_invalid][0].item()}")
        return counts.to(torch.float32) if self.weight is None else torch.where(
            counts, self.weight[torch.where(counts, target, 0)], 0.0)

    def _scale_gradient(self, queries: Tensor) -> Tensor:
        # The loss is that of the whole batch. Data parallelism averages the encoder's gradients
        # over ranks instead of summing them, which this factor corrects.
        return queries if self.reduction == "none" else ScaleGradient.apply(
            queries, float(self._shards.size))

    # ---- exact loss

    def _log_normalizers(self, queries: Tensor) -> Tensor:
        """Returns the log of the sum of e^score over this rank's classes, [Q]."""
        weight, bias = self.linear.weight, self.linear.bias
        if len(weight) == 0:
            return queries.new_full([len(queries)], -torch.inf, dtype=self._accumulation(queries))
        first = queries.new_zeros(len(queries), dtype=torch.int64)
        difference = torch.ops.xsoftmax.linear_cross_entropy(
            queries, weight, bias, first, None, f"reduction=none,ignore_index={NO_CLASS}")
        return difference + self._scores(queries, first)

    def _accumulation(self, queries: Tensor) -> torch.dtype:
        return torch.float64 if queries.dtype == torch.float64 else torch.float32

    def _scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Returns the score of each query q for this rank's row rows[q]."""
        dtype = self._accumulation(queries)
        scores = (queries.to(dtype) * self.linear.weight.index_select(0, rows).to(dtype)).sum(1)
        return scores if self.linear.bias is None else scores + self.linear.bias.index_select(
            0, rows).to(dtype)

    def exact(self, input: Tensor, target: Tensor, target_prob: Optional[Tensor] = None) -> Tensor:
        self._refuse_argument(target_prob is None, "target_prob")
        self.catch_up()
        queries, batch = self._batch(input, target)
        targets = batch.gather(target.reshape(-1))
        # Ignored queries may be NaN, and 0 * NaN would reach the gradient of the table.
        all_queries = torch.where((targets != self.ignore_index).unsqueeze(1),
                                  GatherQueries.apply(self._scale_gradient(queries), batch), 0.0)
        counts = self._counts(targets)
        shares = [self._log_normalizers(all_queries), self._target_scores(all_queries, targets)]
        if self.label_smoothing != 0.0:
            shares.append(self._sum_scores(all_queries) / self.num_classes)
        normalizers, *scores = ScatterShares.apply(torch.stack(shares, 1), batch).unbind(2)
        normalizer, score = normalizers.logsumexp(0), scores[0].sum(0)
        if self.label_smoothing != 0.0:
            score = (1 - self.label_smoothing) * score + self.label_smoothing * scores[1].sum(0)
        return self._reduce_over_ranks(self._weigh_losses(normalizer - score, target), target,
                                       counts)

    def _target_scores(self, queries: Tensor, targets: Tensor) -> Tensor:
        """Returns the scores of the targets held by this rank; 0 for other targets."""
        shards = self._shards
        if shards.end == shards.begin:
            return queries.new_zeros(len(queries), dtype=self._accumulation(queries))
        is_local = shards.contains(targets) & (targets != self.ignore_index)
        return torch.where(is_local,
                           self._scores(queries, torch.where(is_local, targets - shards.begin, 0)),
                           0.0)

    def _sum_scores(self, queries: Tensor) -> Tensor:
        dtype = self._accumulation(queries)
        sums = queries.to(dtype) @ self.linear.weight.sum(0, dtype=dtype)
        return sums if self.linear.bias is None else sums + self.linear.bias.sum(dtype=dtype)

    def _weigh_losses(self, loss: Tensor, target: Tensor) -> Tensor:
        """Returns the losses of this rank's queries, [*] or their sum."""
        options = option_text(reduction="none" if self.reduction == "none" else "sum",
                              ignore_index=self.ignore_index)
        return torch.ops.xsoftmax.reduced_loss(loss, target, self.weight, options)

    def _reduce_over_ranks(self, loss: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        """Computes the loss over all ranks from that of this rank's queries. Its gradient is that
        of this rank's part."""
        if self.reduction == "none":
            return loss.reshape(target.shape)
        return SumOverRanks.apply(
            loss, self._shards.group) / (counts.sum() if self.reduction == "mean" else 1)

    def _refuse_argument(self, is_absent: bool, argument: str) -> None:
        if not is_absent:
            raise ValueError(f"{self._name}: expected no {argument} with a table that is split "
                             "over ranks, got some: replicate it")

    def entropy(self, input: Tensor) -> Tensor:
        raise ValueError(f"{self._name}: expected entropy of a whole table, got one that is split "
                         "over ranks: replicate it")

    @torch.no_grad()
    def log_prob(self, input: Tensor, ids: Optional[Tensor] = None) -> Tensor:
        self._refuse_argument(ids is None, "ids")
        self.catch_up()
        shards = self._shards
        queries, batch = self._batch(input, None)
        # [all ranks' queries, classes of this rank]
        logits = torch.ops.xsoftmax.linear_scores(batch.gather(queries), self.linear.weight,
                                                  self.linear.bias)
        padding = shards.chunk - logits.shape[1]
        all_logits = batch.scatter(nn.functional.pad(logits, (0, padding))).transpose(0,
                                                                                      1).flatten(1)
        return all_logits[:, :self.num_classes].log_softmax(-1).reshape(
            *input.shape[:-1], self.num_classes)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int,
             exclude: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        self.catch_up()
        shards, k = self._shards, self._check_k(k)
        # All ranks request the same number: the maximum over ranks.
        largest_size = torch.tensor(self._add_excluded(k, input, exclude), device=input.device)
        torch.distributed.all_reduce(largest_size, torch.distributed.ReduceOp.MAX,
                                     group=shards.group)
        size = int(largest_size)
        queries, batch = self._batch(input, None)
        all_queries = batch.gather(queries)
        log_z = self._log_normalizers(all_queries)
        local_size = min(size, shards.end - shards.begin)
        values = log_z.new_full([batch.total, size], -torch.inf)
        classes = torch.zeros(batch.total, size, dtype=torch.int64, device=values.device)
        if local_size > 0:
            best, rows = torch.ops.xsoftmax.linear_topk(all_queries, self.linear.weight,
                                                        self.linear.bias, local_size)
            values[:, :local_size], classes[:, :local_size] = best + log_z.unsqueeze(
                1), rows + shards.begin
        values, classes = (batch.scatter(part).transpose(0, 1).flatten(1)
                           for part in (values, classes))
        best, places = values.topk(size)
        return self._drop_excluded(best - batch.scatter(log_z).logsumexp(0).unsqueeze(1),
                                   classes.gather(1, places), k, input, exclude)

    # ---- sampled loss

    def _compute_sampled_loss(self, input: Tensor, target: Tensor,
                              generator: Optional[torch.Generator], negatives: Optional[Tensor],
                              negative_log_count: Optional[Tensor], is_step: bool,
                              target_prob: Optional[Tensor] = None) -> Tensor:
        self._refuse_argument(negatives is None and negative_log_count is None, "negatives")
        self._refuse_argument(target_prob is None, "target_prob")
        queries, batch = self._batch(input, target)
        target_ids = target.reshape(-1)
        sampler_queries = torch.where((target_ids != self.ignore_index).unsqueeze(1),
                                      queries.detach(), 0.0)
        exchanges_queries = self._exchange == "queries" or (self._exchange == "auto"
                                                            and self._prefers_queries(batch))
        fetch_from_owners(self.sampler, not exchanges_queries)
        # Start the exchanges that must finish before sampling together, so that they overlap.
        finish_generator = start_same_generator(generator, queries.device, self._shards.group)
        finish_queries = batch.start_gather(
            sampler_queries) if exchanges_queries or self._needs_all_queries() else None
        targets = batch.gather(target_ids)
        counts = self._counts(targets)
        sampler_targets, generator = torch.where(targets == self.ignore_index, -1,
                                                 targets), finish_generator()
        if is_step:
            self.sampler.prepare(self.linear.weight, self.linear.bias, generator)
        if exchanges_queries:
            loss = self._loss_by_queries(
                self._scale_gradient(queries),
                target,
                batch,
                finish_queries,  # type: ignore[arg-type]
                sampler_targets,
                generator)
        else:
            loss = self._loss_by_rows(
                self._scale_gradient(queries), target, batch,
                sampler_queries if finish_queries is None else finish_queries(), sampler_targets,
                generator)
        return self._reduce_over_ranks(loss, target, counts)

    def _needs_all_queries(self) -> bool:
        return self.sampler.follows_table and not can_draw_for_part(self.sampler)

    def _prefers_queries(self, batch: Ragged) -> bool:
        """Returns whether to exchange queries: if there are fewer queries in total than rows that
        one rank needs for its part of them, or if sampling needs all queries anyway."""
        shared, private = candidate_numbers(self.sampler, batch.total)
        has_fewer_queries = batch.total < shared + self.head.numel() + (
            private + 1) * batch.total / batch.size
        return torch.ops.xsoftmax.estimator_is_joined(
            self.estimator) and (has_fewer_queries or self._needs_all_queries())

    def _shared_log_z(self, device: Device) -> Optional[Tensor]:
        if self.log_z is not None:
            return SumGradient.apply(self.log_z, self._shards.group)
        return None if self.fixed_log_z == 0.0 else torch.full([], self.fixed_log_z, device=device)

    def _loss_by_queries(self, queries: Tensor, target: Tensor, batch: Ragged,
                         finish_queries: Callable[[], Tensor], sampler_targets: Tensor,
                         generator: torch.Generator) -> Tensor:
        """Computes the loss with every rank scoring its classes for all queries.
        `finish_queries` waits for these queries."""
        shards, linear = self._shards, self.linear
        # If sampling does not depend on the queries, it overlaps with their exchange.
        follows_table = self.sampler.follows_table
        all_queries = finish_queries() if follows_table else self._make_placeholder(batch)
        sets = self.propose(all_queries, sampler_targets, generator)
        if torch.ops.xsoftmax.estimator_replaces_a_sample(self.estimator):
            sets = remove_a_draw(sets, sampler_targets, shards.group)
        sets = sorted((restrict_to_rank(part, shards) for part in sets), key=lambda part:
                      (part.ids.dim() == 1, not part.distinct))
        local_targets = torch.where(shards.contains(sampler_targets),
                                    sampler_targets - shards.begin, -1)
        all_queries = all_queries if follows_table else finish_queries()
        private = torch.cat([
            local_targets.clamp(min=0).unsqueeze(1), *(part.ids
                                                       for part in sets if part.ids.dim() == 2)
        ], 1)
        shared = [part.ids for part in sets if part.ids.dim() == 1]
        scores = ScoresOfAll.apply(queries, linear.weight, linear.bias, all_queries, sampler_targets
                                   >= 0, private,
                                   torch.cat(shared) if shared else None, batch, self.sparse_grad)
        log_z = self._shared_log_z(queries.device)
        options = option_text(estimator=self.estimator,
                              remove_accidental_hits=self.remove_accidental_hits,
                              label_smoothing=self.label_smoothing)
        columns = columns_of(sets)
        shares = torch.ops.xsoftmax.candidate_shares(scores if log_z is None else scores - log_z,
                                                     local_targets, *columns, options)
        loss = torch.ops.xsoftmax.loss_of_shares(ScatterShares.apply(shares, batch), columns[-1],
                                                 options)
        return self._weigh_losses(loss, target)

    def _make_placeholder(self, batch: Ragged) -> Tensor:
        """Returns a placeholder for the queries of all ranks, if only their number matters."""
        return self.linear.weight.new_zeros(1, 1).expand(batch.total, self.in_features)

    def _loss_by_rows(self, queries: Tensor, target: Tensor, batch: Ragged, sampler_queries: Tensor,
                      sampler_targets: Tensor, generator: torch.Generator) -> Tensor:
        """Computes the loss with every rank fetching the rows that its queries need.
        `sampler_queries` are those of this rank or of all ranks."""
        local_targets = batch.local(sampler_targets)
        if can_draw_for_part(self.sampler):
            with draw_for_part(self.sampler, batch.begin):
                ids, log_count, target_log_count, distinct = columns_of(
                    self.propose(sampler_queries, local_targets, generator))
        else:  # sample for the whole batch
            all_queries = sampler_queries if self.sampler.follows_table else self._make_placeholder(
                batch)
            ids, log_count, target_log_count, distinct = columns_of(
                self.propose(all_queries, sampler_targets, generator))
            ids, log_count = ([batch.local(part) if part.dim() == 2 else part for part in parts]
                              for parts in (ids, log_count))
            target_log_count = [
                None if part is None else batch.local(part) for part in target_log_count
            ]
        classes, places = find_unique([local_targets[local_targets >= 0], *ids])
        target_places = torch.full_like(local_targets, NO_CLASS)
        target_places[local_targets >= 0] = places[0]
        requests = row_requests(self._name, "candidates", classes, self._shards)
        weight = FetchRows.apply(self.linear.weight, requests, self.sparse_grad)
        bias = None if self.linear.bias is None else FetchRows.apply(self.linear.bias, requests,
                                                                     self.sparse_grad)
        options = {name: getattr(self, name) for name in self._option_names}
        options |= {
            "ignore_index": NO_CLASS, "sparse_grad": False,
            "reduction": "none" if self.reduction == "none" else "sum"
        }
        return torch.ops.xsoftmax.sampled_softmax_loss(
            queries, weight, bias, target_places, places[1:], log_count, target_log_count,
            distinct, None if self.weight is None else self.weight[classes],
            self._shared_log_z(queries.device), option_text(**options))


class ShardedCrossEntropyLoss(ShardedLoss, LinearCrossEntropyLoss):
    pass


class ShardedSampledSoftmaxLoss(ShardedLoss, SampledSoftmaxLoss):
    def _shard(self, shards: ClassShards, exchange: str) -> None:
        super()._shard(shards, exchange)
        self.sampler = split_sampler(self.sampler, shards, exchange != "queries")


def _as_dtensors(module: ShardedLoss, state: Dict[str, Any], prefix: str,
                 local_metadata: Dict[str, Any]) -> None:
    for name, _ in module.linear.named_parameters():
        key = f"{prefix}linear.{name}"
        state[key] = rows_of_all(state[key], module._shards)


_SHARDED_CLASSES = {
    LinearCrossEntropyLoss: ShardedCrossEntropyLoss, SampledSoftmaxLoss: ShardedSampledSoftmaxLoss
}


def shard_classes(model: nn.Module, mesh: Optional[DeviceMesh] = None, *,
                  exchange: str = "auto") -> nn.Module:
    """Shards the class tables of losses over the ranks of a mesh, in place. Rank r holds the
    classes ``[r ceil(N / W), (r + 1) ceil(N / W))``.

    All ranks then call a loss together, each with its own batch of any size, as under data
    parallelism. The loss is that of one process with all batches concatenated: the mean or the sum
    over all of them, or with "none" each rank's part. Samples are those of one process with the
    torch generator of the first rank.

    There are two ways to exchange data. With W ranks of b queries each and e bytes per number, a
    rank receives per step

    - with "queries", ``2 (W - 1) b D e`` bytes and about ``24 (W - 1) b``: all queries are
      gathered, each rank scores its classes for them, and gradients of queries are summed over
      ranks;
    - with "rows", ``2 (W - 1) / W R D e`` bytes: each rank fetches the R distinct rows of its
      targets and candidates from their owners, and sends the gradients back.

    `exact`, `topk`, `predict`, `log_prob` and `eval()` always gather the queries. `topk`, `predict`
    and `log_prob` are not differentiable. `target_prob`, `entropy` and `log_prob` with ids are not
    supported.

    For a mean or a sum, the gradient of `input` is W times the rank's share, because data
    parallelism averages the encoder's gradients over ranks. The encoder thus receives the gradient
    of one process. The gradients of the table and of a learned log_z are complete on each rank.

    `state_dict()` holds the table as DTensors (``Shard(0)``), which torch.distributed.checkpoint
    can save and load with any number of ranks. `load_state_dict` accepts these, or the whole table
    of a single process.

    Parallelise the encoder as usual, but exclude the table: DistributedDataParallel skips it if
    `shard_classes(model)` was called first; for FSDP2 use ``fully_shard(model, ...,
    ignored_params=set(model.loss.parameters()))``.

    Args:
        model: a loss, or a module that contains some. Supported are LinearCrossEntropyLoss, and
            SampledSoftmaxLoss with a sampler that does not follow the table (static samplers,
            "in_batch", their unions and complements), with a MidxSampler without bias, or with a
            union that contains one. The table and the sampler's state are set to those of the first
            rank. For a table on the meta device, each rank allocates and initialises only its own
            rows. Tree losses are replicated; see :func:`replicate`.
        mesh: a one-dimensional DeviceMesh. None: all ranks.
        exchange: "queries", for estimators whose candidates enter as one sum ("sampled_softmax",
            "ranking", "nce", "negative_sampling", "importance"); "rows", for all estimators; or
            "auto", which chooses the supported way that sends less, and "queries" if a shared MIDX
            set is drawn from all queries.

    Returns:
        `model`. The class of each loss is replaced by a subclass. Create the optimizer after this
        call, because parameters are replaced.

    Raises:
        TypeError, ValueError: the model has no supported loss; its sampler or estimator does not
            support sharding or the exchange; an estimator is written in Python; or ranks disagree,
            in which case the message gives both values.
        RuntimeError: there is no process group, or a loss is replicated.
    """
    owner = "shard_classes"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    tables = [module for module in model.modules() if isinstance(module, TableModule)]
    if not tables:
        raise ValueError(f"{owner}: expected a model with a class table, got a "
                         f"{type(model).__name__} without one")
    if exchange not in EXCHANGES:
        raise ValueError(f"{owner}: expected exchange as one of {EXCHANGES}, got {exchange!r}")
    trees = [table for table in tables if not isinstance(table, LinearLoss)]
    losses = [table for table in tables if isinstance(table, LinearLoss)]
    for loss in losses:
        check_splits(owner, loss, exchange)
    check_equal(owner, {"exchange": exchange, **facts_of(tables)}, group)
    if mesh is None:
        mesh = dist.device_mesh.DeviceMesh.from_group(
            group,
            device_of_values(next(tables[0].parameters()).device).type)
    replicate_tables(owner, trees, group)
    for loss in losses:
        loss.catch_up()
        broadcast(
            [tensor for tensor in (*loss.parameters(), *loss.buffers()) if not tensor.is_meta],
            group)
        loss.__class__ = _SHARDED_CLASSES[type(loss)]
        loss._shard(ClassShards(loss.num_classes, mesh), exchange)
    leave_out(model)
    return model


def check_splits(owner: str, loss: TableModule, exchange: str) -> None:
    """Raises an error unless the table of a loss can be sharded."""
    if type(loss) not in _SHARDED_CLASSES:
        raise TypeError(f"{owner}: expected a SampledSoftmaxLoss or a LinearCrossEntropyLoss, "
                        f"which is not split yet, got {type(loss).__name__}: "
                        "replicate it")
    if not table_of(loss).is_local:
        raise RuntimeError(f"{owner}: expected a model that is not replicated yet, got one that is")
    if isinstance(loss, LinearLoss) and (loss.logit_scale != 1.0 or loss.softcap is not None
                                         or loss.z_loss != 0.0):
        raise ValueError(f"{owner}: expected a loss with logit_scale=1, softcap=None and z_loss=0, "
                         "which tables over ranks do not support yet, got "
                         f"{loss.logit_scale}, {loss.softcap} and {loss.z_loss}: replicate it")
    if isinstance(loss, SampledSoftmaxLoss):
        check_sampler(owner, loss.sampler)
        if is_registered(loss.estimator):
            raise ValueError(f"{owner}: expected an estimator of the library, got "
                             f"{loss.estimator!r}, which is written in Python")
        if exchange == "queries" and not torch.ops.xsoftmax.estimator_is_joined(loss.estimator):
            raise ValueError(f"{owner}: expected an estimator whose candidates enter as one sum "
                             "(sampled_softmax, ranking, nce, negative_sampling or "
                             f"importance) with exchange=\"queries\", got {loss.estimator!r}: use "
                             "exchange=\"rows\"")
    if loss.label_smoothing != 0.0 and loss.weight is not None:
        raise ValueError(f"{owner}: expected label_smoothing=0 with class weights, got "
                         f"{loss.label_smoothing}")


class ClassParallel(ParallelStyle):
    """A style for ``torch.distributed.tensor.parallel.parallelize_module`` that calls
    :func:`shard_classes`. With DistributedDataParallel, call :func:`leave_out` on the model too.

    Args:
        exchange: as in :func:`shard_classes`.
    """
    def __init__(self, exchange: str = "auto") -> None:
        super().__init__()
        self.exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: Optional[DeviceMesh]) -> nn.Module:
        return shard_classes(module, device_mesh, exchange=self.exchange)
