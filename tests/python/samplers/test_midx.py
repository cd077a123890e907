"""MIDX draws follow its formula, for the index that it holds."""

import contextlib
import copy
import math

import pytest
import torch

import xsoftmax as xs
from midx_checks import (CLASSES, D, HEAD, K, N, Q, both_kinds, formula, make_sampler, seed,
                         with_bias)
from sampler_checks import changed, check_scripted_compiled_and_saved, chi_square, log_prob
from xsoftmax.samplers import (ExactMidxSampler, LearnableMidxSampler, MidxSampler,
                               SpreadMidxSampler, UnigramSampler, UnionSampler)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
TARGET = torch.arange(Q) + HEAD


@both_kinds
@with_bias
def test_private_draws_follow_the_formula(kind, bias):
    sampler, z, _, b = make_sampler(kind, bias, 30_000)
    assert (sampler.default_estimator, sampler.shared, sampler.distinct,
            sampler.follows_table) == ("ranking", False, False, True)
    log_q = log_prob(sampler, z, CLASSES)
    assert log_q.dtype == torch.float32 and torch.isneginf(log_q[:, :HEAD]).all()
    torch.testing.assert_close(log_q[:, HEAD:].double(),
                               formula(sampler, z, kind, b if bias else None)[:, HEAD:], rtol=0,
                               atol=1e-5)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(Q))
    ids = torch.randint(N, (Q, 11))
    torch.testing.assert_close(log_prob(sampler, z, ids), log_q.gather(1, ids))
    [drawn] = sampler.sample(z, TARGET)
    assert not drawn.distinct and drawn.ids.shape == (Q, 30_000)
    for q in range(Q):
        assert chi_square(torch.bincount(drawn.ids[q], minlength=N),
                          log_q[q].double().exp() * 30_000) > 1e-4
    count = log_q + math.log(30_000)
    torch.testing.assert_close(drawn.log_count, count.gather(1, drawn.ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.target_log_count, count[torch.arange(Q), TARGET], rtol=0,
                               atol=1e-5)
    several = torch.stack([TARGET, torch.full((Q,), -1), torch.zeros(Q, dtype=torch.int64)], 1)
    of_several = sampler.sample(z, several)[0].target_log_count
    assert torch.equal(of_several[:, 0],
                       drawn.target_log_count) and of_several[:, 1:].isneginf().all()
    assert sampler.sample(z)[0].target_log_count is None


@both_kinds
@with_bias
def test_draws_follow_a_stale_index(kind, bias):
    """If the table changed since the last refresh, q is that of the index. An update changes single
    classes."""
    sampler, z, weight, b = make_sampler(kind, bias, 30_000)
    before = sampler.log_count(z, CLASSES)
    weight.normal_()
    assert torch.equal(sampler.log_count(z, CLASSES), before)
    rows = torch.arange(50, 90)
    sampler.update(weight, b if bias else None, rows)
    want = ops.midx_encode(weight, sampler.codewords1, sampler.codewords2)[0]
    assert torch.equal(sampler.cell[rows],
                       want[rows]) and not torch.equal(sampler.cell[90:], want[90:])
    log_q = log_prob(sampler, z, CLASSES)
    torch.testing.assert_close(log_q[:, HEAD:].double(),
                               formula(sampler, z, kind, b if bias else None)[:, HEAD:], rtol=0,
                               atol=1e-5)
    assert chi_square(torch.bincount(sampler.sample(z)[0].ids[0], minlength=N),
                      log_q[0].double().exp() * 30_000) > 1e-4


@with_bias
@pytest.mark.parametrize("size", [1, 20, 150, N - HEAD])
def test_private_draws_without_replacement_have_their_inclusion_probability(bias, size):
    sampler, z, _, _ = make_sampler(bias=bias, num_samples=size, distinct=True)
    assert sampler.default_estimator == "sampled_softmax"
    runs, seen = 600, torch.zeros(Q, N)
    every = CLASSES.expand(Q, N)  # counts are computed while drawing
    inclusion = sampler.sample(z, every)[0].target_log_count.double().exp()
    for _ in range(runs):
        [drawn] = sampler.sample(z)
        assert drawn.distinct and (drawn.ids.sort(1).values.diff(dim=1)
                                   > 0).all() and drawn.ids.min() >= HEAD
        seen.scatter_add_(1, drawn.ids, torch.ones(Q, size))
    torch.testing.assert_close(inclusion.sum(1), torch.full((Q,), float(size), dtype=torch.float64),
                               rtol=1e-5, atol=0)
    assert ((inclusion > 1 - 1e-9)
            <= (seen == runs)).all()  # classes with probability 1 are always drawn
    usual = inclusion * runs > 5
    assert ((seen / runs - inclusion).abs()
            < 6 * (inclusion * (1 - inclusion) / runs).sqrt() + 1e-9)[usual].all()
    torch.testing.assert_close(drawn.log_count.double().exp(), inclusion.gather(1, drawn.ids),
                               rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="whose counts only a draw knows"):
        sampler.log_count(z, CLASSES)


@both_kinds
@with_bias
@pytest.mark.parametrize("mixture", ["mean", "rms"])
@pytest.mark.parametrize("distinct", [False, None])
def test_shared_draws_follow_the_mixture(kind, bias, mixture, distinct):
    size, runs = 40, 600
    sampler, z, _, _ = make_sampler(kind, bias, size, mixture=mixture, shared=True,
                                    distinct=distinct)
    assert sampler.default_estimator == "sampled_softmax"
    log_q = log_prob(changed(sampler, shared=False, distinct=False), z, CLASSES).double()
    want = log_q.exp().mean(0) if mixture == "mean" else log_q.exp().square().mean(0).sqrt()
    want = want / want.sum()
    count = sampler.log_count(z, CLASSES).double()
    seen = torch.zeros(N)
    for _ in range(runs):
        [drawn] = sampler.sample(z, TARGET)
        seen += torch.bincount(drawn.ids, minlength=N)
    torch.testing.assert_close(drawn.log_count.double(), count[drawn.ids], rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn.target_log_count.double(), count[TARGET], rtol=0, atol=1e-5)
    if distinct is False:
        torch.testing.assert_close(count.exp(), want * size, rtol=1e-5, atol=1e-10)
        assert chi_square(seen, want * size * runs) > 1e-4
        return
    assert drawn.distinct and drawn.ids.unique().numel() == size
    inclusion = count.exp()
    torch.testing.assert_close(inclusion.sum(), torch.tensor(float(size), dtype=torch.float64),
                               rtol=1e-5, atol=0)
    scale = (inclusion / want)[(inclusion < 1) & (want > 0)]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale), rtol=1e-4, atol=0)
    usual = inclusion * runs > 5
    assert ((seen / runs - inclusion).abs()
            < 6 * (inclusion * (1 - inclusion) / runs).sqrt() + 1e-9)[usual].all()


