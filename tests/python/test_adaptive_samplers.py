"""LSH, sphere and RFF draw what they say, from an index that may be stale."""

import math

import pytest
import torch

import xsoftmax as xs
from sampler_checks import check_scripted_compiled_and_saved, chi_square
from xsoftmax.samplers import LshSampler, RffSampler, SphereSampler, UnigramSampler, UnionSampler, make_sampler

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
N, D, Q, HEAD = 300, 7, 5, 6

KINDS = {"lsh": LshSampler, "sphere": SphereSampler, "rff": RffSampler}
every_kind = pytest.mark.parametrize("kind", KINDS)
with_bias = pytest.mark.parametrize("bias", [False, True])


def make(kind, bias=False, **kwargs):
    """A sampler that knows a random table, and queries."""
    torch.manual_seed(0)
    weight, b = torch.randn(N, D), torch.randn(N)
    sampler = KINDS[kind](N, D, bias=bias, exclude=HEAD, **kwargs)
    sampler.refresh(weight, b if bias else None)
    return sampler, torch.randn(Q, D), weight, b if bias else None


def widened(z, weight, bias):
    """Queries and rows in float64, the bias as a last column."""
    if bias is None:
        return z.double(), weight.double()
    return torch.cat([z, torch.ones(len(z), 1)], 1).double(), torch.cat([weight, bias[:, None]], 1).double()


def lsh_formula(sampler, z, weight):
    hashes = [(x @ sampler.planes.double().T > 0).view(-1, sampler.tables, sampler.bits) for x in (z, weight)]
    same = (hashes[0][:, None] == hashes[1][None]).all(3).double()  # [Q, N, T]
    same[:, :HEAD] = 0
    size = same.sum(1, keepdim=True)
    found = (same / size.clamp(min=1)).sum(2) / (size > 0).sum(2).clamp(min=1)
    even = torch.full_like(found, 1 / (N - HEAD))
    q = torch.where((size > 0).any(2), (1 - sampler.uniform) * found + sampler.uniform * even, even)
    q[:, :HEAD] = 0
    return q


def sphere_formula(sampler, z, weight):
    kernel = sampler._scale * (z @ weight.T).square() + 1
    kernel[:, :HEAD] = 0
    return kernel / kernel.sum(1, keepdim=True)


