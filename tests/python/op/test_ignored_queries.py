"""Ignored queries have no loss and no gradient, whatever their values."""

import copy

import pytest
import torch

import xsoftmax as xs

N, D, Q = 40, 8, 6
IGNORED = [1, 4]


def tree():
    return xs.LabelTree.balanced(N, 3)


LOSSES = {
    "exact": lambda **options: xs.LinearCrossEntropyLoss(D, N, **options),
    "sampled": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, **
                                                       options),
    "private": lambda **options: xs.
    SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, shared=False, estimator=
                       "sampled_softmax", **options),
    "head": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="log_uniform", num_samples=8,
                                                    head_classes=4, **options),
    "nce": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=8, estimator
                                                   ="nce", log_z="learned", **options),
    "midx": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=8, **options),
    "cane": lambda **options: xs.CaneLoss(D, N, candidates=4, **options),
    "beam_tree": lambda **options: xs.BeamTreeLoss(D, tree(), num_candidates=5, num_noises=2, **
                                                   options),
    "routed": lambda **options: xs.BeamTreeLoss(D, xs.LabelTree.balanced(N, 7), num_candidates=4,
                                                num_noises=1, routed=True, **options),
    "hierarchical": lambda **options: xs.HierarchicalSoftmaxLoss(D, tree(), **options),
}
HELD = {"nan": torch.nan, "inf": -torch.inf}


def results(loss, x, target, training, **more):
    """Returns the loss and the gradients of the input and all parameters, with a fixed seed."""
    loss = copy.deepcopy(loss).train(training)
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    value = loss(x, target, **more)
    (value * torch.arange(1, value.numel() + 1).view_as(value)).sum().backward()
    tables = [
        parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        for parameter in loss.parameters() if parameter.grad is not None
    ]
    return [value.detach(), x.grad, *tables]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_ignored_queries_may_be_nan_or_infinite(name, reduction, training, held, impl):
    """Results have the same bits as with zeros: 0 * NaN must not reach a gradient."""
    torch.manual_seed(0)
    loss = LOSSES[name](bias=True, reduction=reduction)
    x, target = torch.randn(Q, D), torch.randint(N, (Q,))
    target[IGNORED] = -100
    want = results(loss, x.index_fill(0, torch.tensor(IGNORED), 0.0), target, training)
    got = results(loss, x.index_fill(0, torch.tensor(IGNORED), HELD[held]), target, training)
    assert len(got) == len(want) >= 3
    for value, of_zeros in zip(got, want, strict=True):
        assert value.isfinite().all() and torch.equal(value, of_zeros)
    assert not got[1][IGNORED].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_exact_loss_equals_that_of_the_other_queries(reduction, dtype, impl):
    """Loss and gradients of table, bias and input equal those of a batch without the ignored
    queries."""
    torch.manual_seed(0)
    loss = xs.LinearCrossEntropyLoss(D, N, bias=True, reduction=reduction, dtype=dtype)
    x, target = torch.randn(Q, D).to(dtype), torch.randint(N, (Q,))
    kept = torch.tensor([q for q in range(Q) if q not in IGNORED])
    weights = torch.arange(1., Q + 1)

    def run(rows, ids, of_query):
        rows = rows.clone().requires_grad_()
        value = loss(rows, ids)
        return value, *torch.autograd.grad(
            (value * of_query).sum() if reduction == "none" else value, (rows, *loss.parameters()))

    want = run(x[kept], target[kept], weights[kept])
    ignored = target.index_fill(0, torch.tensor(IGNORED), -100)
    got = run(x.index_fill(0, torch.tensor(IGNORED), torch.nan), ignored, weights)
    torch.testing.assert_close(got[0][kept] if reduction == "none" else got[0], want[0])
    torch.testing.assert_close(got[1][kept], want[1])
    for value, other in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(value, other)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("positives", ["mean", "sum"])
@pytest.mark.parametrize("name", ["exact", "sampled", "private"])
def test_padding_among_several_positives_may_be_nan_or_infinite(name, positives, soft, training,
                                                                held, impl):
    """Also queries with padding only, and probabilities of padding."""
    torch.manual_seed(0)
    loss = LOSSES[name](bias=True, positives=positives)
    x, target = torch.randn(Q, D), torch.randint(N, (Q, 3))
    target[IGNORED], target[0, 1] = -100, -100
    more = dict(target_prob=torch.rand(Q, 3)) if soft else {}
    want = results(loss, x.index_fill(0, torch.tensor(IGNORED), 0.0), target, training, **more)
    if soft:
        more = dict(target_prob=more["target_prob"].masked_fill(target == -100, HELD[held]))
        target[0, 1] = -1  # -1 is padding too
    got = results(loss, x.index_fill(0, torch.tensor(IGNORED), HELD[held]), target, training,
                  **more)
    for value, of_zeros in zip(got, want, strict=True):
        assert value.isfinite().all() and torch.equal(value, of_zeros)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name, kind", [
    *((name, "one") for name in LOSSES),
    ("cane", "several"), *((name, kind) for name in ("exact", "sampled", "private")
                           for kind in ("several", "soft"))
])
def test_weights_of_classes_that_are_no_target_have_no_effect(name, kind, training, held, impl):
    """A weight may be infinite, such as 1 / count of a class that was never seen.

    Class 0 is also used internally in place of ignored targets.
    """
    torch.manual_seed(0)
    loss = LOSSES[name](bias=True, weight=torch.rand(N))
    x, target = torch.randn(Q, D), torch.randint(1, N, (Q,) if kind == "one" else (Q, 3))
    target[IGNORED] = -100
    more = dict(target_prob=torch.rand(Q, 3)) if kind == "soft" else {}
    want = results(loss, x, target, training, **more)
    loss.weight[0] = HELD[held]
    got = results(loss, x, target, training, **more)
    for value, of_others in zip(got, want, strict=True):
        assert value.isfinite().all() and torch.equal(value, of_others)


def test_a_batch_with_only_ignored_queries_has_no_loss_or_gradient():
    """Its sum is 0 and its gradients are zero."""
    loss = xs.LinearCrossEntropyLoss(D, N, reduction="sum")
    x = torch.full((Q, D), torch.nan, requires_grad=True)
    value = loss(x, torch.full((Q,), -100))
    value.backward()
    assert value == 0 and not x.grad.any() and not loss.linear.weight.grad.any()
