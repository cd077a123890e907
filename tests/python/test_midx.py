"""MIDX draws what its formula says, from the index that it has."""

import contextlib
import copy
import math

import pytest
import torch

import xsoftmax as xs
from midx_checks import D, HEAD, K, N, Q, both_kinds, formula, make_sampler, seed, with_bias
from sampler_checks import check_scripted_compiled_and_saved, chi_square
from xsoftmax.samplers import MidxSampler, UnigramSampler, UnionSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax


@both_kinds
@with_bias
def test_log_prob_is_the_formula_and_sums_to_one(kind, bias):
    sampler, z, _, b = make_sampler(kind, bias)
    want = formula(sampler, z, b if bias else None)
    got = sampler.log_prob(z, torch.arange(N))
    assert got.dtype == torch.float32 and torch.isneginf(got[:, :HEAD]).all()
    torch.testing.assert_close(got[:, HEAD:].double(), want[:, HEAD:], rtol=0, atol=1e-5)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(Q))
    ids = torch.randint(N, (Q, 11))
    torch.testing.assert_close(sampler.log_prob(z, ids), got.gather(1, ids))


@both_kinds
@with_bias
def test_private_draws_follow_log_prob(kind, bias):
    sampler, z, _, _ = make_sampler(kind, bias)
    log_q = sampler.log_prob(z, torch.arange(N))
    proposal = sampler.sample(z, 30_000, False, torch.arange(Q) + HEAD)
    assert not proposal.distinct and proposal.ids.shape == (Q, 30_000)
    for q in range(Q):
        assert chi_square(torch.bincount(proposal.ids[q], minlength=N), log_q[q].double().exp() * 30_000) > 1e-4
    torch.testing.assert_close(proposal.log_count, log_q.gather(1, proposal.ids) + math.log(30_000), rtol=0, atol=1e-5)
    torch.testing.assert_close(proposal.target_log_count, log_q[torch.arange(Q), torch.arange(Q) + HEAD] + math.log(30_000), rtol=0, atol=1e-5)


@both_kinds
@with_bias
def test_draws_follow_a_stale_index(kind, bias):
    """The table moves on, the index does not: q is that of the index. An update moves single classes."""
    sampler, z, weight, b = make_sampler(kind, bias)
    before = sampler.log_prob(z, torch.arange(N))
    weight.normal_()
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(N)), before)
    rows = torch.arange(50, 90)
    sampler.update(weight, b if bias else None, rows)
    want = ops.midx_encode(weight, sampler.codewords1, sampler.codewords2)[0]
    assert torch.equal(sampler.cell[rows], want[rows]) and not torch.equal(sampler.cell[90:], want[90:])
    log_q = sampler.log_prob(z, torch.arange(N))
    torch.testing.assert_close(log_q[:, HEAD:].double(), formula(sampler, z, b if bias else None)[:, HEAD:], rtol=0, atol=1e-5)
    ids = sampler.sample(z, 30_000, False).ids
    assert chi_square(torch.bincount(ids[0], minlength=N), log_q[0].double().exp() * 30_000) > 1e-4


@with_bias
@pytest.mark.parametrize("size", [1, 20, 150, N - HEAD])
def test_distinct_private_draws_have_their_inclusion_probability(bias, size):
    sampler, z, _, _ = make_sampler(bias=bias, distinct=True)
    runs = 600
    seen = torch.zeros(Q, N)
    for _ in range(runs):
        proposal = sampler.sample(z, size, False)
        assert proposal.distinct and all(len(set(row)) == size for row in proposal.ids.tolist())
        assert proposal.ids.min() >= HEAD
        seen.scatter_add_(1, proposal.ids, torch.ones(Q, size))
    inclusion = torch.stack([sampler.sample(z, size, False, torch.full((Q,), i)).target_log_count for i in range(N)], 1).double().exp()
    torch.testing.assert_close(inclusion.sum(1), torch.full((Q,), float(size), dtype=torch.float64), rtol=1e-5, atol=0)
    assert ((inclusion > 1 - 1e-9) <= (seen == runs)).all()  # what is certain is always there
    spread = (inclusion * (1 - inclusion) / runs).sqrt()
    usual = inclusion * runs > 5
    assert ((seen / runs - inclusion).abs() < 6 * spread + 1e-9)[usual].all()
    torch.testing.assert_close(proposal.log_count.double().exp(), inclusion.gather(1, proposal.ids), rtol=1e-5, atol=0)


