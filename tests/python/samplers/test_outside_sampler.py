"""A user-defined sampler works like a built-in one: registered by name, in unions, with a head, as
noise."""

import math
from typing import List, Optional

import pytest
import torch
from torch import Tensor

import xsoftmax as xs
from gradient_checks import seeded  # noqa: F401 (a fixture of every test)
from sampler_checks import chi_square, loss_before_and_after_training
from xsoftmax.samplers import (CandidateSet, ComplementSampler, MidxSampler, Sampler,
                               UnigramSampler, UnionSampler, make_sampler, register)

N, D = 12, 5


@register("outside-linear")
class LinearSampler(Sampler):
    """q_i proportional to i + 1; private draws with replacement."""
    def __init__(self, num_classes: int, num_samples: int, *, shared: bool = False):
        super().__init__(num_classes, num_samples, shared=shared)
        weights = torch.arange(1, num_classes + 1).double()
        self.register_buffer("log_q", (weights / weights.sum()).log().float(), persistent=False)

    @torch.jit.export
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[CandidateSet]:
        rows = 1 if self.shared else queries.size(0)
        ids = torch.multinomial(self.log_q.exp().expand(rows, -1), self.num_samples,
                                replacement=True, generator=generator)
        ids = ids[0] if self.shared else ids
        target_log_count: Optional[Tensor] = None
        if target is not None:
            target_log_count = self.log_count(queries, target.clamp(min=0))
        return [CandidateSet(ids, self.log_count(queries, ids), target_log_count, False)]

    @torch.jit.export
    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return self.log_q[ids] + math.log(self.num_samples)


def outside(num_samples, shared=False):
    return LinearSampler(N, num_samples, shared=shared)


def builtin(num_samples, shared=False):
    return UnigramSampler(torch.arange(1, N + 1), num_samples, power=1.0, shared=shared,
                          distinct=False)


WAYS = {
    "alone": lambda make: xs.SampledSoftmaxLoss(D, N, sampler=make(4)),
    "shared": lambda make: xs.SampledSoftmaxLoss(D, N, sampler=make(6, shared=True)),
    "ranking": lambda make: xs.SampledSoftmaxLoss(D, N, sampler=make(
        4), estimator="ranking", bias=True), "union": lambda make: xs.SampledSoftmaxLoss(
            D, N, sampler=UnionSampler(MidxSampler(N, D, 3, codewords=2), make(3))),
    "head": lambda make: xs.SampledSoftmaxLoss(D, N, sampler=make(
        4), head_classes=torch.tensor([1, 8])), "complementary": lambda make: xs.SampledSoftmaxLoss(
            D, N, sampler=make(4), estimator="complementary_sum"),
    "noise": lambda make: xs.CaneLoss(D, N, candidates=3, num_noises=2, noise_sampler=make(8)),
    "candidates": lambda make: xs.CaneLoss(D, N, candidates=make(5), num_noises=2)
}


