"""Static samplers, and in-batch sampling with the same distribution: draws match log_count, for any
number of threads."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import xsoftmax  # noqa: F401
from sampler_checks import chi_square, queries, seed, zipf
from xsoftmax.samplers import (FixedSampler, InBatchSampler, LogUniformSampler, UniformSampler,
                               UnigramSampler, make_sampler)

ops = torch.ops.xsoftmax
MAX_SEED = 2**63 - 1


def systematic(weights):
    return weights, *ops.systematic_table(weights)


# ---- Philox and the operators that use it directly, against Python integers


def philox(key, query, draw):
    """Philox4x32-10 as defined in the paper: two 64-bit halves."""
    mask = 0xFFFFFFFF
    c = [draw & mask, draw >> 32, query & mask, query >> 32]
    k = [key & mask, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0] | c[1] << 32, c[2] | c[3] << 32


# test vectors of Random123; C++ checks them with static_assert
def test_philox_oracle_known_answers():
    assert philox(0, 0, 0) == (0xe169c58d6627e8d5, 0x9b00dbd8bc57ac4c)
    assert philox(0x299f31d0a4093822, 0x0370734413198a2e,
                  0x85a308d3243f6a88) == (0x94fdccebd16cfe09, 0x24126ea15001e420)


@pytest.mark.parametrize("key", [0, 1, 2**40 + 17, MAX_SEED])
def test_uniform_draws_are_philox(key):
    got = ops.uniform_sample(seed(key), 5, 1_000_005, 3, 4, False)
    want = [[5 + (philox(key, q, j)[0] * 1_000_000 >> 64) for j in range(4)] for q in range(3)]
    assert got.tolist() == want
    # a shared set uses the random numbers of query 0
    assert ops.uniform_sample(seed(key), 5, 1_000_005, None, 4, False).tolist() == want[0]


def test_alias_draws_are_philox():
    bins = ops.alias_table(zipf(37))
    key = 2**50 + 3
    want = []
    for j in range(200):
        low, high = philox(key, 0, j)
        bin = low * 37 >> 64
        want.append(bin if high >> 11 < bins[bin, 0] else int(bins[bin, 1]))
    assert ops.alias_sample(seed(key), bins, None, 200, []).tolist() == want


def test_log_uniform_draws_invert_the_distribution():
    low, high, key = 2, 10_000_000, 99
    ids = ops.log_uniform_sample(seed(key), low, high, None, 2000)
    u = np.array([(philox(key, 0, j)[0] >> 11) * 2.0**-53 for j in range(2000)])
    want = np.floor(np.exp(math.log(low + 1) + u * (math.log(high + 1) - math.log(low + 1)))) - 1
    # libm's exp may differ in the last bit, which matters only next to an integer
    assert (np.abs(ids.numpy() - want) <= 1).all() and (ids.numpy() == want).mean() > 0.999


@pytest.mark.parametrize("layout", [lambda ids: ids, lambda ids: ids.t(), lambda ids: ids[:, ::2]],
                         ids=["contiguous", "transposed", "strided"])
def test_log_uniform_counts_match_the_distribution(impl, layout):
    low, high, draws = 2, 10_000_000, 7
    ids = layout(
        torch.cat([
            torch.arange(-2, 6),
            torch.randint(high, (5000,)),
            torch.tensor([high - 1, high, 2**63 - 1, -(2**63)])
        ]).view(4, 1253))
    got = ops.log_uniform_log_count(ids, low, high,
                                    math.log(draws) - math.log(math.log((high + 1) / (low + 1))))
    inside = (ids >= low) & (ids < high)
    share = torch.log1p(1 / (ids.clamp(min=0).double() + 1)) / math.log((high + 1) / (low + 1))
    assert got.dtype == torch.float32 and got.shape == ids.shape
    torch.testing.assert_close(got,
                               torch.where(inside, (draws * share).log(), -math.inf).float(),
                               rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [
    zipf(1),
    zipf(1000, 3.0),
    torch.ones(17, dtype=torch.float64),
    torch.tensor([0, 0, 5.0, 0, 1e-12, 1e300, 0], dtype=torch.float64),
    torch.tensor([0.1] * 10 + [0.0] * 3, dtype=torch.float64)
])
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
            yield ops.alias_sample, (seed(1), bins, num_queries, num_samples, [])
            yield ops.systematic_sample, (seed(1), *tables, num_queries, num_samples, [])
    yield ops.alias_table, (weights,)
    yield ops.systematic_table, (weights,)
    yield ops.table_log_prob, (weights, torch.tensor([[3, -1], [99, 0]]))
    for sampler in (UniformSampler(50, 7), UniformSampler(50, 7, shared=False),
                    LogUniformSampler(50, 7, distinct=False), UnigramSampler(weights, 7),
                    UnigramSampler(weights, 7, shared=False), FixedSampler(50, 3)):
        for target in (None, torch.tensor([3, -1]), torch.tensor([[3, 4, -1], [-1, -1, 0]])):
            yield ops.static_sample, (seed(1), queries(2), target, sampler._tables(),
                                      sampler.options)
        yield ops.static_log_count, (torch.tensor([[3, -1],
                                                   [49, 0]]), sampler._tables(), sampler.options)
    for target in (torch.tensor([3, 3, -1, 0]), torch.tensor([[3, 4], [-1, 4], [2, -1]])):
        for text in ("num_ids=5", "num_ids=5,half_life=3", "num_ids=none,half_life=3,buckets=8"):
            for counted in (None, target):
                yield ops.in_batch_sample, (target, counted, *ops.streaming_counts("Counts", text),
                                            seed(0), text)
            yield ops.in_batch_log_count, (target, *ops.streaming_counts("Counts", text), seed(2),
                                           text)
    for distinct in ("true", "false"):
        sampler, text = UnigramSampler(torch.ones(5), 3,
                                       distinct=distinct == "true"), "num_ids=5,half_life=3"
        yield ops.static_follow_, (torch.tensor([3, -1]), torch.tensor([3, -1,
                                                                        4]), torch.tensor([0]),
                                   seed(1), *ops.streaming_counts("Counts", text),
                                   sampler._tables(), text, f"refresh_every=0,distinct={distinct}")


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


def distribution(sampler):
    """q of a sampler that draws with replacement."""
    return (sampler.log_count(queries(1), torch.arange(sampler.num_classes)).double() -
            math.log(sampler.num_samples)).exp()


@pytest.mark.parametrize("sampler", list(all_samplers(distinct=False)))
def test_counts_with_replacement_sum_to_num_samples(sampler):
    log_count = sampler.log_count(queries(1), torch.arange(N))
    assert log_count.dtype == torch.float32
    assert log_count.double().exp().sum().item() == pytest.approx(9, abs=1e-5)


def test_excluded_classes_are_never_drawn():
    for exclude, ids in ((6, range(6)), (torch.tensor([5, 0, 33, 5]), (0, 5, 33)), (torch.arange(6),
                                                                                    range(6))):
        for name in ("uniform", "log_uniform"):
            for shared in (True, False):
                sampler = make_sampler(name, N, 9, exclude=exclude, shared=shared)
                assert set(
                    sampler.log_count(
                        queries(1),
                        torch.arange(N)).isneginf().nonzero().flatten().tolist()) == set(ids)
    log_count = UnigramSampler(torch.tensor([0, 1, 2, 3]), 2,
                               exclude=torch.tensor([2])).log_count(queries(1), torch.arange(4))
    assert log_count.isneginf().tolist() == [True, False, True, False]


def test_formulas_of_the_distributions():
    ids = torch.arange(30)
    want = ((ids + 2).double().log() - (ids + 1).double().log()) / (math.log(31) - math.log(5))
    want[:4] = 0
    torch.testing.assert_close(distribution(LogUniformSampler(30, 5, exclude=4, distinct=False)),
                               want, rtol=1e-6, atol=0)
    counts = torch.tensor([1, 0, 16, 81])
    torch.testing.assert_close(distribution(UnigramSampler(counts, 3, distinct=False)),
                               torch.tensor([1, 0, 8, 27]).double() / 36, rtol=1e-6, atol=0)
    ids = torch.tensor([[1, 7], [-1, 0]])
    assert UniformSampler(8, 4, distinct=False).log_count(queries(1),
                                                          ids).exp().tolist() == [[0.5, 0.5],
                                                                                  [0, 0.5]]


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
    q = distribution(sampler)
    assert seen[q == 0].sum() == 0
    assert chi_square(seen, q * seen.sum()) > 1e-4
    assert torch.equal(candidates.log_count, sampler.log_count(queries(1), candidates.ids))


def inclusion(probability, num_samples):
    """Inclusion probabilities by bisection on c, independent of the operator's code."""
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
    # every pi is almost 1: rounding must not put a class in a set twice
    yield torch.full((1000,), 0.1, dtype=torch.float64), 999
    yield zipf(100, 1.5), 5
    yield zipf(200, 4.0), 60  # the tail has 1e-5 of the total weight


