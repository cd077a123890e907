"""MIDX draws what its formula says, from an index that is what K-means and the class table make of it."""

import contextlib
import copy
import math

import pytest
import torch

import xsoftmax as xs
from sampler_checks import check_scripted_compiled_and_saved, chi_square
from xsoftmax.samplers import MidxSampler, UnigramSampler, UnionSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
N, D, K, Q, HEAD = 400, 9, 6, 5, 7


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def make_sampler(kind="rq", bias=False, **kwargs):
    """A sampler whose index knows a random table, and queries."""
    torch.manual_seed(0)
    weight, b = torch.randn(N, D), 1.5 * torch.randn(N)
    sampler = MidxSampler(N, D, codewords=kwargs.pop("codewords", K), kind=kind, bias=bias, exclude=HEAD, **kwargs)
    sampler.refresh(weight, b if bias else None)
    return sampler, torch.randn(Q, D), weight, b


def formula(sampler, z, bias=None):
    """log q [Q, N] of Theorem 2, written out: the softmax of codeword scores and biases."""
    k1, k2 = sampler.cell.long().clamp(min=0) // sampler.codewords, sampler.cell.long().clamp(min=0) % sampler.codewords
    z = z.double()
    z1, z2 = (z, z) if sampler.kind == "rq" else (z[:, :(D + 1) // 2], z[:, (D + 1) // 2:])
    score = z1 @ sampler.codewords1.double()[k1].T + z2 @ sampler.codewords2.double()[k2].T
    score = score if bias is None else score + bias
    return score.masked_fill(sampler.cell < 0, -math.inf).log_softmax(1)


both_kinds = pytest.mark.parametrize("kind", ["rq", "pq"])
with_bias = pytest.mark.parametrize("bias", [False, True])


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


def test_any_number_of_threads_lays_out_many_classes_alike():
    """Beyond 65,536 classes threads share the sort by cell; by weights and without some classes as well."""
    torch.manual_seed(1)
    n = 150_000
    weight, bias, queries, ids = torch.randn(n, 8), torch.randn(n), torch.randn(4, 8), torch.randint(n, (50,))
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            torch.manual_seed(7)
            sampler = MidxSampler(n, 8, codewords=16, bias=True, exclude=torch.arange(0, n, 7), train_points=1000, iterations=2)
            sampler.refresh(weight, bias)
            seen.append([*sampler.sample(queries, 20, False)[:2], sampler.log_prob(queries, ids), *sampler.buffers()])
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other))
    cell, order, start = sampler.cell.long(), sampler.order, sampler.start
    drawn = cell[cell >= 0]
    assert (cell[::7] == -1).all() and len(drawn) == n - len(cell[::7])
    assert torch.equal(start[1:], drawn.bincount(minlength=256).cumsum(0))
    assert torch.equal(order, torch.argsort(torch.where(cell < 0, 256, cell), stable=True)[: len(drawn)])


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


@pytest.mark.parametrize("table", ["zeros", "duplicates", "huge", "spread"])
def test_degenerate_tables(table):
    torch.manual_seed(0)
    weight = {"zeros": torch.zeros(60, 4), "duplicates": torch.randn(3, 4).repeat(20, 1), "huge": 300 * torch.randn(60, 4),
              "spread": torch.randn(60, 4) * torch.logspace(-6, 3, 60)[:, None]}[table]
    sampler = MidxSampler(60, 4, codewords=8)
    sampler.refresh(weight)
    z = torch.randn(5, 4)
    for shared in (False, True):
        for m in (1, 30, 60):
            proposal = sampler.sample(z, m, shared, torch.arange(5))
            assert torch.isfinite(proposal.log_count).all() and torch.isfinite(proposal.target_log_count).all()
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(60)).double().exp().sum(1), torch.ones(5, dtype=torch.float64), rtol=1e-5, atol=0)


def test_queries_that_are_no_numbers_give_a_loss_that_is_none():
    loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=8)
    for bad in (math.nan, math.inf):
        for shared in (False, True):
            loss.shared = shared
            x = torch.randn(3, D)
            x[1, 2] = bad
            assert not torch.isfinite(loss(x, torch.tensor([1, 2, 3])))


