"""Samplers draw what their log_prob says, whatever the threads, and say the same under every front end."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from scipy import stats

import xsoftmax  # noqa: F401
from xsoftmax.samplers import (InBatchSampler, LogUniformSampler, Proposal, Sampler, StaticSampler, UniformSampler, UnigramSampler,
                               make_sampler)

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
    threshold, alias = ops.alias_table(zipf(37))
    key = 2**50 + 3
    want = []
    for j in range(200):
        low, high = philox(key, 0, j)
        bin = low * 37 >> 64
        want.append(bin if (high >> 11) * 2.0**-53 < threshold[bin] else int(alias[bin]))
    assert ops.alias_sample(seed(key), threshold, alias, None, 200).tolist() == want


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
    threshold, alias = ops.alias_table(weights)
    n = weights.numel()
    held = threshold.clone().index_add_(0, alias, 1 - threshold) / n
    want = weights / weights.sum()
    torch.testing.assert_close(held, want, rtol=1e-12, atol=1e-14 / n)
    assert (held[weights == 0] == 0).all()


# ---- opcheck


def op_samples():
    weights = zipf(100)
    threshold, alias = ops.alias_table(weights)
    tables = systematic(weights)
    for num_queries in (None, 3, 0):
        for num_samples in (0, 7):
            yield ops.uniform_sample, (seed(1), 2, 50, num_queries, num_samples, False)
            yield ops.uniform_sample, (seed(1), 2, 50, num_queries, num_samples, True)
            yield ops.log_uniform_sample, (seed(1), 2, 50, num_queries, num_samples)
            yield ops.alias_sample, (seed(1), threshold, alias, num_queries, num_samples)
            yield ops.systematic_sample, (seed(1), *tables, num_queries, num_samples)
    yield ops.alias_table, (weights,)
    yield ops.systematic_table, (weights,)


@pytest.mark.parametrize("op, args", list(op_samples()))
def test_opcheck(op, args):
    torch.library.opcheck(op.default, args)


# ---- distributions


def all_samplers():
    n = 40
    counts = torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(0)).double()
    counts[3], counts[7] = 0, 400
    scattered = torch.tensor([5, 0, 33])
    for exclude in (None, 6, torch.arange(6), scattered):
        yield UniformSampler(n, exclude=exclude)
        yield LogUniformSampler(n, exclude=exclude)
        yield UnigramSampler(counts, exclude=exclude)
        yield UnigramSampler(counts, power=0.0, exclude=exclude)


@pytest.mark.parametrize("sampler", list(all_samplers()))
def test_log_prob_is_a_distribution_without_the_excluded(sampler):
    log_q = sampler.log_prob(queries(1), torch.arange(40))
    assert log_q.dtype == torch.float32
    assert log_q.double().exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_excluded_classes_have_no_probability():
    for exclude, ids in ((6, range(6)), (torch.tensor([5, 0, 33, 5]), (0, 5, 33)), (torch.arange(6), range(6))):
        for name in ("uniform", "log_uniform"):
            log_q = make_sampler(name, 40, exclude=exclude).log_prob(queries(1), torch.arange(40))
            assert set((log_q == -math.inf).nonzero().flatten().tolist()) == set(ids)
    log_q = UnigramSampler(torch.tensor([0, 1, 2, 3]), exclude=torch.tensor([2])).log_prob(queries(1), torch.arange(4))
    assert (log_q == -math.inf).tolist() == [True, False, True, False]


def test_log_prob_formulas():
    ids = torch.arange(30)
    q = LogUniformSampler(30, exclude=4).log_prob(queries(1), ids).double().exp()
    want = ((ids + 2).double().log() - (ids + 1).double().log()) / (math.log(31) - math.log(5))
    want[:4] = 0
    torch.testing.assert_close(q, want, rtol=1e-6, atol=0)
    counts = torch.tensor([1, 0, 16, 81])
    q = UnigramSampler(counts, power=0.75).log_prob(queries(1), torch.arange(4)).double().exp()
    torch.testing.assert_close(q, torch.tensor([1, 0, 8, 27]).double() / 36, rtol=1e-6, atol=0)
    assert UniformSampler(8).log_prob(queries(1), torch.tensor([[1, 8], [-1, 7]])).exp().tolist() == [[0.125, 0], [0, 0.125]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sampler", list(all_samplers()))
def test_independent_draws_follow_log_prob(sampler, shared):
    sampler = copy.deepcopy(sampler)
    sampler.distinct = False
    generator = torch.Generator().manual_seed(11)
    proposal = sampler.sample(queries(1 if shared else 400), 20_000 if shared else 50, shared, generator=generator)
    assert proposal.ids.shape == ((20_000,) if shared else (400, 50)) and not proposal.distinct
    q = sampler.log_prob(queries(1), torch.arange(40)).double().exp().numpy()
    seen = np.bincount(proposal.ids.flatten().numpy(), minlength=40)
    assert seen[q == 0].sum() == 0
    support = q > 0
    assert stats.chisquare(seen[support], q[support] / q.sum() * 20_000).pvalue > 1e-4
    m = 20_000 if shared else 50
    torch.testing.assert_close(proposal.log_count, sampler.log_prob(queries(1), proposal.ids) + math.log(m), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("sampler", list(all_samplers()))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("distinct", [True, None])
def test_proposal_counts(sampler, shared, distinct):
    sampler = copy.deepcopy(sampler)
    sampler.distinct = distinct
    target = torch.tensor([7, 8, 35])
    torch.manual_seed(0)
    proposal = sampler.sample(queries(3), 9, shared, target)
    assert isinstance(proposal, Proposal) and isinstance(sampler, Sampler)
    is_distinct = shared if distinct is None else distinct
    assert proposal.distinct == is_distinct
    assert proposal.ids.shape == proposal.log_count.shape == ((9,) if shared else (3, 9))
    assert proposal.ids.dtype == torch.int64 and proposal.log_count.dtype == proposal.target_log_count.dtype == torch.float32
    q = sampler.log_prob(queries(1), torch.arange(40)).double().exp()
    want = inclusion(q, 9) if is_distinct else 9 * q
    torch.testing.assert_close(proposal.log_count.double().exp(), want[proposal.ids], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(proposal.target_log_count.double().exp(), want[target], rtol=1e-5, atol=1e-7)
    if is_distinct:
        assert (proposal.ids.sort(-1).values.diff() > 0).all() and (proposal.log_count <= 0).all()
    if is_distinct and shared:
        assert (proposal.ids.diff() > 0).all()
    assert sampler.sample(queries(3), 9, shared).target_log_count is None
    assert sampler.refresh(torch.zeros(40, 4)) == {} and sampler.shared_by_default


@pytest.mark.parametrize("sampler", [UniformSampler(40), LogUniformSampler(40), UnigramSampler(zipf(40))])
def test_no_samples_and_no_queries(sampler):
    for shared, shape in ((True, (0,)), (False, (2, 0))):
        proposal = sampler.sample(queries(2), 0, shared, torch.tensor([1, 2]))
        assert proposal.ids.shape == proposal.log_count.shape == shape
        assert (proposal.target_log_count == -math.inf).all()  # the expected count of no draws is 0
    assert sampler.sample(queries(0), 3, False, torch.empty(0, dtype=torch.int64)).ids.shape == (0, 3)


def test_threads_do_not_matter():
    weights = zipf(5000)
    threshold, alias = ops.alias_table(weights)
    tables = systematic(weights)
    draws = [lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, True), lambda: ops.uniform_sample(seed(8), 0, 5000, 3001, 33, False),
             lambda: ops.log_uniform_sample(seed(8), 0, 5000, 3001, 33), lambda: ops.alias_sample(seed(8), threshold, alias, 3001, 33),
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


@pytest.mark.parametrize("sampler", [UniformSampler(1000), LogUniformSampler(1000), UnigramSampler(zipf(1000))])
@pytest.mark.parametrize("shared", [True, False])
def test_the_torch_generator_governs(sampler, shared):
    def ids(generator=None):
        return sampler.sample(queries(3), 30, shared, generator=generator).ids

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
    def __init__(self, sampler, shared):
        super().__init__()
        self.sampler = sampler
        self.shared = shared

    def forward(self, input, target):
        proposal = self.sampler.sample(input, 7, self.shared, target)
        return proposal.ids, proposal.log_count, proposal.target_log_count, self.sampler.log_prob(input, target)


def front_end_samplers():
    yield UniformSampler(50), True
    yield UniformSampler(50), False
    yield UniformSampler(50, exclude=torch.tensor([2, 9])), False
    yield LogUniformSampler(50, distinct=False), True
    yield LogUniformSampler(50), True
    yield UnigramSampler(zipf(50)), True
    yield UnigramSampler(zipf(50), distinct=True), False
    yield UnigramSampler(zipf(50), distinct=False), False
    yield InBatchSampler(50), True


@pytest.mark.parametrize("sampler, shared", list(front_end_samplers()))
def test_torchscript(sampler, shared):
    input, target = queries(5), torch.tensor([1, 2, 3, 3, 49])
    eager = Use(copy.deepcopy(sampler), shared)
    scripted = torch.jit.script(Use(copy.deepcopy(sampler), shared))
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
    torch.jit.script(copy.deepcopy(sampler)).sample(input, 7, shared, target, generator)
    assert isinstance(sampler, InBatchSampler) or not torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("sampler, shared", list(front_end_samplers()))
def test_compile_and_export(sampler, shared):
    input, target = queries(5), torch.tensor([1, 2, 3, 3, 49])
    module = Use(copy.deepcopy(sampler), shared)
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
    compiled = torch.compile(Use(UnigramSampler(zipf(50)), True), fullgraph=True)
    target = torch.tensor([1, 2, 3, 3, 49])
    first, second = compiled(queries(5), target), compiled(queries(5), target)
    eager = Use(UnigramSampler(zipf(50)), True)(queries(5), target)
    assert (first[0].diff() > 0).all() and not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[2], eager[2])


def test_state_dict_holds_what_the_constructor_does_not_say():
    """Tables follow from the constructor's arguments: a loss keeps the keys of torch.nn.LinearCrossEntropyLoss. Counts do not."""
    for sampler in (UnigramSampler(zipf(30)), UniformSampler(30), UniformSampler(30, exclude=torch.tensor([3])), LogUniformSampler(30)):
        assert sampler.state_dict() == {}
    source, other = InBatchSampler(30), InBatchSampler(30)
    source.sample(queries(3), 0, True, torch.tensor([1, 2, 2]))
    classes = torch.arange(30)
    assert not torch.equal(source.log_prob(queries(1), classes), other.log_prob(queries(1), classes))
    other.load_state_dict(source.state_dict())
    assert torch.equal(source.log_prob(queries(1), classes), other.log_prob(queries(1), classes))