@pytest.mark.parametrize("weights, m", list(distinct_cases()))
def test_distinct_inclusion_is_exact(weights, m):
    trials = 4000
    weights = weights[torch.randperm(weights.numel(), generator=torch.Generator().manual_seed(1))]
    ids, log_scale = ops.systematic_sample(seed(m), *systematic(weights), trials, m, [])
    pi = (log_scale + weights.log()).exp().clamp(max=1)
    torch.testing.assert_close(pi, inclusion(weights, m), rtol=1e-9, atol=1e-12)
    assert pi.sum().item() == pytest.approx(m, rel=1e-12)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()  # no class is drawn twice
    assert (weights[ids] > 0).all()
    seen = torch.bincount(ids.flatten(), minlength=weights.numel()).double()
    assert (seen[pi > 1 - 1e-12] == trials).all()
    open_ = (pi > 0) & (pi < 1 - 1e-12)
    for count, p in zip(seen[open_].tolist(), pi[open_].tolist()):
        assert stats.binomtest(int(count), trials, p).pvalue > 1e-6


@pytest.mark.parametrize("n, m", [(1, 1), (2, 1), (3, 2), (10, 4), (64, 64), (1000, 10),
                                  (1025, 1000)])
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
    lambda s, m: ops.uniform_sample(s, 0, 50, 20_000, m, True), lambda s, m: ops.systematic_sample(
        s, *systematic(torch.ones(50, dtype=torch.float64)), 20_000, m, [])[0]
])
def test_all_pairs_occur_in_a_set(draw):
    """Among equal classes every pair has a probability near M (M - 1) / (n (n - 1))."""
    ids = draw(seed(3), 5)
    member = torch.zeros(20_000, 50, dtype=torch.float64).scatter_(1, ids, 1.0)
    pairs = (member.T @ member)[torch.triu(torch.ones(50, 50), diagonal=1).bool()]
    want = 20_000 * 5 * 4 / (50 * 49)
    assert pairs.min() > want - 6 * want**0.5 and pairs.max() < want + 6 * want**0.5