def rff_formula(sampler, z, weight):
    """The tree by recursion."""
    def features(x):
        angle = torch.nn.functional.normalize(x) @ sampler.directions.double().T
        return torch.cat([angle.cos(), angle.sin()], 1) / math.sqrt(sampler.features)

    product = features(z) @ features(weight).T
    q = torch.zeros(len(z), N, dtype=torch.float64)
    leaves, rows = len(sampler.sums) // 2, N - HEAD

    def descend(low, high, share):
        ids = sampler.order[low * rows // leaves : high * rows // leaves]
        if high - low == 1:
            kernel = product[:, ids].clamp(min=sampler._scale)
            q[:, ids] = share * kernel / kernel.sum(1, keepdim=True)
            return
        middle = (low + high) // 2
        masses = []
        for a, b in ((low, middle), (middle, high)):
            part = sampler.order[a * rows // leaves : b * rows // leaves]
            masses.append(product[:, part].sum(1, keepdim=True).clamp(min=sampler._scale * len(part)))
        descend(low, middle, share * masses[0] / (masses[0] + masses[1]))
        descend(middle, high, share * masses[1] / (masses[0] + masses[1]))

    descend(0, leaves, torch.ones(len(z), 1, dtype=torch.float64))
    return q


FORMULAS = {"lsh": lsh_formula, "sphere": sphere_formula, "rff": rff_formula}


@every_kind
@with_bias
def test_log_prob_is_the_formula_and_sums_to_one(kind, bias):
    sampler, z, weight, b = make(kind, bias)
    want = FORMULAS[kind](sampler, *widened(z, weight, b))
    got = sampler.log_prob(z, torch.arange(N))
    assert got.dtype == torch.float32 and torch.isneginf(got[:, :HEAD]).all()
    torch.testing.assert_close(got.double().exp(), want, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(got.exp().sum(1), torch.ones(Q))
    ids = torch.randint(N, (Q, 11))
    torch.testing.assert_close(sampler.log_prob(z, ids), got.gather(1, ids))


@every_kind
@with_bias
def test_draws_follow_log_prob_also_of_a_stale_index(kind, bias):
    sampler, z, weight, _ = make(kind, bias)
    before = sampler.log_prob(z, torch.arange(N))
    weight.normal_()  # the table moves on, the index does not
    torch.testing.assert_close(sampler.log_prob(z, torch.arange(N)), before)
    proposal = sampler.sample(z, 30_000, False, torch.arange(Q) + HEAD)
    assert not proposal.distinct and proposal.ids.shape == (Q, 30_000)
    for q in range(Q):
        assert chi_square(torch.bincount(proposal.ids[q], minlength=N), before[q].double().exp() * 30_000) > 1e-4
    torch.testing.assert_close(proposal.log_count, before.gather(1, proposal.ids) + math.log(30_000), rtol=0, atol=1e-4)
    torch.testing.assert_close(proposal.target_log_count, before[torch.arange(Q), torch.arange(Q) + HEAD] + math.log(30_000), rtol=0, atol=1e-4)


@every_kind
def test_a_sampler_that_has_seen_no_table_is_uniform_and_one_that_has_is_not(kind):
    sampler, z, _, _ = make(kind)
    fresh = KINDS[kind](N, D, exclude=HEAD)
    torch.testing.assert_close(fresh.log_prob(z, torch.arange(N))[:, HEAD:], torch.full((Q, N - HEAD), -math.log(N - HEAD)))
    assert sampler.log_prob(z, torch.arange(HEAD, N)).std() > 0.1


def test_near_classes_are_drawn_more_often():
    """By the score for the sphere, by the angle for the other two."""
    for kind in KINDS:
        torch.manual_seed(1)
        sampler, z, weight, _ = make(kind)
        near = (z @ weight[HEAD:].T / weight[HEAD:].norm(dim=1)).argsort(1)[:, -20:] + HEAD
        log_q = sampler.log_prob(z, torch.arange(N))
        assert (log_q.gather(1, near).exp().sum(1) > 1.5 * 20 / (N - HEAD)).all(), kind


@every_kind
def test_any_number_of_threads_draws_alike(kind):
    sampler, _, _, _ = make(kind)
    z, target = torch.randn(200, D), torch.randint(N, (200,))
    threads = torch.get_num_threads()
    drawn = []
    try:
        for n in (1, 4):
            torch.set_num_threads(n)
            torch.manual_seed(3)
            drawn.append(sampler.sample(z, 12, False, target))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(drawn[0][:3], drawn[1][:3]):
        assert torch.equal(one, other)


@every_kind
@pytest.mark.parametrize("classes", [1, 2, 33, 100, 1025])
def test_few_and_odd_numbers_of_classes(kind, classes):
    torch.manual_seed(0)
    sampler = KINDS[kind](classes, 3)
    sampler.refresh(torch.randn(classes, 3))
    z = torch.randn(4, 3)
    total = sampler.log_prob(z, torch.arange(classes)).double().exp().sum(1)
    torch.testing.assert_close(total, torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=0)
    assert sampler.sample(z, 9, False).ids.max() < classes
    assert sampler.sample(z, 0, False).ids.shape == (4, 0) and sampler.sample(z[:0], 5, False).ids.shape == (0, 5)


@every_kind
def test_degenerate_tables_and_queries(kind):
    for table in (torch.zeros(N, D), torch.ones(N, D), torch.full((N, D), 1e18)):
        sampler = KINDS[kind](N, D)
        sampler.refresh(table)
        z = torch.cat([torch.randn(3, D), torch.zeros(1, D)])
        drawn = sampler.sample(z, 8, False, torch.zeros(4, dtype=torch.int64))
        assert 0 <= drawn.ids.min() and drawn.ids.max() < N
    sampler, z, _, _ = make(kind)
    drawn = sampler.sample(torch.full_like(z, math.nan), 8, False)  # the loss will say so; nothing crashes
    assert HEAD <= drawn.ids.min() and drawn.ids.max() < N


@every_kind
@with_bias
def test_a_loss_trains_with_it_and_refreshes_it(kind, bias):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=kind, num_samples=20, head_classes=HEAD, bias=bias)
    assert not loss.shared and isinstance(loss.sampler, KINDS[kind])
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.05)
    x, target = torch.randn(64, D), torch.randint(N, (64,))
    before = loss.eval()(x, target).item()
    loss.train()
    for _ in range(60):
        optimizer.zero_grad()
        loss(x, target).backward()
        optimizer.step()
    optimizer.flush()
    assert loss.sampler.step == 60 and loss.eval()(x, target).item() < before - 1
    stale = loss.sampler.log_prob(x, torch.arange(N))
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    assert not torch.equal(stale, loss.sampler.log_prob(x, torch.arange(N)))


@every_kind
def test_the_schedule_refreshes_at_step_0_and_more_often_early(kind):
    sampler = KINDS[kind](N, D, refresh_every=64)
    z, due = torch.randn(Q, D), []
    for step in range(130):
        before = sampler.log_prob(z, torch.arange(N))
        sampler.prepare(torch.randn(N, D), None)
        if not torch.equal(before, sampler.log_prob(z, torch.arange(N))):
            due.append(step)
    assert due == [0, 2, 4, 8, 16, 32, 64, 128]


@every_kind
def test_union_adds_counts(kind):
    sampler, z, _, _ = make(kind)
    union = UnionSampler((UnigramSampler(torch.rand(N) + 0.1, exclude=HEAD), 10), (sampler, 5))
    ids = torch.arange(HEAD, N)
    want = torch.logaddexp(union.parts[0].log_count(z, 10, True, ids).expand(Q, -1), sampler.log_prob(z, ids) + math.log(5))
    torch.testing.assert_close(union.log_count(z, 0, False, ids), want)
    drawn = union.sample(z, 0, False)
    torch.testing.assert_close(drawn.log_count, union.log_count(z, 0, False, drawn.ids), atol=1e-4, rtol=0)


@every_kind
@with_bias
def test_scripted_compiled_and_saved(kind, bias):
    check_scripted_compiled_and_saved(lambda: xs.SampledSoftmaxLoss(D, N, sampler=kind, num_samples=7, head_classes=HEAD, bias=bias))


@every_kind
def test_state_dict_holds_the_index(kind):
    sampler, z, _, _ = make(kind, True)
    other = KINDS[kind](N, D, bias=True, exclude=HEAD)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.log_prob(z, torch.arange(N)), sampler.log_prob(z, torch.arange(N)))