@both_kinds
@with_bias
@pytest.mark.parametrize("mixture", ["mean", "rms"])
@pytest.mark.parametrize("distinct", [False, True])
def test_shared_draws_follow_the_mixture(kind, bias, mixture, distinct):
    sampler, z, _, _ = make_sampler(kind, bias, mixture=mixture, distinct=distinct)
    log_q = sampler.log_prob(z, torch.arange(N)).double()
    want = log_q.exp().mean(0) if mixture == "mean" else log_q.exp().square().mean(0).sqrt()
    want = want / want.sum()
    got = sampler.mixture_log_prob(z, torch.arange(N)).double()
    torch.testing.assert_close(got.exp(), want, rtol=1e-5, atol=1e-12)
    runs, size = 800, 40
    seen = torch.zeros(N)
    for _ in range(runs):
        proposal = sampler.sample(z, size, True, torch.arange(Q) + 30)
        seen += torch.bincount(proposal.ids, minlength=N)
    if not distinct:
        assert chi_square(seen, want * size * runs) > 1e-4
        torch.testing.assert_close(proposal.log_count.double(), got[proposal.ids] + math.log(size), rtol=0, atol=1e-5)
        return
    assert proposal.ids.unique().numel() == size
    inclusion = torch.cat([sampler.sample(z, size, True, torch.arange(i, i + Q) % N).target_log_count for i in range(0, N, Q)]).double().exp()
    torch.testing.assert_close(inclusion.sum(), torch.tensor(float(size), dtype=torch.float64), rtol=1e-5, atol=0)
    free = inclusion < 1
    scale = (inclusion / want)[free & (want > 0)]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale), rtol=1e-4, atol=0)
    usual = inclusion * runs > 5
    assert ((seen / runs - inclusion).abs() < 6 * (inclusion * (1 - inclusion) / runs).sqrt() + 1e-9)[usual].all()


@pytest.mark.parametrize("distinct", [False, True])
def test_any_number_of_threads_draws_alike(distinct):
    torch.manual_seed(1)
    weight, z, target = torch.randn(5000, 32), torch.randn(300, 32), torch.randint(5000, (300,))
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            torch.manual_seed(7)
            sampler = MidxSampler(5000, 32, codewords=16)
            sampler.refresh(weight)
            seen.append([*sampler.sample(z, 50, False, target)[:3], *sampler.sample(z, 50, True, target)[:3],
                         *MidxSampler.sample(_with(sampler, distinct=distinct), z, 20, False, target)[:3], *sampler.buffers(),
                         sampler.log_prob(z, target[:40])])
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))


def _with(sampler, **attributes):
    clone = copy.copy(sampler)
    for name, value in attributes.items():
        setattr(clone, name, value)
    return clone


def test_exact_in_the_limit_of_one_class_a_cell():
    """As many codewords as classes: the index holds the table itself, and q is the softmax."""
    torch.manual_seed(0)
    weight, bias, z = torch.randn(40, 6), torch.randn(40), torch.randn(3, 6)
    sampler = MidxSampler(40, 6, codewords=40, bias=True, iterations=30)
    stats_ = sampler.refresh(weight, bias)
    assert stats_["distortion"] < 1e-6
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(40)), (z @ weight.T + bias).log_softmax(1), rtol=0, atol=1e-4)


@with_bias
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 8), (50, 5, 64), (700, 3, 2), (64, 4, 1)])
def test_odd_sizes(bias, shape):
    """One class, fewer classes than codewords, one codeword."""
    n, d, k = shape
    torch.manual_seed(0)
    weight, b, z = torch.randn(n, d), torch.randn(n), torch.randn(4, d)
    for kind in ("rq", "pq") if d > 1 else ("rq",):
        sampler = MidxSampler(n, d, codewords=k, kind=kind, bias=bias)
        sampler.refresh(weight, b if bias else None)
        log_q = sampler.log_prob(z, torch.arange(n))
        torch.testing.assert_close(log_q.exp().sum(1), torch.ones(4))
        ids = sampler.sample(z, 10, False).ids
        assert ids.min() >= 0 and ids.max() < n
        assert sampler.sample(z, n, True).ids.tolist() == list(range(n))
        assert sampler.sample(z, 0, False).ids.shape == (4, 0) and sampler.sample(z[:0], 3, False).ids.shape == (0, 3)
        assert sampler.sample(z[:0], min(n, 2), True).ids.shape == (min(n, 2),)


