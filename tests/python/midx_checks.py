"""What the tests of MIDX share."""

import math

import pytest
import torch

from xsoftmax.samplers import MidxSampler

N, D, K, Q, HEAD = 400, 9, 6, 5, 7
both_kinds = pytest.mark.parametrize("kind", ["rq", "pq"])
with_bias = pytest.mark.parametrize("bias", [False, True])


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def make_sampler(kind="rq", bias=False, **kwargs):
    """A sampler whose index knows a random table, and queries."""
    torch.manual_seed(0)
    weight, b = torch.randn(N, D), 1.5 * torch.randn(N)
    sampler = MidxSampler(N, D, codewords=kwargs.pop("codewords", K), kind=kind, bias=bias, exclude=HEAD, **kwargs)
    sampler.refresh(weight, b if bias else None)
    return sampler, torch.randn(Q, D), weight, b


def formula(sampler, z, bias=None):
    """log q [Q, N] of Theorem 2, written out: the softmax of codeword scores and biases."""
    k1, k2 = sampler.cell.long().clamp(min=0) // sampler.codewords, sampler.cell.long().clamp(min=0) % sampler.codewords
    z = z.double()
    z1, z2 = (z, z) if sampler.kind == "rq" else (z[:, :(D + 1) // 2], z[:, (D + 1) // 2:])
    score = z1 @ sampler.codewords1.double()[k1].T + z2 @ sampler.codewords2.double()[k2].T
    score = score if bias is None else score + bias
    return score.masked_fill(sampler.cell < 0, -math.inf).log_softmax(1)
