"""Samplers whose distribution follows a stream of ids, on one rank and on several."""

import numpy as np
import pytest
import torch

import xsoftmax as xs
from ranks import ranks
from sampler_checks import queries, zipf
from streaming_checks import Gaps, N, batches, decayed
from xsoftmax.samplers import InBatchSampler, StreamingCounts, UnigramSampler


def test_in_batch_counts_follow_the_stream():
    stream = [batch for batch in batches(40, most=20) if len(batch) > 0]
    for half_life in (None, 30):
        sampler, opened = (InBatchSampler(N, counts=StreamingCounts(ids, half_life=half_life))
                           for ids in (N, None))
        default, gaps = InBatchSampler(N), Gaps(half_life)
        for done, batch in enumerate(stream, 1):
            [drawn], [of_gaps], [plain] = (part.sample(queries(len(batch)), batch)
                                           for part in (sampler, opened, default))
            counts, others = decayed(stream[:done], half_life), len(batch) - 1
            gaps.update(batch)
            torch.testing.assert_close(drawn.target_log_count.exp(),
                                       (others * counts / counts.sum())[batch].float())
            torch.testing.assert_close(
                of_gaps.target_log_count.exp(),
                others / torch.tensor([gaps.gap[id] for id in batch.tolist()]).float())
            torch.testing.assert_close(
                sampler.log_count(queries(1), torch.arange(N)).exp(),
                (others * counts / counts.sum()).float())
            assert half_life is not None or all(
                torch.equal(a, b) for a, b in zip(drawn[:3], plain[:3]))
        assert set(sampler.state_dict()) == {
            "streaming." + name
            for name in ("count", "total", "last", "seen")[:2 if half_life is None else 4]
        }
        before = {name: table.clone() for name, table in sampler.state_dict().items()}
        sampler.eval().sample(queries(2), torch.tensor([1, 2]))
        with pytest.raises(IndexError, match="in_batch_sample: expected target"):
            sampler.train().sample(queries(2), torch.tensor([[1, 3], [2, N]]))
        assert all(torch.equal(table, before[name]) for name, table in sampler.state_dict().items())


DRAWS = {
    "shared": dict(), "private": dict(shared=False), "shared, independent": dict(distinct=False)
}
draws = pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS.keys())


def distribution_of(counts, power, uniform_share, excluded):
    """q by definition."""
    counts = counts.clone()
    counts[excluded] = 0
    drawn = torch.ones(N, dtype=torch.float64)
    drawn[excluded] = 0
    mass = torch.where(counts > 0, counts**power, 0.0)
    return (1 - uniform_share) * mass / mass.sum() + uniform_share * drawn / drawn.sum(
    ) if mass.sum() > 0 else drawn / drawn.sum()


@draws
@pytest.mark.parametrize("half_life, power", [(30, 0.75), (None, 0.0)])
def test_unigram_follows_the_stream(draws, half_life, power):
    excluded, ids = torch.tensor([0, 5]), torch.arange(N)
    sampler = UnigramSampler(StreamingCounts(N, half_life=half_life), 6, power=power,
                             exclude=excluded, refresh_every=4, uniform_share=0.1, **draws)
    plain = lambda distribution: UnigramSampler(distribution, 6, power=1.0, **draws)
    stream, distribution = [batch for batch in batches(14, most=20) if len(batch) > 0
                            ], distribution_of(torch.zeros(N), power, 0.1, excluded)
    torch.testing.assert_close(sampler.log_count(queries(1), ids),
                               plain(distribution).log_count(queries(1), ids))
    refreshed = []
    for step, batch in enumerate(stream):
        if torch.ops.xsoftmax.refresh_is_due(step, 4):
            distribution = distribution_of(decayed(stream[:step + 1], half_life), power, 0.1,
                                           excluded)
            refreshed.append(step)
        drawn, want = (part.sample(queries(len(batch)), batch,
                                   torch.Generator().manual_seed(step))[0]
                       for part in (sampler, plain(distribution)))
        assert torch.equal(drawn.ids, want.ids)
        torch.testing.assert_close(drawn.log_count, want.log_count)
        torch.testing.assert_close(drawn.target_log_count, want.target_log_count)
        torch.testing.assert_close(sampler.log_count(queries(1), ids),
                                   plain(distribution).log_count(queries(1), ids))
        torch.testing.assert_close(sampler.streaming.counts(ids),
                                   decayed(stream[:step + 1], half_life), rtol=1e-12, atol=0)
    assert refreshed == [0, 1, 2, 4, 8, 12] and sampler.step == len(stream)