@both_kinds
def test_encoding_finds_the_nearest_codewords(kind):
    sampler, _, weight, _ = make_sampler(kind, codewords=37)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        rows = weight.to(dtype)
        cell, error = ops.midx_encode(rows, sampler.codewords1, sampler.codewords2)
        k1, k2 = (cell // 37).long(), (cell % 37).long()
        x = rows.float()
        if kind == "rq":
            best1 = torch.cdist(x, sampler.codewords1).argmin(1)
            rest = x - sampler.codewords1[best1]
            left = rest - sampler.codewords2[k2]
            assert (best1 == k1).all() and (torch.cdist(rest, sampler.codewords2).argmin(1) == k2).all()
        else:
            half = (D + 1) // 2
            assert (torch.cdist(x[:, :half], sampler.codewords1).argmin(1) == k1).all()
            assert (torch.cdist(x[:, half:], sampler.codewords2).argmin(1) == k2).all()
            left = x - torch.cat([sampler.codewords1[k1], sampler.codewords2[k2]], 1)
        torch.testing.assert_close(error, left.square().sum(1), rtol=1e-4, atol=1e-4)


def test_kmeans_lowers_the_inertia_and_finds_clusters():
    torch.manual_seed(0)
    centers = 20 * torch.randn(12, 5)
    rows = centers.repeat(50, 1) + 0.1 * torch.randn(600, 5)
    centroids, inertia = ops.kmeans(seed(3), rows, 12, 8)
    assert (inertia.diff() <= 1e-9).all() and inertia[-1] < 0.1
    assert torch.cdist(centers, centroids).min(1).values.max() < 0.2
    # From a bad start, clusters that no row is nearest to start again.
    centroids, inertia = ops.kmeans(seed(3), rows, 12, 8, torch.full((12, 5), 1e3))
    assert torch.cdist(rows, centroids).argmin(1).unique().numel() == 12


def test_refresh_reports_what_the_index_is():
    sampler, _, weight, _ = make_sampler()
    report = sampler.refresh(weight)
    k1, k2 = sampler.cell[HEAD:].long() // K, sampler.cell[HEAD:].long() % K
    rest = weight[HEAD:] - sampler.codewords1[k1] - sampler.codewords2[k2]
    assert report["cells"] == sampler.cell[HEAD:].unique().numel()
    assert report["mean_square"] == pytest.approx(weight[HEAD:].square().sum(1).mean().item(), rel=1e-5)
    assert report["distortion"] == pytest.approx(rest.square().sum(1).mean().item(), rel=1e-4)
    assert sampler.order.sort().values.tolist() == list(range(HEAD, N))


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


@both_kinds
def test_codebook_loss_is_its_formula_and_has_its_gradient(kind):
    sampler, z, weight, b = make_sampler(kind)
    rows, bias = weight[:60], b[:60]
    c1, c2 = sampler.codewords1.clone().requires_grad_(), sampler.codewords2.clone().requires_grad_()
    half = (D + 1) // 2
    w1 = c1[torch.cdist(rows if kind == "rq" else rows[:, :half], c1).argmin(1)]
    w2 = c2[torch.cdist(rows - w1 if kind == "rq" else rows[:, half:], c2).argmin(1)]
    w = w1 + w2 if kind == "rq" else torch.cat([w1, w2], 1)
    p, q = (z @ rows.T + bias).softmax(1), (z @ w.T + bias).softmax(1)
    want = (rows - w).square().sum(1).mean() + (p * p / q).sum(1).log().mean()
    got = ops.midx_codebook_loss(c1, c2, rows, bias, z)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(torch.autograd.grad(got, (c1, c2)), torch.autograd.grad(want, (c1, c2))):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@both_kinds
def test_learnable_codebooks_bring_q_nearer_to_the_softmax(kind):
    """By what they minimise, log sum p^2 / q of the index itself, from where K-means leaves it; and KL(q | p) does not pay for it."""
    torch.manual_seed(0)
    sampler = MidxSampler(N, D, codewords=K, kind=kind, learnable=True, refresh_every=20, learn_rows=N)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=20)
    torch.nn.init.normal_(loss.linear.weight)
    z, target = torch.randn(64, D), torch.randint(N, (64,))
    exact = (z @ loss.linear.weight.detach().T).log_softmax(1)

    def divergence():
        loss.sampler.refresh(loss.linear.weight)
        log_q = loss.sampler.log_prob(z, torch.arange(N))
        return (2 * exact - log_q).logsumexp(1).mean().item(), (log_q.exp() * (log_q - exact)).sum(1).mean().item()

    optimizer = torch.optim.Adam([loss.sampler.codewords1, loss.sampler.codewords2], lr=0.01)
    before = divergence()
    for _ in range(300):
        optimizer.zero_grad()
        loss(z, target).backward()
        optimizer.step()
    after = divergence()
    assert after[0] < before[0] - 0.15 and after[1] < 1.05 * before[1]


