"""Samplers and formulas for the tests of MIDX."""

import math

import pytest
import torch

from xsoftmax.samplers import MidxSampler

N, D, K, Q, HEAD = 400, 9, 6, 5, 7
CLASSES = torch.arange(N)
both_kinds = pytest.mark.parametrize("kind", ["rq", "pq"])
with_bias = pytest.mark.parametrize("bias", [False, True])


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def make_sampler(kind="rq", bias=False, num_samples=20, make=MidxSampler, **kwargs):
    """Returns a sampler refreshed on a random table, queries, the table and its bias."""
    torch.manual_seed(0)
    weight, b = torch.randn(N, D), 1.5 * torch.randn(N)
    sampler = make(N, D, num_samples, codewords=kwargs.pop("codewords", K), kind=kind, bias=bias,
                   exclude=HEAD, **kwargs)
    sampler.refresh(weight, b if bias else None)
    return sampler, torch.randn(Q, D), weight, b


def formula(sampler, z, kind="rq", bias=None):
    """Returns log q [Q, N] by Theorem 2: the log-softmax of codeword scores and biases."""
    cell, k = sampler.cell.long().clamp(min=0), len(sampler.codewords1)
    z = z.double()
    z1, z2 = (z, z) if kind == "rq" else (z[:, :(D + 1) // 2], z[:, (D + 1) // 2:])
    score = z1 @ sampler.codewords1.double()[cell // k].T + z2 @ sampler.codewords2.double()[cell %
                                                                                             k].T
    score = score if bias is None else score + bias
    return score.masked_fill(sampler.cell < 0, -math.inf).log_softmax(1)
