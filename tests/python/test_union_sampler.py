"""Unions of samplers."""

import math

import pytest
import torch

import xsoftmax as xs
from midx_checks import D, HEAD, K, N, Q, make_sampler
from xsoftmax.samplers import MidxSampler, UnigramSampler, UnionSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def test_union_counts_are_sums():
    sampler, z, _, _ = make_sampler()
    unigram = UnigramSampler(torch.rand(N), exclude=HEAD)
    target = torch.randint(HEAD, N, (Q,))
    union = UnionSampler((unigram, 30), (sampler, 12))
    proposal = union.sample(z, 0, False, target)
    ids = torch.arange(N)
    unigram_count = unigram.log_count(z, 30, True, ids).exp()
    total = unigram_count + 12 * sampler.log_prob(z, ids).exp()
    torch.testing.assert_close(proposal.log_count.exp(), total.gather(1, proposal.ids))
    torch.testing.assert_close(proposal.shared_log_count.exp(), total[:, proposal.shared_ids])
    torch.testing.assert_close(proposal.target_log_count.exp(), total.gather(1, target[:, None]).squeeze(1))
    torch.testing.assert_close(proposal.target_log_draws.exp(), 12 * sampler.log_prob(z, target[:, None]).exp().squeeze(1))
    assert proposal.shared_distinct == 30 and proposal.shared_ids.unique().numel() == 30
    torch.testing.assert_close(union.log_prob(z, ids).exp().sum(1), torch.ones(Q))


@pytest.mark.parametrize("mixture", ["mean", "rms"])
@pytest.mark.parametrize("distinct", [False, True])
def test_counts_of_a_shared_set_are_known_for_any_class(mixture, distinct):
    sampler, z, _, _ = make_sampler(bias=True, mixture=mixture, distinct=distinct)
    drawn = sampler.sample(z, 40, True)
    count = sampler.log_count(z, 40, True, torch.arange(N))
    torch.testing.assert_close(count[drawn.ids], drawn.log_count)
    assert count.exp().sum().item() == pytest.approx(40, rel=1e-4)


@pytest.mark.parametrize("distinct", [True, False])
def test_union_estimates_the_normaliser_without_bias(distinct):
    """One part independent, or both, whose hits then say nothing of the others' shares."""
    sampler, z, weight, _ = make_sampler()
    loss = xs.SampledSoftmaxLoss(D, N, sampler=UnionSampler((UnigramSampler(torch.rand(N), distinct=distinct), 20),
                                                            (MidxSampler(N, D, codewords=K), 10)),
                                 num_samples=0, head_classes=HEAD, reduction="none", estimator="sampled_softmax")
    assert loss.sampler.renormalises == distinct
    loss.linear.weight.data.copy_(weight)
    target = torch.randint(N, (Q,))
    scores = z @ weight.T
    with torch.no_grad():
        own = scores.gather(1, target[:, None]).squeeze(1)
        ratio = torch.stack([loss(z, target).exp() for _ in range(1500)])  # the estimate of sum e^s over e^{s_y}
    want = (scores.logsumexp(1) - own).exp()
    assert ((ratio.mean(0) - want).abs() < 5 * ratio.std(0) / math.sqrt(1500)).all()


def test_unions_refresh_their_parts():
    union = UnionSampler((UnigramSampler(torch.rand(N)), 3), (MidxSampler(N, D, codewords=K), 2))
    stats = union.refresh(torch.randn(N, D))
    assert stats["1.cells"] > 1 and union.parts[1].step == 1
