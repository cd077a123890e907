"""Static samplers and that of the batch draw what their log_count says, whatever the threads, and say the same under every front end."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from scipy import stats

import xsoftmax  # noqa: F401
from sampler_checks import chi_square
from xsoftmax.samplers import (FixedSampler, InBatchSampler, LogUniformSampler, Sampler, StaticSampler, UniformSampler, UnigramSampler,
                               make_sampler, register)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
MAX_SEED = 2**63 - 1


def seed(value):
    return torch.tensor(value, dtype=torch.int64)


def zipf(n, power=1.0):
    return torch.arange(1, n + 1, dtype=torch.float64).pow(-power)


def queries(count):
    return torch.zeros(count, 4)


def systematic(weights):
    return weights, *ops.systematic_table(weights)


# ---- Philox and the ops built straight on it, against an implementation in Python integers


def philox(key, query, draw):
    """Philox4x32-10 as the paper defines it: two 64-bit halves."""
    mask = 0xFFFFFFFF
    c = [draw & mask, draw >> 32, query & mask, query >> 32]
    k = [key & mask, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0] | c[1] << 32, c[2] | c[3] << 32


def test_philox_oracle_known_answers():  # the vectors of Random123; the C++ side holds them by static_assert
    assert philox(0, 0, 0) == (0xe169c58d6627e8d5, 0x9b00dbd8bc57ac4c)
    assert philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88) == (0x94fdccebd16cfe09, 0x24126ea15001e420)


@pytest.mark.parametrize("key", [0, 1, 2**40 + 17, MAX_SEED])
def test_uniform_draws_are_philox(key):
    got = ops.uniform_sample(seed(key), 5, 1_000_005, 3, 4, False)
    want = [[5 + (philox(key, q, j)[0] * 1_000_000 >> 64) for j in range(4)] for q in range(3)]
    assert got.tolist() == want
    assert ops.uniform_sample(seed(key), 5, 1_000_005, None, 4, False).tolist() == want[0]  # a shared set is query 0's


def test_alias_draws_are_philox():
    bins = ops.alias_table(zipf(37))
    key = 2**50 + 3
    want = []
    for j in range(200):
        low, high = philox(key, 0, j)
        bin = low * 37 >> 64
        want.append(bin if high >> 11 < bins[bin, 0] else int(bins[bin, 1]))
    assert ops.alias_sample(seed(key), bins, None, 200).tolist() == want


def test_log_uniform_draws_invert_the_distribution():
    low, high, key = 2, 10_000_000, 99
    ids = ops.log_uniform_sample(seed(key), low, high, None, 2000)
    u = np.array([(philox(key, 0, j)[0] >> 11) * 2.0**-53 for j in range(2000)])
    want = np.floor(np.exp(math.log(low + 1) + u * (math.log(high + 1) - math.log(low + 1)))) - 1
    # libm's exp may differ in the last bit, which shows only beside an integer
    assert (np.abs(ids.numpy() - want) <= 1).all() and (ids.numpy() == want).mean() > 0.999


@pytest.mark.parametrize("weights", [
    zipf(1), zipf(1000, 3.0), torch.ones(17, dtype=torch.float64), torch.tensor([0, 0, 5.0, 0, 1e-12, 1e300, 0], dtype=torch.float64),
    torch.tensor([0.1] * 10 + [0.0] * 3, dtype=torch.float64)])
def test_alias_table_holds_the_weights(weights):
    threshold, alias = ops.alias_table(weights).unbind(1)
    threshold = threshold.double() * 2.0**-53
    n = weights.numel()
    held = threshold.clone().index_add_(0, alias, 1 - threshold) / n
    want = weights / weights.sum()
    torch.testing.assert_close(held, want, rtol=1e-12, atol=1e-14 / n)
    assert (held[weights == 0] == 0).all()


# ---- opcheck


def op_samples():
    weights = zipf(100)
    bins = ops.alias_table(weights)
    tables = systematic(weights)
    for num_queries in (None, 3, 0):
        for num_samples in (0, 7):
            yield ops.uniform_sample, (seed(1), 2, 50, num_queries, num_samples, False)
            yield ops.uniform_sample, (seed(1), 2, 50, num_queries, num_samples, True)
            yield ops.log_uniform_sample, (seed(1), 2, 50, num_queries, num_samples)
            yield ops.alias_sample, (seed(1), bins, num_queries, num_samples)
            yield ops.systematic_sample, (seed(1), *tables, num_queries, num_samples)
    yield ops.alias_table, (weights,)
    yield ops.systematic_table, (weights,)


    yield ops.table_log_prob, (weights, torch.tensor([[3, -1], [99, 0]]))
    for sampler in (UniformSampler(50, 7), UniformSampler(50, 7, shared=False), LogUniformSampler(50, 7, distinct=False),
                    UnigramSampler(weights, 7), UnigramSampler(weights, 7, shared=False), FixedSampler(50, 3)):
        for target in (None, torch.tensor([3, -1]), torch.tensor([[3, 4, -1], [-1, -1, 0]])):
            yield ops.static_sample, (seed(1), queries(2), target, sampler._tables(), sampler.options)
        yield ops.static_log_count, (torch.tensor([[3, -1], [49, 0]]), sampler._tables(), sampler.options)
    for target in (torch.tensor([3, 3, -1, 0]), torch.tensor([[3, 4], [-1, 4], [2, -1]])):
        yield ops.in_batch_sample, (target, torch.arange(5), seed(10), seed(0), True)
    yield ops.in_batch_log_count, (torch.tensor([[3, -1]]), torch.arange(5), seed(10), seed(2))


@pytest.mark.parametrize("op, args", list(op_samples()))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


# ---- distributions

N = 40


def all_samplers(**options):
    counts = torch.randint(0, 50, (N,), generator=torch.Generator().manual_seed(0)).double()
    counts[3], counts[7] = 0, 400
    for exclude in (None, 6, torch.arange(6), torch.tensor([5, 0, 33])):
        yield UniformSampler(N, 9, exclude=exclude, **options)
        yield LogUniformSampler(N, 9, exclude=exclude, **options)
        yield UnigramSampler(counts, 9, exclude=exclude, **options)
        yield UnigramSampler(counts, 9, power=0.0, exclude=exclude, **options)


def law(sampler):
    """q of a sampler of independent draws."""
    return (sampler.log_count(queries(1), torch.arange(sampler.num_classes)).double() - math.log(sampler.num_samples)).exp()


@pytest.mark.parametrize("sampler", list(all_samplers(distinct=False)))
def test_counts_of_independent_draws_sum_to_their_number(sampler):
    log_count = sampler.log_count(queries(1), torch.arange(N))
    assert log_count.dtype == torch.float32
    assert log_count.double().exp().sum().item() == pytest.approx(9, abs=1e-5)


def test_excluded_classes_are_never_drawn():
    for exclude, ids in ((6, range(6)), (torch.tensor([5, 0, 33, 5]), (0, 5, 33)), (torch.arange(6), range(6))):
        for name in ("uniform", "log_uniform"):
            for shared in (True, False):
                sampler = make_sampler(name, N, 9, exclude=exclude, shared=shared)
                assert set(sampler.log_count(queries(1), torch.arange(N)).isneginf().nonzero().flatten().tolist()) == set(ids)
    log_count = UnigramSampler(torch.tensor([0, 1, 2, 3]), 2, exclude=torch.tensor([2])).log_count(queries(1), torch.arange(4))
    assert log_count.isneginf().tolist() == [True, False, True, False]


def test_formulas_of_the_laws():
    ids = torch.arange(30)
    want = ((ids + 2).double().log() - (ids + 1).double().log()) / (math.log(31) - math.log(5))
    want[:4] = 0
    torch.testing.assert_close(law(LogUniformSampler(30, 5, exclude=4, distinct=False)), want, rtol=1e-6, atol=0)
    counts = torch.tensor([1, 0, 16, 81])
    torch.testing.assert_close(law(UnigramSampler(counts, 3, distinct=False)), torch.tensor([1, 0, 8, 27]).double() / 36, rtol=1e-6, atol=0)
    ids = torch.tensor([[1, 7], [-1, 0]])
    assert UniformSampler(8, 4, distinct=False).log_count(queries(1), ids).exp().tolist() == [[0.5, 0.5], [0, 0.5]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("number", range(16))
def test_independent_draws_follow_log_count(number, shared):
    sampler = list(all_samplers(shared=shared, distinct=False))[number]
    generator, drawn = torch.Generator().manual_seed(11), []
    for _ in range(200 if shared else 1):
        [candidates] = sampler.sample(queries(1000), generator=generator)
        assert candidates.ids.shape == ((9,) if shared else (1000, 9)) and not candidates.distinct
        drawn.append(candidates.ids.flatten())
    seen = torch.bincount(torch.cat(drawn), minlength=N)
    q = law(sampler)
    assert seen[q == 0].sum() == 0
    assert chi_square(seen, q * seen.sum()) > 1e-4
    assert torch.equal(candidates.log_count, sampler.log_count(queries(1), candidates.ids))


def inclusion(probability, num_samples):
    """pi by bisection on c: an oracle that shares nothing with the op."""
    q = probability / probability.sum()
    if num_samples == int((q > 0).sum()):
        return (q > 0).double()
    low, high = 0.0, float(num_samples / q[q > 0].min())
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if (c * q).clamp(max=1).sum() < num_samples else (low, c)
    return (low * q).clamp(max=1)


def distinct_cases():
    skewed = torch.tensor([1e6, 1e6, 900, 30, 30, 30, 1, 1, 0.5, 0, 0, 0.01], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    mixed = torch.rand(300, generator=generator, dtype=torch.float64).pow(8)
    mixed[::7] = 0
    for m in (1, 3, 6, 9, 10):
        yield skewed, m
    for m in (1, 20, 150, int((mixed > 0).sum()) - 1, int((mixed > 0).sum())):
        yield mixed, m
    yield torch.ones(1, dtype=torch.float64), 1
    yield torch.ones(64, dtype=torch.float64), 32  # all tied
    yield torch.full((65,), 0.1, dtype=torch.float64), 65
    yield torch.full((1000,), 0.1, dtype=torch.float64), 999  # every pi is almost 1: rounding must not make a class stand twice
    yield zipf(100, 1.5), 5
    yield zipf(200, 4.0), 60  # the tail is 1e-5 of the whole


@pytest.mark.parametrize("weights, m", list(distinct_cases()))
def test_distinct_inclusion_is_exact(weights, m):
    trials = 4000
    weights = weights[torch.randperm(weights.numel(), generator=torch.Generator().manual_seed(1))]
    ids, log_scale = ops.systematic_sample(seed(m), *systematic(weights), trials, m)
    pi = (log_scale + weights.log()).exp().clamp(max=1)
    torch.testing.assert_close(pi, inclusion(weights, m), rtol=1e-9, atol=1e-12)
    assert pi.sum().item() == pytest.approx(m, rel=1e-12)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()  # no class twice
    assert (weights[ids] > 0).all()
    seen = torch.bincount(ids.flatten(), minlength=weights.numel()).double()
    assert (seen[pi > 1 - 1e-12] == trials).all()
    open_ = (pi > 0) & (pi < 1 - 1e-12)
    for count, p in zip(seen[open_].tolist(), pi[open_].tolist()):
        assert stats.binomtest(int(count), trials, p).pvalue > 1e-6


@pytest.mark.parametrize("n, m", [(1, 1), (2, 1), (3, 2), (10, 4), (64, 64), (1000, 10), (1025, 1000)])
def test_uniform_distinct_inclusion_is_exact(n, m):
    trials = 4000
    ids = ops.uniform_sample(seed(n), 7, 7 + n, trials, m, True)
    assert ids.min() >= 7 and ids.max() < 7 + n
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    seen = np.bincount(ids.flatten().numpy() - 7, minlength=n)
    if m < n:
        assert min(stats.binomtest(int(count), trials, m / n).pvalue for count in seen) > 1e-6
    else:
        assert (seen == trials).all()


@pytest.mark.parametrize("draw", [
    lambda s, m: ops.uniform_sample(s, 0, 50, 20_000, m, True),
    lambda s, m: ops.systematic_sample(s, *systematic(torch.ones(50, dtype=torch.float64)), 20_000, m)[0]])
def test_partners_vary(draw):
    """The pairs of a small set of equal classes: no pair is impossible, and none is far from M (M - 1) / (n (n - 1))."""
    ids = draw(seed(3), 5)
    member = torch.zeros(20_000, 50, dtype=torch.float64).scatter_(1, ids, 1.0)
    pairs = (member.T @ member)[torch.triu(torch.ones(50, 50), diagonal=1).bool()]
    want = 20_000 * 5 * 4 / (50 * 49)
    assert pairs.min() > want - 6 * want**0.5 and pairs.max() < want + 6 * want**0.5


def test_partners_vary_inside_a_bucket():
    """Classes of one bucket (0, 64, 128, ... here) meet in some sets, and not in all."""
    weights = zipf(6400, 0.5)
    ids, _ = ops.systematic_sample(seed(3), *systematic(weights), 3000, 1000)
    with_64 = ids[(ids == 64).any(1)]
    assert 0 < with_64.size(0) < 3000
    partners = torch.bincount(with_64.flatten(), minlength=6400)[6336 % 64::64]
    together = partners[2:].double() / with_64.size(0)
    alone = torch.bincount(ids.flatten(), minlength=6400)[::64][2:].double() / 3000
    assert together.mean() == pytest.approx(alone.mean().item(), rel=0.2)
    assert (partners[2:] > 0).double().mean() > 0.8


def test_different_seeds_and_queries_differ():
    tables = systematic(zipf(1000))
    for draw in (lambda s, q: ops.systematic_sample(seed(s), *tables, q, 20)[0], lambda s, q: ops.uniform_sample(seed(s), 0, 1000, q, 20, True),
                 lambda s, q: ops.uniform_sample(seed(s), 0, 1000, q, 20, False), lambda s, q: ops.log_uniform_sample(seed(s), 0, 1000, q, 20)):
        sets = {tuple(row) for s in range(20) for row in draw(s, 5).tolist()}
        assert len(sets) == 100


# ---- the modules


@pytest.mark.parametrize("number", range(16))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("distinct", [True, None])
def test_counts_of_a_set(number, shared, distinct):
    sampler = list(all_samplers(shared=shared, distinct=distinct))[number]
    target = torch.tensor([7, -1, 35])
    torch.manual_seed(0)
    [drawn] = sampler.sample(queries(3), target)
    is_distinct = shared if distinct is None else distinct
    assert drawn.distinct == sampler.distinct == is_distinct and sampler.shared == shared and sampler.num_samples == 9
    assert drawn.ids.shape == drawn.log_count.shape == ((9,) if shared else (3, 9))
    assert drawn.ids.dtype == torch.int64 and drawn.log_count.dtype == drawn.target_log_count.dtype == torch.float32
    q = law(list(all_samplers(shared=shared, distinct=False))[number])
    want = inclusion(q, 9) if is_distinct else 9 * q
    torch.testing.assert_close(drawn.log_count.double().exp(), want[drawn.ids], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(drawn.target_log_count[[0, 2]].double().exp(), want[target[[0, 2]]], rtol=1e-5, atol=1e-7)
    assert drawn.target_log_count[1] == -math.inf
    several = torch.stack([target, torch.tensor([0, -1, 12])], 1)
    torch.manual_seed(0)
    [again] = sampler.sample(queries(3), several)
    assert torch.equal(again.ids, drawn.ids) and torch.equal(again.target_log_count[:, 0], drawn.target_log_count)
    assert torch.equal(again.target_log_count, sampler.log_count(queries(3), several))
    if is_distinct:
        assert (drawn.ids.sort(-1).values.diff() > 0).all() and (drawn.log_count <= 0).all()
    if is_distinct and shared:
        assert (drawn.ids.diff() > 0).all()
    assert sampler.sample(queries(3))[0].target_log_count is None
    assert sampler.refresh(torch.zeros(40, 4)) == {} and sampler.default_estimator == "sampled_softmax"


def test_no_samples_and_no_queries():
    for make in (lambda **k: UniformSampler(N, **k), lambda **k: LogUniformSampler(N, **k), lambda **k: UnigramSampler(zipf(N), **k)):
        for shared, shape in ((True, (0,)), (False, (2, 0))):
            [drawn] = make(num_samples=0, shared=shared).sample(queries(2), torch.tensor([1, 2]))
            assert drawn.ids.shape == drawn.log_count.shape == shape
            assert (drawn.target_log_count == -math.inf).all()  # the expected count of no draws is 0
        assert make(num_samples=3, shared=False).sample(queries(0), torch.empty(0, dtype=torch.int64))[0].ids.shape == (0, 3)
    assert InBatchSampler(N).sample(queries(0), torch.empty(0, dtype=torch.int64))[0].log_count.shape == (0, 0)
    assert FixedSampler(N, 0).sample(queries(2), torch.tensor([1, 2]))[0].ids.shape == (0,)


def test_fixed_classes_are_always_there():
    sampler = FixedSampler(N, torch.tensor([30, 2, 30, 7]))
    [drawn] = sampler.sample(queries(4), torch.tensor([2, 3, -1, 30]))
    assert drawn.ids.tolist() == [2, 7, 30] and drawn.log_count.tolist() == [0, 0, 0] and drawn.distinct and sampler.num_samples == 3
    assert drawn.target_log_count.tolist() == [0, -math.inf, -math.inf, 0]
    assert sampler.log_count(queries(1), torch.tensor([[30, 31]])).tolist() == [[0, -math.inf]]
    assert sampler.excluding(torch.tensor([7, 8])).sample(queries(1))[0].ids.tolist() == [2, 30]
    assert FixedSampler(N, 3).sample(queries(1))[0].ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("make", [
    lambda: UniformSampler(N, 9), lambda: UniformSampler(N, 9, shared=False), lambda: LogUniformSampler(N, 9, shared=False),
    lambda: UnigramSampler(zipf(N), 9), lambda: UnigramSampler(zipf(N), 9, shared=False, distinct=True), lambda: FixedSampler(N, 3),
    lambda: InBatchSampler(N)])
def test_queries_that_do_not_count_change_nothing(make):
    target, results = torch.tensor([3, 17, 3, 5, 39]), []
    for extra in (0, 3):
        sampler = make()
        for step in range(3):
            torch.manual_seed(step)
            [drawn] = sampler.sample(queries(5 + extra), torch.cat([target.roll(step), torch.full((extra,), -1)]))
            ids, log_count = (each[:5] if each.dim() == 2 else each for each in (drawn.ids, drawn.log_count))
            keep = slice(5) if isinstance(sampler, InBatchSampler) else slice(None)
            results.append((ids[..., keep], log_count[..., keep], drawn.target_log_count[:5], sampler.log_count(queries(1), target)))
        if isinstance(sampler, InBatchSampler):
            assert drawn.log_count[:, 5:].isposinf().all() and sampler.total == 15
        assert not drawn.log_count.isnan().any()
    for plain, padded in zip(results[:3], results[3:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, padded))


def test_threads_do_not_matter():
    weights = zipf(5000)
    bins = ops.alias_table(weights)
    tables = systematic(weights)
    draws = [lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, True), lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, False),
             lambda: ops.log_uniform_sample(seed(8), 0, 5000, 3001, 33), lambda: ops.alias_sample(seed(8), bins, 3001, 33),
             lambda: ops.systematic_sample(seed(8), *tables, 3001, 33)[0]]
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append([draw() for draw in draws])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("make", [lambda shared: UniformSampler(1000, 30, shared=shared), lambda shared: LogUniformSampler(1000, 30, shared=shared),
                                  lambda shared: UnigramSampler(zipf(1000), 30, shared=shared)])
@pytest.mark.parametrize("shared", [True, False])
def test_the_torch_generator_governs(make, shared):
    sampler = make(shared)

    def ids(generator=None):
        return sampler.sample(queries(3), generator=generator)[0].ids

    torch.manual_seed(5)
    first, second = ids(), ids()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(ids(), first) and torch.equal(ids(), second)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(ids(generator), first) and torch.equal(ids(generator), second)
    torch.manual_seed(5)  # one draw of one int64 a call, so that a second random consumer may be counted on
    ids()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(0, MAX_SEED, [])
    assert torch.equal(torch.get_rng_state(), state)


class Use(torch.nn.Module):
    def __init__(self, sampler):
        super().__init__()
        self.sampler = sampler

    def forward(self, input, target):
        drawn = self.sampler.sample(input, target)[0]
        return drawn.ids, drawn.log_count, drawn.target_log_count, self.sampler.log_count(input, target)


def front_end_samplers():
    yield UniformSampler(50, 7)
    yield UniformSampler(50, 7, shared=False)
    yield UniformSampler(50, 7, exclude=torch.tensor([2, 9]), shared=False)
    yield LogUniformSampler(50, 7, distinct=False)
    yield LogUniformSampler(50, 7)
    yield UnigramSampler(zipf(50), 7)
    yield UnigramSampler(zipf(50), 7, shared=False, distinct=True)
    yield UnigramSampler(zipf(50), 7, shared=False)
    yield FixedSampler(50, 7)
    yield InBatchSampler(50)


@pytest.mark.parametrize("sampler", list(front_end_samplers()))
def test_torchscript(sampler):
    input, target = queries(5), torch.tensor([1, 2, -1, 3, 49])
    eager = Use(copy.deepcopy(sampler))
    scripted = torch.jit.script(Use(copy.deepcopy(sampler)))
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    results = []
    for module in (eager, scripted, loaded):
        torch.manual_seed(1)
        results.append(module(input, target))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    generator = torch.Generator().manual_seed(2)
    state = generator.get_state()
    torch.jit.script(copy.deepcopy(sampler)).sample(input, target, generator)
    assert isinstance(sampler, InBatchSampler) or not torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("sampler", list(front_end_samplers()))
def test_compile_and_export(sampler):
    input, target = queries(5), torch.tensor([1, 2, -1, 3, 49])
    module = Use(copy.deepcopy(sampler))
    torch.manual_seed(1)
    want = copy.deepcopy(module)(input, target)
    exported = torch.export.export(copy.deepcopy(module), (input, target)).module()
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(exported(input, target), want))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(compiled(input, target), want))


def test_inductor():  # its random numbers are its own, so only what does not depend on them is compared
    torch._dynamo.reset()
    compiled = torch.compile(Use(UnigramSampler(zipf(50), 7)), fullgraph=True)
    target = torch.tensor([1, 2, 3, 3, 49])
    first, second = compiled(queries(5), target), compiled(queries(5), target)
    eager = Use(UnigramSampler(zipf(50), 7))(queries(5), target)
    assert (first[0].diff() > 0).all() and not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[2], eager[2])


def test_state_dict_holds_what_the_constructor_does_not_say():
    """Tables follow from the constructor's arguments: a loss keeps the keys of torch.nn.LinearCrossEntropyLoss. Counts do not."""
    for sampler in (UnigramSampler(zipf(30), 5), UniformSampler(30, 5), UniformSampler(30, 5, exclude=torch.tensor([3])), FixedSampler(30, 5)):
        assert sampler.state_dict() == {}
    source, other = InBatchSampler(30), InBatchSampler(30)
    source.sample(queries(3), torch.tensor([1, 2, 2]))
    assert set(source.state_dict()) == {"counts", "total"}
    other.load_state_dict(source.state_dict())
    for sampler in (source, other):
        sampler.eval()
    results = [sampler.sample(queries(3), torch.tensor([1, 2, 2]))[0].log_count for sampler in (source, other)]
    assert torch.equal(*results) and results[0].isfinite().sum() == 6