def test_queries_that_are_no_numbers_give_a_loss_that_is_none():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=8)
    for bad in (math.nan, math.inf):
        for shared in (False, True):
            loss.shared = shared
            x = torch.randn(3, D)
            x[1, 2] = bad
            assert not torch.isfinite(loss(x, torch.tensor([1, 2, 3])))


@both_kinds
@with_bias
def test_exact_midx_is_the_softmax(kind, bias):
    """Theorem 1: probabilities to 1e-5, and draws by chi-square, whatever the index."""
    sampler, z, weight, b = make_sampler(kind, bias, exact=True)
    ids = torch.arange(N)
    scores = (z.double() @ weight.double().T + (b if bias else 0)).masked_fill(ids < HEAD, -math.inf)
    log_p = scores.log_softmax(1)
    got = sampler.log_prob(z, ids)
    torch.testing.assert_close(got.exp().double(), log_p.exp(), rtol=1e-5, atol=1e-5)
    proposal = sampler.sample(z, 30_000, False, torch.arange(Q) + HEAD)
    for q in range(Q):
        assert chi_square(torch.bincount(proposal.ids[q], minlength=N), log_p[q].exp() * 30_000) > 1e-4
    torch.testing.assert_close(proposal.log_count, got.gather(1, proposal.ids) + math.log(30_000), rtol=0, atol=1e-4)
    torch.testing.assert_close(proposal.target_log_count, got[torch.arange(Q), torch.arange(Q) + HEAD] + math.log(30_000), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="private independent draws where exact is set"):
        sampler.sample(z, 3, True)
    # A loss draws from the table of the day.
    loss = xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(N, D, codewords=K, exact=True, refresh_every=0), num_samples=5, bias=bias)
    for _ in range(2):
        torch.nn.init.normal_(loss.linear.weight)
        loss(z, torch.arange(Q))
        torch.testing.assert_close(loss.sampler.log_prob(z, ids), loss.log_prob(z), rtol=0, atol=1e-4)


def test_the_default_estimator_approaches_the_full_gradient():
    """The mean gradient over many draws comes to the exact one as M grows, within its standard error and a bias that falls with M."""
    sampler, z, weight, _ = make_sampler()
    sampler = MidxSampler(N, D, codewords=K)
    sampler.refresh(weight)
    target = torch.randint(N, (Q,))
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=1)
    sampler.refresh_every = 0
    loss.linear.weight.data.copy_(weight)
    x = z.clone().requires_grad_()
    exact = torch.autograd.grad(loss.exact(x, target), x)[0]
    distance = {}
    for m in (16, 1024):
        loss.num_samples = m
        draws = torch.stack([torch.autograd.grad(loss(x, target), x)[0] for _ in range(100)])
        error = draws.std(0) / math.sqrt(100)
        distance[m] = (draws.mean(0) - exact).norm() / exact.norm()
        if m == 1024:
            assert ((draws.mean(0) - exact).abs() < 5 * error).all()
    assert distance[1024] < distance[16] / 4


@pytest.mark.parametrize("make", [
    lambda: MidxSampler(N, D, codewords=K), lambda: MidxSampler(N, D, codewords=K, spread=True),
    lambda: MidxSampler(N, D, codewords=K, update_every=1, refresh_every=4), lambda: MidxSampler(N, D, codewords=K, exact=True),
    lambda: UnionSampler((MidxSampler(N, D, codewords=K), 5), (UnigramSampler(torch.rand(N)), 9))])
@with_bias
def test_scripted_compiled_and_saved(make, bias):
    check_scripted_compiled_and_saved(lambda: xs.SampledSoftmaxLoss(D, N, sampler=make(), num_samples=7, head_classes=HEAD, bias=bias))


