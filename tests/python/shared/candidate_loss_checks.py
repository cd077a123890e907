"""Formulas of candidate_loss for one query and one candidate at a time, and problems for its
tests."""

import math

import pytest
import torch

from set_checks import columns, split

ops = torch.ops.xsoftmax
INF = float("inf")
TOLERANCE = {torch.float32: dict(rtol=2e-5, atol=2e-6), torch.float64: dict(rtol=1e-12, atol=1e-13)}


def candidate_loss(scores, target, **arguments):
    sets, options = split(arguments)
    return ops.candidate_loss(scores, target, *sets, options)


def candidate_loss_backward(grad, scores, target, **arguments):
    return ops.estimator_loss_backward(grad, scores, target, *columns(**arguments))


def log_sigmoid(x):
    return -torch.log1p((-x).exp())


def nce(own, adjusted, scores, weights):
    return -log_sigmoid(own) - sum(
        (log_sigmoid(-a) for a in adjusted), torch.zeros((), dtype=torch.float64))


def one_vs_each(own, adjusted, scores, weights):
    return -sum((w * log_sigmoid(own - s)
                 for s, w in zip(scores, weights)), torch.zeros((), dtype=torch.float64)) + 0 * own


def blackout(own, adjusted, scores, weights):
    p = torch.stack([own, *adjusted]).softmax(0)
    return -p[0].log() - (1 - p[1:]).log().sum()


def importance(own, adjusted, scores, weights):
    return torch.logsumexp(torch.stack(adjusted), 0) - own if adjusted else 0 * own


# Arguments: the target's score (corrected if the estimator does so), the candidates' adjusted
# scores, their scores and their weights.
RIVALS = {
    "nce": nce,
    "negative_sampling": lambda own, adjusted, scores, weights: nce(own, scores, scores, weights),
    "one_vs_each": one_vs_each, "blackout": blackout, "importance": importance
}
CANE = ("cane", "cane_log_of_mean")
COUNTING = ("ranking", "nce", "blackout", *CANE)  # estimators that need target_log_count
SMOOTHING = ("sampled_softmax", "ranking")  # estimators that support label smoothing
every_estimator = pytest.mark.parametrize("estimator", [*SMOOTHING, *RIVALS, *CANE])


def cane(estimator, score, target_log_count, candidates, live, target):
    """The CANE loss of one query. `score` is the target's; `candidates` are as in `naive`."""
    draws = sum(c[3] and c[2] != INF for c in candidates)
    log_draws = math.log(draws) if draws else 0.0
    distinct = [c[1] - c[2] for c in live if not c[3]]
    noise = [c[1] - c[2] + log_draws for c in live if c[3]]
    if any(c[0] == target and not c[3] and c[2] != INF for c in candidates):
        a = torch.logsumexp(torch.stack([score, *distinct]), 0)
        if estimator == "cane":
            logs = [torch.logsumexp(torch.stack([a, m]), 0) for m in noise]
            return (sum(logs) / draws if draws else a) - score
        return torch.logsumexp(torch.stack([a, *(m - log_draws for m in noise)]), 0) - score
    if estimator == "cane":
        others, count = [], target_log_count - log_draws
    else:  # the target replaces the first draw
        first = next((i for i, c in enumerate(candidates) if c[3] and c[2] != INF), None)
        others, count = [
            c[1] - c[2] for i, c in enumerate(candidates) if c in live and c[3] and i != first
        ], target_log_count
    own = score - (0.0 if target_log_count == -INF else count)
    return torch.logsumexp(torch.stack([own, *distinct, *others]), 0) - score


