"""A loop over the definition of CANE, for the tests of CANE and of the beam tree."""

import math

import torch

from score_checks import assert_same_gradients

REDUCTIONS = ["mean_of_logs", "log_of_mean"]


def naive(scores, target, sets, noise, log_q, target_log_q, noise_reduction):
    """Computes CANE losses [Q] in float64.

    `sets` and `noise` are lists of classes for each query; `log_q` are log-probabilities of noise.
    """
    losses = []
    for q, y in enumerate(target.tolist()):
        inside, s = [c for c in sets[q] if c >= 0], scores[q]
        own = s[inside] if inside else s[:0]
        draws = s[noise[q]] - log_q[q]
        at_target = (s[y] - target_log_q[q]).unsqueeze(0)
        n = len(draws)
        if noise_reduction == "mean_of_logs":
            if y in inside:
                losses.append(
                    torch.stack([torch.cat([own, d.unsqueeze(0)]).logsumexp(0)
                                 for d in draws]).mean() - s[y])
            else:
                losses.append(torch.cat([own, at_target]).logsumexp(0) - s[y])
        else:
            others = draws if y in inside else torch.cat([at_target, draws[1:]])
            losses.append(torch.cat([own, others - math.log(n)]).logsumexp(0) - s[y])
    return torch.stack(losses)


def check_against_formula(got, scores, target, sets, noise, noise_reduction, leaves):
    """Checks CANE losses [Q], and their gradients with respect to `leaves`, against :func:`naive`.

    `scores` [Q, N] are those of all classes, and `noise` is the drawn set.
    """
    log_draws = math.log(noise.ids.shape[-1])
    want = naive(scores, target, sets, noise.ids,
                 noise.log_count.double() - log_draws,
                 noise.target_log_count.double() - log_draws, noise_reduction)
    torch.testing.assert_close(got, want)
    directions = torch.randn(len(target), dtype=torch.float64)
    assert_same_gradients(torch.autograd.grad(got @ directions, leaves),
                          torch.autograd.grad(want @ directions, leaves))
