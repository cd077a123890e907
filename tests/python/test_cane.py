"""CaneLoss, BeamTreeLoss and the noise outside a set: the formulas, the statistics, and what users meet."""

import math

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from sampler_checks import check_scripted_compiled_and_saved, chi_square
from score_checks import assert_same_gradients
from tree_checks import TREES
from xsoftmax import BeamTreeLoss, CaneLoss, LabelTree
from xsoftmax.samplers import (ComplementSampler, InBatchSampler, MidxSampler, StaticSampler, UniformSampler, UnigramSampler,
                               UnionSampler)
from xsoftmax.samplers.sampler import one_set

REDUCTIONS = ["mean_of_logs", "log_of_mean"]
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

def naive(scores, target, sets, noise, log_q, target_log_q, noise_reduction):
    """[Q]: lists of classes, and what the noise is; in double."""
    losses = []
    for q, y in enumerate(target.tolist()):
        inside, s = [c for c in sets[q] if c >= 0], scores[q]
        own = s[inside] if inside else s[:0]
        draws = s[noise[q]] - log_q[q]
        at_target = (s[y] - target_log_q[q]).unsqueeze(0)
        n = len(draws)
        if noise_reduction == "mean_of_logs":
            if y in inside:
                losses.append(torch.stack([torch.cat([own, d.unsqueeze(0)]).logsumexp(0) for d in draws]).mean() - s[y])
            else:
                losses.append(torch.cat([own, at_target]).logsumexp(0) - s[y])
        else:
            others = draws if y in inside else torch.cat([at_target, draws[1:]])
            losses.append(torch.cat([own, others - math.log(n)]).logsumexp(0) - s[y])
    return torch.stack(losses)


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


@pytest.mark.parametrize("source", ["private midx", "shared unigram", "midx noise"])
def test_samplers_as_sources(source):
    """A set of each query, or of the batch; what the batch does not cover is exact in its log count all the same."""
    torch.manual_seed(0)
    kwargs = {"private midx": dict(candidates=MidxSampler(300, 6, codewords=8, distinct=True), num_candidates=20),
              "shared unigram": dict(candidates=UnigramSampler(torch.arange(1, 301)), num_candidates=20),
              "midx noise": dict(candidates=30, noise_sampler="midx", num_noises=4)}[source]
    loss = CaneLoss(6, 300, **kwargs)
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


# --- The beam tree ---