def naive(scores, target, private_ids=None, shared_ids=None, private_log_count=None,
          shared_log_count=None, target_log_count=None, estimator="sampled_softmax",
          remove_accidental_hits=True, distinct_private=0, distinct_shared=0, label_smoothing=0.0):
    """Differentiable loss in float64. Excluded candidates are left out rather than masked."""
    losses = []
    for q in range(len(target)):
        candidates = []  # id, score, log count, independent
        sets = ((None if private_ids is None else private_ids[q],
                 None if private_log_count is None else private_log_count[q], distinct_private),
                (shared_ids, shared_log_count, distinct_shared))
        for ids, counts, fixed in sets:
            for j in range(0 if ids is None else len(ids)):
                count = 0.0 if counts is None else counts[j].double().item()
                candidates.append((ids[j].item(), scores[q, 1 + len(candidates)].double(), count, j
                                   >= fixed))
        own = scores[q, 0].double()
        if estimator in ("ranking", "nce", "blackout"):
            own = own - target_log_count[q].double()
        remove = remove_accidental_hits and estimator != "importance"
        stays = estimator in ("ranking", "nce", *CANE)  # a hit among independent draws
        live = [
            c for c in candidates
            if c[2] != INF and not (remove and c[0] == target[q] and not (stays and c[3]))
        ]
        # a target outside the fixed sets stands for the first draw
        if estimator == "ranking" and distinct_private + distinct_shared > 0:
            covered = any(c[0] == target[q] and c[2] != INF and not c[3] for c in candidates)
            first = next((c for c in candidates if c[3] and c[2] != INF), None)
            live = [c for c in live if covered or c is not first]
        M, m = (sum(c[3] and c[2] != INF for c in part) for part in (candidates, live))
        factor = 0.0
        # of several no one q is renormalised
        drawn_sets = sum(ids is not None and len(ids) > fixed for ids, _, fixed in sets)
        if estimator in (
                "sampled_softmax", "one_vs_each"
        ) and remove_accidental_hits and target_log_count is not None and m > 0 and drawn_sets == 1:
            left = M - math.exp(target_log_count[q].item())
            factor = math.log(left / m) if left > 0 else -INF
        if estimator in CANE:
            losses.append(
                cane(estimator, own, target_log_count[q].double(), candidates, live,
                     target[q].item()))
            continue
        terms, weights = [own], [1.0]
        for _, score, count, independent in live:
            terms.append(score - count + (factor if independent else 0.0))
            weights.append(math.exp(-count + (factor if independent else 0.0)))
        if estimator in RIVALS:
            losses.append(RIVALS[estimator](own, terms[1:], [c[1] for c in live], weights[1:]))
            continue
        normalizer = torch.logsumexp(torch.stack(terms), 0)
        mean = sum(w * s for w, s in zip(weights, [own] + [c[1] for c in live])) / sum(weights)
        losses.append((1 - label_smoothing) * (normalizer - own) + label_smoothing *
                      (normalizer - mean))
    return torch.stack(losses)


LAYOUTS = {"private": (5, None), "shared": (None, 6), "both": (5, 6)}


def problem(layout="both", Q=7, N=4, dtype=torch.float32, counts=True, seed=0):
    """Few classes, so most queries have hits and repeats, also across the two sets."""
    P, S = LAYOUTS[layout]
    g = torch.Generator().manual_seed(seed)
    arguments = dict(
        scores=torch.randn(Q, 1 + (P or 0) + (S or 0), generator=g, dtype=torch.float64).to(dtype) *
        2, target=torch.randint(N, (Q,), generator=g))
    if P is not None:
        arguments["private_ids"] = torch.randint(N, (Q, P), generator=g)
    if S is not None:
        arguments["shared_ids"] = torch.randint(N, (S,), generator=g)
    if counts:
        for name in ("private", "shared"):
            if name + "_ids" in arguments:
                arguments[name + "_log_count"] = torch.randn(arguments[name + "_ids"].shape,
                                                             generator=g)
        arguments["target_log_count"] = torch.rand(Q, generator=g)
    return arguments


def loss_and_gradient(function, arguments, **changes):
    arguments = arguments | changes
    scores = arguments.pop("scores").detach().requires_grad_()
    loss = function(scores, **arguments)
    loss.backward(torch.linspace(0.5, 2.0, len(loss), dtype=loss.dtype))
    return loss.detach(), scores.grad


def assert_same(got, want, dtype):
    assert got[0].dtype == dtype
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.to(dtype), **TOLERANCE[dtype])
