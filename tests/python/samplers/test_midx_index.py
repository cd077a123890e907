"""The MIDX index: how K-means, the table and learning build it, and when it is rebuilt."""

import copy
import math

import pytest
import torch

import xsoftmax as xs
from midx_checks import (CLASSES, D, HEAD, K, N, Q, both_kinds, formula, make_sampler, seed,
                         with_bias)
from sampler_checks import changed, chi_square, log_prob
from xsoftmax.samplers import (LearnableMidxSampler, MidxSampler, SpreadMidxSampler, UnigramSampler,
                               UnionSampler)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax


def test_errors_of_new_rows_name_them():
    sampler = MidxSampler(100, 8, codewords=4)
    sampler.refresh(torch.randn(100, 8))
    with pytest.raises(ValueError, match=r"expected rows of shape \[10, 8\], got \[9, 8\]"):
        sampler.resize(110, rows=torch.randn(9, 8))
    with pytest.raises(ValueError,
                       match="expected rows with squared norms that are finite in float32"):
        sampler.resize(101, rows=torch.full((1, 8), 1e25))


def test_any_number_of_threads_builds_the_same_index(same_for_any_threads):
    """Beyond 65,536 classes threads share the sort by cell; also with weights and excluded
    classes."""
    torch.manual_seed(1)
    n = 150_000
    weight, bias, queries, ids = torch.randn(n, 8), torch.randn(n), torch.randn(4,
                                                                                8), torch.randint(
                                                                                    n, (50,))
    made = []

    def compute():
        torch.manual_seed(7)
        sampler = MidxSampler(n, 8, codewords=16, bias=True, exclude=torch.arange(0, n, 7),
                              train_points=1000, iterations=2)
        sampler.refresh(weight, bias)
        made.append(sampler)
        return [
            *sampler.sample(queries)[0][:2],
            sampler.log_count(queries, ids), *sampler.buffers()
        ]

    same_for_any_threads(compute)
    cell, order, start = made[0].cell.long(), made[0].order, made[0].start
    drawn = cell[cell >= 0]
    assert (cell[::7] == -1).all() and len(drawn) == n - len(cell[::7])
    assert torch.equal(start[1:], drawn.bincount(minlength=256).cumsum(0))
    assert torch.equal(order,
                       torch.argsort(torch.where(cell < 0, 256, cell), stable=True)[:len(drawn)])


@pytest.mark.parametrize("table", ["zeros", "duplicates", "huge", "spread"])
def test_degenerate_tables(table):
    torch.manual_seed(0)
    weight = {
        "zeros": torch.zeros(60, 4), "duplicates": torch.randn(3, 4).repeat(20, 1),
        "huge": 300 * torch.randn(60, 4),
        "spread": torch.randn(60, 4) * torch.logspace(-6, 3, 60)[:, None]
    }[table]
    sampler = MidxSampler(60, 4, codewords=8)
    sampler.refresh(weight)
    z = torch.randn(5, 4)
    for shared in (False, True):
        for m in (1, 30, 60):
            [drawn] = changed(sampler, num_samples=m, shared=shared,
                              distinct=shared).sample(z, torch.arange(5))
            assert torch.isfinite(drawn.log_count).all() and torch.isfinite(
                drawn.target_log_count).all()
    q = log_prob(sampler, z, torch.arange(60)).double().exp()
    torch.testing.assert_close(q.sum(1), torch.ones(5, dtype=torch.float64), rtol=1e-5, atol=0)


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
            assert (best1 == k1).all() and (torch.cdist(rest, sampler.codewords2).argmin(1)
                                            == k2).all()
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
    # After a bad start, empty clusters are restarted.
    centroids, inertia = ops.kmeans(seed(3), rows, 12, 8, torch.full((12, 5), 1e3))
    assert torch.cdist(rows, centroids).argmin(1).unique().numel() == 12


