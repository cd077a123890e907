"""Which sampler, how many draws and which estimator suit a batch: measured."""

import copy
import dataclasses
import html
import itertools
import math
import numbers
import statistics
import time
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ._checks import as_tensor, check_count
from ._options import read_options
from ._placement import are_local
from .diagnose import GradientError
from .linear_losses import LinearCrossEntropyLoss, LinearLoss
from .sampled_softmax_loss import SampledSoftmaxLoss
from .samplers import InBatchSampler, Sampler, UnionSampler, make_sampler
from .two_tower import TwoTowerLoss

_ROUNDS = 48  # steps of each candidate: the noise is then known to 10 %
_FIRST = 16  # queries that say what an exact step costs
_FEW = (20, 100)  # draws for each query, of samplers that follow the table
_WIDE, _HEAD = 512, 512  # draws that the batch shares, and head classes, beside few draws for each query


@dataclasses.dataclass(frozen=True)
class Choice:
    """A row of an :class:`Advice`: one way to train the output layer, and what was measured of it."""

    name: str
    """Sampler, draws, head and estimator, in words."""
    code: str
    """The line that makes this loss over the same table, with the user's ``loss``, ``counts`` and class weights as ``loss``, ``counts`` and ``weight``. A
    comment for "as it is"."""
    ms: float
    """Time of a step of the loss, forward and backward pass, gradient of the table included, and its share of a refresh. Without the optimizer."""
    bias: float
    """Distance of the mean gradient from the exact one, over its norm, the root mean square of that of input (``gradient_bias`` of
    :class:`Diagnosis`) and that of the table."""
    noise: float
    """Root mean square distance of one gradient from their mean, alike (``gradient_noise``)."""
    error: float
    """What the rows are ranked by (:func:`advise`)."""
    draws: int
    """How many steps were measured, 0 where the time was extrapolated from a part of the batch."""
    gradient: str
    """Whether the table's gradient is "row-sparse" or "dense" for this batch. The optimizers of :mod:`xsoftmax.optim` take both. Empty where the table
    was not trained."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """What :func:`advise` found. ``print`` shows it as a table, a notebook as HTML."""

    rows: List[Choice]
    """Best first."""
    budget_ms: float
    """The time that ``error`` speaks of."""
    queries: int
    """Of how many queries gradients were compared."""
    threads: int
    """With which steps were measured."""
    notes: List[str]
    """What was left out, and why."""

    @property
    def best(self) -> Choice:
        """The first row."""
        return self.rows[0]

    def _table(self) -> Iterator[Tuple[str, ...]]:
        yield "", "loss", "ms a step", "bias", "noise", "error", "gradient"
        for place, row in enumerate(self.rows, 1):
            yield str(place), row.name, ("" if row.draws else "~") + f"{row.ms:.3g}", f"{row.bias:.3f}", f"{row.noise:.3f}", f"{row.error:.3f}", row.gradient

    def _heading(self) -> str:
        return f"error of the gradient after {self.budget_ms:.3g} ms of training ({self.queries} queries, {self.threads} threads)"

    def __str__(self) -> str:
        table = list(self._table())
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [f"{line[0]:>{widths[0]}}  {line[1]:<{widths[1]}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:]))
                 for line in table]
        return "\n".join([self._heading(), *lines, *self.notes, "", self.best.code])

    def _repr_html_(self) -> str:
        def cells(tag: str, line: Tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) + "</tr>"

        first, *others = self._table()
        body = "".join(cells("td", line) for line in others)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (f"<p>{html.escape(self._heading())}</p><table><thead>{cells('th', first)}</thead><tbody>{body}</tbody></table>{notes}"
                f"<pre>{html.escape(self.best.code)}</pre>")


def advise(loss: LinearLoss, input: Tensor, target: Tensor, seconds: float = 30.0, *, counts: Optional[Tensor] = None,
           samplers: Optional[Sequence[str]] = None, draws: Sequence[int] = (128, 512, 2048), model_ms: float = 0.0,
           budget_ms: Optional[float] = None, seed: int = 0) -> Advice:
    r"""Measures ways to train an output layer on a batch, and ranks them. ``print(xs.advise(loss, hidden, target, counts=counts))`` shows the table, and
    below it the line of code of the best.

    Candidates are the exact loss, the loss as it is, and sampled losses over the same table: each sampler with each number of draws and the estimators that
    suit them, with a head where ``counts`` say which classes are frequent. Each takes its steps in turn with the others. Of each it is measured how long a
    step takes, t, and how far its gradient is from that of the exact loss, as :func:`diagnose` does: bias and noise, relative to the exact gradient. They are
    root mean squares of two, of the gradient of ``input`` and of that of the table (by a random projection of each row). Rows are ranked by the error that
    is left after a time of training B, ``budget_ms``::

        error = sqrt(bias^2 + (1 + noise^2) (t + model_ms) / B)

    In the time B there are ``B / (t + model_ms)`` steps, whose noise averages out while their bias stays. The 1 stands for the noise of the batch itself:
    queries of a batch disagree so much that the exact gradient of one batch is about as far from that of all data as it is long. So the exact loss has an
    error of 1 after one step, and a loss that takes a tenth of the time and adds as much noise again has 0.45 by then.

    What to keep in mind: advice is for the table as it is. In a new one all classes have about the same probability, and samplers look alike: train for some
    hundreds of steps first. An estimator whose optimum is the softmax, but whose gradient is another on the way ("ranking"), does better than its bias says.

    Nothing of the loss changes: neither its parameters, gradients, sampler and mode nor torch's random numbers. (Steps that a row optimizer owes to rows are
    made up, as whenever the whole table is read.) Its table is not copied, but the exact loss makes a dense gradient of it. Where the exact gradient of the
    whole batch would take more than a seventh of the time, gradients are compared on a part of the batch; steps are always measured on all of it, but for the
    exact one, whose time is then extrapolated ("~").

    Args:
        loss: a :class:`SampledSoftmaxLoss`, :class:`LinearCrossEntropyLoss` or :class:`CaneLoss`, whose class weights, label smoothing and kinds of targets
            all candidates share.
        input, target: a batch of the size that training has, [*, D] and [*], or [*, T].
        seconds: how long to measure. What did not fit is named in ``notes``.
        counts: [N], how often each class is a target in the training data. Without them neither "unigram" and "in_batch" nor a head can be
            measured.
        samplers: names, out of "uniform", "log_uniform", "unigram", "in_batch", "midx", "lsh", "sphere", "rff" and those that
            :func:`xsoftmax.samplers.register` was given. None: "uniform", "midx" and, with counts, "unigram" and "in_batch".
        draws: of samplers that know nothing of the query; those that are more than half of the classes are left out. Samplers that follow the table
            draw 20 and 100 for each query.
        model_ms: how long the other parts of a step of training take, milliseconds: encoder and optimizer. The larger, the more a draw may cost.
        budget_ms: B. None: the time of one step with the exact loss, and model_ms.
        seed: of all draws. The candidates are the same for any seed.

    Raises:
        TypeError: a loss without a class table, such as a :class:`TwoTowerLoss` or one over a tree; an argument of another type
        ValueError: shapes that do not fit; no target that counts; queries that are not finite; a name that no sampler has; counts of another
            size, negative or all zero
        RuntimeError: a table that is split or replicated over ranks; fewer seconds than a step of each takes
    """
    start = time.perf_counter()
    counts = None if counts is None else as_tensor("advise", "counts", counts)
    _check(loss, seconds, counts, samplers, model_ms, budget_ms)
    if isinstance(draws, (int, str)):
        raise TypeError(f"advise: expected draws as a sequence of numbers, got {type(draws).__name__}: give [{draws}]")
    sizes = [check_count("advise", "draws", size, 1) for size in draws]
    loss._queries(input, loss._given(input, target))
    inputs, targets = input.detach(), target.detach()
    counted = targets != loss.ignore_index
    places = (counted if targets.dim() < inputs.dim() else counted.any(-1)).reshape(-1).nonzero().squeeze(1)
    if len(places) == 0:
        raise ValueError("advise: expected a target that is not ignored, got none")
    if not inputs.isfinite().all():
        raise ValueError("advise: expected input with finite values, got an infinity or NaN")
    devices = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(check_count("advise", "seed", seed, None))
        generator = torch.Generator(inputs.device).manual_seed(seed)
        bench = _Bench(loss, inputs, targets, places, counts, start, float(seconds), generator)
        for plan in _plans(loss, counts, sizes, samplers):
            bench.add(plan)
        bench.run()
    return bench.advice(float(model_ms), None if budget_ms is None else float(budget_ms))


def _check(loss: LinearLoss, seconds: float, counts: Optional[Tensor], samplers: Optional[Sequence[str]], model_ms: float,
           budget_ms: Optional[float]) -> None:
    if isinstance(loss, TwoTowerLoss):
        raise TypeError("advise: expected a loss over a class table, got TwoTowerLoss, whose "
                        "classes are vectors that a network makes: to compare in-batch candidates "
                        "with others, advise on xs.LinearCrossEntropyLoss.from_linear(linear) "
                        "with the vectors of all items as linear.weight")
    if not isinstance(loss, LinearLoss):
        raise TypeError(f"advise: expected a SampledSoftmaxLoss, LinearCrossEntropyLoss or CaneLoss, got {type(loss).__name__}")
    for name, value, least in (("seconds", seconds, 0.0), ("model_ms", model_ms, -1e-300), ("budget_ms", budget_ms, 0.0)):
        if value is None and name == "budget_ms":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"advise: expected {name} as a number, got {type(value).__name__}")
        if not math.isfinite(value) or value <= least:
            raise ValueError(f"advise: expected {name} above 0, got {value}" if least == 0.0 else f"advise: expected {name} of at least 0, got {value}")
    if not are_local(loss, *loss._tables()):
        raise RuntimeError("advise: expected a table of one process, got one that is split or "
                           "replicated over ranks: call advise before xs.distributed")
    if isinstance(samplers, str):
        raise TypeError(f"advise: expected samplers as a sequence of names, got a string: give [{samplers!r}]")
    if counts is not None:
        if counts.shape != (loss.num_classes,):
            raise ValueError(f"advise: expected counts of shape [{loss.num_classes}], got {list(counts.shape)}")
        if not (counts.isfinite().all() and (counts >= 0).all() and (counts > 0).any()):
            raise ValueError("advise: expected counts that are finite, not negative and not all zero, got others")
    elif samplers is not None and not {"unigram", "in_batch"}.isdisjoint(samplers):
        raise ValueError("advise: expected counts for the samplers \"unigram\" and \"in_batch\", "
                         "got none")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A sampled loss that is not made yet. Its line of code and the loss itself both follow from these."""

    parts: Tuple[Tuple[str, Optional[int]], ...]  # samplers and their draws: more than one is a union
    head: int = 0
    estimator: Optional[str] = None  # None: as suits the sampler

    def name(self) -> str:
        parts = [kind if size is None else f"{kind} {size}" for kind, size in self.parts]
        return " + ".join([f"head {self.head}", *parts] if self.head else parts) + ("" if self.estimator is None else f", {self.estimator}")

    def _argument(self, owner: LinearLoss) -> str:
        def alone(kind: str, size: Optional[int]) -> str:
            if kind == "unigram":
                return f"xs.samplers.UnigramSampler(counts, {size})"
            table = f", dim={owner.in_features}" + (", bias=True" if owner.linear.bias is not None else "") if _adaptive(kind) else ""
            return f"xs.samplers.make_sampler({kind!r}, {owner.num_classes}, {size}{table})".replace("'", '"')

        if len(self.parts) > 1:
            return f"sampler=xs.samplers.UnionSampler({', '.join(itertools.starmap(alone, self.parts))})"
        kind, size = self.parts[0]
        if kind == "unigram":
            return f"sampler={alone(kind, size)}"
        return f'sampler="{kind}"' + ("" if size is None else f", num_samples={size}")

    def code(self, owner: LinearLoss, falling: bool) -> str:
        text = self._argument(owner)
        if self.head:
            text += f", head_classes={self.head}" if falling else f", head_classes=counts.topk({self.head}).indices"
        if self.estimator is not None:
            text += f', estimator="{self.estimator}"'
        if owner.sparse_grad is not None:
            text += f", sparse_grad={owner.sparse_grad}"
        return f"loss = xs.SampledSoftmaxLoss.from_linear(loss.linear, {text}{_shared_options(owner)})"

    def make(self, owner: LinearLoss, linear: nn.Linear, counts: Optional[Tensor], falling: bool) -> SampledSoftmaxLoss:
        def alone(kind: str, size: Optional[int]) -> Sampler:
            options = {"counts": counts} if kind == "unigram" else {}
            return make_sampler(kind, owner.num_classes, size, dim=owner.in_features, bias=linear.bias is not None, **options)

        made = list(itertools.starmap(alone, self.parts))
        sampler = made[0] if len(made) == 1 else UnionSampler(*made)
        if isinstance(sampler, InBatchSampler) and counts is not None:  # as after an epoch
            sampler.counts.copy_((counts.double() / counts.double().sum() * 2**40).long())
            sampler.total.copy_(sampler.counts.sum())
        head = self.head if falling or counts is None or not self.head else counts.topk(self.head).indices
        return SampledSoftmaxLoss.from_linear(linear, sampler=sampler, head_classes=head, estimator=self.estimator, reduction="sum", weight=owner.weight,
                                              ignore_index=owner.ignore_index, label_smoothing=owner.label_smoothing, positives=owner.positives,
                                              logit_scale=owner.logit_scale, softcap=owner.softcap, z_loss=owner.z_loss, sparse_grad=owner.sparse_grad)


