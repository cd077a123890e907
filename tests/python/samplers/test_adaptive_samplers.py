"""LSH, sphere and RFF: draws match their counts, also from a stale index."""

import copy
import math

import pytest
import torch

import xsoftmax as xs
from sampler_checks import changed, check_scripted_compiled_and_saved, chi_square, log_prob
from xsoftmax.samplers import LshSampler, RffSampler, SphereSampler, make_sampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
N, D, Q, HEAD = 300, 7, 5, 6
CLASSES = torch.arange(N)
# default options
TABLES, BITS, UNIFORM, ALPHA, FEATURES, FLOOR = 16, 4, 0.1, 100.0, 32, 0.01

KINDS = {"lsh": LshSampler, "sphere": SphereSampler, "rff": RffSampler}
every_kind = pytest.mark.parametrize("kind", KINDS)
with_bias = pytest.mark.parametrize("bias", [False, True])


def make(kind, bias=False, num_samples=20, **kwargs):
    """Returns a sampler refreshed with a random table, and queries."""
    torch.manual_seed(0)
    weight, b = torch.randn(N, D), torch.randn(N)
    sampler = KINDS[kind](N, D, num_samples, bias=bias, exclude=HEAD, **kwargs)
    sampler.refresh(weight, b if bias else None)
    return sampler, torch.randn(Q, D), weight, b if bias else None


def widened(z, weight, bias):
    """Queries and rows in float64, with the bias as a last column."""
    if bias is None:
        return z.double(), weight.double()
    return torch.cat([z, torch.ones(len(z), 1)], 1).double(), torch.cat([weight, bias[:, None]],
                                                                        1).double()


@every_kind
def test_the_table_is_read_only_when_a_refresh_is_due(kind):
    """In other steps a caller whose table is costly to build may pass an old one."""
    sampler, _, weight, _ = make(kind)
    fresh = KINDS[kind](N, D, 20, exclude=HEAD, refresh_every=64)
    due = []
    for step in range(130):
        due += [step] * fresh.refresh_due()
        fresh.prepare(weight if fresh.refresh_due() else torch.full_like(weight, math.nan), None)
    assert due == [0, 2, 4, 8, 16, 32, 64, 128]
    never = KINDS[kind](N, D, 20, exclude=HEAD, refresh_every=0)
    assert never.refresh_due()
    never.refresh(weight)
    assert not never.refresh_due() and not sampler.refresh_due()


def lsh_formula(sampler, z, weight):
    hashes = [(x @ sampler.planes.double().T > 0).view(-1, TABLES, BITS) for x in (z, weight)]
    same = (hashes[0][:, None] == hashes[1][None]).all(3).double()  # [Q, N, T]
    same[:, :HEAD] = 0
    size = same.sum(1, keepdim=True)
    found = (same / size.clamp(min=1)).sum(2) / (size > 0).sum(2).clamp(min=1)
    even = torch.full_like(found, 1 / (N - HEAD))
    q = torch.where((size > 0).any(2), (1 - UNIFORM) * found + UNIFORM * even, even)
    q[:, :HEAD] = 0
    return q


def sphere_formula(sampler, z, weight):
    kernel = ALPHA * (z @ weight.T).square() + 1
    kernel[:, :HEAD] = 0
    return kernel / kernel.sum(1, keepdim=True)


