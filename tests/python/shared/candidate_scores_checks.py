"""candidate_scores by plain indexing, and problems for its tests."""

import torch

from score_checks import ROUNDING, opmath

ops = torch.ops.xsoftmax


def problem(Q, N, D, P, S, dtype=torch.float32, bias=True, seed=0):
    """P or S None: no private or no shared ids."""
    g = torch.Generator().manual_seed(seed)
    input, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype) for n in (Q, N))
    row = torch.randn(N, generator=g, dtype=torch.float64).to(dtype) if bias else None
    own = None if P is None else torch.randint(N, (Q, P), generator=g)
    shared = None if S is None else torch.randint(N, (S,), generator=g)
    return input, weight, row, own, shared


def plain(input, weight, bias, own, shared, sparse_grad=False):
    """In float64 for any input dtype; differentiable by autograd."""
    input, weight, bias = (t if t is None else t.double() for t in (input, weight, bias))
    parts = []
    if own is not None:
        scores = (input[:, None, :] * weight[own]).sum(-1)
        parts.append(scores if bias is None else scores + bias[own])
    if shared is not None:
        scores = input @ weight[shared].T
        parts.append(scores if bias is None else scores + bias[shared])
    return torch.cat(parts, 1)


def coefficient_rounding(input, weight, bias, own, shared):
    """Error of gradients if those of shared candidates' scores are rounded to bfloat16, so that
    tensor cores multiply them by a bfloat16 table: half a unit in the last place of each, 2^-8 of
    each term of the sums. torch's bfloat16 linear layer has the same error."""
    if input.dtype != torch.bfloat16 or shared is None:
        return None
    grad = torch.randn(input.shape[0], (0 if own is None else own.shape[1]) + shared.shape[0],
                       generator=torch.Generator().manual_seed(9),
                       dtype=torch.float64)  # as scores_and_gradients has it
    terms = grad[:, grad.shape[1] - shared.shape[0]:].abs() * 2**-8
    return [
        0.0, terms @ weight[shared].double().abs(),
        torch.zeros(weight.shape,
                    dtype=torch.float64).index_add_(0, shared, terms.T @ input.double().abs()), 0.0
    ]


def assert_same(got, want, dtype, inputs, slack=None):
    """Compares within the rounding of `dtype`, relative to the largest value, plus `slack` for each
    result."""
    assert got[0].dtype == opmath(dtype)
    for i, (a, b) in enumerate(zip(got, want)):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.shape == b.shape
        a, b = ((t.to_dense() if t.layout == torch.sparse_coo else t).double() for t in (a, b))
        rounding = ROUNDING[opmath(dtype) if i == 0 else dtype]
        largest = b.abs().max().item() if b.numel() else 0.0
        if slack is not None:
            b = torch.where((a - b).abs() <= slack[i], a, b + (a - b).sign() * slack[i])
        torch.testing.assert_close(a, b, rtol=rounding,
                                   atol=4 * max(1.0, largest) * min(rounding, 2e-6))
    for leaf, grad in zip(inputs, got[1:]):
        assert grad is None or grad.dtype == leaf.dtype


LAYOUTS = {"private": (4, None), "shared": (None, 6), "both": (4, 6)}