def test_excluding():
    """A sampler told later what to leave out is the one that was built so."""
    for make in (lambda **k: UnigramSampler(zipf(30), **k), lambda **k: UniformSampler(30, **k), lambda **k: LogUniformSampler(30, **k)):
        for exclude in (4, torch.tensor([2, 7])):
            later, built = make().excluding(exclude), make(exclude=exclude)
            torch.testing.assert_close(later.log_prob(queries(1), torch.arange(30)), built.log_prob(queries(1), torch.arange(30)))
    with pytest.raises(TypeError, match="head_classes"):
        InBatchSampler(30).excluding(3)


def test_in_batch_leaves_out_targets_that_do_not_count():
    sampler = InBatchSampler(30)
    proposal = sampler.sample(queries(4), 0, True, torch.tensor([1, -1, 2, -1]))
    assert sampler.total == 2 and sampler.counts[0] == 0
    assert proposal.log_count.isposinf().tolist() == [False, True, False, True]


def test_casting_a_model_keeps_the_tables():
    sampler = UnigramSampler(zipf(1000))
    want = sampler.sample(queries(1), 30, True, generator=torch.Generator().manual_seed(0))
    torch.nn.Sequential(sampler).half().float().bfloat16()
    assert sampler.probability.dtype == sampler.cumulative.dtype == sampler.threshold.dtype == torch.float64
    got = sampler.sample(queries(1), 30, True, generator=torch.Generator().manual_seed(0))
    assert torch.equal(got.ids, want.ids) and torch.equal(got.log_count, want.log_count)


