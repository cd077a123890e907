"""Targets of the batch as candidates: which queries count, and how often."""

import math

import pytest
import torch

from sampler_checks import queries, zipf
from xsoftmax.samplers import InBatchSampler


def test_counts_and_frequencies():
    sampler = InBatchSampler(10)
    first, second = torch.tensor([1, 1, 4, 2]), torch.tensor([4, 4, 9])
    [drawn] = sampler.sample(queries(4), first)
    assert torch.equal(drawn.ids, first) and not drawn.distinct
    count = 3 * torch.tensor([2.0, 2, 1, 1]) / 4  # (n - 1) p, with the batch in the counts
    itself = torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(drawn.log_count.exp(),
                               count.expand(4, 4).masked_fill(itself, math.inf))
    torch.testing.assert_close(drawn.target_log_count.exp(), count)
    [drawn] = sampler.sample(queries(3), second)
    torch.testing.assert_close(drawn.target_log_count.exp(), 2 * torch.tensor([3.0, 3, 1]) / 7)
    assert sampler.counts.tolist() == [0, 2, 1, 0, 3, 0, 0, 0, 0, 1] and sampler.total == 7
    sampler.eval()
    [drawn] = sampler.sample(queries(2), torch.tensor([[1, 3], [3, 1]]))
    assert sampler.total == 7 and drawn.ids.tolist() == [1, 3]
    torch.testing.assert_close(drawn.target_log_count.exp(), torch.tensor([[2.0, 0], [0, 2]]) / 7)
    torch.testing.assert_close(
        sampler.log_count(queries(2), torch.arange(10)).exp(), sampler.counts / 7.0)
    assert InBatchSampler(3).log_count(queries(1), torch.arange(3)).isneginf().all()


def test_ignored_targets_are_no_candidates():
    sampler = InBatchSampler(30)
    [drawn] = sampler.sample(queries(4), torch.tensor([1, -1, 2, -1]))
    assert sampler.total == 2 and sampler.counts[0] == 0 and drawn.ids.tolist() == [1, 0, 2, 0]
    assert drawn.log_count.isfinite().nonzero().tolist() == [[0, 2], [2, 0]]
    assert (drawn.log_count.isfinite() | drawn.log_count.isposinf()).all()
    [alone] = sampler.sample(queries(3), torch.tensor([-1, 1, -1]))
    # no other query has this target
    assert alone.log_count.isposinf().all() and alone.target_log_count.isneginf().all()


def test_log_count_is_the_mean_count():
    """The average number of times that a class is among the targets of the other queries."""
    torch.manual_seed(0)
    sampler, p, seen = InBatchSampler(20), zipf(20) / zipf(20).sum(), torch.zeros(
        20, dtype=torch.float64)
    for _ in range(400):
        target = torch.multinomial(p, 100, replacement=True)
        [drawn] = sampler.sample(queries(100), target)
        seen += torch.bincount(target[1:], minlength=20)  # candidates of query 0
    count = sampler.log_count(queries(100), torch.arange(20)).double().exp()
    torch.testing.assert_close(count, 99 * p, rtol=0.15, atol=0)
    torch.testing.assert_close(count, seen / 400, rtol=0.02, atol=0)


def test_errors_change_nothing():
    sampler = InBatchSampler(10)
    sampler.sample(queries(2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="expected target, .* got None"):
        sampler.sample(queries(2))
    with pytest.raises(IndexError, match=r"in_batch_sample: expected target in \[0, 10\).*got 10"):
        sampler.sample(queries(2), torch.tensor([1, 10]))
    with pytest.raises(TypeError, match="target of dtype int64"):
        sampler.sample(queries(2), torch.tensor([1.0, 2.0]))
    assert sampler.counts.sum() == sampler.total == sampler.drawn == 2