def index_of(sampler):
    if isinstance(sampler, LshSampler):
        return (sampler.planes, sampler.code, sampler.order, sampler.start), sampler.uniform
    return (sampler.directions, sampler.rows, sampler.sums, sampler.order, sampler.place), sampler._scale


@every_kind
@with_bias
def test_opcheck(kind, bias):
    sampler, z, weight, b = make(kind, bias)
    index, parameter = index_of(sampler)
    family = "lsh" if kind == "lsh" else "kernel"
    ids, step = torch.randint(N, (Q, 3)), torch.tensor(0)
    torch.library.opcheck(getattr(ops, family + "_sample").default, (torch.tensor(1), z, *index, parameter, 4, ids[:, 0]))
    torch.library.opcheck(getattr(ops, family + "_log_prob").default, (z, *index, parameter, ids))
    torch.library.opcheck(getattr(ops, family + "_refresh_").default, (weight, b, *index, step, 4))


@every_kind
@with_bias
@pytest.mark.parametrize("classes", [N, 40])
def test_kernels_agree_with_the_composites(kind, bias, classes):
    torch.manual_seed(0)
    sampler = KINDS[kind](classes, D, bias=bias, exclude=torch.tensor([3, 17]))
    sampler.refresh(torch.randn(classes, D), torch.randn(classes) if bias else None)
    z = torch.randn(Q, D)
    for ids in (torch.arange(classes), torch.randint(classes, (Q, 8))):
        kernel = sampler.log_prob(z, ids)
        with xs.use_impl("reference"):
            torch.testing.assert_close(sampler.log_prob(z, ids), kernel, rtol=1e-4, atol=1e-4)