def make_tree_loss(tree=None, D=5, dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    kwargs = dict(num_candidates=5, num_noises=3) | kwargs
    loss = BeamTreeLoss(D, LabelTree.balanced(40, 3) if tree is None else tree, dtype=dtype, **kwargs)
    torch.nn.init.normal_(loss.edges.weight)
    return loss


@pytest.mark.parametrize("noise_reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("noise", ["uniform", "skewed"])
@pytest.mark.parametrize("tree", ["balanced", "huffman", "flat", "equal mass", "routed"])
def test_beam_tree_equals_the_formula(monkeypatch, tree, noise, bias, noise_reduction):
    """CANE over the sums of all paths, with the candidates and the noise of the step."""
    routed = tree == "routed"
    tree = TREES["equal mass" if routed else tree]
    N, Q = tree.num_classes, 40
    sampler = UniformSampler(N) if noise == "uniform" else StaticSampler(torch.arange(1, N + 1).double())
    loss = make_tree_loss(tree, num_candidates=12, noise_sampler=sampler, noise_reduction=noise_reduction, bias=bias, reduction="none",
                          routed=routed)
    draws, sample = [], ComplementSampler.sample
    monkeypatch.setattr(ComplementSampler, "sample", lambda *args: draws.append((args[3], sample(*args))) or draws[-1][1])
    input = torch.randn(Q, 5, dtype=torch.float64, requires_grad=True)
    target = torch.where(torch.rand(Q) < 0.5, loss.predict(input), torch.randint(N, (Q,)))  # often among the candidates
    torch.manual_seed(4)
    got = loss(input, target)
    ((candidates, drawn),) = draws
    if not routed:
        assert torch.equal(candidates, loss.candidates(input))
    assert 0.1 < xs.metrics.coverage(candidates, target) < 1
    want = naive(loss.scores(input), target, candidates.tolist(), drawn.ids, drawn.log_count.double() - math.log(3),
                 drawn.target_log_count.double() - math.log(3), noise_reduction)
    torch.testing.assert_close(got, want)
    leaves = (input, *loss.parameters())
    ways = torch.randn(Q, dtype=torch.float64)
    assert_same_gradients(torch.autograd.grad(got @ ways, leaves), torch.autograd.grad(want @ ways, leaves))


def test_routed_candidates():
    """Different classes of the best subset, all of it where it is small; each class of it alike often."""
    tree = LabelTree.from_frequencies(1.0 / torch.arange(1, 101), 6)
    loss = make_tree_loss(tree, num_candidates=7, routed=True)
    input = torch.randn(1, 5, dtype=torch.float64).expand(9000, 5)
    best = int((input[:1] @ loss.edges.weight[:6].T).argmax()) + 1
    members = tree.node_class[int(tree.first_child[best]) : int(tree.first_child[best + 1])]
    torch.manual_seed(1)
    found = loss.candidates(input)
    assert torch.isin(found[found >= 0], members).all()
    assert all(len(set(row)) == len(row) for row in ([c for c in row if c >= 0] for row in found.tolist()))
    if len(members) > 7:
        counts = torch.bincount(found.flatten(), minlength=100)[members].double()
        assert (counts / 9000 - 7 / len(members)).abs().max() < 0.03
        # Any two of them together alike often, too.
        there = (found.unsqueeze(2) == members).any(1).double()
        together = (there.t() @ there)[~torch.eye(len(members), dtype=torch.bool)] / 9000
        assert (together - 7 * 6 / (len(members) * (len(members) - 1))).abs().max() < 0.03
    small = [v for v in range(1, 7) if int(tree.first_child[v + 1] - tree.first_child[v]) < 7]
    assert small  # the most frequent classes stand in small subsets
    with torch.no_grad():
        loss.edges.weight[small[0] - 1] = 100 * input[0]
    found = loss.candidates(input[:1])[0]
    held = tree.node_class[int(tree.first_child[small[0]]) : int(tree.first_child[small[0] + 1])]
    assert sorted(found[found >= 0].tolist()) == sorted(held.tolist()) and found[len(held) :].eq(-1).all()


def test_beam_as_wide_as_the_tree_is_the_exact_loss():
    loss = make_tree_loss(num_candidates=100)
    assert loss.num_candidates == 40 and loss.num_noises == 0
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(40, (6,))
    torch.testing.assert_close(loss(input, target), F.cross_entropy(loss.scores(input), target))
    torch.testing.assert_close(loss.eval()(input, target), loss.exact(input, target))


def test_candidates_of_a_wider_beam():
    """The best of all classes once the beam is as wide as the tree; topk and predict look as far."""
    input = torch.randn(50, 5, dtype=torch.float64)
    loss = make_tree_loss(num_candidates=4, beam=1000)
    assert loss.beam == 40 and "beam=40" in repr(loss)
    want = loss.scores(input).topk(4).indices
    assert torch.equal(loss.candidates(input), want)
    assert torch.equal(loss.topk(input, 2)[1], want[:, :2]) and torch.equal(loss.predict(input), want[:, 0])
    narrow = make_tree_loss(num_candidates=4)
    assert not torch.equal(narrow.candidates(input), want)
    assert torch.equal(make_tree_loss(num_candidates=4, beam=4).candidates(input), narrow.candidates(input))
    assert torch.equal(torch.jit.script(loss).candidates(input), want)
    for beam in (3, 0):
        with pytest.raises(ValueError, match="BeamTreeLoss: expected beam of at least"):
            make_tree_loss(num_candidates=4, beam=beam)


@pytest.mark.parametrize("tree", TREES)
def test_scores_exact_and_topk(tree):
    tree = TREES[tree]
    loss = make_tree_loss(tree, bias=True, num_candidates=1)
    input, target = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(tree.num_classes, (2, 3))
    target[0, 1] = -100
    edges = loss.edges(input)
    path = tree.path(torch.arange(tree.num_classes)) - 1
    want = torch.stack([edges[..., [e for e in row if e >= 0]].sum(-1) for row in path.tolist()], -1)
    torch.testing.assert_close(loss.scores(input), want)
    torch.testing.assert_close(loss.log_prob(input), want.log_softmax(-1))
    torch.testing.assert_close(loss.exact(input, target), F.cross_entropy(want.flatten(0, 1), target.flatten()))
    k = min(4, tree.num_classes)
    values, classes = loss.topk(input, k, tree.num_classes)
    torch.testing.assert_close(values, want.topk(k).values)
    torch.testing.assert_close(want.gather(-1, classes), values)
    assert loss.predict(input).shape == (2, 3)


@pytest.mark.parametrize("tree", TREES)
def test_class_table_and_balance(tree):
    """Balanced edges give the same scores; the children of a node that is not the root then sum to zero."""
    tree = TREES[tree]
    loss, input = make_tree_loss(tree, bias=True), torch.randn(7, 5, dtype=torch.float64)
    torch.nn.init.normal_(loss.edges.bias)
    want = loss.scores(input)
    torch.testing.assert_close(F.linear(input, *loss.class_table()), want)
    loss.balance()
    torch.testing.assert_close(loss.scores(input), want)
    for node in range(1, tree.num_nodes):
        children = slice(int(tree.first_child[node]) - 1, int(tree.first_child[node + 1]) - 1)
        assert loss.edges.weight[children].sum(0).abs().max() < 1e-12 and loss.edges.bias[children].sum().abs() < 1e-12


def test_balance_every():
    """In training alone; counted across checkpoints; by 0 never."""
    input, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(40, (7,))
    loss = make_tree_loss(balance_every=3)
    other = make_tree_loss(balance_every=3)

    def balanced(loss):
        children = slice(int(loss.tree.first_child[1]) - 1, int(loss.tree.first_child[2]) - 1)
        return bool(loss.edges.weight[children].sum(0).abs().max() < 1e-12)

    loss.eval()(input, target)
    for step in range(1, 4):
        assert not balanced(loss)
        loss.train()(input, target)
        if step == 2:
            other.load_state_dict(loss.state_dict())
            other(input, target)
            assert balanced(other)
    assert balanced(loss)
    never = make_tree_loss(balance_every=0)
    for _ in range(5):
        never(input, target)
    assert not balanced(never)
    assert make_tree_loss().balance_every == 100


def test_balance_leaves_alone_what_does_not_learn():
    """Edges that are frozen, that are someone else's, or of a call that records no gradient."""
    input, target = torch.randn(7, 5, dtype=torch.float64), torch.randint(40, (7,))
    loss = make_tree_loss(balance_every=1)
    before = loss.edges.weight.detach().clone()
    with torch.no_grad():
        loss(input, target)
    given = {name: parameter.detach().clone().requires_grad_() for name, parameter in loss.named_parameters()}
    torch.func.functional_call(loss, given, (input, target))
    assert torch.equal(given["edges.weight"], before)
    loss.edges.weight.requires_grad_(False)
    loss(input, target)
    assert torch.equal(loss.edges.weight, before) and loss.steps == 0
    loss.edges.weight.requires_grad_()
    loss(input, target)
    assert not torch.equal(loss.edges.weight, before) and loss.steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_exact_loss_of_16_bit_edges_is_summed_in_float32(dtype, reduction):
    torch.manual_seed(0)
    loss = BeamTreeLoss(16, LabelTree.random(400, 4), num_candidates=3, num_noises=1, bias=True, reduction=reduction, dtype=dtype).eval()
    input, target = torch.randn(30, 16, dtype=dtype), torch.randint(400, (30,))
    target[3] = -100
    got = loss(input, target)
    weight, bias = (loss._along_paths(table).double() for table in (loss.edges.weight.double().t(), loss.edges.bias.double().unsqueeze(0)))
    want = F.cross_entropy(input.double() @ weight + bias, target, reduction=reduction)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_losses_over_one_tree_share_checkpoints():
    tree = LabelTree.random(40, 4)
    beam, hierarchical = BeamTreeLoss(5, tree, num_candidates=3, num_noises=1), xs.HierarchicalSoftmaxLoss(5, tree)
    hierarchical.load_state_dict(beam.state_dict())
    assert torch.equal(hierarchical.edges.weight, beam.edges.weight)
    other = BeamTreeLoss(5, tree, num_candidates=3, num_noises=1)
    other.load_state_dict(hierarchical.state_dict())
    assert torch.equal(other.edges.weight, beam.edges.weight)
    input, target = torch.randn(3, 5), torch.tensor([1, 5, 39])
    assert torch.equal(hierarchical.exact(input, target), hierarchical(input, target))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_beam_tree_compiled_for_any_batch(routed, training):
    """One graph for several sizes: in eval() the exact loss, too."""
    loss = BeamTreeLoss(5, TREES["equal mass"], num_candidates=6, num_noises=2, routed=routed).train(training)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (5, 6, 9):
        input, target = torch.randn(size, 5), torch.randint(99, (size,))
        torch.manual_seed(1)
        got = compiled(input, target)
        torch.manual_seed(1)
        torch.testing.assert_close(got, loss(input, target))


@pytest.mark.parametrize("call", ["forward", "exact"])
def test_balance_between_forward_and_backward(call):
    """Several losses may wait for one backward pass, whichever step balances: their gradients depend on whole paths alone."""
    input, target = torch.randn(9, 5, dtype=torch.float64, requires_grad=True), torch.randint(40, (9,))
    gradients = []
    for balanced in (False, True):
        loss = make_tree_loss(bias=True)
        torch.manual_seed(2)
        value = getattr(loss, call)(input, target)
        if balanced:
            loss.balance()
        gradients.append(torch.autograd.grad(value, (input, *loss.parameters())))
    assert_same_gradients(*gradients)


def test_balance_of_edges_in_any_layout():
    """The kernel, the composite, a table in columns, 16-bit edges."""
    for tree in TREES.values():
        table = torch.randn(tree.num_edges, 5, dtype=torch.float64)
        results = []
        for name in ("kernel", "reference"):
            with xs.use_impl(name):
                results.append(table.clone())
                torch.ops.xsoftmax.tree_balance_(results[-1], tree.first_child, tree.layer_sizes)
        results.append(table.clone().t().contiguous().t())
        torch.ops.xsoftmax.tree_balance_(results[-1], tree.first_child, tree.layer_sizes)
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(results[0], results[2])
        low = table.bfloat16()
        torch.ops.xsoftmax.tree_balance_(low, tree.first_child, tree.layer_sizes)
        torch.testing.assert_close(low.double(), results[0], rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="tree_balance_: expected the children of node"):
        torch.ops.xsoftmax.tree_balance_(torch.zeros(284, 5), torch.zeros(286, dtype=torch.int64), TREES["balanced"].layer_sizes)
    assert BeamTreeLoss(5, TREES["balanced"], num_candidates=3, num_noises=1, dtype=torch.bfloat16).balance_every == 0


def test_a_loss_has_a_tree_of_its_own():
    """A checkpoint with a tree of other layers, and as many nodes: the loss goes on with that tree, another with its own."""
    counts = [torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1]), torch.ones(8)]
    one, other = (LabelTree.huffman(some) for some in counts)
    assert one.num_nodes == other.num_nodes and one.layer_sizes != other.layer_sizes
    input, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(8, (6,))
    for make in (lambda tree: make_tree_loss(tree), lambda tree: xs.HierarchicalSoftmaxLoss(5, tree, dtype=torch.float64)):
        first, second, third = make(one), make(other), make(other)
        want, kept = first.log_prob(input), third.log_prob(input)
        second.load_state_dict(first.state_dict())
        torch.testing.assert_close(second.log_prob(input), want)
        assert second(input, target).isfinite()
        assert torch.equal(third.log_prob(input), kept) and other.layer_sizes != one.layer_sizes