def _adaptive(kind: str) -> bool:
    return kind not in ("uniform", "log_uniform", "unigram", "in_batch")


def _shared_options(owner: LinearLoss) -> str:
    """What every loss over the same table is made with, where it is not the default."""
    text = ", weight=weight" if owner.weight is not None else ""
    for name, default in (("reduction", "mean"), ("ignore_index", -100), ("label_smoothing", 0.0), ("positives", "mean"), ("logit_scale", 1.0),
                          ("softcap", None), ("z_loss", 0.0)):
        value = getattr(owner, name)
        text += "" if value == default else f', {name}="{value}"' if isinstance(value, str) else f", {name}={value}"
    return text


def _plans(loss: LinearLoss, counts: Optional[Tensor], sizes: Sequence[int], samplers: Optional[Sequence[str]]) -> List[_Plan]:
    """In the order in which they are tried where time is short."""
    classes = loss.num_classes
    kinds = list(samplers) if samplers is not None else ["uniform", "midx"] if counts is None else ["unigram", "uniform", "in_batch", "midx"]
    sizes = [size for size in sizes if 2 * size <= classes] or [max(1, classes // 4)]
    few = [size for size in _FEW if 2 * size <= classes] or [max(1, classes // 4)]
    wide, head = min(_WIDE, max(1, classes // 4)), min(_HEAD, max(1, classes // 4))
    plans = []
    for kind in kinds:
        if kind == "in_batch":
            plans.append(_Plan((("in_batch", None),)))
        elif _adaptive(kind):
            plans += [_Plan(((kind, size),)) for size in few]
            plans.append(_Plan(((kind, few[0]),), estimator="sampled_softmax"))
            if counts is not None:
                plans.append(_Plan(((kind, few[0]),), head=head))
        else:
            plans += [_Plan(((kind, size),)) for size in sizes]
            if counts is not None and kind == "unigram":
                plans += [_Plan(((kind, size),), head=min(size, classes // 4)) for size in sizes if size < classes // 4]
    static = next((kind for kind in kinds if not _adaptive(kind) and kind != "in_batch"), None)
    plans += [_Plan(((static, wide), (kind, few[0])), head=0 if counts is None else head)
              for kind in kinds if static is not None and _adaptive(kind)]
    if loss.label_smoothing != 0.0:
        plans = [plan for plan in plans if plan.estimator is None]
    return plans


class _Run:
    """A loss that takes steps."""

    def __init__(self, name: str, code: str, loss: LinearLoss, refresh_seconds: float, references: List[Tensor]):
        self.name, self.code, self.loss, self.refresh_seconds = name, code, loss, refresh_seconds
        self.errors = [GradientError(reference) for reference in references]
        self.seconds: List[float] = []
        self.gradient = ""
        every = max((_refresh_every(part) for part in loss.sampler.modules()), default=0)
        self.refresh_ms = 1e3 * refresh_seconds / every if every else 0.0

    def steps(self) -> int:
        return self.errors[0].count

    def distance(self) -> Tuple[float, float]:
        """Bias and noise: root mean squares over the gradients of input and of the table."""
        return (math.sqrt(statistics.fmean(error.bias() ** 2 for error in self.errors)),
                math.sqrt(statistics.fmean(error.noise() ** 2 for error in self.errors)))

    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds[1:] if len(self.seconds) > 2 else self.seconds) + self.refresh_ms


class _Bench:
    """Takes steps of all candidates in turn until the time is up. Losses are sums here, so that gradients of a part of the batch compare."""

    def __init__(self, owner: LinearLoss, input: Tensor, target: Tensor, places: Tensor, counts: Optional[Tensor], start: float, seconds: float,
                 generator: torch.Generator):
        self.owner, self.generator, self.counts = owner, generator, counts
        self.seconds, self.deadline = seconds, start + 0.95 * seconds
        self.notes: List[str] = []
        self.runs: List[_Run] = []
        self.falling = counts is not None and bool((counts[1:] <= counts[:-1]).all())
        owner.settle()
        self.linear = nn.Linear(owner.in_features, owner.num_classes, bias=owner.linear.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(owner.linear.weight.detach())
        self.linear.bias = None if owner.linear.bias is None else nn.Parameter(owner.linear.bias.detach())
        table = self.linear.weight
        self.signs = torch.randint(0, 2, [owner.in_features], generator=generator, device=table.device) * 2.0 - 1.0
        self.trains_exact = table.numel() * table.element_size() < _memory_left(table.device)
        if not self.trains_exact:
            self.notes.append("exact: not trained, since a dense gradient of its table does not fit into memory; errors are those of input's gradient alone")
        self.whole = input.reshape(-1, owner.in_features), target.reshape(-1, *target.shape[input.dim() - 1:])
        self._measure_exact(places)
        if isinstance(owner, SampledSoftmaxLoss) and (owner.sampler.num_samples != 0 or owner.head.numel() > 0):
            self._add_own(owner)

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def _measure_exact(self, places: Tensor) -> None:
        """What an exact step takes, and the gradients of as many queries as a seventh of the time allows."""
        owner = self.owner
        exact = LinearCrossEntropyLoss.from_linear(self.linear, reduction="sum", weight=owner.weight, ignore_index=owner.ignore_index,
                                                   label_smoothing=owner.label_smoothing, positives=owner.positives, logit_scale=owner.logit_scale,
                                                   softcap=owner.softcap, z_loss=owner.z_loss)
        mixed = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(0)).to(places.device)]

        def part_of(size: int) -> Tuple[Tensor, Tensor]:
            if size == len(self.whole[0]):
                return self.whole
            some = mixed[:size].sort().values
            return self.whole[0][some], self.whole[1][some]

        self.part = part_of(min(_FIRST, len(mixed)))
        self.references, spent, _ = self._step(exact, *self.part, self.trains_exact)
        self.exact_steps, rate = 0, spent / len(self.part[0])
        for allowed in (0.25, 0.15):  # a step on 4 times as many queries, then one on as many as fit
            size = min(len(mixed), 4 * _FIRST if allowed == 0.25 else len(self.part[0]) + int(max(0.15 * self.seconds - spent, 0.0) / rate))
            if size <= len(self.part[0]) or spent + rate * (size - len(self.part[0])) > allowed * self.seconds:
                continue
            before, fewer, self.part = spent, len(self.part[0]), part_of(size)
            self.references, spent, _ = self._step(exact, *self.part, self.trains_exact)
            # At least a quarter: the first step is the slowest, since memory is new to it.
            rate = max(spent - before, 0.25 * spent) / (size - fewer)
        if not self.references[0].double().norm() > 0:
            raise ValueError("advise: expected a batch with an exact gradient other than 0, got one that has none")
        others = len(self.whole[0]) - len(self.part[0])
        if others and len(self.part[0]) <= _FIRST:  # nothing to extrapolate from
            self.notes.append(f"exact: a step takes longer than that: only one on {len(self.part[0])} queries was measured, for want of time")
            rate = 0.0
        self.exact_ms = 1e3 * (spent + rate * others)
        if spent + rate * others < 0.05 * self.seconds:
            times = [self._step(exact, *self.whole, self.trains_exact)[1] for _ in range(min(5, max(2, int(0.05 * self.seconds / spent))))]
            self.exact_steps, self.exact_ms = len(times), 1e3 * statistics.median(times)

    def _step(self, loss: LinearLoss, input: Tensor, target: Tensor, table: bool = True) -> Tuple[List[Tensor], float, str]:
        """The gradient of input and, with table, a projection of that of the table; the seconds of the step; the form of the table's gradient."""
        leaf = input.clone().requires_grad_()
        tables = [part for part in (self.linear.weight, self.linear.bias) if part is not None]
        for part in tables:
            part.requires_grad_(table)
        _synchronize(leaf)
        start = time.perf_counter()
        value = loss.estimate(leaf, target, self.generator) if isinstance(loss, SampledSoftmaxLoss) else loss(leaf, target)
        gradients = torch.autograd.grad(value, [leaf, *tables] if table else [leaf])
        _synchronize(leaf)
        seconds = time.perf_counter() - start
        form = "" if not table else "row-sparse" if gradients[1].is_sparse else "dense"
        return [gradients[0], *([self._projection(gradients[1])] if table else [])], seconds, form

    def _projection(self, gradient: Tensor) -> Tensor:
        """A number a class, by random signs of the features: its norm is about that of the gradient."""
        if not gradient.is_sparse:
            return gradient.float() @ self.signs
        rows, values = gradient._indices()[0], gradient._values().float() @ self.signs
        return values.new_zeros(self.owner.num_classes).index_add_(0, rows, values)

    def _add_own(self, owner: SampledSoftmaxLoss) -> None:
        own = copy.copy(owner)
        own._modules = {**owner._modules, "linear": self.linear, "sampler": copy.deepcopy(owner.sampler)}
        own.reduction = "sum"
        new = any(getattr(part, "follows_table", False) and getattr(part, "step", None) == 0 for part in own.sampler.modules())
        if not new or self._fits("as it is"):
            self._enter("as it is", "# the loss as it is", own, refresh=new)

    def add(self, plan: _Plan) -> None:
        name = plan.name()
        if self.left() < 0.35 * self.seconds:
            self.notes.append(f"{name}: not measured, for want of time")
            return
        seen = 0 if self.counts is None else max(0, int((self.counts > 0).sum()) - plan.head)  # classes that "unigram" can draw: a head has the most frequent
        if any(kind == "unigram" and size is not None and size > seen for kind, size in plan.parts):
            self.notes.append(f"{name}: left out, since only {seen} classes{' outside the head' if plan.head else ''} have a count above 0")
            return
        if any(_adaptive(kind) for kind, _ in plan.parts) and not self._fits(name):
            return
        self._enter(name, plan.code(self.owner, self.falling), plan.make(self.owner, self.linear, self.counts, self.falling), refresh=True)

    def _fits(self, name: str) -> bool:
        """Whether there is time for an index."""
        seconds = self._refresh_seconds()
        if seconds <= 0.25 * self.left():
            return True
        self.notes.append(f"{name}: not measured, since its index alone would take about {seconds:.1f} s")
        return False

    def _refresh_seconds(self) -> float:
        """Of a sampler that follows the table: by the fastest so far, or by what a MIDX refresh would take, passes over rows against 64 codewords."""
        known = [run.refresh_seconds for run in self.runs if run.refresh_seconds > 0]
        if known:
            return min(known)
        rows = self.linear.weight.detach()[:256 * 64].float()
        start = time.perf_counter()
        (rows @ rows[:64].t()).argmax(1)
        _synchronize(rows)
        return (time.perf_counter() - start) * 2 * (10 + self.owner.num_classes / len(rows))

    def _enter(self, name: str, code: str, loss: SampledSoftmaxLoss, refresh: bool) -> None:
        start = time.perf_counter()
        if refresh:
            bias = self.linear.bias
            loss.sampler.refresh(self.linear.weight.detach(), None if bias is None else bias.detach())
        seconds = time.perf_counter() - start if loss.sampler.follows_table else 0.0
        loss.eval()  # an in-batch sampler counts nothing
        self.runs.append(_Run(name, code, loss, seconds, self.references))

    def run(self) -> None:
        for _ in range(_ROUNDS):
            for run in self.runs:
                if self.left() < 0 or run.seconds and self.left() < 2 * min(run.seconds):
                    continue
                gradients, seconds, run.gradient = self._step(run.loss, *self.whole, self.trains_exact)
                run.seconds.append(seconds)
                if self.part is not self.whole:
                    gradients, _, _ = self._step(run.loss, *self.part, self.trains_exact)
                for error, gradient in zip(run.errors, gradients):
                    error.add(gradient)
        for run in self.runs:
            if run.steps() < 2:
                self.notes.append(f"{run.name}: not measured, for want of time")

    def advice(self, model_ms: float, budget_ms: Optional[float]) -> Advice:
        budget = self.exact_ms + model_ms if budget_ms is None else budget_ms
        measured = []
        if self.trains_exact:
            code = f"loss = xs.LinearCrossEntropyLoss.from_linear(loss.linear{_shared_options(self.owner)})"
            measured.append(("exact", code, self.exact_ms, 0.0, 0.0, self.exact_steps, "dense"))
        measured += [(run.name, run.code, run.ms(), *run.distance(), run.steps(), run.gradient) for run in self.runs if run.steps() >= 2]
        if not any(run.steps() >= 2 for run in self.runs) and (self.runs or not measured):
            raise RuntimeError(f"advise: expected more than {self.seconds:g} seconds, in which no sampled loss took two steps")
        rows = [Choice(name, code, ms, bias, noise, math.sqrt(bias**2 + (1 + noise**2) * (ms + model_ms) / budget), draws, gradient)
                for name, code, ms, bias, noise, draws, gradient in measured]
        if self.counts is None:
            self.notes.append("with counts= of the classes, frequent ones could be drawn more often, or always")
        return Advice(sorted(rows, key=lambda row: row.error), budget, len(self.part[0]), torch.get_num_threads(), self.notes)


def _refresh_every(sampler: nn.Module) -> int:
    options = getattr(sampler, "options", "")
    return int(read_options(options).get("refresh_every", 0))


def _memory_left(device: torch.device) -> float:
    """Bytes: half of what is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2
    try:
        with open("/proc/meminfo") as lines:
            known: Dict[str, str] = dict(line.split(":", 1) for line in lines)
        return int(known["MemAvailable"].split()[0]) * 1024 / 2
    except (OSError, KeyError):
        return math.inf


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
