"""Logit transforms written with PyTorch, and problems for their tests."""

import torch
import torch.nn.functional as F

import xsoftmax as xs

ops = torch.ops.xsoftmax
D, N, Q = 5, 23, 7
TRANSFORMS = {
    "scale": dict(logit_scale=2.5), "cap": dict(softcap=1.5),
    "both": dict(logit_scale=0.3, softcap=2.0), "z": dict(z_loss=0.2),
    "all": dict(logit_scale=1.7, softcap=3.0, z_loss=0.1)
}


def transformed(scores, logit_scale=1.0, softcap=None, z_loss=0.0):
    scores = scores * logit_scale
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def plain(input, weight, bias, target, class_weight=None, reduction="mean", label_smoothing=0.0,
          **transform):
    logits = transformed(F.linear(input, weight, bias), **transform)
    loss = F.cross_entropy(logits, target, class_weight, reduction=reduction,
                           label_smoothing=label_smoothing)
    counts = target != -100
    share = counts.to(logits.dtype) if class_weight is None else torch.where(
        counts, class_weight[target.clamp(min=0)], 0.0)
    squares = torch.where(counts,
                          logits.logsumexp(1).square(), 0.0) * share * transform.get("z_loss", 0.0)
    return loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / share.sum()
                   }[reduction]


def problem(queries=Q, width=D, classes=N, dtype=torch.float64, seed=0, ignored=1):
    made = torch.Generator().manual_seed(seed)
    input, weight, bias = (torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)
                           for shape in ((queries, width), (classes, width), (classes,)))
    target = torch.randint(classes, (queries,), generator=made)
    target[:ignored] = -100
    return input, weight, bias, target


def drawn_sets(dtype=torch.float64):
    """A head, and private draws with replacement and exact counts."""
    sampler = xs.samplers.UniformSampler(N, 4, shared=False, exclude=torch.arange(3))
    target = problem()[3]
    drawn = sampler.sample(torch.zeros(Q, D), torch.where(target < 0, -1, target),
                           torch.Generator().manual_seed(2))
    head = xs.samplers.CandidateSet(torch.arange(3), torch.zeros(3), None, True)
    return [head, *drawn]


def losses(**options):
    torch.manual_seed(0)
    return [
        xs.LinearCrossEntropyLoss(D, N, bias=True, **options),
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4, bias=True, **options),
        xs.CaneLoss(D, N, candidates=3, bias=True, **options)
    ]