@pytest.mark.parametrize("options", [{},
                                     dict(distinct=True),
                                     dict(shared=True),
                                     dict(shared=True, distinct=False),
                                     dict(shared=True, mixture="rms")])
def test_ignored_queries_change_nothing_for_the_others(options):
    plain, z, _, _ = make_sampler(update_every=5, make=SpreadMidxSampler, bias=True, **options)
    padded = copy.deepcopy(plain)
    more, mark = torch.zeros(3, D), torch.full((3,), -1)
    torch.manual_seed(1)
    [want] = plain.sample(z, TARGET)
    torch.manual_seed(1)
    [got] = padded.sample(torch.cat([z, more]), torch.cat([TARGET, mark]))
    rows = len(want.ids)
    assert torch.equal(got.ids[:rows], want.ids)
    torch.testing.assert_close(got.log_count[:rows], want.log_count, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.target_log_count[:Q], want.target_log_count, rtol=0, atol=1e-5)
    assert not got.log_count.isnan().any() and torch.equal(
        plain.touched, padded.touched) and plain.touched.sum() > Q
    torch.testing.assert_close(plain.query_square, padded.query_square)
    torch.testing.assert_close(plain.query_square, z.double().square().sum(1).mean())


@pytest.mark.parametrize("distinct, width, queries", [(False, 32, 300), (True, 32, 300),
                                                      (False, 1024, 130)])