def test_exported_program_draws_from_the_index():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=6)
    loss(torch.randn(4, D), torch.randint(N, (4,)))

    class Draw(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sampler = loss.sampler

        def forward(self, x, ids):
            return self.sampler.log_prob(x, ids)

    x, ids = torch.randn(4, D), torch.randint(N, (4, 3))
    program = torch.export.export(Draw(), (x, ids))
    torch.testing.assert_close(program.module()(x, ids), loss.sampler.log_prob(x, ids))


@with_bias
def test_opcheck(bias):
    sampler, z, weight, b = make_sampler(bias=bias)
    index = [sampler.codewords1, sampler.codewords2, sampler.cell, sampler.order, sampler.start, sampler.mass, sampler.log_weight,
             sampler.prefix, sampler.heaviest]
    ids = torch.randint(N, (Q, 3))
    check = lambda op, args: torch.library.opcheck(op.default, args)  # noqa: E731
    check(ops.midx_log_prob, (z, *index, ids))
    check(ops.midx_mixture_log_prob, (z, *index, False, ids[0]))
    check(ops.midx_sample, (seed(1), z, *index, 4, False, ids[:, 0]))
    check(ops.midx_sample_shared, (seed(1), z, *index, 4, True, False, ids[:, 0]))
    check(ops.midx_encode, (weight, *index[:2]))
    check(ops.midx_cells, (sampler.cell, sampler.log_weight, K, N - HEAD))
    check(ops.kmeans, (seed(1), weight, 4, 3))
    table = (weight, b if bias else None, *((torch.rand(N), torch.tensor(3.0, dtype=torch.float64)) if bias else (None, None)))
    check(ops.midx_refresh_, (seed(1), *table, *index, True, 3, 100, True))
    check(ops.midx_update_, (*table, *index, ids[0]))
    check(ops.midx_step_, (seed(1), *table, torch.zeros([], dtype=torch.int64), torch.zeros(N, dtype=torch.bool), *index, True, 3, 3, 100, 4, 2))
    exact = (z, *index, weight, b if bias else None)
    check(ops.midx_exact_log_prob, (*exact, ids))
    check(ops.midx_exact_sample, (seed(1), *exact, 3))
    leaves = [sampler.codewords1.clone().requires_grad_(), sampler.codewords2.clone().requires_grad_(), weight]
    check(ops.midx_codebook_loss, (*leaves, b if bias else None, z))


@with_bias
def test_kernels_agree_with_the_composites(bias):
    sampler, z, weight, _ = make_sampler(bias=bias)
    ids, cells = torch.randint(N, (30,)), (sampler.cell, sampler.log_weight, K, N - HEAD)
    run = lambda: [sampler.log_prob(z, ids), *ops.midx_encode(weight, sampler.codewords1, sampler.codewords2), *ops.midx_cells(*cells)]  # noqa: E731
    kernel = run()
    with xs.use_impl("reference"):
        composite = run()
    for got, want in zip(kernel, composite):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change, error, message", [
    (dict(codewords=0), ValueError, "codewords of at least 1"), (dict(codewords=2000), ValueError, "at most 1024"),
    (dict(kind="opq"), ValueError, "kind as"), (dict(dim=0), ValueError, "dim of at least 1"), (dict(dim=1, kind="pq"), ValueError, "dim of at least 2"),
    (dict(mixture="max"), ValueError, "mixture as"), (dict(distinct=1), TypeError, "distinct as"), (dict(codewords=6.5), TypeError, "codewords of type int"),
    (dict(exclude=N), ValueError, "exclude to leave a class"), (dict(train_points=0), ValueError, "train_points"),
    (dict(refresh_every=-1), ValueError, "refresh_every of at least 0"),
    (dict(exact=True, spread=True), ValueError, "spread=False beside exact=True"),
])
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        MidxSampler(N, **({"dim": D} | change))


