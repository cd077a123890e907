"""Comparisons of scores and gradients, for the tests of score operators."""

import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Scores and float gradients differ by the order of sums; 16-bit gradients may be rounded the other
# way once.
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

# Each returns the values of a matrix in a layout that is not contiguous.
STRIDED = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided rows": lambda t: t.repeat_interleave(2, 0)[::2],
    "strided columns": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "slice": lambda t: torch.cat([t, t], 1)[:, :t.size(1)]
}


def opmath(dtype):
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def scores_and_gradients(function, input, weight, bias, *ids, wanted=(True, True, True), **kwargs):
    leaves = [
        t if t is None else t.detach().requires_grad_(w)
        for t, w in zip((input, weight, bias), wanted)
    ]
    scores = function(*leaves, *ids, **kwargs)
    if scores.requires_grad:
        scores.backward(
            torch.randn(scores.shape, generator=torch.Generator().manual_seed(9),
                        dtype=torch.float64).to(scores.dtype))
    return [scores.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


def assert_same(got, want, dtype):
    """Checks that scores and gradients are equal within the rounding of `dtype`."""
    assert got[0].dtype == opmath(dtype)
    for i, (a, b) in enumerate(zip(got, want)):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.shape == b.shape and (i == 0 or a.dtype == dtype)
        a, b = (t.to_dense() if t.layout == torch.sparse_coo else t for t in (a, b))
        rounding = ROUNDING[opmath(dtype) if i == 0 else dtype]
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=rounding,
                                   atol=4 * max(1.0, largest) * min(rounding, 2e-6))


def assert_same_gradients(got, want):
    """Checks that gradients of any layout are equal."""
    for a, b in zip(got, want):
        torch.testing.assert_close(*(t.to_dense() if t.layout == torch.sparse_coo else t
                                     for t in (a, b)))
