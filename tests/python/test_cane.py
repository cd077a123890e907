"""CaneLoss and the noise outside a set: the formulas, the statistics, and what users meet."""

import math

import pytest
import torch

import xsoftmax as xs
from cane_checks import REDUCTIONS, naive
from sampler_checks import check_scripted_compiled_and_saved, chi_square
from score_checks import assert_same_gradients
from xsoftmax import CaneLoss
from xsoftmax.samplers import (ComplementSampler, InBatchSampler, MidxSampler, StaticSampler, UniformSampler, UnigramSampler,
                               UnionSampler)
from xsoftmax.samplers.sampler import one_set

WEIGHTS = torch.tensor([9.0, 5, 4, 3, 2, 2, 1, 1, 1, 0.5])


# --- The noise ---

def noise_samplers():
    midx = MidxSampler(10, 4, codewords=3, refresh_every=0)
    midx.refresh(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)))
    return {"uniform": UniformSampler(10), "uniform but three": UniformSampler(10, exclude=3), "skewed": StaticSampler(WEIGHTS),
            "midx": midx}


@pytest.mark.parametrize("tries", [1, 2, 5])
@pytest.mark.parametrize("name", noise_samplers())
def test_noise_is_drawn_as_it_says(name, tries):
    """Never a candidate; counts that sum to 1 over what is outside, and that the draws have. Sets of several sizes in one batch."""
    complement = ComplementSampler(noise_samplers()[name], tries)
    sets = torch.tensor([[0, 1, 2, 5], [9, -1, -1, 0], [-1, -1, -1, -1]])
    n, input = 6000, torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    drawn = complement.sample(input, n, sets, torch.tensor([3, 1, 0]))
    assert not drawn.distinct and drawn.ids.shape == (3, n)
    for q in range(3):
        outside = [c for c in range(10) if c not in sets[q].tolist()]
        log_q = torch.stack([complement.sample(input, n, sets, torch.full((3,), c)).target_log_count[q] for c in outside]) - math.log(n)
        torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0), rtol=1e-5, atol=1e-5)
        counts = torch.bincount(drawn.ids[q], minlength=10)
        assert counts[outside].sum() == n
        assert chi_square(counts[outside], n * log_q.exp().double()) > 1e-3
        where = torch.tensor([outside.index(i) for i in drawn.ids[q].tolist()])
        torch.testing.assert_close(drawn.log_count[q], (log_q + math.log(n))[where], rtol=1e-5, atol=1e-5)