@both_kinds
@with_bias
def test_learnable_codebooks_learn(kind, bias):
    torch._dynamo.reset()
    torch.manual_seed(0)
    sampler = MidxSampler(N, D, codewords=K, kind=kind, learnable=True, refresh_every=50, iterations=0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=20, bias=bias)
    torch.nn.init.normal_(loss.linear.weight)
    sampler = loss.sampler
    z, target = torch.randn(64, D), torch.randint(N, (64,))
    optimizer = torch.optim.Adam([sampler.codewords1, sampler.codewords2], lr=0.02)
    measure = lambda: ops.midx_codebook_loss(sampler.codewords1, sampler.codewords2, loss.linear.weight, loss.linear.bias, z).item()  # noqa: E731
    loss(z, target)
    before = measure()
    for _ in range(200):
        optimizer.zero_grad()
        value = loss(z, target)
        value.backward()
        optimizer.step()
    assert measure() < 0.8 * before
    # Neither value nor gradient of the loss itself changes.
    plain = xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(N, D, codewords=K, kind=kind, refresh_every=0), num_samples=20, bias=bias)
    plain.load_state_dict({name: value for name, value in loss.state_dict().items() if name != "sampler.touched"})
    sampler.refresh_every = 0
    results = []
    for module in (loss, plain):
        torch.manual_seed(3)
        module.zero_grad()
        value = module(z, target)
        value.backward()
        results.append((value.detach(), module.linear.weight.grad.to_dense()))
    torch.testing.assert_close(results[0], results[1])
    # q is that of the codewords of the day.
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(N)).exp().sum(1), torch.ones(64))
    scripted = torch.jit.script(loss)
    assert torch.isfinite(scripted(z, target))
    assert torch.isfinite(torch.compile(loss, fullgraph=True, backend="aot_eager")(z, target))


def test_a_loss_refreshes_by_its_schedule():
    torch.manual_seed(0)
    sampler = MidxSampler(N, D, codewords=K, refresh_every=64, update_every=3)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler, num_samples=5)
    optimizer = xs.optim.RowSGD(loss.parameters(), lr=5.0)
    refreshed, recoded = [], []
    for step in range(130):
        codewords, cells = sampler.codewords1.clone(), sampler.cell.clone()
        optimizer.zero_grad()
        loss(torch.randn(8, D), torch.randint(N, (8,))).backward()
        if not torch.equal(codewords, sampler.codewords1):
            refreshed.append(step)
        elif not torch.equal(cells, sampler.cell):
            recoded.append(step)
        optimizer.step()
    assert refreshed == [0, 2, 4, 8, 16, 32, 64, 128]
    assert recoded and all(step % 3 == 0 for step in recoded)
    # Only rows that were scored may be marked, and an update leaves the others' cells alone.
    assert 0 < sampler.touched.sum() < N


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


@pytest.mark.parametrize("make", [
    lambda: MidxSampler(N, D, codewords=K), lambda: MidxSampler(N, D, codewords=K, spread=True),
    lambda: MidxSampler(N, D, codewords=K, update_every=1, refresh_every=4), lambda: MidxSampler(N, D, codewords=K, exact=True),
    lambda: UnionSampler((MidxSampler(N, D, codewords=K), 5), (UnigramSampler(torch.rand(N)), 9))])
@with_bias
def test_scripted_compiled_and_saved(make, bias):
    check_scripted_compiled_and_saved(lambda: xs.SampledSoftmaxLoss(D, N, sampler=make(), num_samples=7, head_classes=HEAD, bias=bias))


def test_state_dict_holds_the_index():
    sampler, z, _, _ = make_sampler(bias=True)
    other = MidxSampler(N, D, codewords=K, bias=True, exclude=HEAD)
    other.load_state_dict(sampler.state_dict())
    torch.testing.assert_close(other.log_prob(z, torch.arange(N)), sampler.log_prob(z, torch.arange(N)))
    torch.testing.assert_close(copy.deepcopy(sampler).half().log_prob(z, torch.arange(N)), sampler.log_prob(z, torch.arange(N)))
    # A checkpoint without one: built anew at the next step.
    plain, loss = torch.nn.Linear(D, N), xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=5, bias=True)
    loss(torch.randn(2, D), torch.tensor([1, 2]))
    loss.load_state_dict({f"linear.{name}": value for name, value in plain.state_dict().items()})
    assert loss.sampler.step == 0


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