def test_refresh_returns_statistics_of_the_index():
    sampler, _, weight, _ = make_sampler()
    report = sampler.refresh(weight)
    k1, k2 = sampler.cell[HEAD:].long() // K, sampler.cell[HEAD:].long() % K
    rest = weight[HEAD:] - sampler.codewords1[k1] - sampler.codewords2[k2]
    assert report["cells"] == sampler.cell[HEAD:].unique().numel()
    assert report["mean_square"] == pytest.approx(weight[HEAD:].square().sum(1).mean().item(),
                                                  rel=1e-5)
    assert report["distortion"] == pytest.approx(rest.square().sum(1).mean().item(), rel=1e-4)
    assert sampler.order.sort().values.tolist() == list(range(HEAD, N))


@both_kinds
def test_codebook_loss_is_its_formula_and_has_its_gradient(kind):
    sampler, z, weight, b = make_sampler(kind)
    rows, bias = weight[:60], b[:60]
    c1, c2 = sampler.codewords1.clone().requires_grad_(), sampler.codewords2.clone().requires_grad_(
    )
    half = (D + 1) // 2
    w1 = c1[torch.cdist(rows if kind == "rq" else rows[:, :half], c1).argmin(1)]
    w2 = c2[torch.cdist(rows - w1 if kind == "rq" else rows[:, half:], c2).argmin(1)]
    w = w1 + w2 if kind == "rq" else torch.cat([w1, w2], 1)
    p, q = (z @ rows.T + bias).softmax(1), (z @ w.T + bias).softmax(1)
    want = (rows - w).square().sum(1).mean() + (p * p / q).sum(1).log().mean()
    got = ops.midx_codebook_loss(c1, c2, rows, bias, z)
    torch.testing.assert_close(got, want)
    for mine, theirs in zip(torch.autograd.grad(got, (c1, c2)), torch.autograd.grad(want,
                                                                                    (c1, c2))):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@both_kinds
def test_learnable_codebooks_bring_q_nearer_to_the_softmax(kind):
    """Training lowers the objective, log sum p^2 / q, from where K-means leaves it, without raising
    KL(q | p)."""
    torch.manual_seed(0)
    sampler = LearnableMidxSampler(N, D, codewords=K, kind=kind, refresh_every=20, learn_rows=N)
    weight, z = torch.randn(N, D), torch.randn(64, D)
    exact = (z @ weight.T).log_softmax(1)

    def divergence():
        sampler.refresh(weight)
        log_q = log_prob(sampler, z, CLASSES)
        return (2 * exact -
                log_q).logsumexp(1).mean().item(), (log_q.exp() *
                                                    (log_q - exact)).sum(1).mean().item()

    optimizer = torch.optim.Adam(sampler.parameters(), lr=0.01)
    before = divergence()
    for _ in range(300):
        optimizer.zero_grad()
        sampler.prepare(weight, None)
        sampler.codebook_loss(z, weight).backward()
        optimizer.step()
    after = divergence()
    assert after[0] < before[0] - 0.15 and after[1] < 1.05 * before[1]


@both_kinds
@with_bias
def test_codebooks_learn_during_training(kind, bias):
    """The same in eager mode, TorchScript and compiled. The loss has no gradient in the codebooks,
    and ignored queries change nothing."""
    torch._dynamo.reset()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.loss = xs.SampledSoftmaxLoss(
                D, N, sampler=LearnableMidxSampler(N, D, codewords=K, kind=kind, bias=bias),
                bias=bias)

        def forward(self, z, target):
            learnt = self.loss.sampler.codebook_loss(z, self.loss.linear.weight,
                                                     self.loss.linear.bias)
            return self.loss(z, target), learnt

    z, target = torch.randn(16, D), torch.randint(N, (16,))
    values = []
    for wrap in (lambda m: m, torch.jit.script,
                 lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")):
        model = Model()
        called = wrap(model)
        torch.manual_seed(2)
        called(z, target)
        torch.manual_seed(3)
        value, learnt = called(z, target)
        (value + learnt).backward()
        sampler = model.loss.sampler
        assert sampler.codewords1.grad.abs().sum() > 0 and sampler.codewords2.grad.abs().sum() > 0
        values.append((value.detach(), learnt.detach(), sampler.codewords1.grad))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])
    model.zero_grad()
    model.loss(z, target).backward()
    assert sampler.codewords1.grad is None and sampler.codewords2.grad is None
    padded = torch.cat([z, torch.zeros(3, D)])
    learnt = [
        sampler.codebook_loss(x, model.loss.linear.weight, model.loss.linear.bias,
                              torch.Generator().manual_seed(1)) for x in (z, padded)
    ]
    torch.testing.assert_close(learnt[0], learnt[1])


