"""The measurements of advise: the candidate losses, and the cost and error of a step of each."""

import copy
import dataclasses
import itertools
import math
import statistics
import time
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .._core.options import read_options
from .diagnose import GradientError
from ..losses.linear_cross_entropy import LinearCrossEntropyLoss
from ..losses.linear_loss import LinearLoss
from ..losses.sampled_softmax_loss import SampledSoftmaxLoss
from ..samplers import InBatchSampler, Sampler, UnionSampler, make_sampler
from .advice import Advice, Choice

_ROUNDS = 48  # steps per candidate; they estimate the noise to within 10 %
_FIRST_QUERIES = 16  # queries of the first exact step, which estimates the cost of a full one
_FEW_SIZES = (20, 100)  # samples per query, for samplers that follow the table
# shared samples, and head classes, that are combined with few samples per query
_UNION_SIZE, _UNION_HEAD = 512, 512


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings of a sampled loss that is not built yet. They determine both the loss and its
    line of code."""

    # samplers and their numbers of samples; more than one form a union
    parts: Tuple[Tuple[str, Optional[int]], ...]
    head: int = 0
    estimator: Optional[str] = None  # None: as suits the sampler

    def name(self) -> str:
        parts = [kind if size is None else f"{kind} {size}" for kind, size in self.parts]
        return " + ".join([f"head {self.head}", *parts] if self.head else parts) + (
            "" if self.estimator is None else f", {self.estimator}")

    def _argument(self, owner: LinearLoss) -> str:
        def sampler_code(kind: str, size: Optional[int]) -> str:
            if kind == "unigram":
                return f"xs.samplers.UnigramSampler(counts, {size})"
            table = f", dim={owner.in_features}" + (
                ", bias=True" if owner.linear.bias is not None else "") if is_adaptive(kind) else ""
            text = f"xs.samplers.make_sampler({kind!r}, {owner.num_classes}, {size}{table})"
            return text.replace("'", '"')

        if len(self.parts) > 1:
            samplers = ", ".join(itertools.starmap(sampler_code, self.parts))
            return f"sampler=xs.samplers.UnionSampler({samplers})"
        kind, size = self.parts[0]
        if kind == "unigram":
            return f"sampler={sampler_code(kind, size)}"
        return f'sampler="{kind}"' + ("" if size is None else f", num_samples={size}")

    def code(self, owner: LinearLoss, is_descending: bool) -> str:
        text = self._argument(owner)
        if self.head:
            text += (f", head_classes={self.head}"
                     if is_descending else f", head_classes=counts.topk({self.head}).indices")
        if self.estimator is not None:
            text += f', estimator="{self.estimator}"'
        if owner.sparse_grad is not None:
            text += f", sparse_grad={owner.sparse_grad}"
        return (f"loss = xs.SampledSoftmaxLoss.from_linear(loss.linear, {text}"
                f"{shared_options(owner)})")

    def make(self, owner: LinearLoss, linear: nn.Linear, counts: Optional[Tensor],
             is_descending: bool) -> SampledSoftmaxLoss:
        def make_part(kind: str, size: Optional[int]) -> Sampler:
            options = {"counts": counts} if kind == "unigram" else {}
            return make_sampler(kind, owner.num_classes, size, dim=owner.in_features,
                                bias=linear.bias is not None, **options)

        parts = list(itertools.starmap(make_part, self.parts))
        sampler = parts[0] if len(parts) == 1 else UnionSampler(*parts)
        if isinstance(sampler, InBatchSampler) and counts is not None:  # counts as after an epoch
            sampler.counts.copy_((counts.double() / counts.double().sum() * 2**40).long())
            sampler.total.copy_(sampler.counts.sum())
        head = self.head if is_descending or counts is None or not self.head else counts.topk(
            self.head).indices
        return SampledSoftmaxLoss.from_linear(linear, sampler=sampler, head_classes=head,
                                              estimator=self.estimator, reduction="sum",
                                              weight=owner.weight, ignore_index=owner.ignore_index,
                                              label_smoothing=owner.label_smoothing,
                                              positives=owner.positives,
                                              logit_scale=owner.logit_scale, softcap=owner.softcap,
                                              z_loss=owner.z_loss, sparse_grad=owner.sparse_grad)


def is_adaptive(kind: str) -> bool:
    return kind not in ("uniform", "log_uniform", "unigram", "in_batch")


def shared_options(owner: LinearLoss) -> str:
    """Returns the arguments, other than defaults, that all losses over the same table share."""
    text = ", weight=weight" if owner.weight is not None else ""
    for name, default in (("reduction", "mean"), ("ignore_index", -100), ("label_smoothing", 0.0),
                          ("positives", "mean"), ("logit_scale", 1.0), ("softcap", None), ("z_loss",
                                                                                           0.0)):
        value = getattr(owner, name)
        text += "" if value == default else f', {name}="{value}"' if isinstance(
            value, str) else f", {name}={value}"
    return text


def plans_of(loss: LinearLoss, counts: Optional[Tensor], sizes: Sequence[int],
             samplers: Optional[Sequence[str]]) -> List[Plan]:
    """Returns the plans in the order in which they are tried if time is short."""
    classes = loss.num_classes
    kinds = list(samplers) if samplers is not None else ["uniform", "midx"] if counts is None else [
        "unigram", "uniform", "in_batch", "midx"
    ]
    sizes = [size for size in sizes if 2 * size <= classes] or [max(1, classes // 4)]
    few_sizes = [size for size in _FEW_SIZES if 2 * size <= classes] or [max(1, classes // 4)]
    wide, head = min(_UNION_SIZE, max(1, classes // 4)), min(_UNION_HEAD, max(1, classes // 4))
    plans = []
    for kind in kinds:
        if kind == "in_batch":
            plans.append(Plan((("in_batch", None),)))
        elif is_adaptive(kind):
            plans += [Plan(((kind, size),)) for size in few_sizes]
            plans.append(Plan(((kind, few_sizes[0]),), estimator="sampled_softmax"))
            if counts is not None:
                plans.append(Plan(((kind, few_sizes[0]),), head=head))
        else:
            plans += [Plan(((kind, size),)) for size in sizes]
            if counts is not None and kind == "unigram":
                plans += [
                    Plan(((kind, size),), head=min(size, classes // 4))
                    for size in sizes if size < classes // 4
                ]
    static_kind = next((kind for kind in kinds if not is_adaptive(kind) and kind != "in_batch"),
                       None)
    plans += [
        Plan(((static_kind, wide), (kind, few_sizes[0])), head=0 if counts is None else head)
        for kind in kinds if static_kind is not None and is_adaptive(kind)
    ]
    if loss.label_smoothing != 0.0:
        plans = [plan for plan in plans if plan.estimator is None]
    return plans


class Run:
    """A loss whose steps are measured."""
    def __init__(self, name: str, code: str, loss: LinearLoss, refresh_seconds: float,
                 references: List[Tensor]):
        self.name, self.code, self.loss, self.refresh_seconds = name, code, loss, refresh_seconds
        self.errors = [GradientError(reference) for reference in references]
        self.seconds: List[float] = []
        self.gradient = ""
        interval = max((refresh_every(part) for part in loss.sampler.modules()), default=0)
        self.refresh_ms = 1e3 * refresh_seconds / interval if interval else 0.0

    def steps(self) -> int:
        return self.errors[0].count

    def distance(self) -> Tuple[float, float]:
        """Returns bias and noise: root mean squares over the gradients of input and of the
        table."""
        return (math.sqrt(statistics.fmean(error.bias()**2 for error in self.errors)),
                math.sqrt(statistics.fmean(error.noise()**2 for error in self.errors)))

    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[1:] if len(self.seconds) >
                                       2 else self.seconds) + self.refresh_ms


class Bench:
    """Measures steps of all choices in turn until the time is up. The losses use reduction="sum",
    so that gradients of a part of the batch are comparable."""
    def __init__(self, owner: LinearLoss, input: Tensor, target: Tensor, places: Tensor,
                 counts: Optional[Tensor], start: float, seconds: float,
                 generator: torch.Generator):
        self.owner, self.generator, self.counts = owner, generator, counts
        self.seconds, self.deadline = seconds, start + 0.95 * seconds
        self.notes: List[str] = []
        self.runs: List[Run] = []
        self.is_descending = counts is not None and bool((counts[1:] <= counts[:-1]).all())
        owner.catch_up()
        self.linear = nn.Linear(owner.in_features, owner.num_classes, bias=owner.linear.bias
                                is not None, device="meta")
        self.linear.weight = nn.Parameter(owner.linear.weight.detach())
        self.linear.bias = None if owner.linear.bias is None else nn.Parameter(
            owner.linear.bias.detach())
        table = self.linear.weight
        self.signs = torch.randint(0, 2, [owner.in_features], generator=generator,
                                   device=table.device) * 2.0 - 1.0
        self.trains_exact = table.numel() * table.element_size() < memory_left(table.device)
        if not self.trains_exact:
            self.notes.append("exact: not trained, since a dense gradient of its table does not "
                              "fit into memory; errors are those of input's gradient alone")
        self.batch = input.reshape(-1, owner.in_features), target.reshape(
            -1, *target.shape[input.dim() - 1:])
        self._measure_exact(places)
        if isinstance(owner, SampledSoftmaxLoss) and (owner.sampler.num_samples != 0
                                                      or owner.head.numel() > 0):
            self._add_current(owner)

    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def _measure_exact(self, places: Tensor) -> None:
        """Measures the time of an exact step, and computes the exact gradients of as many queries
        as fit into a seventh of the time."""
        owner = self.owner
        exact = LinearCrossEntropyLoss.from_linear(
            self.linear, reduction="sum", weight=owner.weight, ignore_index=owner.ignore_index,
            label_smoothing=owner.label_smoothing, positives=owner.positives,
            logit_scale=owner.logit_scale, softcap=owner.softcap, z_loss=owner.z_loss)
        shuffled_places = places[torch.randperm(
            len(places), generator=torch.Generator().manual_seed(0)).to(places.device)]

        def select_part(size: int) -> Tuple[Tensor, Tensor]:
            if size == len(self.batch[0]):
                return self.batch
            rows = shuffled_places[:size].sort().values
            return self.batch[0][rows], self.batch[1][rows]

        self.part = select_part(min(_FIRST_QUERIES, len(shuffled_places)))
        self.references, step_seconds, _ = self._step(exact, *self.part, self.trains_exact)
        self.exact_steps, rate = 0, step_seconds / len(self.part[0])
        # a step on 4 times as many queries, then a step on as many queries as fit
        for share in (0.25, 0.15):
            size = min(
                len(shuffled_places), 4 * _FIRST_QUERIES if share == 0.25 else len(self.part[0]) +
                int(max(0.15 * self.seconds - step_seconds, 0.0) / rate))
            if size <= len(
                    self.part[0]
            ) or step_seconds + rate * (size - len(self.part[0])) > share * self.seconds:
                continue
            old_seconds, old_size, self.part = step_seconds, len(self.part[0]), select_part(size)
            self.references, step_seconds, _ = self._step(exact, *self.part, self.trains_exact)
            # At least a quarter of the time is attributed to the added queries, because the first
            # step also pays for memory allocation.
            rate = max(step_seconds - old_seconds, 0.25 * step_seconds) / (size - old_size)
        if not self.references[0].double().norm() > 0:
            raise ValueError("advise: expected a batch with an exact gradient other than 0, got "
                             "one that has none")
        num_left = len(self.batch[0]) - len(self.part[0])
        if num_left and len(self.part[0]) <= _FIRST_QUERIES:  # too few measurements to extrapolate
            self.notes.append("exact: a step takes longer than that: only one on "
                              f"{len(self.part[0])} queries was measured, for want of time")
            rate = 0.0
        self.exact_ms = 1e3 * (step_seconds + rate * num_left)
        if step_seconds + rate * num_left < 0.05 * self.seconds:
            times = [
                self._step(exact, *self.batch, self.trains_exact)[1]
                for _ in range(min(5, max(2, int(0.05 * self.seconds / step_seconds))))
            ]
            self.exact_steps, self.exact_ms = len(times), 1e3 * statistics.median(times)

    def _step(self, loss: LinearLoss, input: Tensor, target: Tensor,
              table: bool = True) -> Tuple[List[Tensor], float, str]:
        """Returns the gradient of input and, with table=True, a projection of that of the table;
        the seconds of the step; and the layout of the table's gradient."""
        leaf = input.clone().requires_grad_()
        tables = [part for part in (self.linear.weight, self.linear.bias) if part is not None]
        for part in tables:
            part.requires_grad_(table)
        synchronize(leaf)
        start = time.perf_counter()
        value = loss.estimate(leaf, target, self.generator) if isinstance(
            loss, SampledSoftmaxLoss) else loss(leaf, target)
        gradients = torch.autograd.grad(value, [leaf, *tables] if table else [leaf])
        synchronize(leaf)
        seconds = time.perf_counter() - start
        form = "" if not table else "row-sparse" if gradients[1].is_sparse else "dense"
        return [gradients[0], *([self._projection(gradients[1])] if table else [])], seconds, form

    def _projection(self, gradient: Tensor) -> Tensor:
        """Projects each row of a gradient onto random signs. The norm of the result [N] is about
        that of the gradient."""
        if not gradient.is_sparse:
            return gradient.float() @ self.signs
        rows, values = gradient._indices()[0], gradient._values().float() @ self.signs
        return values.new_zeros(self.owner.num_classes).index_add_(0, rows, values)

    def _add_current(self, owner: SampledSoftmaxLoss) -> None:
        current = copy.copy(owner)
        current._modules = {
            **owner._modules, "linear": self.linear, "sampler": copy.deepcopy(owner.sampler)
        }
        current.reduction = "sum"
        is_new = any(
            getattr(part, "follows_table", False) and getattr(part, "step", None) == 0
            for part in current.sampler.modules())
        if not is_new or self._has_time_for("as it is"):
            self._add_run("as it is", "# the loss as it is", current, refresh=is_new)

    def add(self, plan: Plan) -> None:
        name = plan.name()
        if self.seconds_left() < 0.35 * self.seconds:
            self.notes.append(f"{name}: not measured, for want of time")
            return
        # classes that "unigram" can sample: the head takes the most frequent ones
        num_counted = 0 if self.counts is None else max(0, int((self.counts > 0).sum()) - plan.head)
        if any(kind == "unigram" and size is not None and size > num_counted
               for kind, size in plan.parts):
            self.notes.append(f"{name}: left out, since only {num_counted} "
                              f"classes{' outside the head' if plan.head else ''} have a count "
                              "above 0")
            return
        if any(is_adaptive(kind) for kind, _ in plan.parts) and not self._has_time_for(name):
            return
        self._add_run(name, plan.code(self.owner, self.is_descending),
                      plan.make(self.owner, self.linear, self.counts, self.is_descending),
                      refresh=True)

    def _has_time_for(self, name: str) -> bool:
        """Returns whether there is time to build an index."""
        seconds = self._refresh_seconds()
        if seconds <= 0.25 * self.seconds_left():
            return True
        self.notes.append(f"{name}: not measured, since its index alone would take about "
                          f"{seconds:.1f} s")
        return False

    def _refresh_seconds(self) -> float:
        """Estimates the refresh time of a sampler that follows the table: the fastest refresh so
        far, or the time of a MIDX refresh, which compares all rows with 64 codewords repeatedly."""
        refresh_seconds = [run.refresh_seconds for run in self.runs if run.refresh_seconds > 0]
        if refresh_seconds:
            return min(refresh_seconds)
        rows = self.linear.weight.detach()[:256 * 64].float()
        start = time.perf_counter()
        (rows @ rows[:64].t()).argmax(1)
        synchronize(rows)
        return (time.perf_counter() - start) * 2 * (10 + self.owner.num_classes / len(rows))

    def _add_run(self, name: str, code: str, loss: SampledSoftmaxLoss, refresh: bool) -> None:
        start = time.perf_counter()
        if refresh:
            bias = self.linear.bias
            loss.sampler.refresh(self.linear.weight.detach(),
                                 None if bias is None else bias.detach())
        seconds = time.perf_counter() - start if loss.sampler.follows_table else 0.0
        loss.eval()  # so that an in-batch sampler does not count targets
        self.runs.append(Run(name, code, loss, seconds, self.references))

    def run(self) -> None:
        for _ in range(_ROUNDS):
            for run in self.runs:
                if self.seconds_left() < 0 or run.seconds and self.seconds_left() < 2 * min(
                        run.seconds):
                    continue
                gradients, seconds, run.gradient = self._step(run.loss, *self.batch,
                                                              self.trains_exact)
                run.seconds.append(seconds)
                if self.part is not self.batch:
                    gradients, _, _ = self._step(run.loss, *self.part, self.trains_exact)
                for error, gradient in zip(run.errors, gradients):
                    error.add(gradient)
        for run in self.runs:
            if run.steps() < 2:
                self.notes.append(f"{run.name}: not measured, for want of time")

    def advice(self, model_ms: float, budget_ms: Optional[float]) -> Advice:
        budget = self.exact_ms + model_ms if budget_ms is None else budget_ms
        results = []
        if self.trains_exact:
            options = shared_options(self.owner)
            code = f"loss = xs.LinearCrossEntropyLoss.from_linear(loss.linear{options})"
            results.append(("exact", code, self.exact_ms, 0.0, 0.0, self.exact_steps, "dense"))
        results += [(run.name, run.code, run.ms(), *run.distance(), run.steps(), run.gradient)
                    for run in self.runs if run.steps() >= 2]
        if not any(run.steps() >= 2 for run in self.runs) and (self.runs or not results):
            raise RuntimeError(f"advise: expected more than {self.seconds:g} seconds, in which no "
                               "sampled loss took two steps")
        rows = [
            Choice(name, code, ms, bias, noise,
                   math.sqrt(bias**2 + (1 + noise**2) * (ms + model_ms) / budget), draws, gradient)
            for name, code, ms, bias, noise, draws, gradient in results
        ]
        if self.counts is None:
            self.notes.append("with counts= of the classes, frequent ones could be drawn more "
                              "often, or always")
        return Advice(sorted(rows, key=lambda row: row.error), budget, len(self.part[0]),
                      torch.get_num_threads(), self.notes)


def refresh_every(sampler: nn.Module) -> int:
    options = getattr(sampler, "options", "")
    return int(read_options(options).get("refresh_every", 0))


def memory_left(device: torch.device) -> float:
    """Returns half of the free memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2
    try:
        with open("/proc/meminfo") as lines:
            fields: Dict[str, str] = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024 / 2
    except (OSError, KeyError):
        return math.inf


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
