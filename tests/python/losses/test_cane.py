"""CaneLoss: its formulas, its statistics, and its errors."""

import copy
import math

import pytest
import torch

import xsoftmax as xs
from cane_checks import REDUCTIONS, check_against_formula, naive
from sampler_checks import check_scripted_compiled_and_saved
from xsoftmax import CaneLoss
from xsoftmax.samplers import (CandidateSet, InBatchSampler, MidxSampler, StaticSampler,
                               StreamingCounts, UniformSampler, UnigramSampler)

WEIGHTS = torch.tensor([9.0, 5, 4, 3, 2, 2, 1, 1, 1, 0.5])

SOURCES = {
    "head": dict(candidates=4), "ids": dict(candidates=torch.tensor([7, 2, 11])),
    "none": dict(candidates=None), "given to all": dict(candidates=None),
    "given to each": dict(candidates=None)
}


def given(source, Q):
    if source == "given to all":
        return torch.tensor([3, 1, 3, 8, -1])  # 3 is given twice
    if source == "none":
        return torch.tensor([-1])
    if source == "given to each":
        return torch.randint(-1, 12, (Q, 5), generator=torch.Generator().manual_seed(5))
    return None


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
@pytest.mark.parametrize("source", SOURCES)
def test_equals_the_formula(source, noise, bias, noise_reduction):
    N, Q = 12, 20
    torch.manual_seed(0)
    sampler = "uniform" if noise == "uniform" else StaticSampler(
        torch.arange(1, N + 1).double(), 6, shared=False)
    loss = CaneLoss(5, N, num_noises=3, noise_sampler=sampler, noise_reduction=noise_reduction,
                    bias=bias, reduction="none", dtype=torch.float64, **SOURCES[source])
    input, target = torch.randn(Q, 5, dtype=torch.float64,
                                requires_grad=True), torch.randint(N, (Q,))
    extra = given(source, Q)
    got = loss(input, target, extra, generator=torch.Generator().manual_seed(1))
    own = extra if extra is not None else loss.candidates
    found = own if extra is None else torch.ops.xsoftmax.candidate_set(extra, N)
    drawn = loss.noise.sample_outside(input.detach(), found, target,
                                      torch.Generator().manual_seed(1))
    sets = [sorted(set((own[q] if own.dim() == 2 else own).tolist())) for q in range(Q)]
    assert any(y in s for y, s in zip(target.tolist(), sets)) or source == "none"
    check_against_formula(got, loss.linear(input), target, sets, drawn, noise_reduction,
                          (input, *loss.parameters()))


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
def test_recovers_the_log_odds(noise, noise_reduction):
    """Theorem 1: for any candidates and noise, the expected gradient is zero at the softmax. The
    expectation is exact over targets and sampled over noise."""
    N, draws = 10, 12_000
    p = WEIGHTS / WEIGHTS.sum()
    loss = CaneLoss(
        1, N, candidates=torch.tensor([0, 3, 9]), num_noises=2, bias=True,
        noise_reduction=noise_reduction, reduction="none",
        noise_sampler="uniform" if noise == "uniform" else StaticSampler(
            WEIGHTS.flip(0), 8, shared=False), sparse_grad=False)
    with torch.no_grad():
        loss.linear.weight.zero_()
        loss.linear.bias.copy_(p.log() + 3.0)  # log Z may have any value
    torch.manual_seed(1)
    # Gradients of the scores, from one batch for each target.
    mean, variance = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    blocks = 30
    for y in range(N):
        parts = []
        for _ in range(blocks):
            value = loss(torch.zeros(draws // blocks, 1), torch.full((draws // blocks,), y)).mean()
            parts.append(torch.autograd.grad(value, loss.linear.bias)[0].double())
        parts = torch.stack(parts)
        mean += p[y] * parts.mean(0)
        variance += p[y]**2 * parts.var(0) / blocks
    assert (mean.abs() < 4.5 * variance.sqrt() + 1e-6).all()
    # away from the optimum the sum is far from zero
    wrong = torch.zeros(N, dtype=torch.float64)
    with torch.no_grad():
        loss.linear.bias[3] += 0.5
    for y in range(N):
        wrong += p[y] * torch.autograd.grad(
            loss(torch.zeros(1500, 1), torch.full(
                (1500,), y)).mean(), loss.linear.bias)[0].double()
    assert wrong.abs().max() > 20 * variance.sqrt().max()


def excess_variance(candidates, noise_reduction="mean_of_logs", num_noises=1):
    """Variance of the estimated logits for many targets, relative to that of maximum likelihood,
    minus 1. It is the trace of H^-1 V H^-1 (Theorem 3), with H the expected second derivative of
    the loss at the softmax and V the variance of its gradient. Averages over all targets and, with
    one noise class, over all noise; otherwise over as many draws."""
    N = len(WEIGHTS)
    p, outside = (WEIGHTS / WEIGHTS.sum()).double(), torch.arange(candidates, N)
    if num_noises == 1:
        noise = outside.unsqueeze(1)
    else:
        noise = outside[torch.randint(len(outside), (1500, num_noises),
                                      generator=torch.Generator().manual_seed(0))]
    target, noise = torch.arange(N).repeat_interleave(len(noise)), noise.repeat(N, 1)
    share = p[target] * N / len(target)
    log_count = torch.tensor(math.log(num_noises / len(outside)))
    drawn = CandidateSet(noise, log_count.expand(noise.shape), log_count.expand(len(target)), False)
    # The table is the identity, so the logits are the queries.
    loss = CaneLoss(N, N, candidates=candidates, num_noises=num_noises,
                    noise_reduction=noise_reduction, reduction="sum", dtype=torch.float64)
    with torch.no_grad():
        loss.linear.weight.copy_(torch.eye(N))

    def gradients(logits):
        input = logits.expand(len(target), N).clone().requires_grad_()
        value = loss._candidate_loss(
            input, target,
            [CandidateSet(loss.candidates, torch.zeros(candidates), None, True), drawn], None)
        return torch.autograd.grad(value, input)[0]

    at, h = p.log(), 1e-5
    V = gradients(at).T @ (gradients(at) * share.unsqueeze(1))
    H = torch.stack([
        share @ (gradients(at + h * e) - gradients(at - h * e)) / (2 * h)
        for e in torch.eye(N, dtype=torch.float64)
    ])
    inverse = torch.linalg.pinv(H, rtol=1e-6)  # adding a constant to all logits changes nothing
    fisher = p.diag() - p.outer(p)
    return (
        (inverse @ V @ inverse).trace() / torch.linalg.pinv(fisher, rtol=1e-6).trace()).item() - 1


def test_variance_falls_to_that_of_the_softmax():
    """Corollary 1: the variance decreases as the candidates cover the targets. (The variance of the
    gradient would not show it: without candidates it is zero.)"""
    found = [excess_variance(candidates) for candidates in (1, 2, 4, 6, 8, 9)]
    assert all(a > b > 0 for a, b in zip(found, found[1:])), found
    assert found[0] > 1 and found[-1] < 1e-3, found


def test_log_of_mean_has_less_variance():
    mean_of_logs, log_of_mean = (excess_variance(3, reduction, 4) for reduction in REDUCTIONS)
    assert 0 < log_of_mean < 0.9 * mean_of_logs, (log_of_mean, mean_of_logs)


def with_samplers(source, **kwargs):
    kwargs |= {
        "private midx": dict(candidates=MidxSampler(300, 6, 20, codewords=8, distinct=True)),
        "shared unigram": dict(candidates=UnigramSampler(torch.arange(1, 301), 20)),
        "midx noise": dict(candidates=30, noise_sampler="midx", num_noises=4)
    }[source]
    return CaneLoss(6, 300, **kwargs)


@pytest.mark.parametrize("source", ["private midx", "shared unigram", "midx noise"])
def test_samplers_as_sources(source):
    """The formula for the candidates and the noise that samplers draw."""
    torch.manual_seed(0)
    loss = with_samplers(source, reduction="none", dtype=torch.float64)
    input, target = torch.randn(64, 6, dtype=torch.float64), torch.randint(300, (64,))
    target[::2] = torch.randint(25, (32,))  # often among the candidates
    twin, generator = copy.deepcopy(loss), torch.Generator().manual_seed(1)
    for sampler in filter(None, [twin.candidate_sampler, twin.noise]):
        sampler.prepare(twin.linear.weight, None, generator)
    found = twin._candidates(input, target, None, generator)
    noise = twin.noise.sample_outside(input, found, target, generator)
    got = loss(input, target, generator=torch.Generator().manual_seed(1))
    sets = (found.expand(64, -1) if found.dim() == 1 else found).tolist()
    assert 0.01 < sum(y in s for y, s in zip(target.tolist(), sets)) / 64 < 0.99
    n = noise.ids.shape[1]
    want = naive(input @ loss.linear.weight.T, target, sets, noise.ids,
                 noise.log_count.double() - math.log(n),
                 noise.target_log_count.double() - math.log(n), "mean_of_logs")
    torch.testing.assert_close(got, want)
    # Noise probabilities: four tries, then a uniform draw.
    q = ((loss.noise.sampler.log_count(input, torch.arange(300)).double().exp() /
          (4 * n)).expand(64, 300) if loss.noise.sampler is not None else torch.full(
              (64, 300), 1 / 300, dtype=torch.float64))
    for i, (y, held) in enumerate(zip(target.tolist(), sets)):
        held = [c for c in held if c >= 0]
        if y not in held and loss.noise.sampler is None:
            torch.testing.assert_close(noise.target_log_count[i].double() - math.log(n),
                                       torch.tensor(-math.log(300 - len(held))).double())
        elif y not in held:
            f = q[i, held].sum()
            log_q = (q[i, y] * (1 + f + f**2 + f**3) + f**4 / (300 - len(held))).log()
            torch.testing.assert_close(noise.target_log_count[i].double() - math.log(n), log_q,
                                       rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["private midx", "shared unigram", "midx noise"])
def test_learns_with_samplers_as_sources(source):
    torch.manual_seed(0)
    loss = with_samplers(source)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.05)
    input = torch.randn(64, 6)
    target = torch.randint(300, (64,))
    first = loss.exact(input, target).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss(input, target).backward()
        optimizer.step()
    assert loss.exact(input, target) < 0.5 * first
    torch.testing.assert_close(loss.eval()(input, target), loss.exact(input, target))


def test_samplers_belong_to_one_loss():
    """Candidates and noise need separate samplers; a loss that raised has claimed neither."""
    candidates, noise = UniformSampler(20, 5), UniformSampler(20, 4, shared=False)
    with pytest.raises(ValueError, match="expected two samplers for candidates and noise, got one "
                       "for both"):
        CaneLoss(6, 20, candidates=noise, noise_sampler=noise, num_noises=2)
    with pytest.raises(ValueError, match="ComplementSampler: expected a sampler that draws a "
                       "multiple"):
        CaneLoss(6, 20, candidates=candidates, noise_sampler=noise, num_noises=3)
    CaneLoss(6, 20, candidates=candidates, noise_sampler=noise, num_noises=2)
    with pytest.raises(
            ValueError, match="expected a sampler that no other module uses, got a "
            "UniformSampler that belongs to a CaneLoss"):
        CaneLoss(6, 20, candidates=candidates)


def test_reduction_weights_and_ignored_targets():
    class_weight = torch.linspace(0.5, 2.0, 12)
    values = {}
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        loss = CaneLoss(5, 12, candidates=4, weight=class_weight, reduction=reduction,
                        ignore_index=11)
        input, target = torch.randn(3, 4, 5), torch.randint(11, (3, 4))
        target[1, 1] = 11
        torch.manual_seed(1)
        values[reduction] = loss(input, target)
    share = torch.where(target == 11, 0.0, class_weight[target])
    assert values["none"][1, 1] == 0
    torch.testing.assert_close(values["sum"], values["none"].sum())
    torch.testing.assert_close(values["mean"], values["none"].sum() / share.sum())


@pytest.mark.parametrize("source", ["head", "ids"])
def test_cane_scripted_compiled_and_saved(source):
    check_scripted_compiled_and_saved(lambda: CaneLoss(5, 12, num_noises=2, **SOURCES[source]))


def test_cane_scripted_with_samplers():
    check_scripted_compiled_and_saved(
        lambda: CaneLoss(5, 40, candidates=UnigramSampler(torch.arange(1, 41), 7), noise_sampler=
                         StaticSampler(torch.arange(1, 41).double(), 3, shared=False)))


def test_noise_outside_fixed_candidates_is_renormalised():
    weights = torch.arange(1.0, 31)
    loss = CaneLoss(4, 30, candidates=torch.tensor([29, 28, 3]),
                    noise_sampler=StaticSampler(weights, 1, shared=False))
    outside = torch.tensor([c for c in range(30) if c not in (29, 28, 3)])
    drawn = loss.noise.sample_outside(torch.zeros(len(outside), 4), loss.candidates, outside)
    torch.testing.assert_close(drawn.target_log_count,
                               (weights[outside] / weights[outside].sum()).log(), rtol=1e-5,
                               atol=1e-5)
    assert torch.isin(drawn.ids, outside).all()


def test_no_noise():
    """A target outside the candidates is its own noise; otherwise the loss is the softmax over the
    candidates."""
    loss = CaneLoss(5, 9, candidates=4, num_noises=0)
    input = torch.randn(3, 5)
    want = torch.nn.functional.cross_entropy(loss.linear(input)[:, :4], torch.tensor([0, 3, 2]))
    torch.testing.assert_close(loss(input, torch.tensor([0, 3, 2])), want)
    assert loss(input, torch.tensor([8, 3, 2])).isfinite()


def test_noise_in_eval_counts_nothing():
    noise = UnigramSampler(StreamingCounts(50), 5, shared=False, distinct=False)
    loss = CaneLoss(5, 50, candidates=4, noise_sampler=noise)
    loss.noise.eval()
    loss(torch.randn(6, 5), torch.arange(6) + 20)
    assert int(noise.streaming.total) == 0
    loss.noise.train()
    loss(torch.randn(6, 5), torch.arange(6) + 20)
    assert int(noise.streaming.total) == 6


BAD = [
    (lambda: CaneLoss(5, 9, candidates=3, noise_sampler=UniformSampler(9, 4)), ValueError,
     "expected a sampler of private independent draws"),
    (lambda: CaneLoss(5, 9, candidates=UniformSampler(9, 0)), ValueError, "expected a sampler that "
     "draws at least one "
     "class as candidates"),
    (lambda: CaneLoss(
        5, 9, candidates=3, noise_sampler=UnigramSampler(torch.tensor([0.0] * 5 + [1.0] * 4), 4,
                                                         shared=False)), ValueError,
     "CaneLoss: expected a noise_sampler that draws every class outside the candidates, got one "
     "that never draws 2 of them, such as 3"),
    (lambda: CaneLoss(5, 9, candidates=3, noise_sampler="unigram"), ValueError,
     "expected counts of 9 classes for .unigram., got none"),
    (lambda: CaneLoss(5, 9)(torch.zeros(2, 5), torch.zeros(2).long(), [1, 2]), TypeError,
     "CaneLoss: expected candidates as a tensor, got list"),
    (lambda: CaneLoss(-1, 9, candidates=3), ValueError, "CaneLoss: expected in_features of at "
     "least 0, got -1"),
    (lambda: CaneLoss(5, 10, candidates=0), ValueError, "CaneLoss: expected at least one class as "
     "candidates"),
    (lambda: CaneLoss(5, 10)(torch.zeros(3, 5), torch.zeros(3).long(), torch.tensor([1, 10])),
     IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10)(torch.zeros(3, 5), torch.zeros(3).long(), torch.tensor([1, -2])),
     IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10)
     (torch.zeros(6, 5), torch.zeros(6).long(), torch.zeros(2, 3, 4).long()), ValueError,
     r"CaneLoss: expected candidates of shape \[C\], or that of target with one more dimension"),
    (lambda: CaneLoss(5, 10)(torch.zeros(6, 5), torch.zeros(6).long(), torch.tensor(3)), ValueError,
     "expected candidates of shape"),
    (lambda: CaneLoss(5, 10, candidates=11), ValueError, r"CaneLoss: expected candidates in \[0, "
     r"10\], got 11"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1, 1])), ValueError, "CaneLoss: expected "
     "candidates without "
     "repeats"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1, 10])), IndexError, r"CaneLoss: expected "
     r"candidates in \[0, "
     r"10\), got 1 .. 10"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1.0])), TypeError, "CaneLoss: expected "
     "candidates as a number "
     "or 1-D int64 ids"),
    (lambda: CaneLoss(5, 10, candidates="midx"), TypeError, "CaneLoss: expected candidates as a "
     "number, .* got the str .midx.: pass a "
     "Sampler"),
    (lambda: CaneLoss(5, 10, candidates=UniformSampler(11, 3)), ValueError, "expected a sampler of "
     "10 classes for "
     "candidates, got one "
     "of 11"),
    (lambda: CaneLoss(5, 10, candidates=InBatchSampler(10)), ValueError, "expected a sampler that "
     "draws at least one class "
     "as candidates"),
    (lambda: CaneLoss(5, 10, candidates=4, num_noises=-1), ValueError, "CaneLoss: expected "
     "num_noises of at least 0, "
     "got -1"),
    (lambda: CaneLoss(5, 10, candidates=4, noise_reduction="mean"), ValueError,
     'expected noise_reduction to be "mean_of_logs" or'),
    (lambda: CaneLoss(5, 10, candidates=4, noise_sampler="nope"), ValueError, "make_sampler: "
     "expected one of"),
    (lambda: CaneLoss(5, 10, candidates=4, noise_sampler=UniformSampler(11, 4, shared=False)),
     ValueError, "expected a noise_sampler of 10 classes, got one of 11"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long()), ValueError,
     "CaneLoss: expected candidates in each call of a loss that was made with"),
    (lambda: CaneLoss(5, 10, candidates=4)
     (torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([1])), ValueError,
     "CaneLoss: expected no candidates in the call of a loss that has its own, got some"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([1.0])),
     TypeError, "CaneLoss: expected candidates of dtype int64, got float32"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([10])),
     IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10, candidates=4)
     (torch.zeros(2, 5), torch.tensor([1, 10])), IndexError, r"expected target in \[0, 10\)"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