def test_any_number_of_threads_draws_the_same(distinct, width, queries, same_for_any_threads):
    """Matrix products of MKL depend on the threads if sums are long or there are few rows: the last
    block has 2 queries of 130."""
    torch.manual_seed(1)
    weight, z = torch.randn(5000, width), torch.randn(queries, width)
    target = torch.randint(5000, (queries,))

    def compute():
        torch.manual_seed(7)
        sampler = MidxSampler(5000, width, 50, codewords=16, distinct=distinct)
        sampler.refresh(weight)
        shared = changed(sampler, shared=True)
        return [
            *sampler.sample(z, target)[0][:3], *shared.sample(z, target)[0][:3], *sampler.buffers(),
            shared.log_count(z, target[:40]),
            changed(sampler, distinct=False).log_count(z, target[:40])
        ]

    same_for_any_threads(compute)


def test_one_class_per_cell_gives_the_softmax():
    """With as many codewords as classes the index holds the table itself, so q is the softmax."""
    torch.manual_seed(0)
    weight, bias, z = torch.randn(40, 6), torch.randn(40), torch.randn(3, 6)
    sampler = MidxSampler(40, 6, codewords=40, bias=True, iterations=30)
    assert sampler.refresh(weight, bias)["distortion"] < 1e-6
    torch.testing.assert_close(log_prob(sampler, z, torch.arange(40)),
                               (z @ weight.T + bias).log_softmax(1), rtol=0, atol=1e-4)


@with_bias
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 8), (50, 5, 64), (700, 3, 2), (64, 4, 1)])
def test_odd_sizes(bias, shape):
    """One class, fewer classes than codewords, one codeword."""
    n, d, k = shape
    torch.manual_seed(0)
    weight, b, z = torch.randn(n, d), torch.randn(n), torch.randn(4, d)
    for kind in ("rq", "pq") if d > 1 else ("rq",):
        sampler = MidxSampler(n, d, 10, codewords=k, kind=kind, bias=bias)
        sampler.refresh(weight, b if bias else None)
        torch.testing.assert_close(
            log_prob(sampler, z, torch.arange(n)).exp().sum(1), torch.ones(4))
        ids = sampler.sample(z)[0].ids
        assert ids.min() >= 0 and ids.max() < n and sampler.sample(z[:0])[0].ids.shape == (0, 10)
        whole = changed(sampler, num_samples=n, shared=True, distinct=True)
        assert whole.sample(z)[0].ids.tolist() == whole.sample(z[:0])[0].ids.tolist() == list(
            range(n))
        assert changed(sampler, num_samples=0).sample(z)[0].ids.shape == (4, 0)