@draws
def test_unigram_continues_from_its_state(draws):
    def make(**options):
        return UnigramSampler(StreamingCounts(N, half_life=30), 6, refresh_every=8, **draws,
                              **options)

    def run(sampler, batch, seed):
        return sampler.sample(queries(len(batch)), batch,
                              torch.Generator().manual_seed(seed))[0][:3]

    first, second, other, stream = make(), make(), make(exclude=3), [
        batch for batch in batches(20) if len(batch) > 0
    ]
    for step, batch in enumerate(stream[:10]):  # the table is two steps behind
        run(first, batch, step)
    state = {name: table.clone() for name, table in first.state_dict().items()}
    second.load_state_dict(state)
    other.load_state_dict(state)
    partial = make()
    with pytest.raises(RuntimeError, match='Missing key.*"step"'):
        partial.load_state_dict({name: table for name, table in state.items() if name != "step"})
    with_head = first.excluding(torch.arange(3))
    for step, batch in enumerate(stream[10:]):
        assert all(
            torch.equal(a, b) for a, b in zip(run(first, batch, step), run(second, batch, step)))
    assert other.step == 0 and torch.equal(other.streaming.count, state["streaming.count"])
    run(other, stream[0], 0)
    assert other.log_count(queries(1), torch.arange(3)).isneginf().all() and other.log_count(
        queries(1), torch.arange(3, N)).isfinite().all()
    assert with_head.streaming is first.streaming
    assert with_head.follow_options == first.follow_options
    assert with_head.log_count(queries(1),
                               torch.arange(4)).isneginf().tolist() == [True, True, True, False]
    before = {name: table.clone() for name, table in first.state_dict().items()}
    run(first.eval(), stream[0], 0)
    first.train().sample(queries(2))  # without targets nothing is counted
    for wrong, error in ((torch.tensor([[1, 3],
                                        [2, N]]), IndexError), (torch.tensor([1.0]), TypeError)):
        with pytest.raises(error, match="static_follow_: expected target"):
            first.sample(queries(len(wrong)), wrong)
    assert all(torch.equal(table, before[name]) for name, table in first.state_dict().items())


def test_candidates_of_cane_count_no_targets():
    with pytest.raises(
            ValueError, match="CaneLoss: expected candidates that do not depend on the "
            "target, got a UnigramSampler that counts targets"):
        xs.CaneLoss(4, N, candidates=UnigramSampler(StreamingCounts(N), 5))


def rank_batches(rank, step):
    # the first rank's are empty
    return batches(8, seed=step, most=12)[rank] if step != 2 else torch.arange(rank * 3)


def of_ranks(rank):
    alone = xs.distributed.share_counts(StreamingCounts(None, half_life=30))
    losses = [
        xs.SampledSoftmaxLoss(4, N, sampler=sampler)
        for sampler in (InBatchSampler(N, counts=StreamingCounts(N, half_life=30)),
                        UnigramSampler(StreamingCounts(N), 5, refresh_every=2))
    ]
    model = xs.distributed.replicate(torch.nn.ModuleList(losses))
    for step in range(5):
        ids = rank_batches(rank, step)
        alone.update(torch.stack([ids, ids + 1]), torch.stack([ids >= 0, ids < 0]))
        for loss in model:
            loss(torch.ones(len(ids), 4), torch.where(ids == 1, loss.ignore_index, ids))
    return [dict(module.state_dict()) for module in (alone, *(loss.sampler for loss in losses))]


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="no gloo here")
def test_ranks_count_the_ids_of_all():
    results = ranks(2).run(of_ranks)
    alone, streamed, unigram = StreamingCounts(None, half_life=30), StreamingCounts(
        N, half_life=30), UnigramSampler(StreamingCounts(N), 5, refresh_every=2)
    for step in range(5):
        ids = torch.cat([rank_batches(rank, step) for rank in range(2)])
        alone.update(ids)
        counted = torch.where(ids == 1, -1, ids)
        streamed.update(counted)
        unigram.sample(queries(len(ids)), counted)
    want = [
        alone.state_dict(),
        {"streaming." + name: table
         for name, table in streamed.state_dict().items()},
        unigram.state_dict()
    ]
    for of_rank in results:
        for got, expected in zip(of_rank, want):
            assert got.keys() == expected.keys() and all(
                torch.equal(got[name], table) for name, table in expected.items())


def bad_models(rank):
    for model, error, match in ((torch.nn.Linear(2, 2), ValueError, "share_counts: expected a "
                                 "model with StreamingCounts, "
                                 "got a Linear without one"),
                                (3, TypeError, "expected model to be a module, got int"),
                                (StreamingCounts(5, half_life=1 + rank), ValueError,
                                 "expected the same on all ranks, got options of counts 0")):
        with pytest.raises(error, match=match):
            xs.distributed.share_counts(model)


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="no gloo here")
def test_models_that_cannot_count_over_ranks_are_refused():
    ranks(2).run(bad_models)


def shifted(ids, half_life, batch=2**16, **options):
    """The largest relative error of q among the thousand most frequent ids, ten half-lives after
    the distribution changed. `half_life` is such that the least frequent of these ids is seen 1,900
    times in a half-life: its estimate has a standard deviation of 1.35 %, so 5 % are 3.7 standard
    deviations."""
    random = np.random.default_rng(0)
    distribution = zipf(len(ids), 0.25).numpy()
    before, distribution = distribution[random.permutation(
        len(ids))] / distribution.sum(), distribution / distribution.sum()
    assert half_life * distribution[999] == pytest.approx(1900, rel=0.01)
    counts = StreamingCounts(half_life=half_life, **options)
    for q, half_lives in ((before, 2), (distribution, 10)):
        for _ in range(round(half_lives * half_life / batch)):
            counts.update(ids[torch.from_numpy(
                np.repeat(np.arange(len(ids)), random.multinomial(batch, q)))])
    found = counts.log_prob(ids[:1000]).double().exp().numpy()
    return np.abs(found / distribution[:1000] - 1).max()


def test_a_changing_distribution_is_followed():
    assert shifted(torch.arange(1200), 2_910_000, num_ids=1200) < 0.05


def test_a_changing_distribution_is_followed_in_buckets():
    """Of 1,200 ids in 2^20 buckets about 1.4 share one bucket, and none share both."""
    ids = torch.randint(-2**63, 2**63 - 1, [1200], generator=torch.Generator().manual_seed(0))
    assert shifted(ids, 2_910_000, num_ids=None) < 0.05
