"""Measures how much a sampled loss differs from the exact one."""

import dataclasses
import math
from typing import Any, Optional

import torch
from torch import Tensor

from .._core.checks import check_count, check_tensor
from ..tables.table_module import flat_queries
from ..losses.sampled_softmax_loss import SampledSoftmaxLoss

_CHUNK = 1 << 22  # number of (query, class) pairs processed at once


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`diagnose`.

    Below, p is the softmax and q the proposal: expected counts, including those of head classes,
    divided by their sum.
    """

    kl: float
    """KL(q || p) in nats, averaged over queries."""
    renyi: float
    """Renyi divergence of order 2 of p from q, log sum_i p_i^2 / q_i, averaged over queries. It
    bounds the bias of the gradient (Chen et al., 2025, Theorem 6). Infinite if a class with p > 0
    is never proposed."""
    gradient_bias: float
    """Norm of (mean sampled gradient - exact gradient) of `input`, corrected for the remaining
    noise, divided by the norm of the exact gradient. If the exact gradient is 0, as for a table of
    zeros or with one class: 0 if the sampled gradients are 0, else infinity."""
    gradient_noise: float
    """Root mean square distance of a sampled gradient from the mean sampled gradient, divided by
    the norm of the exact gradient; if that is 0, as for ``gradient_bias``."""
    sample_size: float
    """Effective sample size, (sum w)^2 / sum w^2 with w = e^s / count, averaged over queries."""
    candidates: float
    """Number of candidates per query."""
    log_z_bias: float
    """Mean error of the estimate of the log normaliser, log sum e^s / count over the
    candidates."""
    log_z_error: float
    """Root mean square error of that estimate."""
    hits: float
    """Number of candidates per query that equal the target."""
    def __str__(self) -> str:
        width = max(map(len, _MEANINGS))
        return "\n".join(f"{name.replace('_', ' '):<{width}}  {getattr(self, name):>9.4g}  "
                         f"{meaning}" for name, meaning in _MEANINGS.items())


_MEANINGS = {
    "kl": "nats, KL(proposal || softmax); 0 is best",
    "renyi": "nats, log of E[p / q]; 0 is best, bounds the gradient's bias",
    "gradient_bias": "relative to the exact gradient's norm; 0 is best",
    "gradient_noise": "relative to the exact gradient's norm, per step; falls with more samples",
    "sample_size": "effective number of candidates",
    "candidates": "candidates per query",
    "log_z_bias": "nats, mean error of the log normaliser; 0 is best",
    "log_z_error": "nats, root mean square of that error",
    "hits": "candidates per query that equal its target",
}


def diagnose(loss: SampledSoftmaxLoss, input: Tensor, target: Tensor, *, draws: int = 32,
             generator: Optional[torch.Generator] = None) -> Diagnosis:
    """Compares a sampled loss with the exact one on a batch.

    All classes are scored, in chunks of queries, so the cost is that of evaluating the batch.

    Args:
        loss: the loss. It is not changed: no sampler is refreshed and no step is counted.
        input, target: a batch as for the loss, [*, D] and [*].
        draws: how many times to sample, at least 2. Standard errors of the results decrease with
            its square root.
        generator: for the samples, on the device of `input`. None: torch's default generator.

    Returns:
        A :class:`Diagnosis`. ``print`` shows it as a table.

    Raises:
        TypeError: loss is not a SampledSoftmaxLoss, or draws is not an int.
        ValueError: draws is below 2; there are no candidates; all targets are ignored; a query is
            not finite; or a sampler has not seen the class table yet (take a step in train(), or
            call ``loss.sampler.refresh(loss.linear.weight, loss.linear.bias)``).
    """
    if not isinstance(loss, SampledSoftmaxLoss):
        raise TypeError(f"diagnose: expected a SampledSoftmaxLoss, got {type(loss).__name__}")
    check_count("diagnose", "draws", draws, 2)
    for part in loss.sampler.modules():
        if getattr(part, "follows_table", False) and getattr(part, "step", None) == 0:
            raise ValueError(f"diagnose: expected a {type(part).__name__} that has seen the class "
                             "table, got one that was never refreshed: take a step in train(), or "
                             "call loss.sampler.refresh(loss.linear.weight, loss.linear.bias)")
    check_tensor("diagnose", "input", input)
    queries = flat_queries("diagnose", loss.in_features, input.detach(), target,
                           num_classes=loss.num_classes)
    is_counted = (target != loss.ignore_index).reshape(-1)
    queries, targets = queries[is_counted], target.reshape(-1)[is_counted]
    if len(targets) == 0:
        raise ValueError("diagnose: expected a target that is not ignored, got none")
    if not queries.isfinite().all():
        raise ValueError("diagnose: expected input with finite values, got an infinity or NaN")
    modes = {module: module.training for module in loss.modules()}
    loss.eval()  # so that an in-batch sampler does not count these targets
    try:
        with torch.no_grad():
            kl, renyi, log_z = _distances(loss, queries)
            size, count, bias, error, hits = _draws(loss, queries, targets, log_z, draws, generator)
        gradient_bias, noise = _gradients(loss, queries, targets, draws, generator)
    finally:
        for module, training in modes.items():
            module.training = training
    return Diagnosis(kl, renyi, gradient_bias, noise, size, count, bias, error, hits)


def proposal_log_prob(loss: SampledSoftmaxLoss, queries: Tensor) -> Tensor:
    """Returns log q of the whole proposal of a loss, including its head: expected counts divided by
    their sum.

    For shared samples this is the proposal for the batch ``queries``. For private samples without
    replacement it is the sampling distribution itself, because expected counts depend on the
    samples.

    Args:
        loss: the loss.
        queries: [Q, D].

    Returns:
        float64 [Q, N].
    """
    return _normalise(loss, _log_count(loss, queries), queries)


def _log_count(loss: SampledSoftmaxLoss, queries: Tensor) -> Tensor:
    """Returns the log expected counts of all classes, [N] or [Q, N]."""
    ids = torch.arange(loss.num_classes, device=queries.device)
    return loss.sampler.log_count(_scale_queries(loss, queries), ids)


def _scale_queries(loss: SampledSoftmaxLoss, queries: Tensor) -> Tensor:
    """Returns the queries as the sampler receives them in a step."""
    return queries if loss.logit_scale == 1.0 else queries * loss.logit_scale


def _normalise(loss: SampledSoftmaxLoss, log_count: Tensor, queries: Tensor) -> Tensor:
    log_count = log_count.expand(len(queries), -1).double().clone()
    log_count[:, loss.head] = 0.0
    return log_count.log_softmax(1)


def _distances(loss: SampledSoftmaxLoss, queries: Tensor) -> tuple[float, float, Tensor]:
    kl, renyi, log_z = [], [], []
    # counts of shared samples may depend on all queries of the batch
    batch_log_count = _log_count(loss, queries) if loss.sampler.shared else None
    for part in queries.split(max(1, _CHUNK // loss.num_classes)):
        scores = loss._logits(
            torch.ops.xsoftmax.linear_scores(part, loss.linear.weight, loss.linear.bias).double())
        log_z.append(scores.logsumexp(1))
        log_p, log_q = scores - log_z[-1][:, None], _normalise(
            loss,
            _log_count(loss, part) if batch_log_count is None else batch_log_count, part)
        q = log_q.exp()
        kl.append(torch.where(q > 0, q * (log_q - log_p), 0.0).sum(1))
        renyi.append((2 * log_p - log_q).logsumexp(1))
    return torch.cat(kl).mean().item(), torch.cat(renyi).mean().item(), torch.cat(log_z)


def _draws(loss: SampledSoftmaxLoss, queries: Tensor, target: Tensor, log_z: Tensor, draws: int,
           generator: Optional[torch.Generator]) -> Any:
    sizes, errors, hits, count = [], [], [], 0
    for _ in range(draws):
        sets = sorted(loss.propose(_scale_queries(loss, queries), target, generator),
                      key=lambda part: part.ids.dim() == 1)
        private, shared = ([part.ids for part in sets if part.ids.dim() == dim] for dim in (2, 1))
        scores = torch.ops.xsoftmax.candidate_scores(queries, loss.linear.weight, loss.linear.bias,
                                                     torch.cat(private, 1) if private else None,
                                                     torch.cat(shared) if shared else None)
        ids, log_count = (torch.cat([values.expand(len(queries), -1) for values in column], 1)
                          for column in ([part.ids
                                          for part in sets], [part.log_count for part in sets]))
        log_weight = loss._logits(scores.double()) - log_count
        count = log_weight.shape[1]
        total = log_weight.logsumexp(1)
        sizes.append((2 * total - (2 * log_weight).logsumexp(1)).exp())
        errors.append(total - log_z)
        hits.append((ids == target[:, None]).sum(1).double())
    error = torch.cat(errors)
    return (torch.cat(sizes).mean().item(), float(count), error.mean().item(),
            error.square().mean().sqrt().item(), torch.cat(hits).mean().item())


def _gradients(loss: SampledSoftmaxLoss, queries: Tensor, target: Tensor, draws: int,
               generator: Optional[torch.Generator]) -> Any:
    leaf = queries.clone().requires_grad_()
    with torch.enable_grad():
        error = GradientError(torch.autograd.grad(loss.exact(leaf, target).sum(), leaf)[0])
        for _ in range(draws):
            error.add(torch.autograd.grad(loss.estimate(leaf, target, generator).sum(), leaf)[0])
    return error.bias(), error.noise()


class GradientError:
    """Accumulates the distance of sampled gradients from the exact gradient, relative to its norm.
    Gradients are added one by one and are not stored."""
    def __init__(self, exact: Tensor):
        self.exact = exact.double()
        self.count, self._mean, self._squares = 0, torch.zeros_like(self.exact), 0.0

    def add(self, sampled: Tensor) -> None:
        self.count += 1
        deviation = sampled.double() - self._mean
        self._mean += deviation / self.count
        # Welford's algorithm: the sum of squared distances from the mean
        self._squares += (deviation * (sampled - self._mean)).sum().item()

    def noise(self) -> float:
        """Returns the relative root mean square distance of a gradient from the mean."""
        return self._divide_by_norm(math.sqrt(self._variance()))

    def bias(self) -> float:
        """Returns the relative distance of the mean, corrected for the noise that remains in it."""
        squared_bias = (self._mean -
                        self.exact).square().sum().item() - self._variance() / self.count
        return self._divide_by_norm(math.sqrt(max(squared_bias, 0.0)))

    def _divide_by_norm(self, distance: float) -> float:
        """Returns distance / norm of the exact gradient. If that norm is 0: 0 if distance is 0,
        else infinity."""
        norm = self.exact.norm().item()
        if norm > 0:
            return distance / norm
        return math.inf if distance > 0 else 0.0

    def _variance(self) -> float:
        return max(self._squares, 0.0) / (self.count - 1)