def test_pairs_within_a_bucket_vary():
    """Classes of one bucket (0, 64, 128, ... here) are together in some sets but not in all."""
    weights = zipf(6400, 0.5)
    ids, _ = ops.systematic_sample(seed(3), *systematic(weights), 3000, 1000, [])
    with_64 = ids[(ids == 64).any(1)]
    assert 0 < with_64.size(0) < 3000
    partners = torch.bincount(with_64.flatten(), minlength=6400)[6336 % 64::64]
    together = partners[2:].double() / with_64.size(0)
    alone = torch.bincount(ids.flatten(), minlength=6400)[::64][2:].double() / 3000
    assert together.mean() == pytest.approx(alone.mean().item(), rel=0.2)
    assert (partners[2:] > 0).double().mean() > 0.8


def test_different_seeds_and_queries_differ():
    tables = systematic(zipf(1000))
    for draw in (lambda s, q: ops.systematic_sample(seed(s), *tables, q, 20, [])[0],
                 lambda s, q: ops.uniform_sample(seed(s), 0, 1000, q, 20, True),
                 lambda s, q: ops.uniform_sample(seed(s), 0, 1000, q, 20, False),
                 lambda s, q: ops.log_uniform_sample(seed(s), 0, 1000, q, 20)):
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
    assert drawn.distinct == sampler.distinct == is_distinct
    assert sampler.shared == shared and sampler.num_samples == 9
    assert drawn.ids.shape == drawn.log_count.shape == ((9,) if shared else (3, 9))
    assert drawn.ids.dtype == torch.int64
    assert drawn.log_count.dtype == drawn.target_log_count.dtype == torch.float32
    q = distribution(list(all_samplers(shared=shared, distinct=False))[number])
    want = inclusion(q, 9) if is_distinct else 9 * q
    torch.testing.assert_close(drawn.log_count.double().exp(), want[drawn.ids], rtol=1e-5,
                               atol=1e-7)
    torch.testing.assert_close(drawn.target_log_count[[0, 2]].double().exp(), want[target[[0, 2]]],
                               rtol=1e-5, atol=1e-7)
    assert drawn.target_log_count[1] == -math.inf
    several = torch.stack([target, torch.tensor([0, -1, 12])], 1)
    torch.manual_seed(0)
    [again] = sampler.sample(queries(3), several)
    assert torch.equal(again.ids, drawn.ids) and torch.equal(again.target_log_count[:, 0],
                                                             drawn.target_log_count)
    assert torch.equal(again.target_log_count, sampler.log_count(queries(3), several))
    if is_distinct:
        assert (drawn.ids.sort(-1).values.diff() > 0).all() and (drawn.log_count <= 0).all()
    if is_distinct and shared:
        assert (drawn.ids.diff() > 0).all()
    assert sampler.sample(queries(3))[0].target_log_count is None
    assert sampler.refresh(torch.zeros(40, 4)) == {}
    assert sampler.default_estimator == ("sampled_softmax" if shared or is_distinct else "ranking")