def test_sixteen_bit_queries_and_tables():
    for kind in KINDS:
        sampler, z, weight, _ = make(kind)
        sampler.refresh(weight.bfloat16())
        assert sampler.sample(z.bfloat16(), 4, False).log_count.dtype == torch.float32


@pytest.mark.parametrize("kind, change, error, message", [
    ("lsh", dict(tables=0), ValueError, "tables of at least 1"), ("lsh", dict(bits=0), ValueError, "bits of at least 1"),
    ("lsh", dict(bits=21), ValueError, "bits of at most 20"), ("lsh", dict(uniform=1.5), ValueError, r"uniform in \[0, 1\]"),
    ("lsh", dict(tables=2.5), TypeError, "tables of type int"), ("sphere", dict(alpha=0), ValueError, "alpha as a finite number above 0"),
    ("sphere", dict(dim=0), ValueError, "dim of at least 1"), ("sphere", dict(exclude=N), ValueError, "exclude to leave a class"),
    ("rff", dict(features=0), ValueError, "features of at least 1"), ("rff", dict(tau=-1), ValueError, "tau as a finite"),
    ("lsh", dict(uniform="a"), TypeError, "uniform as a number"), ("sphere", dict(alpha=None), TypeError, "alpha as a number"),
    ("sphere", dict(bias=1), TypeError, "bias as True or False, got 1"),
    ("rff", dict(floor=0), ValueError, "floor as a finite"), ("rff", dict(refresh_every=-1), ValueError, "refresh_every of at least 0"),
])
def test_bad_arguments(kind, change, error, message):
    with pytest.raises(error, match=message):
        KINDS[kind](N, **({"dim": D} | change))