def test_learned_codewords_survive_a_refresh_and_a_cast():
    loss = xs.SampledSoftmaxLoss(D, N, sampler=LearnableMidxSampler(N, D, 5,
                                                                    codewords=K)).bfloat16()
    assert loss.sampler.codewords1.dtype == torch.float32
    loss(torch.randn(3, D, dtype=torch.bfloat16), torch.tensor([1, 2, 3])).backward()
    codewords = loss.sampler.codewords1.clone()
    loss.linear.weight.data.normal_()
    loss.sampler.refresh(loss.linear.weight)  # new codes with the learned codewords
    assert torch.equal(codewords, loss.sampler.codewords1)
    assert loss.sampler.codebook_loss(torch.zeros(0, D), loss.linear.weight).isfinite()


def test_a_loss_refreshes_by_its_schedule():
    torch.manual_seed(0)
    sampler = MidxSampler(N, D, 5, codewords=K, refresh_every=64, update_every=3)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=sampler)
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
    # Only rows that were scored may be marked, and an update changes no other cells.
    assert 0 < sampler.touched.sum() < N


@pytest.mark.parametrize("shared", [False, True])
def test_a_draw_marks_the_rows_to_update(shared):
    """The drawn ids and the targets, also those of the other parts of a union; not in eval()."""
    sampler = MidxSampler(N, D, 3, codewords=K, update_every=9, shared=shared)
    union = UnionSampler(sampler, UnigramSampler(torch.ones(N), 4))
    z, target = torch.randn(Q, D), torch.tensor([3, -1, 8, 9, -1])
    union.eval().sample(z, target)
    assert not sampler.touched.any()
    mine, theirs = union.train().sample(z, target)
    if mine.ids.size(-1) == 4:
        mine, theirs = theirs, mine
    want = {
        3, 8, 9, *(mine.ids if shared else mine.ids[target >= 0]).flatten().tolist(),
        *([] if shared else theirs.ids.tolist())
    }
    assert set(sampler.touched.nonzero().flatten().tolist()) == want


def test_a_refresh_applies_pending_updates_first():
    """prepare() and refresh() catch up the rows of a row optimizer before they read the table."""
    for scheduled in (True, False):
        sampler, other = (MidxSampler(N, D, codewords=K) for _ in range(2))
        table = torch.nn.Embedding(N, D, sparse=True)
        optimizer = xs.optim.RowAdam(table.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.arange(30 * step, 30 * step + 30)).square().sum().backward()
            optimizer.step()
        deferred = table.weight.detach().clone()
        torch.manual_seed(1)
        sampler.prepare(table.weight, None) if scheduled else sampler.refresh(table.weight)
        assert not torch.equal(deferred, table.weight)
        torch.manual_seed(1)
        other.refresh(table.weight.detach().clone())
        assert torch.equal(sampler.cell, other.cell) and torch.equal(sampler.codewords2,
                                                                     other.codewords2)