def test_noise_approaches_the_renormalised_sampler():
    """q / (1 - q(C)), the closer the more tries."""
    sampler, inside = StaticSampler(WEIGHTS), torch.tensor([0, 1])
    q = WEIGHTS / WEIGHTS.sum()
    want = (q[2:] / q[2:].sum()).log()
    errors = []
    for tries in (1, 4, 16):
        got = ComplementSampler(sampler, tries).sample(torch.zeros(8, 1), 1, inside, torch.arange(2, 10)).target_log_count
        errors.append((got - want).abs().max().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-4


def test_noise_for_all_queries_and_for_each():
    sampler = ComplementSampler(UniformSampler(50))
    input, target = torch.zeros(4, 1), torch.tensor([7, 8, 9, 10])
    torch.manual_seed(0)
    shared = sampler.sample(input, 3, torch.tensor([5, 2]), target)
    torch.manual_seed(0)
    private = sampler.sample(input, 3, torch.tensor([5, 2]).expand(4, 2), target)
    assert torch.equal(shared.ids, private.ids) and torch.equal(shared.log_count, private.log_count)
    torch.testing.assert_close(shared.target_log_count, torch.full((4,), math.log(3 / 48)))


def test_nothing_outside():
    drawn = ComplementSampler(UniformSampler(3)).sample(torch.zeros(2, 1), 4, torch.tensor([2, 0, 1]), torch.tensor([0, 1]))
    assert drawn.log_count.eq(math.inf).all() and drawn.ids.ge(0).all() and drawn.ids.lt(3).all()


# --- The loss ---

SOURCES = {"head": dict(candidates=4), "ids": dict(candidates=torch.tensor([7, 2, 11])), "none": dict(candidates=None),
           "given to all": dict(candidates=None), "given to each": dict(candidates=None)}


def given(source, Q):
    if source == "given to all":
        return torch.tensor([3, 1, 3, 8, -1])  # one of them twice
    if source == "none":
        return torch.zeros(0, dtype=torch.int64)
    if source == "given to each":
        return torch.randint(-1, 12, (Q, 5), generator=torch.Generator().manual_seed(5))
    return None


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
@pytest.mark.parametrize("source", SOURCES)
def test_equals_the_formula(monkeypatch, source, noise, bias, noise_reduction):
    N, Q = 12, 20
    torch.manual_seed(0)
    sampler = UniformSampler(N) if noise == "uniform" else StaticSampler(torch.arange(1, N + 1).double())
    loss = CaneLoss(5, N, num_noises=3, noise_sampler=sampler, noise_reduction=noise_reduction, bias=bias, reduction="none",
                    dtype=torch.float64, **SOURCES[source])
    draws, sample = [], ComplementSampler.sample
    monkeypatch.setattr(ComplementSampler, "sample", lambda *args: draws.append(sample(*args)) or draws[-1])
    input, target = torch.randn(Q, 5, dtype=torch.float64, requires_grad=True), torch.randint(N, (Q,))
    extra = given(source, Q)
    got = loss(input, target) if extra is None else loss(input, target, extra)
    (drawn,) = draws
    own = extra if extra is not None else loss.candidates
    sets = [sorted(set((own[q] if own.dim() == 2 else own).tolist())) for q in range(Q)]
    assert any(y in s for y, s in zip(target.tolist(), sets)) or source == "none"
    want = naive(loss.linear(input), target, sets, drawn.ids, drawn.log_count.double() - math.log(3),
                 drawn.target_log_count.double() - math.log(3), noise_reduction)
    torch.testing.assert_close(got, want)
    leaves = (input, *loss.parameters())
    ways = torch.randn(Q, dtype=torch.float64)
    assert_same_gradients(torch.autograd.grad(got @ ways, leaves), torch.autograd.grad(want @ ways, leaves))


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
def test_recovers_the_log_odds(noise, noise_reduction):
    """Theorem 1: for any candidates and noise, the expected gradient is zero at the softmax. Here the expectation over the targets and, to
    its standard error, over the noise."""
    N, draws = 10, 40_000
    p = WEIGHTS / WEIGHTS.sum()
    loss = CaneLoss(1, N, candidates=torch.tensor([0, 3, 9]), num_noises=2, bias=True, noise_reduction=noise_reduction, reduction="none",
                    noise_sampler=UniformSampler(N) if noise == "uniform" else StaticSampler(WEIGHTS.flip(0)), sparse_grad=False)
    with torch.no_grad():
        loss.linear.weight.zero_()
        loss.linear.bias.copy_(p.log() + 3.0)  # log Z is free
    torch.manual_seed(1)
    # Gradients of each query's scores: the bias of a table that is linear in one-hot inputs would do; here by a batch for each target.
    mean, variance = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    blocks = 100
    for y in range(N):
        parts = []
        for _ in range(blocks):
            value = loss(torch.zeros(draws // blocks, 1), torch.full((draws // blocks,), y)).mean()
            parts.append(torch.autograd.grad(value, loss.linear.bias)[0].double())
        parts = torch.stack(parts)
        mean += p[y] * parts.mean(0)
        variance += p[y] ** 2 * parts.var(0) / blocks
    assert (mean.abs() < 4.5 * variance.sqrt() + 1e-6).all()
    wrong = torch.zeros(N, dtype=torch.float64)  # the same sum away from the optimum is far from zero
    with torch.no_grad():
        loss.linear.bias[3] += 0.5
    for y in range(N):
        wrong += p[y] * torch.autograd.grad(loss(torch.zeros(4000, 1), torch.full((4000,), y)).mean(), loss.linear.bias)[0].double()
    assert wrong.abs().max() > 20 * variance.sqrt().max()


def excess_variance(monkeypatch, candidates, noise_reduction="mean_of_logs", num_noises=1):
    """Of the estimate of the logits from many targets, over that of the maximum likelihood estimate, less 1: the trace of H^-1 V H^-1
    (Theorem 3), H the expected second derivative of the loss at the softmax and V the variance of its gradient. Over all targets, and over
    all noises where there is one, else over as many draws."""
    N = len(WEIGHTS)
    p, outside = (WEIGHTS / WEIGHTS.sum()).double(), torch.arange(candidates, N)
    if num_noises == 1:
        noise = outside.unsqueeze(1)
    else:
        noise = outside[torch.randint(len(outside), (4000, num_noises), generator=torch.Generator().manual_seed(0))]
    target, noise = torch.arange(N).repeat_interleave(len(noise)), noise.repeat(N, 1)
    share = p[target] * N / len(target)
    log_count = torch.tensor(math.log(num_noises / len(outside)))
    drawn = one_set(noise, log_count.expand(noise.shape), log_count.expand(len(target)), False)
    monkeypatch.setattr(ComplementSampler, "sample", lambda *args: drawn)
    # The logits are the queries of a table that is the identity.
    loss = CaneLoss(N, N, candidates=candidates, num_noises=num_noises, noise_reduction=noise_reduction, reduction="sum", dtype=torch.float64)
    with torch.no_grad():
        loss.linear.weight.copy_(torch.eye(N))

    def gradients(logits):
        input = logits.expand(len(target), N).clone().requires_grad_()
        return torch.autograd.grad(loss(input, target), input)[0]

    at, h = p.log(), 1e-5
    V = gradients(at).T @ (gradients(at) * share.unsqueeze(1))
    H = torch.stack([share @ (gradients(at + h * e) - gradients(at - h * e)) / (2 * h) for e in torch.eye(N, dtype=torch.float64)])
    inverse = torch.linalg.pinv(H, rtol=1e-6)  # the sum of the logits is free
    fisher = p.diag() - p.outer(p)
    return ((inverse @ V @ inverse).trace() / torch.linalg.pinv(fisher, rtol=1e-6).trace()).item() - 1


def test_variance_falls_to_that_of_the_softmax(monkeypatch):
    """Corollary 1: as the candidates cover the targets. That of the gradient would say nothing: without a candidate it is zero."""
    found = [excess_variance(monkeypatch, candidates) for candidates in (1, 2, 4, 6, 8, 9)]
    assert all(a > b > 0 for a, b in zip(found, found[1:])), found
    assert found[0] > 1 and found[-1] < 1e-3, found


def test_log_of_mean_has_less_variance(monkeypatch):
    mean_of_logs, log_of_mean = (excess_variance(monkeypatch, 3, reduction, 4) for reduction in REDUCTIONS)
    assert 0 < log_of_mean < 0.9 * mean_of_logs, (log_of_mean, mean_of_logs)


def with_samplers(source, **kwargs):
    kwargs |= {"private midx": dict(candidates=MidxSampler(300, 6, codewords=8, distinct=True), num_candidates=20),
               "shared unigram": dict(candidates=UnigramSampler(torch.arange(1, 301)), num_candidates=20),
               "midx noise": dict(candidates=30, noise_sampler="midx", num_noises=4)}[source]
    return CaneLoss(6, 300, **kwargs)


@pytest.mark.parametrize("source", ["private midx", "shared unigram", "midx noise"])
def test_samplers_as_sources(monkeypatch, source):
    """The formula, for the sets and the noise that they draw."""
    torch.manual_seed(0)
    loss = with_samplers(source, reduction="none", dtype=torch.float64)
    draws, sample = [], ComplementSampler.sample
    monkeypatch.setattr(ComplementSampler, "sample", lambda *args: draws.append((args[3], sample(*args))) or draws[-1][1])
    input, target = torch.randn(64, 6, dtype=torch.float64), torch.randint(300, (64,))
    target[::2] = torch.randint(25, (32,))  # often among the candidates
    got = loss(input, target)
    ((found, noise),) = draws
    sets = (found.expand(64, -1) if found.dim() == 1 else found).tolist()
    assert 0.01 < sum(y in s for y, s in zip(target.tolist(), sets)) / 64 < 0.99
    n = noise.ids.shape[1]
    want = naive(input @ loss.linear.weight.T, target, sets, noise.ids, noise.log_count.double() - math.log(n),
                 noise.target_log_count.double() - math.log(n), "mean_of_logs")
    torch.testing.assert_close(got, want)
    # And the probabilities are those of four tries, then a uniform draw.
    q = loss.noise.sampler.log_prob(input, torch.arange(300)).double().exp().expand(64, 300)
    for i, (y, held) in enumerate(zip(target.tolist(), sets)):
        held = [c for c in held if c >= 0]
        if y not in held:
            f = q[i, held].sum()
            log_q = (q[i, y] * (1 + f + f**2 + f**3) + f**4 / (300 - len(held))).log()
            torch.testing.assert_close(noise.target_log_count[i].double() - math.log(n), log_q, rtol=1e-4, atol=1e-4)


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


def test_one_sampler_for_both_takes_each_step_once():
    sampler = MidxSampler(60, 6, codewords=4, learnable=True)
    sampler.note = lambda ids, note=sampler.note: noted.append(ids) or note(ids)
    loss, noted = CaneLoss(6, 60, candidates=sampler, num_candidates=5, noise_sampler=sampler), []
    assert loss.candidate_sampler is loss.noise.sampler
    for step in range(1, 4):
        loss(torch.randn(8, 6), torch.randint(60, (8,)))
        assert sampler.step.item() == step and len(noted) == 3 * step


@pytest.mark.parametrize("where", ["noise", "candidates"])
def test_learnable_samplers_learn(where):
    """Their codebooks get the gradient that SampledSoftmaxLoss gives them; the value of the loss is left as it is."""
    torch.manual_seed(0)
    sampler = MidxSampler(60, 6, codewords=4, learnable=True, distinct=True if where == "candidates" else None)
    kwargs = dict(noise_sampler=sampler, candidates=5) if where == "noise" else dict(candidates=sampler, num_candidates=5)
    loss = CaneLoss(6, 60, **kwargs)
    input, target = torch.randn(8, 6), torch.randint(60, (8,))
    target[3] = -100
    loss(input, target).backward()
    learnt = (loss.noise.sampler if where == "noise" else loss.candidate_sampler).codewords1
    assert learnt.grad is not None and learnt.grad.abs().max() > 0 and learnt.grad.isfinite().all()


def test_reduction_weights_and_ignored_targets():
    class_weight = torch.linspace(0.5, 2.0, 12)
    values = {}
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        loss = CaneLoss(5, 12, candidates=4, weight=class_weight, reduction=reduction, ignore_index=11)
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
    check_scripted_compiled_and_saved(lambda: CaneLoss(5, 40, candidates=UnigramSampler(torch.arange(1, 41)), num_candidates=7,
                                                       noise_sampler=StaticSampler(torch.arange(1, 41).double())))


SAMPLER = UniformSampler(10)


def outside(candidates, N=9):
    return ComplementSampler(UniformSampler(N)).sample(torch.zeros(2, 1), 3, torch.tensor(candidates), torch.zeros(2).long())


def test_opcheck():
    ops, candidates = torch.ops.xsoftmax, torch.tensor([[3, -1, 0], [-1, 7, 8]])
    torch.library.opcheck(ops.candidate_set.default, (torch.tensor([[3, -1, 3], [-1, 7, 8]]), 9))
    torch.library.opcheck(ops.complement_of.default, (candidates, 9))
    held = ops.complement_of(candidates, 9)
    torch.library.opcheck(ops.outside_uniform.default, (held, torch.rand(2, 4, dtype=torch.float64), 9))
    torch.library.opcheck(ops.is_held.default, (held, torch.randint(9, (2, 4))))


def test_noise_of_a_fixed_set_is_the_renormalised_sampler():
    weights = torch.arange(1.0, 31)
    loss = CaneLoss(4, 30, candidates=torch.tensor([29, 28, 3]), noise_sampler=StaticSampler(weights))
    outside = torch.tensor([c for c in range(30) if c not in (29, 28, 3)])
    torch.manual_seed(0)
    drawn = loss.noise.sample(torch.zeros(len(outside), 4), 1, loss.candidates, outside)
    torch.testing.assert_close(drawn.target_log_count, (weights[outside] / weights[outside].sum()).log(), rtol=1e-5, atol=1e-5)
    assert torch.isin(drawn.ids, outside).all()


def test_tries_of_ones_own():
    noise = ComplementSampler(UnigramSampler(torch.arange(1, 10)), tries=7)
    assert CaneLoss(5, 9, candidates=3, noise_sampler=noise).noise.tries == 7


BAD = [
    (lambda: CaneLoss(5, 9, candidates=3, noise_sampler=UnigramSampler(torch.tensor([0.0] * 5 + [1.0] * 4))), ValueError,
     "CaneLoss: expected a noise_sampler that draws every class outside the candidates, got one that never draws 2 of them, such as 3"),
    (lambda: CaneLoss(5, 9, candidates=3, noise_sampler="unigram"), ValueError, "expected noise_sampler as a module .* got 'unigram', which needs counts"),
    (lambda: CaneLoss(5, 9)(torch.zeros(2, 5), torch.zeros(2).long(), [1, 2]), TypeError, "CaneLoss: expected candidates as an int64 tensor, got list"),
    (lambda: CaneLoss(-1, 9, candidates=3), ValueError, "CaneLoss: expected in_features of at least 0, got -1"),
    (lambda: outside([[3, 3], [1, 2]]), ValueError, "ComplementSampler: expected candidates without repeats in a set, got 3 twice in that of query 0"),
    (lambda: outside([[3, 1], [1, 30]]), IndexError, r"ComplementSampler: expected candidates in \[0, 9\), or -1 for none, got 30 at \[1, 1\]"),
    (lambda: outside([4, -2]), IndexError, r"ComplementSampler: expected candidates in \[0, 9\), or -1 for none, got -2"),
    (lambda: outside([4.0, 2.0]), TypeError, "ComplementSampler: expected candidates of dtype int64, got float32"),
    (lambda: torch.ops.xsoftmax.outside_uniform(torch.zeros(2, 3).long(), torch.zeros(4, 2), 9), ValueError,
     "ComplementSampler: expected held with 1 row or 4, the queries, got 2"),
    (lambda: ComplementSampler(UnionSampler((UniformSampler(9), 3), (UnigramSampler(torch.ones(9), distinct=False), 2))), ValueError,
     "ComplementSampler: expected one sampler whose private draws are independent"),
    (lambda: CaneLoss(5, 9, candidates=UnionSampler((UniformSampler(9), 3), (MidxSampler(9, 5, codewords=2), 2)), num_candidates=3), ValueError,
     "CaneLoss: expected one sampler of candidates, which does not depend on the targets, got UnionSampler"),
    (lambda: ComplementSampler("uniform"), TypeError, "ComplementSampler: expected sampler to be a Sampler, got str"),
    (lambda: ComplementSampler(UniformSampler(9, distinct=True)), ValueError, "expected one sampler whose private draws are independent"),
    (lambda: ComplementSampler(InBatchSampler(9)), ValueError, "expected one sampler whose private draws are independent"),
    (lambda: ComplementSampler(SAMPLER, 0), ValueError, "expected tries of at least 1, got 0"),
    (lambda: ComplementSampler(SAMPLER).sample(torch.zeros(3, 2), 1, torch.zeros(2, 4).long(), torch.zeros(3).long()), ValueError,
     r"expected candidates of shape \[C\] or \[3, C\], got \[2, 4\]"),
    (lambda: CaneLoss(5, 10, candidates=0), ValueError, "CaneLoss: expected at least one of candidates"),
    (lambda: CaneLoss(5, 10, candidates=UniformSampler(10)), ValueError, "CaneLoss: expected num_candidates of at least 1 beside a sampler"),
    (lambda: CaneLoss(5, 10)(torch.zeros(3, 5), torch.zeros(3).long(), torch.tensor([1, 10])), IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10)(torch.zeros(3, 5), torch.zeros(3).long(), torch.tensor([1, -2])), IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10)(torch.zeros(6, 5), torch.zeros(6).long(), torch.zeros(2, 3, 4).long()), ValueError,
     r"CaneLoss: expected candidates of shape \[C\] or \[6\] \+ \[C\]"),
    (lambda: CaneLoss(5, 10)(torch.zeros(6, 5), torch.zeros(6).long(), torch.tensor(3)), ValueError, "expected candidates of shape"),
    (lambda: CaneLoss(5, 10, candidates=11), ValueError, r"CaneLoss: expected candidates in \[0, 10\], got 11"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1, 1])), ValueError, "CaneLoss: expected candidates without repeats"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1, 10])), IndexError, r"CaneLoss: expected candidates in \[0, 10\), got 1 .. 10"),
    (lambda: CaneLoss(5, 10, candidates=torch.tensor([1.0])), TypeError, "CaneLoss: expected candidates to be a number or a 1-D int64 tensor"),
    (lambda: CaneLoss(5, 10, candidates="midx"), TypeError, "CaneLoss: expected candidates as a number, .* got the str .midx.: give a sampler"),
    (lambda: CaneLoss(5, 10, candidates=4, num_candidates=3), ValueError, "CaneLoss: expected num_candidates and shared beside a sampler"),
    (lambda: CaneLoss(5, 10, candidates=UniformSampler(11)), ValueError, "expected a sampler of 10 classes for candidates, got one of 11"),
    (lambda: CaneLoss(5, 10, candidates=InBatchSampler(10)), ValueError, "expected one sampler of candidates, which does not depend on the targets"),
    (lambda: CaneLoss(5, 10, candidates=SAMPLER, num_candidates=11), ValueError, "UniformSampler: expected num_samples of at most 10"),
    (lambda: CaneLoss(5, 10, candidates=4, num_noises=-1), ValueError, "CaneLoss: expected num_noises of at least 0, got -1"),
    (lambda: CaneLoss(5, 10, candidates=4, noise_reduction="mean"), ValueError, 'expected noise_reduction to be "mean_of_logs" or'),
    (lambda: CaneLoss(5, 10, candidates=4, noise_sampler="nope"), ValueError, "make_sampler: expected one of"),
    (lambda: CaneLoss(5, 10, candidates=4, noise_sampler=UniformSampler(11)), ValueError, "expected a noise_sampler of 10 classes, got one of 11"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long()), ValueError, "CaneLoss: expected candidates, which a loss built with"),
    (lambda: CaneLoss(5, 10, candidates=4)(torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([1])), ValueError,
     "CaneLoss: expected candidates with the call of a loss that was built with candidates=None alone"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([1.0])), TypeError,
     "CaneLoss: expected candidates of dtype torch.int64, got torch.float32"),
    (lambda: CaneLoss(5, 10)(torch.zeros(2, 5), torch.zeros(2).long(), torch.tensor([10])), IndexError, r"expected candidates in \[0, 10\)"),
    (lambda: CaneLoss(5, 10, candidates=4)(torch.zeros(2, 5), torch.tensor([1, 10])), IndexError, r"expected target in \[0, 10\)"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
