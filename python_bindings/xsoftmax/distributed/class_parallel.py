"""Class tables split over ranks."""

from typing import List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from .._options import option_text
from .._table import TableModule, flat_queries, refuse_data_parallel
from ..estimators import is_registered
from ..losses import LinearCrossEntropyLoss, LinearLoss, SampledSoftmaxLoss
from ..samplers import columns_of
from ._exchange import (ClassShards, FetchRows, GatherQueries, LocalRows, LogSumExpOverRanks, RowRequests, ScaleGradient, SumOverRanks,
                        same_generator, unique_of)
from ._group import Ragged, all_gather, broadcast, check_alike, facts_of, group_of, leave_out
from ._state import rows_of_all, rows_of_rank

NO_CLASS = -100  # in the place of targets that are ignored, where classes are places among those of a step


class ShardedLoss(LinearLoss):
    """What a loss becomes by :func:`shard_classes`: the same calls, by all ranks at once."""

    def _shard(self, shards: ClassShards) -> None:
        linear, self._shards = self.linear, shards
        for name, table in list(linear.named_parameters()):
            local = nn.Parameter(shards.local(table.detach()).clone(), requires_grad=table.requires_grad)
            local._class_shards = shards  # for clip_grad_norm_
            setattr(linear, name, local)
        linear.out_features = shards.end - shards.begin
        self._register_state_dict_hook(_as_dtensors)
        self._mark_tables()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name, table in self.linear.named_parameters():
            key = f"{prefix}linear.{name}"
            if key in state_dict:
                state_dict[key] = rows_of_rank(self._name, key, state_dict[key], self._shards)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # ------------------------------------------------------------------------------------------------------------------ batches

    def _batch(self, input: Tensor, target: Optional[Tensor]) -> Tuple[Tensor, Ragged]:
        queries = flat_queries(self._name, self.in_features, input, target)
        refuse_data_parallel(self._name, self._tables())
        return queries, Ragged(len(queries), queries.device, self._shards.group)

    def _counts(self, target: Tensor) -> Tensor:
        """What each query counts in a mean: 0 where its target is ignored."""
        counts = target != self.ignore_index
        bad = counts & ((target < 0) | (target >= self.num_classes))
        if bad.any():
            raise IndexError(f"{self._name}: expected target in [0, {self.num_classes}) or ignore_index {self.ignore_index}, got {target[bad][0].item()}")
        return counts.to(torch.float32) if self.weight is None else torch.where(counts, self.weight[torch.where(counts, target, 0)], 0.0)

    def _scaled(self, queries: Tensor) -> Tensor:
        # The loss is that of the whole batch. Data parallelism of the encoder takes means over ranks of what ought to be summed.
        return queries if self.reduction == "none" else ScaleGradient.apply(queries, float(self._shards.size))

    # --------------------------------------------------------------------------------------------------------------- exact loss

    def _log_normalizers(self, queries: Tensor) -> Tensor:
        """log sum over this rank's classes of e^score, [Q]."""
        weight, bias = self.linear.weight, self.linear.bias
        if len(weight) == 0:
            return queries.new_full([len(queries)], -torch.inf, dtype=self._accumulation(queries))
        first = queries.new_zeros(len(queries), dtype=torch.int64)
        above = torch.ops.xsoftmax.linear_cross_entropy(queries, weight, bias, first, None, 0, NO_CLASS, 0.0)
        return above + self._scores(queries, first)

    def _accumulation(self, queries: Tensor) -> torch.dtype:
        return torch.float64 if queries.dtype == torch.float64 else torch.float32

    def _scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        """Of query q and row rows[q] of this rank."""
        dtype = self._accumulation(queries)
        scores = (queries.to(dtype) * self.linear.weight.index_select(0, rows).to(dtype)).sum(1)
        return scores if self.linear.bias is None else scores + self.linear.bias.index_select(0, rows).to(dtype)

    def exact(self, input: Tensor, target: Tensor) -> Tensor:
        self.settle()
        shards, group = self._shards, self._shards.group
        queries, batch = self._batch(input, target)
        everyone = GatherQueries.apply(self._scaled(queries), batch)
        targets = batch.gather(target.reshape(-1))
        counts = self._counts(targets)
        normalizer = LogSumExpOverRanks.apply(self._log_normalizers(everyone), group)
        mine = (targets >= shards.begin) & (targets < shards.end) & (counts != 0)
        if shards.end > shards.begin:
            score = torch.where(mine, self._scores(everyone, torch.where(mine, targets - shards.begin, 0)), 0.0)
        else:
            score = torch.zeros_like(normalizer)
        loss = normalizer - SumOverRanks.apply(score, group)
        if self.label_smoothing != 0.0:
            mean = self._scores_summed(everyone) / self.num_classes
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * (normalizer - SumOverRanks.apply(mean, group))
        each = torch.where(counts != 0, counts * loss, 0.0)
        if self.reduction == "none":
            return LocalRows.apply(each, batch).reshape(target.shape)
        return each.sum() if self.reduction == "sum" else each.sum() / counts.sum()

    def _scores_summed(self, queries: Tensor) -> Tensor:
        dtype = self._accumulation(queries)
        sums = queries.to(dtype) @ self.linear.weight.sum(0, dtype=dtype)
        return sums if self.linear.bias is None else sums + self.linear.bias.sum(dtype=dtype)

    @torch.no_grad()
    def log_prob(self, input: Tensor) -> Tensor:
        self.settle()
        shards = self._shards
        queries, batch = self._batch(input, None)
        logits = self.linear(batch.gather(queries)).t()  # [classes, Q]
        padded = torch.cat([logits, logits.new_zeros(shards.chunk - len(logits), batch.total)])
        whole = padded.new_empty(shards.size * shards.chunk, batch.total)
        all_gather(whole, padded.contiguous(), group=shards.group)
        return batch.local(whole[:self.num_classes].t()).log_softmax(-1).reshape(*input.shape[:-1], self.num_classes)

    @torch.no_grad()
    def topk(self, input: Tensor, k: int) -> Tuple[Tensor, Tensor]:
        self.settle()
        shards, k = self._shards, self._best(k)
        queries, batch = self._batch(input, None)
        everyone = batch.gather(queries)
        log_z = self._log_normalizers(everyone)
        known = min(k, shards.end - shards.begin)
        values = log_z.new_full([batch.total, k], -torch.inf)
        classes = torch.zeros(batch.total, k, dtype=torch.int64, device=values.device)
        if known > 0:
            best, rows = torch.ops.xsoftmax.linear_topk(everyone, self.linear.weight, self.linear.bias, known)
            values[:, :known], classes[:, :known] = best + (log_z - LogSumExpOverRanks.apply(log_z, shards.group)).unsqueeze(1), rows + shards.begin
        else:
            LogSumExpOverRanks.apply(log_z, shards.group)
        everywhere = []
        for part in (values, classes):
            whole = part.new_empty(shards.size * batch.total, k)
            all_gather(whole, part, group=shards.group)
            everywhere.append(batch.local(whole.view(shards.size, batch.total, k).transpose(0, 1).flatten(1)))
        best, places = everywhere[0].topk(k)
        shape = [*input.shape[:-1], k]
        return best.reshape(shape), everywhere[1].gather(1, places).reshape(shape)

    # ------------------------------------------------------------------------------------------------------------- sampled loss

    def _sampled(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        shards, group = self._shards, self._shards.group
        queries, batch = self._batch(input, target)
        targets = batch.gather(target.reshape(-1))
        counts = self._counts(targets)
        shown = torch.where(targets == self.ignore_index, -1, targets)
        # Every rank draws for the whole batch, as one process would, and keeps what its queries see.
        dummies = queries.new_zeros(1, 1).expand(batch.total, self.in_features)
        sets = self.propose(dummies, shown, same_generator(generator, queries.device, group))
        ids, log_count, target_log_count, distinct = columns_of(sets)
        ids = [batch.local(part) if part.dim() == 2 else part for part in ids]
        log_count = [batch.local(part) if part.dim() == 2 else part for part in log_count]
        target_log_count = [None if part is None else batch.local(part) for part in target_log_count]
        mine = batch.local(shown)
        classes, places = unique_of([mine[mine >= 0], *ids])
        known = torch.full_like(mine, NO_CLASS)
        known[mine >= 0] = places[0]
        requests = RowRequests(classes, shards)
        weight = FetchRows.apply(self.linear.weight, requests, self.sparse_grad)
        bias = None if self.linear.bias is None else FetchRows.apply(self.linear.bias, requests, self.sparse_grad)
        options = {name: getattr(self, name) for name in self._option_names}
        options |= {"ignore_index": NO_CLASS, "sparse_grad": False, "reduction": "none" if self.reduction == "none" else "sum"}
        log_z = self.log_z
        if log_z is None and self.fixed_log_z != 0.0:
            log_z = torch.full([], self.fixed_log_z, device=queries.device)
        elif log_z is not None:
            log_z = SumGradient.apply(log_z, group)
        loss = torch.ops.xsoftmax.sampled_softmax_loss(
            self._scaled(queries), weight, bias, known, places[1:], log_count, target_log_count, distinct,
            None if self.weight is None else self.weight[classes], log_z, option_text(**options))
        if self.reduction == "none":
            return loss.reshape(target.shape)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        count = counts.sum() if self.reduction == "mean" else 1
        return (loss + (total - loss.detach())) / count


class SumGradient(torch.autograd.Function):
    """A parameter that all ranks have, each of which has a share of its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ShardedCrossEntropyLoss(ShardedLoss, LinearCrossEntropyLoss):
    pass


class ShardedSampledSoftmaxLoss(ShardedLoss, SampledSoftmaxLoss):
    def forward(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        return self._sampled(input, target, generator) if self.training else self.exact(input, target)

    def estimate(self, input: Tensor, target: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
        return self._sampled(input, target, generator)


def _as_dtensors(module: ShardedLoss, state: dict, prefix: str, local_metadata) -> None:
    for name, _ in module.linear.named_parameters():
        key = f"{prefix}linear.{name}"
        state[key] = rows_of_all(state[key], module._shards)


_SHARDED = {LinearCrossEntropyLoss: ShardedCrossEntropyLoss, SampledSoftmaxLoss: ShardedSampledSoftmaxLoss}


def shard_classes(model: nn.Module, mesh=None) -> nn.Module:
    """Splits the class tables of losses over the ranks of a mesh, in place: rank r keeps classes ``[r ceil(N / W), (r + 1) ceil(N / W))``.

    From then on all ranks call a loss together, each with its batch of any size, as under data parallelism, and the loss is what one process would
    return for all batches in a row: a mean or a sum over all of them, or each rank's rows of "none". Draws are those of one process whose torch
    generator is the first rank's. In a step the drawn rows and those of the targets are fetched from their owners, and their gradients go back there:
    ``2 (W - 1) / W R D e`` bytes a rank, R different classes of its step. `exact`, `topk`, `predict`, `log_prob` and `eval()` gather the queries
    instead and score them where the classes are; `topk`, `predict` and `log_prob` give no gradient.

    The gradient of a mean or a sum that reaches `input` is W times its share, since data parallelism takes the mean of the encoder's gradients over
    ranks: what comes out is the gradient of one process. That of the table and of a learned log Z is whole.

    `state_dict()` holds DTensors (``Shard(0)``) of the table, which torch.distributed.checkpoint saves and loads on any number of ranks;
    `load_state_dict` takes those, or the whole table of one process.

    The encoder is left to others, which must leave the table out: DistributedDataParallel does so for a `model` that this was called with before,
    ``fully_shard(model, ..., ignored_params=set(model.loss.parameters()))`` beside FSDP2.

    Args:
        model: a loss, or a module that holds some: a SampledSoftmaxLoss whose sampler does not follow the table (static ones, "in_batch",
            unions and complements of those; all estimators of the library), or a LinearCrossEntropyLoss. Its table, and what its sampler keeps, become those of the first rank.
        mesh: a DeviceMesh of one dimension. None: all ranks.

    Returns:
        `model`. The class of its losses is now a subclass of what it was. Make the optimizer after this call: the parameters are others.

    Raises:
        TypeError, ValueError: a module without such a loss; a sampler that follows the table; an estimator written in Python; ranks that
            disagree, with both values
    """
    owner = "shard_classes"
    group = group_of(owner, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: expected model to be a module, got {type(model).__name__}")
    tables = [module for module in model.modules() if isinstance(module, TableModule)]
    if not tables:
        raise ValueError(f"{owner}: expected a model with a class table, got a {type(model).__name__} without one")
    for loss in tables:
        check_splits(owner, loss)
    check_alike(owner, facts_of(tables), group)
    if mesh is None:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, tables[0].linear.weight.device.type)
    for loss in tables:
        loss.settle()
        broadcast([*loss.parameters(), *loss.buffers()], group)
        loss.__class__ = _SHARDED[type(loss)]
        loss._shard(ClassShards(loss.num_classes, mesh))
    leave_out(model)
    return model


def check_splits(owner: str, loss: TableModule) -> None:
    """Whether the table of a loss can be split."""
    if type(loss) not in _SHARDED:
        raise TypeError(f"{owner}: expected a SampledSoftmaxLoss or a LinearCrossEntropyLoss, which is not split yet, got {type(loss).__name__}")
    if isinstance(loss, SampledSoftmaxLoss):
        if loss.sampler.follows_table:
            raise ValueError(f"{owner}: expected a sampler that does not follow the class table, got {loss.sampler}")
        if is_registered(loss.estimator):
            raise ValueError(f"{owner}: expected an estimator of the library, got {loss.estimator!r}, which is written in Python")
    if loss.label_smoothing != 0.0 and loss.weight is not None:
        raise ValueError(f"{owner}: expected label_smoothing=0 beside class weights, got {loss.label_smoothing}")


class ClassParallel(ParallelStyle):
    """:func:`shard_classes` as a style of ``torch.distributed.tensor.parallel.parallelize_module``. Beside DistributedDataParallel call
    :func:`leave_out` with the model."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        return shard_classes(module, device_mesh)
