"""A user-defined estimator equals a built-in one with the same formula: by itself, in a union, with
a head, with noise."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from sampler_checks import loss_before_and_after_training
from xsoftmax.samplers import (InBatchSampler, MidxSampler, UniformSampler, UnigramSampler,
                               UnionSampler)

N, D = 12, 5


def softmax(batch):
    return torch.logaddexp(batch.adjusted.logsumexp(1), batch.target) - batch.target


def logistic(batch):
    return F.softplus(-batch.target) + F.softplus(batch.score - (-batch.log_weight)).masked_fill(
        batch.log_weight == -torch.inf, 0).sum(1)


OUTSIDE = {
    "sampled_softmax": (softmax,
                        dict(renormalizes=True, weighs=True, drops_distinct_hits=True,
                             drops_drawn_hits=True)),
    "ranking": (softmax,
                dict(corrects_target=True, weighs=True, drops_distinct_hits=True,
                     replaces_a_sample=True)),
    "nce": (logistic, dict(corrects_target=True, weighs=True, drops_distinct_hits=True))
}
for name, (loss, traits) in OUTSIDE.items():
    xs.register_estimator(f"outside-{name}", loss, **traits)

WAYS = {
    "alone": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=6, bias=
                                                     True, **options),
    "private": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(
        N, D, 4, codewords=2), **options), "batch": lambda **options: xs.SampledSoftmaxLoss(
            D, N, sampler=InBatchSampler(N), reduction="sum", **options),
    "union": lambda **options: xs.SampledSoftmaxLoss(
        D, N, sampler=UnionSampler(UnigramSampler(torch.arange(1, N + 1), 4),
                                   UniformSampler(N, 3, shared=False)), **options),
    "head": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=4,
                                                    head_classes=torch.tensor([1, 8]), **options),
    "weights": lambda **options: xs.SampledSoftmaxLoss(D, N, sampler="log_uniform",
                                                       num_samples=4, weight=torch.linspace(
                                                           0.5, 2, N), sparse_grad=False, **options)
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_equal_those_of_the_built_in_estimator(way, name):
    found = []
    for estimator in (name, f"outside-{name}"):
        torch.manual_seed(0)
        loss = WAYS[way](estimator=estimator)
        input, target = torch.randn(6, D, requires_grad=True), torch.tensor([0, 3, -100, 5, 11, 3])
        value = loss(input, target)
        value.backward()
        found.append([
            value.detach(), input.grad,
            *(parameter.grad.to_dense() for parameter in loss.parameters())
        ])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert found[0][1][2].eq(0).all() and found[0][1][0].ne(0).any()


@pytest.mark.parametrize("way", WAYS)
def test_a_user_defined_estimator_trains(way):
    torch.manual_seed(0)
    loss = WAYS[way](estimator="outside-sampled_softmax")
    before, after = loss_before_and_after_training(loss)
    assert after < 0.9 * before


def test_an_estimator_with_noise_gets_candidates_and_noise():
    seen = []
    xs.register_estimator("outside-noise", lambda batch:
                          (seen.append(batch.drawn), softmax(batch))[1], weighs=True,
                          has_noise=True)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, head_classes=4,
                                 estimator="outside-noise")
    assert loss(torch.randn(2, D), torch.tensor([0, 7])).isfinite()
    assert sorted(seen[0].tolist()) == [False] * 4 + [True] * 3
    with pytest.raises(ValueError, match="expected candidates .head classes, or draws without "
                       "replacement"):
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, estimator="outside-noise")


def test_wrong_estimators_are_refused():
    with pytest.raises(ValueError, match="expected a name that is not taken, got 'outside-nce'"):
        xs.register_estimator("outside-nce", softmax)
    with pytest.raises(ValueError, match="expected a name that is not taken, got 'nce'"):
        xs.register_estimator("nce", softmax)
    with pytest.raises(TypeError, match="expected traits among"):
        xs.register_estimator("outside-x", softmax, weigh=True)
    with pytest.raises(TypeError, match="expected a function"):
        xs.register_estimator("outside-x", None)
    with pytest.raises(ValueError, match="expected label_smoothing=0"):
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3, estimator="outside-nce",
                              label_smoothing=0.1)
    xs.register_estimator("outside-mean", lambda batch: softmax(batch).mean())
    with pytest.raises(
            ValueError, match=r"expected estimator 'outside-mean' to give a loss for "
            r"each query, \[2\], got \[\]"):
        xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=3,
                              estimator="outside-mean")(torch.randn(2, D), torch.tensor([0, 7]))