def test_state_dict_holds_the_index():
    sampler, z, _, _ = make_sampler(bias=True)
    other = MidxSampler(N, D, codewords=K, bias=True, exclude=HEAD)
    other.load_state_dict(sampler.state_dict())
    want = sampler.log_count(z, CLASSES)
    assert torch.equal(other.log_count(z, CLASSES), want) and torch.equal(
        copy.deepcopy(sampler).half().log_count(z, CLASSES), want)
    # With other options, or without an index, it is rebuilt at the next step.
    for state in (MidxSampler(N, D, codewords=K + 1, bias=True).state_dict(), {}):
        other.step.fill_(3)
        other.load_state_dict(state, strict=bool(state))
        assert other.step == 0


@with_bias
def test_a_state_dict_may_omit_empty_tables(bias):
    """safetensors, through Accelerate, drops empty tensors."""
    sampler, z, _, _ = make_sampler(bias=bias)
    state = {name: table for name, table in sampler.state_dict().items() if table.numel() > 0}
    assert len(state) < len(sampler.state_dict())
    other = MidxSampler(N, D, codewords=K, bias=bias, exclude=HEAD)
    other.load_state_dict(state)
    assert torch.equal(other.log_count(z, CLASSES), sampler.log_count(
        z, CLASSES)) and other.step == sampler.step > 0


@pytest.mark.parametrize("lost", ["mass", "codewords1", "step"])
def test_an_incomplete_index_is_refused_or_rebuilt(lost):
    sampler, *_ = make_sampler()
    state = {name: table for name, table in sampler.state_dict().items() if name != lost}
    other, *_ = make_sampler()
    assert other.step > 0
    with pytest.raises(RuntimeError, match=f'Missing key.*"{lost}"'):
        other.load_state_dict(state)
    other.step.fill_(3)
    assert other.load_state_dict(state, strict=False).missing_keys == [lost] and other.step == 0


@both_kinds
@with_bias
def test_spread_weights_classes_by_their_residuals(kind, bias):
    sampler, z, weight, b = make_sampler(kind, bias, 30_000, make=SpreadMidxSampler)
    plain = formula(sampler, z, kind, b if bias else None)
    # before the first query
    torch.testing.assert_close(
        log_prob(sampler, z, CLASSES)[:, HEAD:].double(), plain[:, HEAD:], rtol=0, atol=1e-5)
    for _ in range(3):
        sampler.sample(z)
    sampler.refresh(weight, b if bias else None)
    k1, k2 = sampler.cell.long().clamp(min=0) // K, sampler.cell.long().clamp(min=0) % K
    coded = (sampler.codewords1[k1], sampler.codewords2[k2])
    rest = (weight - (sum(coded) if kind == "rq" else torch.cat(coded, 1))).square().sum(1)
    torch.testing.assert_close(sampler.spread[HEAD:], rest[HEAD:], rtol=1e-3, atol=1e-3)
    want = formula(sampler, z, kind, rest * z.square().sum(1).mean() / (2 * D) + (b if bias else 0))
    log_q = log_prob(sampler, z, CLASSES)
    torch.testing.assert_close(log_q[:, HEAD:].double(), want[:, HEAD:], rtol=0, atol=1e-4)
    assert chi_square(torch.bincount(sampler.sample(z)[0].ids[0], minlength=N),
                      log_q[0].double().exp() * 30_000) > 1e-4
    # New codes keep the residual of their class.
    weight.normal_()
    sampler.update(weight, b if bias else None, torch.arange(50, 90))
    _, error = ops.midx_encode(weight, sampler.codewords1, sampler.codewords2)
    torch.testing.assert_close(sampler.spread[50:90], error[50:90])
    torch.testing.assert_close(sampler.spread[90:], rest[90:], rtol=1e-3, atol=1e-3)


def test_one_bad_batch_does_not_spoil_the_spread():
    sampler, z, weight, _ = make_sampler(make=SpreadMidxSampler)
    sampler.sample(z)
    before = sampler.query_square.clone()
    sampler.sample(torch.full_like(z, math.inf))
    assert torch.equal(sampler.query_square, before) and before > 0
    sampler.refresh(weight)
