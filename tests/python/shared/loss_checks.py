"""Losses and batches for tests of losses over a class table."""

import torch
import torch.nn.functional as F

import xsoftmax as xs

D, N = 6, 40


def sampled(**kwargs):
    return xs.SampledSoftmaxLoss(D, N, **(dict(sampler="uniform", num_samples=8) | kwargs))


def batch(*shape, ignored=0):
    input, target = torch.randn(*shape, D), torch.randint(N, shape)
    target.view(-1)[:ignored] = -100
    return input, target


def exact(loss, input, target, **kwargs):
    return F.cross_entropy(loss.linear(input).flatten(0, -2), target.flatten(), **kwargs)