def test_beam_tree_learns():
    """Classes in clusters, the tree built of their centres: coverage and accuracy rise; a step's gradient has a static number of rows."""
    torch.manual_seed(0)
    centres = (3 * torch.randn(40, 1, 16) + torch.randn(40, 8, 16)).flatten(0, 1)
    tree = LabelTree.from_vectors(centres, 8, generator=torch.Generator().manual_seed(0))
    loss = BeamTreeLoss(16, tree, num_candidates=9, num_noises=1)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.02)
    test, classes = centres + 0.3 * torch.randn(320, 16), torch.arange(320)
    assert xs.metrics.coverage(loss.candidates(test), classes) < 0.2
    for step in range(150):
        target = torch.randint(320, (200,))
        optimizer.zero_grad()
        loss(centres[target] + 0.3 * torch.randn(200, 16), target).backward()
        grad = loss.edges.weight.grad
        assert grad.is_sparse and grad._nnz() == sum(min(200 * 11, size) for size in tree.layer_sizes)
        optimizer.step()
    assert xs.metrics.coverage(loss.candidates(test), classes) > 0.95
    assert (loss.predict(test) == classes).float().mean() > 0.9


def test_ignored_queries_take_no_part():
    loss = make_tree_loss(TREES["balanced"])
    input, target = torch.randn(5, 5, dtype=torch.float64), torch.tensor([3, -100, 7, -100, 9])
    input[1] = math.inf
    input.requires_grad_()
    loss(input, target).backward()
    assert input.grad[1::2].eq(0).all() and input.grad[::2].ne(0).any(1).all()
    assert loss.edges.weight.grad.to_dense().isfinite().all()
    assert loss(input, torch.full((5,), -100)).isnan()