@both_kinds
@with_bias
def test_exact_midx_is_the_softmax(kind, bias):
    """Theorem 1: probabilities to 1e-5, and draws by chi-square, for any index."""
    sampler, z, weight, b = make_sampler(kind, bias, 30_000, make=ExactMidxSampler)
    log_p = (z.double() @ weight.double().T + (b if bias else 0)).masked_fill(
        CLASSES < HEAD, -math.inf).log_softmax(1)
    log_q = log_prob(sampler, z, CLASSES)
    torch.testing.assert_close(log_q.exp().double(), log_p.exp(), rtol=1e-5, atol=1e-5)
    [drawn] = sampler.sample(z, TARGET)
    for q in range(Q):
        assert chi_square(torch.bincount(drawn.ids[q], minlength=N), log_p[q].exp() * 30_000) > 1e-4
    count = log_q + math.log(30_000)
    torch.testing.assert_close(drawn.log_count, count.gather(1, drawn.ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn.target_log_count, count[torch.arange(Q), TARGET], rtol=0,
                               atol=1e-4)
    for _ in range(2):  # a step draws from the current table
        weight.normal_()
        sampler.prepare(weight, b if bias else None)
    want = (z @ weight.T + (b if bias else 0)).masked_fill(CLASSES < HEAD, -math.inf).log_softmax(1)
    torch.testing.assert_close(log_prob(sampler, z, CLASSES), want, rtol=0, atol=1e-4)


def test_the_default_estimator_approaches_the_full_gradient():
    """As M grows, the mean gradient over draws approaches the exact one, within its standard error
    and a bias that decreases with M."""
    torch.manual_seed(0)
    x, target = torch.randn(Q, D).requires_grad_(), torch.randint(N, (Q,))
    weight, distance = torch.randn(N, D), {}
    for m in (16, 1024):
        loss = xs.SampledSoftmaxLoss(D, N, sampler=MidxSampler(N, D, m, codewords=K,
                                                               refresh_every=0))
        loss.linear.weight.data.copy_(weight)
        exact = torch.autograd.grad(loss.exact(x, target), x)[0]
        draws = torch.stack([torch.autograd.grad(loss(x, target), x)[0] for _ in range(100)])
        distance[m] = (draws.mean(0) - exact).norm() / exact.norm()
    assert ((draws.mean(0) - exact).abs() < 5 * draws.std(0) / math.sqrt(100)).all()
    assert distance[1024] < distance[16] / 4


@pytest.mark.parametrize("make", [
    lambda **o: MidxSampler(N, D, codewords=K, update_every=1, refresh_every=4, **o),
    lambda **o: SpreadMidxSampler(N, D, codewords=K, **o),
    lambda **o: ExactMidxSampler(N, D, codewords=K, **o),
    lambda **o: LearnableMidxSampler(N, D, codewords=K, **o), lambda **o: UnionSampler(
        MidxSampler(N, D, 5, codewords=K, **o), UnigramSampler(torch.rand(N), 9))
])
def test_scripted_compiled_and_saved(make):
    check_scripted_compiled_and_saved(
        lambda: xs.SampledSoftmaxLoss(D, N, sampler=make(bias=True), head_classes=HEAD, bias=True))


def test_exported_program_draws_from_the_index():
    sampler, z, _, _ = make_sampler()

    class Count(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sampler = sampler

        def forward(self, x, ids):
            return self.sampler.log_count(x, ids)

    ids = torch.randint(N, (Q, 3))
    torch.testing.assert_close(
        torch.export.export(Count(), (z, ids)).module()(z, ids), sampler.log_count(z, ids))


@pytest.mark.parametrize("make", [MidxSampler, ExactMidxSampler, SpreadMidxSampler])
@with_bias
def test_opcheck(make, bias):
    sampler, z, weight, b = make_sampler(bias=bias, num_samples=4, make=make, update_every=2,
                                         train_points=100, iterations=3)
    given, ids, table = torch.randint(N,
                                      (Q, 3)), torch.randint(N,
                                                             (Q, 2)), (weight, b if bias else None)
    index = lambda: ([t.clone() for t in sampler._index()], sampler.options)
    written = lambda: (torch.tensor(0), index()[0][:-1], sampler.options)
    check = lambda op, args: torch.library.opcheck(op.default, args)
    check(ops.midx_sample, (seed(1), z, given, *index()))
    check(ops.midx_log_count, (z, ids, *index()))
    check(ops.midx_refresh_, (*table, *written()))
    check(ops.midx_update_, (*table, ids[0], *written()))
    check(ops.midx_step_, (*table, *written()))
    check(ops.midx_note_, (sampler.touched.clone(), getattr(sampler, "query_square",
                                                            None), sampler.step, z, given, ids))
    if make is MidxSampler:
        shared = changed(sampler, shared=True)
        check(ops.midx_sample, (seed(1), z, given[:, 0], shared._index(), shared.options))
        check(ops.midx_log_count, (z, ids, shared._index(), shared.options))
        check(ops.midx_encode, (weight, *sampler._index()[:2]))
        check(ops.midx_cells, (sampler.cell, sampler.log_weight if bias else None, K, N - HEAD))
        check(ops.midx_codebook_loss,
              (*(t.clone().requires_grad_()
                 for t in sampler._index()[:2]), weight, b if bias else None, z))


@pytest.mark.parametrize(
    "options", [{}, dict(distinct=True),
                dict(shared=True),
                dict(shared=True, distinct=False)])
def test_classes_by_slots(options):
    sampler, z, _, _ = make_sampler(bias=False, **options)
    target = torch.randint(HEAD, N, (len(z), 2))
    slot = torch.full((N,), -1)
    slot[sampler.order] = torch.arange(N - HEAD)
    index = sampler._index()
    by_slot, text = [*index[:2], index[2][:0], index[3][:0],
                     *index[4:]], f"{sampler.options},slots={N - HEAD}"
    ids, log_count, of_target = ops.midx_sample(seed(3), z, target, index, sampler.options)
    slots, *counts = ops.midx_sample(seed(3), z, slot[target], by_slot, text)
    assert torch.equal(sampler.order[slots].sort(-1).values, ids.sort(-1).values)
    torch.testing.assert_close(counts[0].sort(-1).values, log_count.sort(-1).values)
    torch.testing.assert_close(counts[1], of_target)
    if options != dict(distinct=True):
        torch.testing.assert_close(ops.midx_log_count(z, slot[target], by_slot, text),
                                   ops.midx_log_count(z, target, index, sampler.options))
        with xs.use_impl("reference"):
            torch.testing.assert_close(ops.midx_log_count(z, slot[target], by_slot, text),
                                       ops.midx_log_count(z, target, index, sampler.options))
    with pytest.raises(
            ValueError, match="midx_sample: expected classes that weigh alike and "
            "update_every=0 where classes are numbered by slots"):
        ops.midx_sample(seed(3), z, None, by_slot, text.replace("update_every=0", "update_every=2"))


@with_bias
@pytest.mark.parametrize(
    "options",
    [{}, dict(shared=True, distinct=False),
     dict(shared=True, distinct=False, mixture="rms")])
def test_kernels_agree_with_the_composites(bias, options):
    sampler, z, weight, _ = make_sampler(bias=bias, **options)
    ids, cells = torch.randint(N, (30,)), (sampler.cell, sampler.log_weight if bias else None, K,
                                           N - HEAD)
    run = lambda: [
        sampler.log_count(z, ids), *ops.midx_encode(weight,
                                                    *sampler._index()[:2]), *ops.midx_cells(*cells)
    ]
    kernel = run()
    with xs.use_impl("reference"):
        composite = run()
    for got, want in zip(kernel, composite):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change, error, message", [
    (dict(codewords=0), ValueError, "codewords of at least 1"),
    (dict(codewords=2000), ValueError, "at most 1024"),
    (dict(kind="opq"), ValueError, "kind as"),
    (dict(dim=0), ValueError, "dim of at least 1"),
    (dict(dim=1, kind="pq"), ValueError, "dim of at least 2"),
    (dict(mixture="max"), ValueError, "mixture as"),
    (dict(distinct=1), TypeError, "distinct as"),
    (dict(codewords=6.5), ValueError, "codewords"),
    (dict(exclude=N), ValueError, "exclude to leave at least one of"),
    (dict(train_points=0), ValueError, "train_points"),
    (dict(exclude=torch.tensor([N])), IndexError, "exclude in"),
    (dict(num_samples=N + 1, shared=True), ValueError, "num_samples of at most 400"),
    (dict(refresh_every=-1), ValueError, "refresh_every of at least 0"),
    (dict(bias=1), ValueError, "bias"),
    (dict(num_samples=1.5), TypeError, "num_samples of type int"),
])
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match="MidxSampler: .*" + message):
        MidxSampler(N, **({"dim": D} | change))