def test_excluding():
    """A sampler told later what to leave out is the one that was built so, and draws as many."""
    for make in (lambda **k: UnigramSampler(zipf(30), 9, **k), lambda **k: UniformSampler(30, 9, **k), lambda **k: LogUniformSampler(30, 9, **k)):
        for options in (dict(), dict(shared=False), dict(distinct=False)):
            for exclude in (torch.arange(4), torch.tensor([2, 7]), torch.tensor([], dtype=torch.int64)):
                later, built = make(**options).excluding(exclude), make(exclude=exclude, **options)
                torch.testing.assert_close(later.log_count(queries(1), torch.arange(30)), built.log_count(queries(1), torch.arange(30)))
                assert later.num_samples == 9 and (later.shared, later.distinct) == (built.shared, built.distinct)
            twice = make(exclude=torch.arange(4), **options).excluding(torch.tensor([4, 5]))
            torch.testing.assert_close(twice.log_count(queries(1), torch.arange(30)), make(exclude=6, **options).log_count(queries(1), torch.arange(30)))
    assert UniformSampler(30, 9, exclude=4).excluding(torch.tensor([4, 5])).probability.numel() == 0
    assert InBatchSampler(30).excluding(torch.arange(3)) is None
    with pytest.raises(ValueError, match="UniformSampler: expected num_samples of at most 7, .* got 9"):
        UniformSampler(10, 9).excluding(torch.tensor([0, 5, 7]))