def rff_formula(sampler, z, weight):
    """The tree of features by recursion."""
    def features(x):
        angle = torch.nn.functional.normalize(x) @ sampler.directions.double().T
        return torch.cat([angle.cos(), angle.sin()], 1) / math.sqrt(FEATURES)

    product = features(z) @ features(weight).T
    q = torch.zeros(len(z), N, dtype=torch.float64)
    leaves, rows = len(sampler.sums) // 2, N - HEAD

    def descend(low, high, share):
        ids = sampler.order[low * rows // leaves:high * rows // leaves]
        if high - low == 1:
            kernel = product[:, ids].clamp(min=FLOOR)
            q[:, ids] = share * kernel / kernel.sum(1, keepdim=True)
            return
        middle = (low + high) // 2
        masses = []
        for a, b in ((low, middle), (middle, high)):
            part = sampler.order[a * rows // leaves:b * rows // leaves]
            masses.append(product[:, part].sum(1, keepdim=True).clamp(min=FLOOR * len(part)))
        descend(low, middle, share * masses[0] / (masses[0] + masses[1]))
        descend(middle, high, share * masses[1] / (masses[0] + masses[1]))

    descend(0, leaves, torch.ones(len(z), 1, dtype=torch.float64))
    return q


FORMULAS = {"lsh": lsh_formula, "sphere": sphere_formula, "rff": rff_formula}


@every_kind
@with_bias
def test_draws_follow_the_formula_also_of_a_stale_index(kind, bias):
    sampler, z, weight, b = make(kind, bias, 30_000)
    assert (sampler.default_estimator, sampler.shared, sampler.follows_table) == ("ranking", False,
                                                                                  True)
    log_q = log_prob(sampler, z, CLASSES)
    assert log_q.dtype == torch.float32 and torch.isneginf(log_q[:, :HEAD]).all()
    torch.testing.assert_close(log_q.double().exp(), FORMULAS[kind](sampler, *widened(z, weight,
                                                                                      b)),
                               rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(log_q.exp().sum(1), torch.ones(Q))
    ids = torch.randint(N, (Q, 11))
    torch.testing.assert_close(log_prob(sampler, z, ids), log_q.gather(1, ids))
    weight.normal_()  # the table changes, the index does not
    assert torch.equal(log_prob(sampler, z, CLASSES), log_q)
    target = torch.arange(Q) + HEAD
    [drawn] = sampler.sample(z, target)
    assert not drawn.distinct and drawn.ids.shape == (Q, 30_000)
    for q in range(Q):
        assert chi_square(torch.bincount(drawn.ids[q], minlength=N),
                          log_q[q].double().exp() * 30_000) > 1e-4
    count = log_q + math.log(30_000)
    torch.testing.assert_close(drawn.log_count, count.gather(1, drawn.ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn.target_log_count, count[torch.arange(Q), target], rtol=0,
                               atol=1e-4)
    several = torch.stack([target, torch.full((Q,), -1), torch.zeros(Q, dtype=torch.int64)], 1)
    of_several = sampler.sample(z, several)[0].target_log_count
    torch.testing.assert_close(of_several[:, 0], drawn.target_log_count)
    assert of_several[:, 1:].isneginf().all() and sampler.sample(z)[0].target_log_count is None


@every_kind
def test_ignored_queries_change_nothing_for_the_others(kind):
    sampler, z, _, _ = make(kind)
    target = torch.arange(Q) + HEAD
    torch.manual_seed(1)
    [want] = sampler.sample(z, target)
    torch.manual_seed(1)
    [got] = sampler.sample(torch.cat([z, torch.zeros(3, D)]),
                           torch.cat([target, torch.full((3,), -1)]))
    assert torch.equal(got.ids[:Q], want.ids) and not got.log_count.isnan().any()
    torch.testing.assert_close(got.log_count[:Q], want.log_count, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.target_log_count[:Q], want.target_log_count, rtol=0, atol=1e-5)


@every_kind
def test_a_sampler_is_uniform_before_its_first_refresh_only(kind):
    sampler, z, _, _ = make(kind)
    fresh = KINDS[kind](N, D, exclude=HEAD)
    torch.testing.assert_close(
        log_prob(fresh, z, CLASSES)[:, HEAD:], torch.full((Q, N - HEAD), -math.log(N - HEAD)))
    assert sampler.log_count(z, torch.arange(HEAD, N)).std() > 0.1


def test_near_classes_are_drawn_more_often():
    """By score for the sphere, by angle for the other two."""
    for kind in KINDS:
        sampler, z, weight, _ = make(kind)
        near = (z @ weight[HEAD:].T / weight[HEAD:].norm(dim=1)).argsort(1)[:, -20:] + HEAD
        assert (log_prob(sampler, z, near).exp().sum(1) > 1.5 * 20 / (N - HEAD)).all(), kind


@every_kind
def test_any_number_of_threads_draws_the_same(kind, same_for_any_threads):
    sampler, _, weight, _ = make(kind)
    z, target = torch.randn(200, D), torch.randint(N, (200,))

    def compute():
        torch.manual_seed(3)
        sampler.refresh(weight)
        return [*sampler.sample(z, target)[0][:3], *sampler.buffers()]

    same_for_any_threads(compute)


@every_kind
@pytest.mark.parametrize("num_samples", [2, 40])
def test_any_number_of_threads_draws_the_same_from_wide_tables(kind, num_samples,
                                                               same_for_any_threads):
    """Matrix products of MKL depend on the threads if sums are long or there are few rows: the last
    block has 8 queries of 200."""
    torch.manual_seed(0)
    sampler = KINDS[kind](5000, 64, num_samples)
    sampler.refresh(torch.randn(5000, 64))
    z = torch.randn(200, 64)

    def compute():
        torch.manual_seed(3)
        return sampler.sample(z)[0][:2]

    same_for_any_threads(compute)


@every_kind
@pytest.mark.parametrize("classes", [1, 2, 33, 100, 1025])
def test_few_and_odd_numbers_of_classes(kind, classes):
    torch.manual_seed(0)
    sampler = KINDS[kind](classes, 3)
    sampler.refresh(torch.randn(classes, 3))
    z = torch.randn(4, 3)
    total = log_prob(sampler, z, torch.arange(classes)).double().exp().sum(1)
    torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=0)
    assert sampler.sample(z)[0].ids.max() < classes and sampler.sample(
        z[:0])[0].ids.shape == (0, 20)
    assert changed(sampler, num_samples=0).sample(z)[0].ids.shape == (4, 0)


@every_kind
def test_degenerate_tables_and_queries(kind):
    for table in (torch.zeros(N, D), torch.ones(N, D), torch.full((N, D), 1e18)):
        sampler = KINDS[kind](N, D)
        sampler.refresh(table)
        ids = sampler.sample(torch.cat([torch.randn(3, D), torch.zeros(1, D)]),
                             torch.zeros(4, dtype=torch.int64))[0].ids
        assert 0 <= ids.min() and ids.max() < N
    sampler, z, _, _ = make(kind)
    # the loss is NaN, but nothing crashes
    ids = sampler.sample(torch.full_like(z, math.nan))[0].ids
    assert HEAD <= ids.min() and ids.max() < N


@every_kind
@with_bias
def test_a_loss_trains_with_it_and_refreshes_it(kind, bias):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=kind, num_samples=20, head_classes=HEAD, bias=bias)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.05)
    x, target = torch.randn(64, D), torch.randint(N, (64,))
    before = loss.eval()(x, target).item()
    loss.train()
    for _ in range(60):
        optimizer.zero_grad()
        loss(x, target).backward()
        optimizer.step()
    [sampler] = [part for part in loss.modules() if isinstance(part, KINDS[kind])]
    assert sampler.step == 60 and loss.eval()(x, target).item() < before - 1
    stale = sampler.log_count(x, CLASSES)
    sampler.refresh(loss.linear.weight, loss.linear.bias)
    assert not torch.equal(stale, sampler.log_count(x, CLASSES))


@every_kind
def test_the_schedule_refreshes_at_step_0_and_more_often_early(kind):
    sampler = KINDS[kind](N, D, refresh_every=64)
    z, due = torch.randn(Q, D), []
    for step in range(130):
        before = sampler.log_count(z, CLASSES)
        sampler.prepare(torch.randn(N, D), None)
        if not torch.equal(before, sampler.log_count(z, CLASSES)):
            due.append(step)
    assert due == [0, 2, 4, 8, 16, 32, 64, 128] and sampler.step == 130


@every_kind
def test_scripted_compiled_and_saved(kind):
    check_scripted_compiled_and_saved(lambda: xs.SampledSoftmaxLoss(
        D, N, sampler=kind, num_samples=7, head_classes=HEAD, bias=True))


@every_kind
@with_bias
def test_opcheck(kind, bias):
    sampler, z, weight, b = make(kind, bias)
    family, ids = type(sampler)._family, torch.randint(N, (Q, 3))
    index = lambda: ([t.clone() for t in sampler._index()], sampler.options)
    check = lambda name, args: torch.library.opcheck(getattr(ops, family + name).default, args)
    check("_sample", (torch.tensor(1), z, ids, *index()))
    check("_log_count", (z, ids, *index()))
    for name in ("_refresh_", "_step_"):
        check(name, (weight, b, torch.tensor(0), index()[0][:-1], sampler.options))


@every_kind
@with_bias
@pytest.mark.parametrize("classes", [N, 40, 3000])
def test_kernels_agree_with_the_composites(kind, bias, classes):
    """The number of classes and of draws decides which products a kernel sampler computes in
    advance."""
    torch.manual_seed(0)
    sampler = KINDS[kind](classes, D, bias=bias, exclude=torch.tensor([3, 17]))
    sampler.refresh(torch.randn(classes, D), torch.randn(classes) if bias else None)
    z = torch.randn(Q, D)
    for ids in (torch.arange(classes), torch.randint(classes, (Q, 8))):
        kernel = sampler.log_count(z, ids)
        with xs.use_impl("reference"):
            torch.testing.assert_close(sampler.log_count(z, ids), kernel, rtol=1e-4, atol=1e-4)
    for samples in (1, 8, 100):
        [drawn] = changed(sampler, num_samples=samples).sample(z)
        with xs.use_impl("reference"):
            torch.testing.assert_close(
                log_prob(sampler, z, drawn.ids) + math.log(samples), drawn.log_count, rtol=1e-4,
                atol=1e-4)


def test_sixteen_bit_queries_and_tables():
    for kind in KINDS:
        sampler, z, weight, _ = make(kind)
        sampler.refresh(weight.bfloat16())
        assert sampler.sample(z.bfloat16())[0].log_count.dtype == torch.float32


@pytest.mark.parametrize("kind, change, error, message", [
    ("lsh", dict(tables=0), ValueError, "tables of at least 1"),
    ("lsh", dict(bits=0), ValueError, "bits of at least 1"),
    ("lsh", dict(bits=21), ValueError, "bits of at most 20"),
    ("lsh", dict(uniform=1.5), ValueError, r"uniform in \[0, 1\]"),
    ("lsh", dict(tables=2.5), ValueError, "tables"),
    ("sphere", dict(alpha=0), ValueError, "alpha as a finite number above 0"),
    ("sphere", dict(dim=0), ValueError, "dim of at least 1"),
    ("sphere", dict(exclude=N), ValueError, "exclude to leave at least one of"),
    ("rff", dict(features=0), ValueError, "features of at least 1"),
    ("rff", dict(tau=-1), ValueError, "tau as a finite"),
    ("lsh", dict(uniform="a"), ValueError, "uniform"),
    ("sphere", dict(alpha=None), ValueError, "alpha"),
    ("sphere", dict(bias=1), ValueError, "bias"),
    ("sphere", dict(shared=True), ValueError, "expected shared=False, got True"),
    ("lsh", dict(shared=True), ValueError, "expected shared=False, got True"),
    ("rff", dict(floor=0), ValueError, "floor as a finite"),
    ("rff", dict(refresh_every=-1), ValueError, "refresh_every of at least 0"),
])
def test_bad_arguments(kind, change, error, message):
    with pytest.raises(error, match=f"{KINDS[kind].__name__}: .*{message}"):
        KINDS[kind](N, **({"dim": D} | change))


@every_kind
def test_bad_calls(kind):
    sampler, z, _, _ = make(kind)
    with pytest.raises(IndexError, match="target in"):
        sampler.sample(z, torch.full((Q,), N))
    with pytest.raises(ValueError, match="ids of shape"):
        sampler.log_count(z, torch.zeros(Q + 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected dim of at least 1"):
        make_sampler(kind, N)
    sampler.order += N
    with pytest.raises(IndexError, match="expected order in"):
        changed(sampler, num_samples=50).sample(z)


# ---- also MIDX

TABLE_SAMPLERS = ["midx", "midx_exact", "midx_spread", "midx_learnable", "lsh", "sphere", "rff"]
every_name = pytest.mark.parametrize("name", TABLE_SAMPLERS)


@every_name
def test_state_dict_holds_the_index(name):
    sampler = make_sampler(name, N, dim=D, bias=True, exclude=HEAD)
    weight, bias, z = torch.randn(N, D), torch.randn(N), torch.randn(Q, D)
    sampler.refresh(weight, bias)
    other = make_sampler(name, N, dim=D, bias=True, exclude=HEAD)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.log_count(z, CLASSES), sampler.log_count(z,
                                                                      CLASSES)) and other.step == 1
    # The index of another head is rebuilt.
    sampler = make_sampler(name, N, dim=D, bias=True, exclude=torch.arange(1, HEAD + 1))
    sampler.load_state_dict(other.state_dict())
    assert sampler.log_count(z, CLASSES)[0].isneginf().nonzero().flatten().tolist() == list(
        range(1, HEAD + 1)) and sampler.step == 0


@every_name
def test_the_step_stays_on_the_host(name):
    sampler = make_sampler(name, N, dim=D)
    sampler.refresh(torch.randn(N, D))
    moved = copy.deepcopy(sampler).to("meta")
    assert all(table.is_meta for key, table in [*moved.named_buffers(), *moved.named_parameters()]
               if key not in ("recent", "step"))
    assert moved.step.device.type == "cpu" and moved.step == 1


@every_name
def test_excluding_classes_keeps_those_excluded_before(name):
    sampler = make_sampler(name, N, 7, dim=D, exclude=torch.tensor([4, 9]))
    other = sampler.excluding(torch.tensor([9, 200]))
    assert type(other) is type(sampler) and other.num_samples == 7
    other.prepare(torch.randn(N, D), None)
    assert other.log_count(torch.randn(1, D),
                           CLASSES)[0].isneginf().nonzero().flatten().tolist() == [4, 9, 200]
    assert sampler.step == 0


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere", "rff"])
def test_a_step_under_autocast(name):
    """The index and draws keep their precision, and log q is the same as without autocast."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=name, num_samples=6, bias=True)
    x, target = torch.randn(4, D), torch.randint(N, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(x.bfloat16(), target).backward()
        inside = loss.sampler.log_count(x, CLASSES)
    assert torch.equal(inside, loss.sampler.log_count(x, CLASSES))


@every_name
@with_bias
def test_queries_and_tables_of_another_width(name, bias):
    """Also a width that would be valid for the other kind, with or without a bias column."""
    sampler = make_sampler(name, N, dim=D, bias=bias)
    some_bias = torch.zeros(N) if bias else None
    for width in (D - 1, D + 1):
        for call in (sampler.sample, lambda z: sampler.log_count(z, CLASSES)):
            with pytest.raises(ValueError, match=r"expected queries of shape \[Q, 7\], got \[5, "
                               rf"{width}\]"):
                call(torch.randn(Q, width))
        for call in (sampler.refresh, sampler.prepare):
            with pytest.raises(
                    ValueError, match=r"expected weight of shape \[300, 7\], got "
                    rf"\[300, {width}\]"):
                call(torch.randn(N, width), some_bias)
    with pytest.raises(ValueError, match=r"expected weight of shape \[300, 7\], got \[299, 7\]"):
        sampler.refresh(torch.randn(N - 1, D), some_bias)
    for call in (sampler.refresh, sampler.prepare):
        with pytest.raises(ValueError, match=f"built with bias={bias}, got "
                           f"{'none' if bias else 'one'}"):
            call(torch.randn(N, D), None if bias else torch.zeros(N))


@every_name
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_table_that_is_not_finite_is_refused_and_nothing_changes(name, value):
    torch.manual_seed(0)
    # row 211 is not one of them
    sampler = make_sampler(name, N, dim=D, bias=True,
                           **({"train_points": 20} if "midx" in name else {}))
    weight, bias = torch.randn(N, D), torch.randn(N)
    sampler.refresh(weight, bias)
    sampler.step.zero_()
    broken, broken_bias = weight.clone(), bias.clone()
    broken[211, 2] = broken_bias[17] = value
    calls = [sampler.refresh, sampler.prepare]
    if "midx" in name:
        calls.append(lambda weight, bias: sampler.update(weight, bias, torch.tensor([4, 211])))
    before = [tensor.clone() for tensor in (*sampler._index(), torch.get_rng_state())]
    for call in calls:
        with pytest.raises(
                ValueError,
                match=r"expected weight with squared norms that are finite in float32, got a norm "
                r"of (nan|inf) for row 211"):
            call(broken, bias)
        with pytest.raises(ValueError, match=r"expected bias with finite values, got (nan|-?inf) "
                           r"at \[17\]"):
            call(weight, broken_bias)
        assert all(
            torch.equal(a, b)
            for a, b in zip(before, (*sampler._index(), torch.get_rng_state()), strict=True))


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere", "rff"])
def test_a_generator_determines_a_step(name):
    values = []
    for other_seed in (1, 2):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, N, sampler=name, num_samples=6)
        x, target = torch.randn(4, D), torch.randint(N, (4,))
        torch.manual_seed(other_seed)
        generator = torch.Generator().manual_seed(9)
        values.append([loss(x, target, generator).item() for _ in range(3)])
    assert values[0] == values[1]