def test_exact_midx_refuses_shared_and_distinct_draws():
    for options in (dict(shared=True), dict(distinct=True)):
        with pytest.raises(ValueError, match="ExactMidxSampler: expected shared=False and "
                           "distinct=False"):
            ExactMidxSampler(N, D, **options)
    with pytest.raises(ValueError, match="LearnableMidxSampler: expected learn_rows of at least 1"):
        LearnableMidxSampler(N, D, learn_rows=0)


def distorted(sampler, **changes):
    hostile = copy.deepcopy(sampler)
    for name, change in changes.items():
        change(getattr(hostile, name))
    return hostile, changed(hostile, shared=True, distinct=True)


def test_bad_calls():
    sampler, z, _, _ = make_sampler(num_samples=4)
    with pytest.raises(ValueError, match=r"expected queries of shape \[Q, 9\], got \[5, 8\]"):
        sampler.sample(z[:, :8])
    with pytest.raises(IndexError, match="target in"):
        sampler.sample(z, torch.full((Q,), N))
    with pytest.raises(ValueError, match="num_samples of at most 393"):
        changed(sampler, num_samples=N, shared=True, distinct=True).sample(z)
    with pytest.raises(IndexError, match="ids in"):
        sampler.log_count(z, torch.tensor([-1]))