def test_ten_million_classes_need_no_tables():
    """O(M) by construction: a uniform or independent log-uniform sampler holds no tensor at all; 2^62 classes work like 10."""
    n = 10_000_000
    for sampler in (UniformSampler(n, exclude=512), LogUniformSampler(n, distinct=False)):
        assert sum(1 for _ in sampler.buffers()) == 0
        for shared in (True, False):
            ids = sampler.sample(queries(4), 50, shared).ids
            assert ids.min() >= 0 and ids.max() < n
    ids = ops.uniform_sample(seed(1), 0, 2**62, None, 1000, True)
    assert ids.unique().numel() == 1000 and (ids > 2**61).double().mean() == pytest.approx(0.5, abs=0.1)


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
    proposal = sampler.sample(queries(4), 0, True, first)
    assert torch.equal(proposal.ids, first) and not proposal.distinct
    torch.testing.assert_close(proposal.log_count.exp(), torch.tensor([2.0, 2, 1, 1]))  # Q p, the batch itself counted
    proposal = sampler.sample(queries(3), 99, True, second)
    torch.testing.assert_close(proposal.log_count.exp(), 3 * torch.tensor([3.0, 3, 1]) / 7)
    assert torch.equal(proposal.log_count, proposal.target_log_count)
    assert sampler.counts.tolist() == [0, 2, 1, 0, 3, 0, 0, 0, 0, 1] and sampler.total == 7
    sampler.eval()
    proposal = sampler.sample(queries(2), 0, True, torch.tensor([1, 3]))
    assert sampler.total == 7 and proposal.log_count[1] == -math.inf
    assert sampler.log_prob(queries(1), torch.arange(10)).exp().sum().item() == pytest.approx(1)
    assert (InBatchSampler(3).log_prob(queries(1), torch.arange(3)) == -math.inf).all()


