"""linear_cross_entropy by F.linear and F.cross_entropy, and problems for its tests."""

import torch
import torch.nn.functional as F

from xsoftmax._core.options import option_text

ops = torch.ops.xsoftmax


def fused(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100,
          label_smoothing=0.0):
    options = option_text(reduction=reduction, ignore_index=ignore_index,
                          label_smoothing=label_smoothing)
    return ops.linear_cross_entropy(input, weight, bias, target, class_weight, options)


def plain(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100,
          label_smoothing=0.0):
    return F.cross_entropy(F.linear(input, weight, bias), target, class_weight, reduction=reduction,
                           ignore_index=ignore_index, label_smoothing=label_smoothing)


def problem(Q, D, N, dtype=torch.float32, bias=True, class_weight=False, ignored=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    input = torch.randn(Q, D, generator=g, dtype=torch.float64).to(dtype)
    weight = (torch.randn(N, D, generator=g, dtype=torch.float64) * 0.5).to(dtype)
    row = torch.randn(N, generator=g, dtype=torch.float64).to(dtype) if bias else None
    target = torch.randint(N, (Q,), generator=g)
    target[:ignored] = -100
    classes = (torch.rand(N, generator=g, dtype=torch.float64) +
               0.1).to(dtype) if class_weight else None
    return input, weight, row, target, classes


def value_and_gradients(function, input, weight, bias, target, *args, wanted=(True, True, True),
                        **kwargs):
    leaves = [
        t if t is None else t.detach().requires_grad_(w)
        for t, w in zip((input, weight, bias), wanted)
    ]
    loss = function(*leaves, target, *args, **kwargs)
    loss.backward(torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return [loss.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


def assert_same(got, want, dtype=torch.float32, scale=1.0):
    rtol = {torch.float64: 1e-10, torch.float32: 3e-5}[dtype] * scale
    for a, b in zip(got, want):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            # With one class a gradient is the difference of two equal terms of about 1: zero, but
            # for their rounding.
            limit = torch.finfo(b.dtype).eps + rtol * (b[b.isfinite()].abs().max().item()
                                                       if b.isfinite().any() else 1.0)
            torch.testing.assert_close(a, b, rtol=rtol, atol=limit, equal_nan=True)