@both_kinds
@with_bias
def test_spread_weighs_classes_by_what_their_codewords_leave(kind, bias):
    sampler, z, weight, b = make_sampler(kind, bias, spread=True)
    plain = formula(sampler, z, b if bias else None)
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(N))[:, HEAD:].double(), plain[:, HEAD:], rtol=0, atol=1e-5)  # no query yet
    for _ in range(3):
        sampler.sample(z, 4, False)
    sampler.refresh(weight, b if bias else None)
    k1, k2 = sampler.cell.long().clamp(min=0) // K, sampler.cell.long().clamp(min=0) % K
    coded = (sampler.codewords1[k1], sampler.codewords2[k2])
    rest = (weight - (sum(coded) if kind == "rq" else torch.cat(coded, 1))).square().sum(1)
    torch.testing.assert_close(sampler.spread[HEAD:], rest[HEAD:], rtol=1e-3, atol=1e-3)
    want = formula(sampler, z, rest * z.square().sum(1).mean() / (2 * D) + (b if bias else 0))
    log_q = sampler.log_prob(z, torch.arange(N))
    torch.testing.assert_close(log_q[:, HEAD:].double(), want[:, HEAD:], rtol=0, atol=1e-4)
    ids = sampler.sample(z, 30_000, False).ids
    assert chi_square(torch.bincount(ids[0], minlength=N), log_q[0].double().exp() * 30_000) > 1e-4
    # Codes that are made again take their class's rest with them.
    weight.normal_()
    sampler.update(weight, b if bias else None, torch.arange(50, 90))
    _, error = ops.midx_encode(weight, sampler.codewords1, sampler.codewords2)
    torch.testing.assert_close(sampler.spread[50:90], error[50:90])
    torch.testing.assert_close(sampler.spread[90:], rest[90:], rtol=1e-3, atol=1e-3)


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


def test_a_checkpoint_loads_into_any_loss():
    """Whatever its sampler keeps: the table is what counts."""
    table = dict(num_samples=6, bias=True)
    losses = [xs.LinearCrossEntropyLoss(D, N, bias=True)]
    losses.append(xs.SampledSoftmaxLoss(D, N, sampler="uniform", estimator="nce", log_z="learned", **table))
    losses.append(xs.SampledSoftmaxLoss(D, N, sampler="uniform", estimator="complementary_sum", **table))
    losses.append(xs.CaneLoss(D, N, candidates=MidxSampler(N, D, codewords=K, distinct=True), num_candidates=4, noise_sampler="midx", bias=True))
    losses += [xs.SampledSoftmaxLoss(D, N, sampler=sampler, **table)
               for sampler in ("uniform", "in_batch", "midx", "lsh", "sphere", "rff", MidxSampler(N, D, codewords=K, update_every=2),
                               UnionSampler((UnigramSampler(torch.rand(N)), 3), (MidxSampler(N, D, codewords=K), 2)))]
    x, target = torch.randn(4, D), torch.randint(N, (4,))
    for one in losses:
        one(x, target)
        for other in losses:
            other.load_state_dict(one.state_dict())
            assert torch.equal(one.linear.weight, other.linear.weight) and other(x, target).isfinite()


def test_unions_refresh_their_parts():
    union = UnionSampler((UnigramSampler(torch.rand(N)), 3), (MidxSampler(N, D, codewords=K), 2))
    stats = union.refresh(torch.randn(N, D))
    assert stats["1.cells"] > 1 and union.parts[1].step == 1


@pytest.mark.parametrize("distinct", [False, True])
def test_a_query_that_is_no_number_leaves_the_others_alone(distinct):
    sampler, z, _, _ = make_sampler(bias=True, distinct=distinct)
    z[0] = math.nan
    drawn = sampler.sample(z, 7, False, torch.full((Q,), 20))
    assert drawn.log_count[0].isnan().all() and drawn.target_log_count[0].isnan()
    assert drawn.log_count[1:].isfinite().all() and drawn.target_log_count[1:].isfinite().all()


def test_one_bad_batch_does_not_spoil_the_spread():
    sampler, z, weight, _ = make_sampler(spread=True)
    sampler.sample(z, 3, False)
    before = sampler.query_square.clone()
    sampler.sample(torch.full_like(z, math.inf), 3, False)
    assert torch.equal(sampler.query_square, before)
    sampler.refresh(weight)


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


def test_learnable_codebooks_beside_losses_of_every_kind():
    def gradient(**kwargs):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(N, D, codewords=K, learnable=True, learn_rows=N), num_samples=5, **kwargs)
        x, target = torch.randn(8, D), torch.randint(N, (8,))
        target[0], x[0] = -100, math.nan
        value = loss(x, target, torch.Generator().manual_seed(1))
        value.sum().backward()
        return loss.sampler.codewords1.grad

    torch.testing.assert_close(gradient(), gradient(reduction="none"))
    assert gradient().isfinite().all() and gradient().abs().sum() > 0
    loss = xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(N, D, codewords=K, learnable=True), num_samples=5).bfloat16()
    assert loss.sampler.codewords1.dtype == torch.float32
    loss(torch.randn(3, D, dtype=torch.bfloat16), torch.tensor([1, 2, 3])).backward()
    empty = loss(torch.randn(0, D, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.int64))
    assert empty.isnan() or empty == 0  # as torch: the mean of nothing
    codewords = loss.sampler.codewords1.clone()
    loss.sampler.refresh(loss.linear.weight)  # codes anew under what was learnt
    assert torch.equal(codewords, loss.sampler.codewords1)