def test_in_batch_log_count_is_the_mean_count():
    torch.manual_seed(0)
    sampler, p = InBatchSampler(20), zipf(20) / zipf(20).sum()
    for _ in range(400):
        proposal = sampler.sample(queries(100), 0, True, torch.multinomial(p, 100, replacement=True))
    torch.testing.assert_close(proposal.log_count.double().exp(), 100 * p[proposal.ids], rtol=0.15, atol=0)


def test_in_batch_errors():
    sampler = InBatchSampler(10)
    with pytest.raises(ValueError, match="expected target, got None"):
        sampler.sample(queries(2), 3, True)
    with pytest.raises(ValueError, match="expected shared=True"):
        sampler.sample(queries(2), 3, False, torch.tensor([1, 2]))
    with pytest.raises((IndexError, RuntimeError)):
        sampler.sample(queries(2), 3, True, torch.tensor([1, 10]))


# ---- bad input


@pytest.mark.parametrize("make, error, message", [
    (lambda: UniformSampler(0), ValueError, "UniformSampler: expected num_classes of at least 1, got 0"),
    (lambda: LogUniformSampler(2.5), TypeError, "expected num_classes of type int, got float"),
    (lambda: InBatchSampler(-1), ValueError, "InBatchSampler: expected num_classes"),
    (lambda: UniformSampler(5, exclude=5), ValueError, "got all of them"),
    (lambda: UniformSampler(5, exclude=-1), ValueError, "exclude of at least 0, got -1"),
    (lambda: UniformSampler(5, exclude=torch.arange(5)), ValueError, "got all of them"),
    (lambda: UniformSampler(5, exclude=torch.tensor([1, 5])), IndexError, r"exclude in \[0, 5\)"),
    (lambda: UniformSampler(5, exclude=torch.tensor([1.0])), ValueError, "exclude as int64 ids"),
    (lambda: UniformSampler(5, exclude=[1]), TypeError, "exclude as an int, a tensor or None, got list"),
    (lambda: UniformSampler(5, distinct="yes"), TypeError, "distinct as True, False or None"),
    (lambda: UnigramSampler(torch.tensor([1.0, -2.0])), ValueError, r"UnigramSampler: expected counts .* got -2.0 at \[1\]"),
    (lambda: UnigramSampler(torch.tensor([math.nan])), ValueError, "got nan"),
    (lambda: UnigramSampler(torch.tensor([1, math.inf])), ValueError, "got inf"),
    (lambda: UnigramSampler(torch.zeros(3)), ValueError, "not all zero"),
    (lambda: UnigramSampler(torch.ones(3, 2)), ValueError, r"got shape \[3, 2\]"),
    (lambda: UnigramSampler(torch.ones(0)), ValueError, r"got shape \[0\]"),
    (lambda: UnigramSampler([1, 2]), ValueError, "got list"),
    (lambda: UnigramSampler(torch.ones(3), power=-1), ValueError, "power as a finite number of at least 0, got -1"),
    (lambda: UnigramSampler(torch.ones(3), power=math.nan), ValueError, "power"),
    (lambda: UnigramSampler(torch.tensor([0, 3, 0]), exclude=torch.tensor([1])), ValueError, "positive weight that is not excluded"),
    (lambda: StaticSampler(torch.ones(2, 2)), ValueError, "StaticSampler: expected weights as a tensor"),
    (lambda: make_sampler("unigram", 3), ValueError, "expected counts"),
    (lambda: make_sampler("unigram", 3, counts=torch.ones(4)), ValueError, "counts of 3 classes, got 4"),
    (lambda: make_sampler("zipf", 3), ValueError, "got 'zipf'"),
    (lambda: UniformSampler(5).sample(queries(1), 6, True), ValueError, "uniform_sample: expected num_samples of at most 5 .*got 6"),
    (lambda: UniformSampler(5).sample(queries(1), -1, True), ValueError, "num_samples of at least 0, got -1"),
    (lambda: UnigramSampler(torch.tensor([0, 1, 2])).sample(queries(1), 3, True), ValueError,
     "systematic_sample: expected num_samples of at most 2 .*got 3"),
    (lambda: UnigramSampler(torch.ones(3), distinct=True).sample(queries(1), 4, False), ValueError, "at most 3 .*got 4"),
    (lambda: ops.uniform_sample(torch.zeros(1, dtype=torch.int64), 0, 5, None, 1, False), ValueError, "seed with 0 dimensions"),
    (lambda: ops.uniform_sample(torch.tensor(1.0), 0, 5, None, 1, False), TypeError, "seed of dtype int64"),
    (lambda: ops.uniform_sample(seed(0), 5, 5, None, 1, False), ValueError, "0 <= low < high, got low = 5 and high = 5"),
    (lambda: ops.log_uniform_sample(seed(0), -1, 5, None, 1), ValueError, "low = -1"),
    (lambda: ops.uniform_sample(seed(0), 0, 5, -1, 1, False), ValueError, "num_queries of at least 0, got -1"),
    (lambda: ops.alias_table(torch.ones(3)), TypeError, "weights of dtype float64, got float32"),
    (lambda: ops.alias_table(torch.ones(0).double()), ValueError, "at least 1 weight"),
    (lambda: ops.alias_table(torch.zeros(3).double()), ValueError, "a weight above zero"),
    (lambda: ops.systematic_table(torch.tensor([1, math.nan]).double()), ValueError, r"got nan at \[1\]"),
    (lambda: ops.alias_sample(seed(0), torch.ones(3).double(), torch.zeros(2).long(), None, 1), ValueError, "alias with size 3"),
    (lambda: ops.alias_sample(seed(0), torch.zeros(3).double(), torch.full((3,), 3), None, 1), IndexError, r"in \[0, 3\), got 3"),
    (lambda: ops.systematic_sample(seed(0), torch.ones(3).double(), torch.full((3,), -1), torch.ones(3).double(), None, 1), IndexError,
     "order in .*got -1"),
])
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_generator_of_another_device():
    with pytest.raises(ValueError, match="expected a generator on input's device meta, got one on cpu"):
        UniformSampler(5).sample(queries(1).to("meta"), 1, True, generator=torch.Generator())


def test_meta_tensors():
    proposal = UnigramSampler(zipf(50)).to("meta").sample(queries(3).to("meta"), 4, False, torch.zeros(3, dtype=torch.int64, device="meta"))
    assert proposal.ids.shape == (3, 4) and proposal.ids.is_meta and proposal.target_log_count.shape == (3,)