@pytest.mark.parametrize("way", WAYS)
def test_a_user_defined_sampler_trains(way):
    loss = WAYS[way](outside)
    before, after = loss_before_and_after_training(loss)
    assert after < 0.8 * before


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("head", "candidates")])
def test_equals_a_built_in_sampler_of_the_same_distribution(way):
    """The mean loss over many queries, within standard errors. (A built-in one excludes the head;
    this one cannot.)"""
    found = []
    for make in (outside, builtin):
        torch.manual_seed(0)
        loss = WAYS[way](make)
        loss.reduction = "none"
        loss.sparse_grad = False
        input, target = torch.randn(1, D).expand(4000, D), torch.tensor([1]).expand(4000)
        torch.nn.init.normal_(loss.linear.weight, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            if way == "shared":  # one set for each call
                parts = torch.cat([loss(input[:1], target[:1]).double() for _ in range(1500)])
            else:
                parts = loss(input, target).double()
        found.append((parts.mean(), parts.std() / len(parts)**0.5))
    (one, error), (other, other_error) = found
    assert abs(one - other) < 4.5 * math.hypot(error, other_error)


def test_counts_include_the_head():
    """The sampler cannot exclude classes, so the count of a head class is one more than its
    draws."""
    loss = WAYS["head"](outside)
    assert loss.head.numel() == 0 and isinstance(loss.sampler, UnionSampler)
    sets = loss.propose(torch.zeros(2, D), torch.tensor([1, 3]))
    q = torch.arange(1, N + 1) / (N * (N + 1) / 2)
    count = 4 * q + torch.zeros(N).index_fill_(0, torch.tensor([1, 8]), 1.0)
    for part in sets:
        torch.testing.assert_close(part.log_count, count[part.ids].log().expand_as(part.log_count))
    drawn = next(part for part in sets if part.ids.dim() == 2)
    many = loss.propose(torch.zeros(4000, D), torch.zeros(4000, dtype=torch.int64))
    ids = next(part for part in many if part.ids.dim() == 2).ids.flatten()
    assert chi_square(torch.bincount(ids, minlength=N),
                      16000 * q.double()) > 1e-3 and drawn.ids.shape == (2, 4)


def test_a_registered_name_makes_the_sampler():
    assert isinstance(make_sampler("outside-linear", N, 3), LinearSampler)
    loss = xs.SampledSoftmaxLoss(D, N, sampler="outside-linear", num_samples=3)
    assert loss.sampler.num_samples == 3
    assert xs.CaneLoss(D, N, candidates=3, num_noises=2,
                       noise_sampler="outside-linear").noise.sampler.num_samples == 8
    with pytest.raises(ValueError, match="expected a name that is not taken, got 'outside-linear'"):
        register("outside-linear")(LinearSampler)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted():
    loss = WAYS["head"](outside)
    input, target = torch.randn(4, D), torch.tensor([0, 3, 5, 11])
    values = []
    for each in (loss, torch.jit.script(loss)):
        torch.manual_seed(3)
        values.append(each(input, target))
    torch.testing.assert_close(*values)
    assert ComplementSampler(LinearSampler(N, 4),
                             2).sample(input, target)[0].ids.ne(target[:, None]).all()


class FaultySampler(LinearSampler):
    fault = ""

    def sample(self, queries, target=None, generator=None):
        drawn, = super().sample(queries, target, generator)
        if self.fault == "no list":
            return drawn
        if self.fault == "ids":
            return [drawn._replace(ids=drawn.ids + N)]
        return [drawn._replace(target_log_count=None)]


@pytest.mark.parametrize("fault, error, message", [("ids", IndexError, r"complement_sample: "
                                                    r"expected draws in \[0, "
                                                    r"12\), got \d+ at"),
                                                   ("counts", ValueError, "ComplementSampler: "
                                                    "expected a set with "
                                                    "target_log_count, .* "
                                                    "got None")])
@pytest.mark.parametrize("make", [
    lambda noise: xs.CaneLoss(D, N, candidates=3, num_noises=2, noise_sampler=noise),
    lambda noise: xs.BeamTreeLoss(D, xs.LabelTree.balanced(N), num_candidates=3, num_noises=2,
                                  noise_sampler=noise, balance_every=1)
])
def test_wrong_results_of_a_sampler_change_nothing(make, fault, error, message):
    loss = make(FaultySampler(N, 8))
    loss.noise.sampler.fault = fault
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    with pytest.raises(error, match=message):
        loss(torch.randn(3, D), torch.tensor([0, 5, 11]))
    for name, value in loss.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_sample_must_return_a_list():
    loss = xs.SampledSoftmaxLoss(D, N, sampler=FaultySampler(N, 8))
    loss.sampler.fault = "no list"
    with pytest.raises(
            TypeError, match="expected a list of CandidateSet, as Sampler.sample "
            "returns it, got CandidateSet without a list"):
        loss(torch.randn(3, D), torch.tensor([0, 5, 11]))
