"""diagnose, for samplers with a known distance from the softmax."""

import math

import pytest
import torch

import xsoftmax as xs
from xsoftmax.tools.diagnose import GradientError
from xsoftmax.samplers import (ExactMidxSampler, InBatchSampler, MidxSampler, UniformSampler,
                               UnigramSampler, UnionSampler)

N, D, Q = 200, 6, 12


def make(sampler, **kwargs):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, **kwargs)
    torch.nn.init.normal_(loss.linear.weight)
    if isinstance(loss.sampler, MidxSampler):
        loss.sampler.refresh(loss.linear.weight)
    return loss, torch.randn(Q, D), torch.randint(N, (Q,))


def test_refuses_draws_that_depend_on_the_target():
    loss = xs.SampledSoftmaxLoss(4, 9, sampler="uniform", num_samples=3,
                                 estimator="complementary_sum")
    with pytest.raises(
            ValueError, match="expected counts of a draw, got a call of log_count: they "
            "depend on the target"):
        xs.diagnose(loss, torch.randn(2, 4), torch.tensor([1, 2]))


def test_a_uniform_proposal_matches_its_formulas():
    loss, x, target = make(UniformSampler(N, 16, shared=False))
    with torch.no_grad():
        log_p = loss.log_prob(x).double()
    report = xs.diagnose(loss, x, target)
    assert report.kl == pytest.approx((-math.log(N) - log_p).mean().item(), rel=1e-4)
    assert report.renyi == pytest.approx((2 * log_p + math.log(N)).logsumexp(1).mean().item(),
                                         rel=1e-4)
    assert report.candidates == 16 and 1 <= report.sample_size <= 16
    # the log of a mean is biased downwards
    assert report.gradient_noise > 0 and report.log_z_bias < 0 < report.log_z_error
    assert "gradient bias" in str(report)


def test_exact_midx_has_distance_zero():
    loss, x, target = make(ExactMidxSampler(N, D, 16, codewords=4))
    report = xs.diagnose(loss, x, target)
    assert abs(report.kl) < 1e-5 and abs(report.renyi) < 1e-5
    assert report.sample_size == pytest.approx(16, rel=1e-4) and report.log_z_error < 1e-4


def test_a_head_of_all_classes_is_exact():
    loss, x, target = make(UniformSampler(N, 1), head_classes=N - 1)
    report = xs.diagnose(loss, x, target)
    assert report.gradient_bias < 1e-3 and report.gradient_noise < 1e-3
    assert report.log_z_error < 1e-4
    assert report.hits == pytest.approx(1, abs=1e-6)


def test_midx_and_more_draws_have_smaller_errors():
    midx = xs.diagnose(*make(MidxSampler(N, D, 16, codewords=16)))
    uniform = xs.diagnose(*make(UniformSampler(N, 16, shared=False)))
    many = xs.diagnose(*make(UniformSampler(N, 128, shared=False)))
    assert midx.kl < uniform.kl and midx.renyi < uniform.renyi
    assert midx.gradient_noise < uniform.gradient_noise
    assert midx.sample_size > uniform.sample_size
    assert many.gradient_noise < uniform.gradient_noise
    assert many.gradient_bias < uniform.gradient_bias


@pytest.mark.parametrize("sampler, kwargs", [
    (lambda: UnigramSampler(torch.arange(1, N + 1), 16), {}),
    (lambda: InBatchSampler(N), {}),
    (lambda: MidxSampler(N, D, 16, codewords=4, shared=True), {}),
    (lambda: UnionSampler(UnigramSampler(torch.arange(1, N + 1), 10),
                          MidxSampler(N, D, 5, codewords=4)), dict(head_classes=3)),
], ids=["unigram", "in_batch", "mixture", "union"])
def test_every_kind_of_proposal(sampler, kwargs):
    loss, x, target = make(sampler(), **kwargs)
    if isinstance(loss.sampler, InBatchSampler):
        for _ in range(50):
            loss(x, torch.randint(N, (Q,)))
    loss.sampler.refresh(loss.linear.weight)
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    report = xs.diagnose(loss, x.reshape(3, 4, D),
                         torch.where(torch.arange(Q) == 1, -100, target).reshape(3, 4))
    assert math.isfinite(report.kl) and math.isfinite(report.gradient_noise)
    assert loss.training and all(
        torch.equal(value, state[name]) for name, value in loss.state_dict().items())


def test_bad_arguments():
    loss, x, target = make(UniformSampler(N, 16))
    with pytest.raises(
            TypeError, match="diagnose: expected a SampledSoftmaxLoss, got "
            "LinearCrossEntropyLoss"):
        xs.diagnose(xs.LinearCrossEntropyLoss(D, N), x, target)
    with pytest.raises(ValueError, match="draws of at least 2"):
        xs.diagnose(loss, x, target, draws=1)
    with pytest.raises(ValueError, match="a target that is not ignored"):
        xs.diagnose(loss, x, torch.full((Q,), -100))
    with pytest.raises(TypeError, match="draws of type int, got float"):
        xs.diagnose(loss, x, target, draws=2.5)
    with pytest.raises(ValueError, match="diagnose: expected target of shape"):
        xs.diagnose(loss, x, target[1:])
    with pytest.raises(ValueError, match="diagnose: expected input of shape"):
        xs.diagnose(loss, x[:, 1:], target)
    with pytest.raises(ValueError, match="input with finite values"):
        xs.diagnose(loss, torch.full_like(x, math.nan), target)
    for sampler in (MidxSampler(N, D, 4), UnionSampler(UniformSampler(N, 4), MidxSampler(N, D, 4))):
        with pytest.raises(ValueError, match="a MidxSampler that has seen the class table"):
            xs.diagnose(xs.SampledSoftmaxLoss(D, N, sampler=sampler), x, target)


@pytest.mark.parametrize("classes", [1, 40])
def test_an_exact_gradient_of_zero_has_no_error(classes):
    """With one class, or a table of zeros, sampled gradients are 0 as well: no bias and no
    noise."""
    loss = xs.SampledSoftmaxLoss(8, classes, sampler="uniform", num_samples=min(classes, 12))
    with torch.no_grad():
        loss.linear.weight.zero_()
    found = xs.diagnose(loss, torch.randn(6, 8), torch.randint(classes, (6,)), draws=4)
    assert found.gradient_bias == found.gradient_noise == 0 and abs(found.kl) < 1e-6 and abs(
        found.log_z_error) < 1e-6
    with pytest.raises(ValueError, match="advise: expected a batch with an exact gradient other "
                       "than 0"):
        xs.advise(loss, torch.randn(6, 8), torch.randint(classes, (6,)), seconds=0.1)


def test_noise_around_an_exact_gradient_of_zero_is_infinite():
    error = GradientError(torch.zeros(3))
    for sampled in (torch.ones(3), torch.ones(3) * 1.5):
        error.add(sampled)
    assert error.bias() == error.noise() == math.inf