def test_casting_a_model_keeps_the_tables():
    sampler = UnigramSampler(zipf(1000), 30)
    [want] = sampler.sample(queries(1), generator=torch.Generator().manual_seed(0))
    torch.nn.Sequential(sampler).half().float().bfloat16()
    assert sampler.probability.dtype == sampler.cumulative.dtype == torch.float64
    [got] = sampler.sample(queries(1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(got.ids, want.ids) and torch.equal(got.log_count, want.log_count)


def test_ten_million_classes_need_no_tables():
    """O(M) by construction: a uniform or independent log-uniform sampler holds no tables at all; 2^62 classes work like 10."""
    n = 10_000_000
    for shared in (True, False):
        for sampler in (UniformSampler(n, 50, shared=shared, exclude=512), LogUniformSampler(n, 50, shared=shared, distinct=False)):
            assert sum(table.numel() for table in sampler.buffers()) == 0
            ids = sampler.sample(queries(4))[0].ids
            assert ids.min() >= 0 and ids.max() < n
    ids = ops.uniform_sample(seed(1), 0, 2**62, None, 1000, True)
    assert ids.unique().numel() == 1000 and (ids > 2**61).double().mean() == pytest.approx(0.5, abs=0.1)


def test_counts_are_integers_of_numpy_too():
    sampler = UniformSampler(np.int64(50), np.int32(7), exclude=np.int64(3))
    assert (sampler.num_classes, sampler.num_samples) == (50, 7) and type(sampler.num_classes) is int
    torch.jit.script(sampler)


def test_names():
    assert isinstance(make_sampler("in_batch", 30), InBatchSampler)
    with pytest.raises(ValueError, match='expected no num_samples for "in_batch"'):
        make_sampler("in_batch", 30, 5)
    sampler = make_sampler("unigram", 30, 5, counts=zipf(30), shared=False, dim=8, bias=True)
    assert isinstance(sampler, UnigramSampler) and sampler.num_samples == 5 and not sampler.shared

    @register("every_third")
    class EveryThird(StaticSampler):
        def __init__(self, num_classes, num_samples):
            super().__init__(torch.arange(num_classes) % 3 == 0, num_samples)

    assert isinstance(make_sampler("every_third", 30, 5), EveryThird)
    assert (make_sampler("every_third", 30, 5).sample(queries(1))[0].ids % 3 == 0).all()
    with pytest.raises(ValueError, match="a name that is not taken, got 'every_third'"):
        register("every_third")(EveryThird)


def test_a_sampler_belongs_to_one_loss():
    sampler = UniformSampler(30, 5)
    sampler._claim("SampledSoftmaxLoss")
    with pytest.raises(ValueError, match="CaneLoss: expected a sampler of its own, got a UniformSampler that a SampledSoftmaxLoss has already"):
        sampler._claim("CaneLoss")


def test_a_set_reads_few_slots_of_its_tables():
    """O(B + M log N): a pass over the weights would meet a NaN, since all are NaN but those that the binary searches may look at."""
    n = 2**20
    weights = torch.ones(n, dtype=torch.float64)
    order, cumulative = ops.systematic_table(weights)
    clean = ops.systematic_sample(seed(1), weights, order, cumulative, None, 100)
    probed = {int(order[p % 64 * (n // 64) + p // 64]) for p in range(100)}
    first, end = 0, n
    while first < end:  # the support's binary search
        middle = first + (end - first) // 2
        probed.add(int(order[middle % 64 * (n // 64) + middle // 64]))
        first = middle + 1
    bad = torch.full_like(weights, math.nan)
    bad[list(probed)] = 1
    poisoned = ops.systematic_sample(seed(1), bad, order, cumulative, None, 100)
    assert torch.equal(clean[0], poisoned[0]) and torch.equal(clean[1], poisoned[1])


# ---- in-batch


def test_in_batch_counts_and_frequencies():
    sampler = InBatchSampler(10)
    first, second = torch.tensor([1, 1, 4, 2]), torch.tensor([4, 4, 9])
    [drawn] = sampler.sample(queries(4), first)
    assert torch.equal(drawn.ids, first) and not drawn.distinct
    count = 3 * torch.tensor([2.0, 2, 1, 1]) / 4  # (n - 1) p, the batch itself counted
    itself = torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(drawn.log_count.exp(), count.expand(4, 4).masked_fill(itself, math.inf))
    torch.testing.assert_close(drawn.target_log_count.exp(), count)
    [drawn] = sampler.sample(queries(3), second)
    torch.testing.assert_close(drawn.target_log_count.exp(), 2 * torch.tensor([3.0, 3, 1]) / 7)
    assert sampler.counts.tolist() == [0, 2, 1, 0, 3, 0, 0, 0, 0, 1] and sampler.total == 7
    sampler.eval()
    [drawn] = sampler.sample(queries(2), torch.tensor([[1, 3], [3, 1]]))
    assert sampler.total == 7 and drawn.ids.tolist() == [1, 3]
    torch.testing.assert_close(drawn.target_log_count.exp(), torch.tensor([[2.0, 0], [0, 2]]) / 7)
    torch.testing.assert_close(sampler.log_count(queries(2), torch.arange(10)).exp(), sampler.counts / 7.0)
    assert InBatchSampler(3).log_count(queries(1), torch.arange(3)).isneginf().all()


def test_in_batch_leaves_out_targets_that_do_not_count():
    sampler = InBatchSampler(30)
    [drawn] = sampler.sample(queries(4), torch.tensor([1, -1, 2, -1]))
    assert sampler.total == 2 and sampler.counts[0] == 0 and drawn.ids.tolist() == [1, 0, 2, 0]
    assert drawn.log_count.isfinite().nonzero().tolist() == [[0, 2], [2, 0]]
    assert (drawn.log_count.isfinite() | drawn.log_count.isposinf()).all()
    [alone] = sampler.sample(queries(3), torch.tensor([-1, 1, -1]))
    assert alone.log_count.isposinf().all() and alone.target_log_count.isneginf().all()  # nobody else's target


def test_in_batch_log_count_is_the_mean_count():
    """Over the other queries of a batch, as often as a class is among their targets."""
    torch.manual_seed(0)
    sampler, p, seen = InBatchSampler(20), zipf(20) / zipf(20).sum(), torch.zeros(20, dtype=torch.float64)
    for _ in range(400):
        target = torch.multinomial(p, 100, replacement=True)
        [drawn] = sampler.sample(queries(100), target)
        seen += torch.bincount(target[1:], minlength=20)  # what query 0 meets
    count = sampler.log_count(queries(100), torch.arange(20)).double().exp()
    torch.testing.assert_close(count, 99 * p, rtol=0.15, atol=0)
    torch.testing.assert_close(count, seen / 400, rtol=0.02, atol=0)


def test_in_batch_errors_change_nothing():
    sampler = InBatchSampler(10)
    sampler.sample(queries(2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="expected target, got None"):
        sampler.sample(queries(2))
    with pytest.raises(IndexError, match=r"in_batch_sample: expected target in \[0, 10\).*got 10"):
        sampler.sample(queries(2), torch.tensor([1, 10]))
    with pytest.raises(TypeError, match="target of dtype int64"):
        sampler.sample(queries(2), torch.tensor([1.0, 2.0]))
    assert sampler.counts.sum() == sampler.total == sampler.drawn == 2


# ---- bad input


@pytest.mark.parametrize("make, error, message", [
    (lambda: UniformSampler(0, 1), ValueError, "UniformSampler: expected num_classes of at least 1, got 0"),
    (lambda: LogUniformSampler(2.5, 1), TypeError, "LogUniformSampler: expected num_classes of type int, got float"),
    (lambda: InBatchSampler(-1), ValueError, "InBatchSampler: expected num_classes"),
    (lambda: UniformSampler(5, -1), ValueError, "UniformSampler: expected num_samples of at least 0, got -1"),
    (lambda: UniformSampler(5, 2.0), TypeError, "UniformSampler: expected num_samples of type int, got float"),
    (lambda: UniformSampler(5, 1, exclude=5), ValueError, "UniformSampler: expected exclude to leave a class of 5, got all of them"),
    (lambda: UniformSampler(5, 1, exclude=-1), ValueError, "UniformSampler: expected exclude of at least 0, got -1"),
    (lambda: LogUniformSampler(5, 1, exclude=10**15), ValueError, "LogUniformSampler: expected exclude to leave a class"),
    (lambda: UniformSampler(5, 1, exclude=torch.arange(5)), ValueError, "got all of them"),
    (lambda: UniformSampler(5, 1, exclude=torch.tensor([1, 5])), IndexError, r"UniformSampler: expected exclude in \[0, 5\), got ids from 1 to 5"),
    (lambda: UniformSampler(5, 1, exclude=torch.tensor([1.0])), ValueError, "exclude as int64 ids"),
    (lambda: UniformSampler(5, 1, exclude=[1]), TypeError, "UniformSampler: expected exclude of type int, got list"),
    (lambda: UniformSampler(5, 1, distinct="yes"), TypeError, "distinct as True, False or None"),
    (lambda: UniformSampler(5, 1, shared=1), TypeError, "UniformSampler: expected shared as True, False or None, got 1"),
    (lambda: UniformSampler(5, 6), ValueError, "UniformSampler: expected num_samples of at most 5, the classes that are ever drawn, .* got 6"),
    (lambda: UniformSampler(5, 4, exclude=2, shared=False, distinct=True), ValueError, "UniformSampler: expected num_samples of at most 3"),
    (lambda: UnigramSampler(torch.tensor([0, 1, 2]), 3), ValueError, "UnigramSampler: expected num_samples of at most 2, .*got 3"),
    (lambda: UnigramSampler(torch.tensor([1.0, -2.0]), 1), ValueError, r"UnigramSampler: expected counts .* got -2 at \[1\]"),
    (lambda: UnigramSampler(torch.tensor([math.nan]), 1), ValueError, "got nan"),
    (lambda: UnigramSampler(torch.tensor([1, math.inf]), 1), ValueError, "got inf"),
    (lambda: UnigramSampler(torch.zeros(3), 1), ValueError, "UnigramSampler: expected counts that are not all zero"),
    (lambda: UnigramSampler(torch.ones(3, 2), 1), ValueError, r"got shape \[3, 2\]"),
    (lambda: UnigramSampler(torch.ones(0), 1), ValueError, r"got shape \[0\]"),
    (lambda: UnigramSampler([1, 2], 1), TypeError, "UnigramSampler: expected counts as a tensor .*got list"),
    (lambda: UnigramSampler(torch.ones(2, dtype=torch.complex64), 1), TypeError, "UnigramSampler: expected counts of a real dtype"),
    (lambda: UnigramSampler(torch.ones(3), 1, power=-1), ValueError, "power as a finite number of at least 0, got -1"),
    (lambda: UnigramSampler(torch.ones(3), 1, power=math.nan), ValueError, "power"),
    (lambda: UnigramSampler(torch.tensor([0, 3, 0]), 1, exclude=torch.tensor([1])), ValueError, "positive weight that is not excluded"),
    (lambda: StaticSampler(torch.ones(2, 2), 1), ValueError, "StaticSampler: expected weights as a tensor"),
    (lambda: FixedSampler(5, torch.tensor([5])), IndexError, r"FixedSampler: expected ids in \[0, 5\)"),
    (lambda: FixedSampler(0, torch.tensor([0])), ValueError, "FixedSampler: expected num_classes of at least 1"),
    (lambda: make_sampler("unigram", 3, 1), ValueError, 'expected counts of 3 classes for "unigram", got none'),
    (lambda: make_sampler("unigram", 3, 1, counts=torch.ones(4)), ValueError, 'counts of 3 classes for "unigram", got 4'),
    (lambda: make_sampler("uniform", 3), ValueError, "make_sampler: expected num_samples for a UniformSampler, got None"),
    (lambda: make_sampler("zipf", 3, 1), ValueError, "got 'zipf'"),
    (lambda: register("x")(int), TypeError, "register: expected a class that derives from Sampler"),
    (lambda: UniformSampler(5, 1).sample(queries(1), torch.tensor([5])), IndexError, r"static_sample: expected target in \[0, 5\)"),
    (lambda: UniformSampler(5, 1).log_count(queries(1), torch.tensor([-2])), IndexError, r"static_log_count: expected ids in \[0, 5\).*-2"),
    (lambda: UnigramSampler(torch.ones(5), 1).log_count(queries(1), torch.tensor([5])), IndexError, r"static_log_count: expected ids in \[0, 5\)"),
    (lambda: UniformSampler(5, 1).log_count(queries(1), torch.tensor([1.0])), TypeError, "static_log_count: expected ids of dtype int64"),
    (lambda: ops.static_log_count(seed(1), [], "law=uniform,num_classes=5"), ValueError, "static_log_count: expected 4 tables, got 0"),
    (lambda: ops.static_tables("X", None, None, None, "law=uniform,size=5"), ValueError, "X: expected options among law, low, .*got 'size'"),
    (lambda: ops.uniform_sample(torch.zeros(1, dtype=torch.int64), 0, 5, None, 1, False), ValueError, "seed with 0 dimensions"),
    (lambda: ops.uniform_sample(torch.tensor(1.0), 0, 5, None, 1, False), TypeError, "seed of dtype int64"),
    (lambda: ops.uniform_sample(seed(0), 5, 5, None, 1, False), ValueError, "0 <= low < high, got low = 5 and high = 5"),
    (lambda: ops.log_uniform_sample(seed(0), -1, 5, None, 1), ValueError, "low = -1"),
    (lambda: ops.uniform_sample(seed(0), 0, 5, -1, 1, False), ValueError, "num_queries of at least 0, got -1"),
    (lambda: ops.alias_table(torch.ones(3)), TypeError, "weights of dtype float64, got float32"),
    (lambda: ops.alias_table(torch.ones(0).double()), ValueError, "at least 1 weight"),
    (lambda: ops.alias_table(torch.zeros(3).double()), ValueError, "a weight above zero"),
    (lambda: ops.systematic_table(torch.tensor([1, math.nan]).double()), ValueError, r"got nan at \[1\]"),
    (lambda: ops.alias_sample(seed(0), torch.zeros(3, 3).long(), None, 1), ValueError, "bins with size 2"),
    (lambda: ops.alias_sample(seed(0), torch.tensor([[0, 3]] * 3), None, 1), IndexError, r"in \[0, 3\), got 3"),
    (lambda: ops.systematic_sample(seed(0), torch.ones(3).double(), torch.full((3,), -1), torch.ones(3).double(), None, 1), IndexError,
     "order in .*got -1"),
])
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_generator_of_another_device():
    with pytest.raises(ValueError, match="expected a generator on the queries' device meta, got one on cpu"):
        UniformSampler(5, 1).sample(queries(1).to("meta"), generator=torch.Generator())


def test_meta_tensors():
    for sampler in (UnigramSampler(zipf(50), 4, shared=False), UniformSampler(50, 4, shared=False)):
        [drawn] = sampler.to("meta").sample(queries(3).to("meta"), torch.zeros(3, dtype=torch.int64, device="meta"))
        assert drawn.ids.shape == (3, 4) and drawn.ids.is_meta and drawn.target_log_count.shape == (3,)