def test_a_corrupt_index_is_an_error():
    sampler, z, weight, b = make_sampler(num_samples=4)
    with pytest.raises(IndexError, match="order in"):
        distorted(sampler, order=lambda t: t.fill_(2**40))[0].sample(z)
    with pytest.raises(ValueError, match="start"):
        distorted(sampler, start=lambda t: t.fill_(2**40))[0].sample(z)
    with pytest.raises(IndexError, match="cell in"):
        distorted(sampler, cell=lambda t: t.fill_(2**20))[0].log_count(z, torch.tensor([1]))
    for distort in (lambda t: t.mul_(1e-4), lambda t: t.fill_(5e-324), lambda t: t.fill_(math.nan),
                    lambda t: t.neg_()):
        for hostile in distorted(sampler, mass=distort):
            with pytest.raises(ValueError, match="expected mass to be the number of classes"):
                hostile.sample(z)
    weighted = MidxSampler(N, D, 4, codewords=K, bias=True, distinct=True)
    weighted.refresh(weight, b)
    for name, factor in (("mass", 1e-4), ("mass", math.nan), ("prefix", 1e-4), ("heaviest", 1e4),
                         ("heaviest", -1.0)):
        for hostile in distorted(weighted, **{name: lambda t, factor=factor: t.mul_(factor)}):
            with pytest.raises(
                    ValueError, match="expected mass to be the sum of the weights in "
                    "prefix, and heaviest within it"):
                hostile.sample(z)

    def break_sums(prefix):  # cumulative sums that fall at the end to the right total
        for begin, end in zip(weighted.start[:-1].tolist(), weighted.start[1:].tolist()):
            prefix[begin:max(begin, end - 1)] = 1e30

    for hostile in distorted(weighted, prefix=break_sums):
        with contextlib.suppress(ValueError):
            ids = hostile.sample(z)[0].ids
            assert ids.min() >= 0 and ids.max() < N


@pytest.mark.parametrize("distinct", [False, True])
def test_a_nan_query_does_not_affect_others(distinct):
    sampler, z, _, _ = make_sampler(bias=True, num_samples=7, distinct=distinct)
    z[0] = math.nan
    [drawn] = sampler.sample(z, torch.full((Q,), 20))
    assert drawn.log_count[0].isnan().all() and drawn.target_log_count[0].isnan()
    assert drawn.log_count[1:].isfinite().all() and drawn.target_log_count[1:].isfinite().all()


def test_biases_far_apart_leave_every_class_drawable():
    for heavy in (0, 9):
        sampler = MidxSampler(10, 2, 3, codewords=1, bias=True, distinct=True)
        bias = torch.full((10,), -40.0)
        bias[heavy] = 0
        sampler.refresh(torch.zeros(10, 2), bias)
        seen = torch.zeros(10)
        for _ in range(300):
            [drawn] = sampler.sample(torch.zeros(1, 2))
            assert drawn.log_count.isfinite().all()
            seen[drawn.ids[0]] += 1
        assert seen[heavy] == 300 and seen.min() > 30


def test_scores_far_apart_leave_every_class_drawable():
    weight, z = torch.tensor([[0.0], [400.0], [-400.0], [800.0]]), torch.ones(3, 1)
    for mixture in ("mean", "rms"):
        sampler = MidxSampler(4, 1, codewords=2, mixture=mixture, shared=True, distinct=False)
        sampler.refresh(weight)
        assert sampler.log_count(z, torch.arange(4)).isfinite().all()
    exact = ExactMidxSampler(4, 1, codewords=2)
    exact.refresh(weight)
    weight[0] = 1e4  # a residual that overflows float32
    exact.prepare(weight, None)
    torch.testing.assert_close(log_prob(exact, z, torch.arange(4)), (z @ weight.T).log_softmax(1))