def test_no_samples_and_no_queries():
    for make in (lambda **k: UniformSampler(N, **k), lambda **k: LogUniformSampler(N, **k),
                 lambda **k: UnigramSampler(zipf(N), **k)):
        for shared, shape in ((True, (0,)), (False, (2, 0))):
            [drawn] = make(num_samples=0, shared=shared).sample(queries(2), torch.tensor([1, 2]))
            assert drawn.ids.shape == drawn.log_count.shape == shape
            # with no draws the expected count is 0
            assert (drawn.target_log_count == -math.inf).all()
        assert make(num_samples=3,
                    shared=False).sample(queries(0),
                                         torch.empty(0, dtype=torch.int64))[0].ids.shape == (0, 3)
    assert InBatchSampler(N).sample(queries(0),
                                    torch.empty(0, dtype=torch.int64))[0].log_count.shape == (0, 0)
    assert FixedSampler(N, 0).sample(queries(2), torch.tensor([1, 2]))[0].ids.shape == (0,)


def test_fixed_classes_are_always_scored():
    sampler = FixedSampler(N, torch.tensor([30, 2, 30, 7]))
    [drawn] = sampler.sample(queries(4), torch.tensor([2, 3, -1, 30]))
    assert drawn.ids.tolist() == [2, 7, 30] and drawn.log_count.tolist() == [
        0, 0, 0
    ] and drawn.distinct and sampler.num_samples == 3
    assert drawn.target_log_count.tolist() == [0, -math.inf, -math.inf, 0]
    assert sampler.log_count(queries(1), torch.tensor([[30, 31]])).tolist() == [[0, -math.inf]]
    assert sampler.excluding(torch.tensor([7, 8])).sample(queries(1))[0].ids.tolist() == [2, 30]
    assert FixedSampler(N, 3).sample(queries(1))[0].ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("make", [
    lambda: UniformSampler(N, 9), lambda: UniformSampler(N, 9, shared=False),
    lambda: LogUniformSampler(N, 9, shared=False), lambda: UnigramSampler(zipf(N), 9),
    lambda: UnigramSampler(zipf(N), 9, shared=False, distinct=True), lambda: FixedSampler(N, 3),
    lambda: InBatchSampler(N)
])
def test_ignored_queries_change_nothing(make):
    target, results = torch.tensor([3, 17, 3, 5, 39]), []
    for extra in (0, 3):
        sampler = make()
        for step in range(3):
            torch.manual_seed(step)
            [drawn] = sampler.sample(queries(5 + extra),
                                     torch.cat([target.roll(step),
                                                torch.full((extra,), -1)]))
            ids, log_count = (each[:5] if each.dim() == 2 else each
                              for each in (drawn.ids, drawn.log_count))
            keep = slice(5) if isinstance(sampler, InBatchSampler) else slice(None)
            results.append((ids[..., keep], log_count[..., keep], drawn.target_log_count[:5],
                            sampler.log_count(queries(1), target)))
        if isinstance(sampler, InBatchSampler):
            assert drawn.log_count[:, 5:].isposinf().all() and sampler.total == 15
        assert not drawn.log_count.isnan().any()
    for plain, padded in zip(results[:3], results[3:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, padded))


def test_threads_do_not_matter():
    weights = zipf(5000)
    bins = ops.alias_table(weights)
    tables = systematic(weights)
    draws = [
        lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, True),
        lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, False),
        lambda: ops.log_uniform_sample(seed(8), 0, 5000, 3001, 33),
        lambda: ops.alias_sample(seed(8), bins, 3001, 33, []),
        lambda: ops.systematic_sample(seed(8), *tables, 3001, 33, [])[0]
    ]
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


def test_a_set_reads_few_slots_of_its_tables():
    """O(B + M log N) reads. All weights are NaN except those that the binary searches may read, so
    a pass over the weights would return NaN."""
    n = 2**20
    weights = torch.ones(n, dtype=torch.float64)
    order, cumulative = ops.systematic_table(weights)
    clean = ops.systematic_sample(seed(1), weights, order, cumulative, None, 100, [])
    probed = {int(order[p % 64 * (n // 64) + p // 64]) for p in range(100)}
    first, end = 0, n
    while first < end:  # binary search in the support
        middle = first + (end - first) // 2
        probed.add(int(order[middle % 64 * (n // 64) + middle // 64]))
        first = middle + 1
    bad = torch.full_like(weights, math.nan)
    bad[list(probed)] = 1
    poisoned = ops.systematic_sample(seed(1), bad, order, cumulative, None, 100, [])
    assert torch.equal(clean[0], poisoned[0]) and torch.equal(clean[1], poisoned[1])
