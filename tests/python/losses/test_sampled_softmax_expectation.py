"""sampled_softmax_loss on average over draws: unbiased sums, and the optimum of each estimator."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from xsoftmax._core.options import option_text
from xsoftmax.samplers import LogUniformSampler, StaticSampler, UniformSampler, columns_of

ops = torch.ops.xsoftmax

# Five logits; the tests use a likely target (p > 0.5) and an unlikely one.
LOGITS = torch.tensor([0.3, 2.0, -1.0, 0.5, 0.0], dtype=torch.float64)
P = LOGITS.softmax(0)
Q = 40000


def assert_mean(samples, want):
    """Checks that the mean of independent rows is `want`, within 4.5 standard errors and the
    float32 rounding of log counts."""
    error = samples.std(0) / len(samples)**0.5
    z = (samples.mean(0) - want) / (error + 1e-6)
    assert (z.abs() < 4.5).all(), f"z-scores {z.tolist()}"


def class_gradients(target, num_samples, estimator, remove, seed):
    """[Q, N]: gradients of the five logits, for Q queries with private candidates from q =
    softmax."""
    targets = torch.full((Q,), target)
    sets = StaticSampler(P, num_samples, shared=False).sample(torch.zeros(Q, 1), targets,
                                                              torch.Generator().manual_seed(seed))
    assert not sets[0].distinct
    ids = torch.cat([targets[:, None], sets[0].ids], 1)
    scores = LOGITS[ids].requires_grad_()
    loss = ops.candidate_loss(scores, targets, *columns_of(sets),
                              option_text(estimator=estimator, remove_accidental_hits=remove))
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    return torch.zeros(Q, 5, dtype=torch.float64).scatter_add_(1, ids, grad)


@pytest.mark.parametrize("num_samples", [1, 2, 6])
@pytest.mark.parametrize("target", [1, 4])
@pytest.mark.parametrize("estimator, remove, share",
                         [("sampled_softmax", True, lambda p, M: 1 - p**M),
                          ("sampled_softmax", False, lambda p, M: 1 / (1 + p)),
                          ("ranking", True, lambda p, M: M / (M + 1)),
                          ("ranking", False, lambda p, M: M / (M + 1))])
def test_expected_gradient_for_q_equal_to_softmax(estimator, remove, share, target, num_samples):
    """The expected gradient is the full one times the factor known for each estimator."""
    full = P - F.one_hot(torch.tensor(target), 5)
    assert_mean(class_gradients(target, num_samples, estimator, remove, seed=num_samples),
                full * share(P[target], num_samples))


@pytest.mark.parametrize("num_samples", [1, 4, 20])
@pytest.mark.parametrize("proposal", ["softmax", "uniform", "opposite"])
@pytest.mark.parametrize("estimator", ["ranking", "nce"])
def test_the_softmax_is_the_optimum(estimator, proposal, num_samples):
    """With targets drawn from the softmax of the scores, the expected gradient is zero for any
    proposal and any number of draws. (It would not be if hits were dropped, least of all for good
    proposals.)"""
    q = {"softmax": P, "uniform": torch.ones(5), "opposite": P.flip(0)}[proposal]
    generator = torch.Generator().manual_seed(num_samples)
    targets = P.float().multinomial(Q, replacement=True, generator=generator)
    sets = StaticSampler(q, num_samples, shared=False).sample(torch.zeros(Q, 1), targets, generator)
    ids = torch.cat([targets[:, None], sets[0].ids], 1)
    scores = P.log()[ids].requires_grad_()
    loss = ops.candidate_loss(scores, targets, *columns_of(sets), option_text(estimator=estimator))
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    assert_mean(torch.zeros(Q, 5, dtype=torch.float64).scatter_add_(1, ids, grad), torch.zeros(5))


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("proposal", ["softmax", "uniform", "opposite"])
@pytest.mark.parametrize("candidates", [[1], [0, 4], [2, 3, 4], [0, 1, 3, 4]])
@pytest.mark.parametrize("estimator", ["cane", "cane_log_of_mean", "ranking"])
def test_the_softmax_is_the_optimum_with_a_head(estimator, candidates, proposal, num_samples):
    """Few or nearly all targets are in the head; noise comes from the other classes."""
    q = {"softmax": P, "uniform": torch.ones(5), "opposite": P.flip(0)}[proposal].clone()
    candidates = torch.tensor(candidates)
    q[candidates] = 0
    generator = torch.Generator().manual_seed(num_samples)
    targets = P.float().multinomial(Q, replacement=True, generator=generator)
    sets = StaticSampler(q, num_samples, shared=False).sample(torch.zeros(Q, 1), targets, generator)
    sets = [*sets, xs.samplers.CandidateSet(candidates, torch.zeros(len(candidates)), None, True)]
    ids = torch.cat([targets[:, None], sets[0].ids, candidates.expand(Q, -1)], 1)
    scores = LOGITS[ids].requires_grad_()
    loss = ops.candidate_loss(scores, targets, *columns_of(sets), option_text(estimator=estimator))
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    grad = torch.zeros(Q, 5, dtype=torch.float64).scatter_add_(1, ids, grad)
    assert_mean(grad, torch.zeros(5))
    if len(candidates) == 4:  # only one noise class is possible, so the gradient is exact
        torch.testing.assert_close(grad, P.expand(Q, 5) - F.one_hot(targets, 5), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def big():
    """One query and 30 classes."""
    g = torch.Generator().manual_seed(3)
    return torch.randn(
        1, 8,
        generator=g), torch.randn(30, 8, generator=g) * 0.5, torch.randn(30, generator=g) * 0.5


def exact_loss(big, target, **kwargs):
    input, weight, bias = big
    return F.cross_entropy(F.linear(input, weight, bias).double(), torch.tensor([target]), **kwargs)


@pytest.mark.parametrize("head", [0, 6])
@pytest.mark.parametrize("target", [2, 20])
@pytest.mark.parametrize("sampler", [UniformSampler, LogUniformSampler])
def test_distinct_draws_are_unbiased(big, sampler, target, head):
    """The mean of exp(loss) is 1 / p_y: each class is weighted by the inverse of its inclusion
    probability."""
    queries = 20000
    loss = xs.SampledSoftmaxLoss(8, 30, sampler=sampler(30, 7, shared=False, distinct=True),
                                 bias=True, reduction="none", head_classes=head)
    loss.linear.weight.data, loss.linear.bias.data = big[1], big[2]
    values = loss(big[0].expand(queries, 8), torch.full((queries,), target),
                  torch.Generator().manual_seed(1))
    assert values.std() > 0.01
    assert_mean(values.detach().double().exp(), exact_loss(big, target).exp())


@pytest.mark.parametrize("target", [2, 20])
def test_head_and_independent_tail_are_unbiased(big, target):
    """A target in the head cannot be drawn; one in the tail is excluded from the draws and from
    q."""
    queries = 20000
    loss = xs.SampledSoftmaxLoss(8, 30, sampler=UniformSampler(30, 40, shared=False), bias=True,
                                 estimator="sampled_softmax", reduction="none", head_classes=6)
    loss.linear.weight.data, loss.linear.bias.data = big[1], big[2]
    values = loss(big[0].expand(queries, 8), torch.full((queries,), target),
                  torch.Generator().manual_seed(1))
    assert values.std() > 0.01
    assert_mean(values.detach().double().exp(), exact_loss(big, target).exp())


def test_shared_draws_are_unbiased(big):
    """One set for the whole batch is unbiased over steps."""
    loss = xs.SampledSoftmaxLoss(8, 30, sampler="log_uniform", num_samples=7, bias=True,
                                 reduction="none")
    loss.linear.weight.data, loss.linear.bias.data = big[1], big[2]
    generator = torch.Generator().manual_seed(1)
    targets = torch.tensor([0, 2, 20])
    with torch.no_grad():
        values = torch.stack([loss(big[0].expand(3, 8), targets, generator) for _ in range(2000)])
    assert_mean(values.double().exp(),
                torch.stack([exact_loss(big, t).exp() for t in targets.tolist()]))
