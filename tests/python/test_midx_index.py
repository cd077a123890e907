"""The index of MIDX: what K-means, the class table and learning make of it, and when it is made again."""

import copy
import math

import pytest
import torch

import xsoftmax as xs
from midx_checks import D, HEAD, K, N, both_kinds, formula, make_sampler, seed, with_bias
from sampler_checks import chi_square
from xsoftmax.samplers import MidxSampler, UnigramSampler, UnionSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax


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


def test_one_bad_batch_does_not_spoil_the_spread():
    sampler, z, weight, _ = make_sampler(spread=True)
    sampler.sample(z, 3, False)
    before = sampler.query_square.clone()
    sampler.sample(torch.full_like(z, math.inf), 3, False)
    assert torch.equal(sampler.query_square, before)
    sampler.refresh(weight)


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