@pytest.mark.parametrize("routed", [False, True])
def test_beam_tree_scripted_compiled_and_saved(routed):
    tree = TREES["equal mass"]
    check_scripted_compiled_and_saved(lambda: BeamTreeLoss(5, tree, num_candidates=6, num_noises=2, routed=routed))


def test_beam_tree_autocast():
    loss = make_tree_loss(dtype=torch.float32, num_candidates=40)
    input, target = torch.randn(6, 5).bfloat16(), torch.randint(40, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(input, target)
        classes = loss.topk(input, 3)[1]
    torch.testing.assert_close(value, loss(input.float(), target))
    assert torch.equal(classes, loss.topk(input.float(), 3)[1])


def test_coverage():
    candidates = torch.tensor([[1, 2, -1], [3, 4, 5], [0, -1, -1], [7, 8, 9]])
    assert xs.metrics.coverage(candidates, torch.tensor([2, 2, 0, -1])) == pytest.approx(2 / 3)
    assert xs.metrics.coverage(torch.tensor([1, 2]), torch.tensor([2, 2, 0, 1])) == 0.75


TREE = TREES["balanced"]
SAMPLER = UniformSampler(10)
BAD = [
    (lambda: ComplementSampler(UnionSampler((UniformSampler(9), 3), (UnigramSampler(torch.ones(9), distinct=False), 2))), ValueError,
     "ComplementSampler: expected one sampler whose private draws are independent"),
    (lambda: CaneLoss(5, 9, candidates=UnionSampler((UniformSampler(9), 3), (MidxSampler(9, 5, codewords=2), 2)), num_candidates=3), ValueError,
     "CaneLoss: expected one sampler of candidates, which does not depend on the targets, got UnionSampler"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1, noise_sampler=MidxSampler(200, 5)), ValueError,
     "BeamTreeLoss: expected a noise_sampler that follows no class table, which a tree has none of, got MidxSampler"),
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
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), -1), ValueError, r"expected k in \[0, 200\], got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=3, num_noises=1).topk(torch.zeros(2, 5), 201), ValueError, r"expected k in \[0, 200\]"),
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
    (lambda: BeamTreeLoss(5, TREE, num_candidates=0, num_noises=1), ValueError, "BeamTreeLoss: expected num_candidates of at least 1, got 0"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, balance_every=-1), ValueError, "expected balance_every of at least 0, got -1"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1.5), TypeError, "BeamTreeLoss: expected num_noises of type int, got float"),
    (lambda: BeamTreeLoss(5, TREE, num_candidates=5, num_noises=1, routed=True), ValueError, "expected a tree of one layer of subsets"),
    (lambda: make_tree_loss()(torch.zeros(2, 5).double(), torch.tensor([1, 40])), IndexError, r"expected target in \[0, 40\).*got 40 at \[1\]"),
    (lambda: make_tree_loss().topk(torch.zeros(2, 5).double(), 7, 3), ValueError, "BeamTreeLoss: expected width of at least k=7, got 3"),
    (lambda: xs.metrics.coverage([1], torch.tensor([1])), TypeError, "coverage: expected candidates as an int64 tensor, got list"),
    (lambda: xs.metrics.coverage(torch.zeros(2, 3).long(), torch.tensor([1])), ValueError, r"got \[2, 3\] and \[1\]"),
    (lambda: xs.metrics.coverage(torch.zeros(3).long(), torch.tensor([-1])), ValueError, "expected a target of 0 or more, got none"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