@every_kind
def test_bad_calls(kind):
    sampler, z, weight, _ = make(kind)
    with pytest.raises(ValueError, match="expected shared=False, got True"):
        sampler.sample(z, 4, True)
    with pytest.raises(IndexError, match="target in"):
        sampler.sample(z, 4, False, torch.full((Q,), N))
    with pytest.raises(ValueError, match="ids of shape"):
        sampler.log_prob(z, torch.zeros(Q + 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="a table of width 7, got 8"):
        xs.SampledSoftmaxLoss(D + 1, N, sampler=sampler, num_samples=4)
    with pytest.raises(ValueError, match=f'expected dim for "{kind}"'):
        make_sampler(kind, N)


@every_kind
def test_a_broken_index_is_an_error(kind):
    sampler, z, _, _ = make(kind)
    sampler.order += N
    with pytest.raises(IndexError, match="expected order in"):
        sampler.sample(z, 50, False)


# ---- beside a loss: MIDX, too

TABLE_SAMPLERS = ["midx", "lsh", "sphere", "rff"]


@pytest.mark.parametrize("name", TABLE_SAMPLERS)
def test_a_step_under_autocast(name):
    """The index and its draws keep their precision; log q is the same outside, for any number of threads."""
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=name, num_samples=6, bias=True)
    x, target = torch.randn(4, D), torch.randint(N, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(x.bfloat16(), target).backward()
        inside = loss.sampler.log_prob(x, torch.arange(N))
    torch.testing.assert_close(inside, loss.sampler.log_prob(x, torch.arange(N)), rtol=0, atol=0)


@pytest.mark.parametrize("name", TABLE_SAMPLERS)
@pytest.mark.parametrize("bias", [False, True])
def test_queries_and_tables_of_another_width(name, bias):
    """Also of one that could be taken for the other kind's, with or without a column for the bias."""
    sampler = make_sampler(name, N, dim=D, bias=bias)
    some, some_bias = torch.arange(N), torch.zeros(N) if bias else None
    for width in (D - 1, D + 1):
        for call in (lambda z: sampler.sample(z, 4, False), lambda z: sampler.log_prob(z, some), lambda z: sampler.log_count(z, 4, False, some)):
            with pytest.raises(ValueError, match=rf"{type(sampler).__name__}: expected input of shape \[Q, 7\], got \[5, {width}\]"):
                call(torch.randn(Q, width))
        for call in (sampler.refresh, sampler.prepare):
            with pytest.raises(ValueError, match=rf"expected weight of shape \[300, 7\], got \[300, {width}\]"):
                call(torch.randn(N, width), some_bias)
    with pytest.raises(ValueError, match=r"expected weight of shape \[300, 7\], got \[299, 7\]"):
        sampler.refresh(torch.randn(N - 1, D), some_bias)
    with pytest.raises(ValueError, match="got none" if bias else "got one"):
        sampler.refresh(torch.randn(N, D), None if bias else torch.zeros(N))


@pytest.mark.parametrize("name", TABLE_SAMPLERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_table_that_is_not_finite_is_refused_and_the_index_stays(name, value):
    torch.manual_seed(0)
    sampler = make_sampler(name, N, dim=D, bias=True, **({"train_points": 20} if name == "midx" else {}))  # row 211 is not among those
    weight, bias, z = torch.randn(N, D), torch.randn(N), torch.randn(Q, D)
    sampler.refresh(weight, bias)
    before = sampler.log_prob(z, torch.arange(N))
    broken, broken_bias = weight.clone(), bias.clone()
    broken[211, 2] = broken_bias[17] = value
    calls = [sampler.refresh, sampler.prepare]
    if name == "midx":
        calls.append(lambda weight, bias: sampler.update(weight, bias, torch.tensor([4, 211])))
    for call in calls:
        with pytest.raises(ValueError, match=r"expected weight with rows of finite norms, got (nan|inf) for row 211"):
            sampler.step.zero_()
            call(broken, bias)
        with pytest.raises(ValueError, match=r"expected bias with finite values, got (nan|-?inf) at \[17\]"):
            sampler.step.zero_()
            call(weight, broken_bias)
    assert torch.equal(sampler.log_prob(z, torch.arange(N)), before)


@pytest.mark.parametrize("name", TABLE_SAMPLERS)
def test_a_generator_governs_a_step(name):
    values = []
    for other_seed in (1, 2):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(D, N, sampler=name, num_samples=6)
        x, target = torch.randn(4, D), torch.randint(N, (4,))
        torch.manual_seed(other_seed)
        generator = torch.Generator().manual_seed(9)
        values.append([loss(x, target, generator).item() for _ in range(3)])
    assert values[0] == values[1]


@pytest.mark.parametrize("name", TABLE_SAMPLERS)
def test_an_index_of_another_head_is_built_anew(name):
    make = lambda head: xs.SampledSoftmaxLoss(D, N, sampler=name, num_samples=6, head_classes=torch.tensor(head))  # noqa: E731
    old, new = make([0, 1, 2]), make([5, 6, 7])
    old(torch.randn(4, D), torch.randint(N, (4,)))
    new.load_state_dict(old.state_dict())
    log_q = new.sampler.log_prob(torch.randn(1, D), torch.arange(N))[0]
    assert log_q.isneginf().nonzero().flatten().tolist() == [5, 6, 7] and new.sampler.step == 0