def test_bad_calls():
    sampler, z, weight, b = make_sampler()
    with pytest.raises(ValueError, match=r"MidxSampler: expected input of shape \[Q, 9\], got \[5, 8\]"):
        sampler.sample(z[:, :8], 4, False)
    with pytest.raises(IndexError, match="target in"):
        sampler.sample(z, 4, False, torch.full((Q,), N))
    with pytest.raises(ValueError, match="num_samples of at most 393"):
        sampler.sample(z, N, True)
    with pytest.raises(IndexError, match="ids in"):
        sampler.log_prob(z, torch.tensor([-1]))
    with pytest.raises(ValueError, match="expected no bias, as it was built with bias=False, got one"):
        sampler.refresh(weight, b)
    with pytest.raises(ValueError, match="finite"):
        sampler.refresh(weight * math.nan)
    with pytest.raises(ValueError, match="table of width 9"):
        xs.SampledSoftmaxLoss(D + 1, N, sampler=sampler, num_samples=3)
    hostile = copy.deepcopy(sampler)
    hostile.order.fill_(2**40)
    with pytest.raises(IndexError, match="order in"):
        hostile.sample(z, 4, False)
    hostile = copy.deepcopy(sampler)
    hostile.start.fill_(2**40)
    with pytest.raises(ValueError, match="start"):
        hostile.sample(z, 4, False)
    for distort in (lambda mass: mass.mul_(1e-4), lambda mass: mass.fill_(5e-324), lambda mass: mass.fill_(math.nan), lambda mass: mass.neg_()):
        hostile = copy.deepcopy(sampler)
        distort(hostile.mass)
        for shared in (False, True):
            with pytest.raises(ValueError, match="expected mass to be the number of classes"):
                hostile.sample(z, 4, shared)
    weighted = MidxSampler(N, D, codewords=K, bias=True, distinct=True)
    weighted.refresh(weight, b)
    for name, factor in (("mass", 1e-4), ("mass", math.nan), ("prefix", 1e-4), ("heaviest", 1e4), ("heaviest", -1.0)):
        hostile = copy.deepcopy(weighted)
        getattr(hostile, name).mul_(factor)
        for shared in (False, True):
            with pytest.raises(ValueError, match="expected mass to be the sum of the weights in prefix, and heaviest within it"):
                hostile.sample(z, 4, shared)
    hostile = copy.deepcopy(weighted)  # sums that end as they should, of weights that are none
    for begin, end in zip(hostile.start[:-1].tolist(), hostile.start[1:].tolist()):
        hostile.prefix[begin : max(begin, end - 1)] = 1e30
    for shared in (False, True):
        with contextlib.suppress(ValueError):
            drawn = hostile.sample(z, 4, shared)
            assert drawn.ids.min() >= 0 and drawn.ids.max() < N
    hostile = copy.deepcopy(sampler)
    hostile.cell.fill_(2**20)
    with pytest.raises(IndexError, match="cell in"):
        hostile.log_prob(z, torch.tensor([1]))


@pytest.mark.parametrize("distinct", [False, True])
def test_a_query_that_is_no_number_leaves_the_others_alone(distinct):
    sampler, z, _, _ = make_sampler(bias=True, distinct=distinct)
    z[0] = math.nan
    drawn = sampler.sample(z, 7, False, torch.full((Q,), 20))
    assert drawn.log_count[0].isnan().all() and drawn.target_log_count[0].isnan()
    assert drawn.log_count[1:].isfinite().all() and drawn.target_log_count[1:].isfinite().all()


def test_biases_far_apart_keep_light_classes_within_reach():
    for heavy in (0, 9):
        sampler = MidxSampler(10, 2, codewords=1, bias=True, distinct=True)
        bias = torch.full((10,), -40.0)
        bias[heavy] = 0
        sampler.refresh(torch.zeros(10, 2), bias)
        seen = torch.zeros(10)
        for _ in range(300):
            proposal = sampler.sample(torch.zeros(1, 2), 3, False)
            assert proposal.log_count.isfinite().all()
            seen[proposal.ids[0]] += 1
        assert seen[heavy] == 300 and seen.min() > 30


def test_scores_far_apart_keep_every_class_within_reach():
    weight = torch.tensor([[0.0], [400.0], [-400.0], [800.0]])
    z = torch.ones(3, 1)
    for mixture in ("mean", "rms"):
        sampler = MidxSampler(4, 1, codewords=2, mixture=mixture)
        sampler.refresh(weight)
        assert sampler.mixture_log_prob(z, torch.arange(4)).isfinite().all()
    exact = MidxSampler(4, 1, codewords=2, exact=True)
    exact.refresh(weight)
    weight[0] = 1e4  # a residual beyond any float
    exact.prepare(weight, None)
    torch.testing.assert_close(exact.log_prob(z, torch.arange(4)), (z @ weight.T).log_softmax(1))
