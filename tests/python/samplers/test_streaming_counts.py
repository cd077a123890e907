"""Counts of a stream of ids against their definitions: dense ids, and open ids by the gaps between
sightings."""

import math

import numpy as np
import pytest
import torch

import xsoftmax as xs
from streaming_checks import Gaps, N, batches, bucket, decayed
from xsoftmax.samplers import StreamingCounts

ops = torch.ops.xsoftmax
KINDS = {
    "never forgets": dict(num_ids=N), "half-life": dict(num_ids=N, half_life=50),
    "open": dict(num_ids=None, half_life=50,
                 buckets=64), "open, never forgets": dict(num_ids=None, buckets=64, hashes=3),
    "open, alpha": dict(num_ids=None, alpha=0.1, buckets=64, hashes=1)
}
each = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def made(options):
    return StreamingCounts(**options)


@pytest.mark.parametrize("half_life", [None, 1, 7.5, 1000, 1e30])
def test_dense_counts_match_their_definition(half_life):
    counts, stream = StreamingCounts(N, half_life=half_life), batches(60)
    for done, batch in enumerate(stream, 1):
        counts.update(batch)
        want = decayed(stream[:done], half_life)
        torch.testing.assert_close(counts.counts(torch.arange(N)), want, rtol=1e-12, atol=0)
        torch.testing.assert_close(counts.total.double(), want.sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(counts.log_prob(torch.arange(N)),
                                   (want / want.sum().clamp(min=1)).log().float())
    assert counts.count.dtype == counts.total.dtype == (torch.int64
                                                        if half_life is None else torch.float64)


def test_old_counts_do_not_underflow():
    counts = StreamingCounts(3, half_life=1)
    counts.update(torch.tensor([0, 0, 0, 0]))
    for _ in range(50):
        counts.update(torch.full([100], 1))
    assert counts.counts(torch.tensor([0])) == 0
    assert counts.log_prob(torch.tensor([0])).item() == pytest.approx(
        math.log(4) - 5000 * math.log(2) - math.log(counts.total.item()), rel=1e-6)


@pytest.mark.parametrize(
    "options", [dict(half_life=50), dict(),
                dict(alpha=0.2), dict(alpha=1.0)], ids=str)
@pytest.mark.parametrize("hashes", [1, 4])
def test_open_counts_match_algorithm_2(options, hashes):
    """Without hash collisions, for any int64 ids."""
    ids = torch.randint(-2**63, 2**63 - 1, [N], generator=torch.Generator().manual_seed(1))
    ids[:2] = torch.tensor([-2**63, 2**63 - 1])
    counts, want = StreamingCounts(None, buckets=2**16, hashes=hashes, **options), Gaps(**options)
    assert all(len({bucket(id, k, 2**16) for id in ids.tolist()}) == N for k in range(hashes))
    for batch in batches(60):
        counts.update(ids[batch])
        want.update(batch)
        gaps = torch.tensor([want.gap.get(id, math.inf) for id in range(N)], dtype=torch.float64)
        torch.testing.assert_close(counts.log_prob(ids), -gaps.log().float())
        torch.testing.assert_close(counts.counts(ids), counts.total / gaps, rtol=1e-12, atol=0)
    assert counts.seen == want.seen and (gaps < math.inf).any()


def test_without_forgetting_gaps_are_ids_over_sightings():
    counts, stream = StreamingCounts(None), batches(50)
    sightings, at = np.zeros(N), np.zeros(N)
    for done, batch in enumerate(stream, 1):
        counts.update(batch)
        np.add.at(sightings, batch.numpy(), 1)
        at[batch.numpy()] = sum(len(part) for part in stream[:done])
    torch.testing.assert_close(
        counts.log_prob(torch.arange(N)).exp(),
        torch.from_numpy(sightings / at).float())


def test_colliding_ids_share_a_count_and_the_longest_gap_is_used():
    ids = torch.arange(N)
    of_one, of_four = (StreamingCounts(None, buckets=16, hashes=hashes) for hashes in (1, 4))
    together = [StreamingCounts(16) for _ in range(4)]
    places = [torch.tensor([bucket(id, k, 16) for id in range(N)]) for k in range(4)]
    for batch in batches(200):
        of_one.update(batch)
        of_four.update(batch)
        for k in range(4):
            together[k].update(places[k][batch])
    frequencies = torch.stack([part.log_prob(place).exp() for part, place in zip(together, places)])
    # the buckets were last updated at different times
    torch.testing.assert_close(of_one.log_prob(ids).exp(), frequencies[0], rtol=0.2, atol=0)
    torch.testing.assert_close(
        of_four.log_prob(ids).exp(),
        frequencies.min(0).values, rtol=0.2, atol=0)


@each
def test_batch_order_and_threads_give_the_same_bits(options):
    stream, shuffled = batches(20, most=5000), np.random.default_rng(0)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            counts = made(options)
            for batch in stream:
                counts.update(batch if number == 1 else batch[torch.from_numpy(
                    shuffled.permutation(len(batch)))].reshape(1, -1))
            results.append([*counts.buffers(), counts.log_prob(torch.arange(N).repeat(300))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@each
def test_masked_and_negative_ids_are_not_counted(options):
    plain, masked = made(options), made(options)
    for batch in batches(20):
        plain.update(batch)
        among = torch.stack([batch, torch.full_like(batch, -1 if options["num_ids"] else 7)], 1)
        mask = torch.tensor([True, False]).expand(len(batch), 2)
        masked.update(among, mask)
        if options["num_ids"]:
            other = among.clone()
            other[:, 1] = 10**6  # masked ids may have any value
            masked.update(other, torch.zeros_like(mask))
            masked.update(torch.full([3], -1))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), masked.buffers()))
    if options["num_ids"]:
        assert plain.log_prob(torch.tensor([-1])).isneginf() and plain.counts(torch.tensor([-1
                                                                                            ])) == 0


@each
def test_kernels_equal_composites(options):
    results = []
    for impl in ("kernel", "reference"):
        counts = made(options)
        with xs.use_impl(impl):
            for step, batch in enumerate(batches(20)):
                counts.update(batch, None if step % 2 else batch % 3 > 0)
            results.append([
                *counts.buffers(),
                counts.counts(torch.arange(N)),
                counts.log_prob(torch.arange(N))
            ])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@each
def test_eval_changes_no_count_and_a_state_dict_continues(options):
    first, second, stream = made(options), made(options), batches(30)
    for batch in stream[:15]:
        first(batch)
    before = {name: table.clone() for name, table in first.state_dict().items()}
    first.eval().update(stream[15])
    assert all(torch.equal(table, before[name]) for name, table in first.state_dict().items())
    second.load_state_dict(before)
    first.train()
    for counts in (first, second):
        for batch in stream[15:]:
            q = counts(batch)
            assert q.dtype == torch.float32 and q.shape == batch.shape and q.isfinite().all() and (
                q <= 0).all()
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers()))


@each
def test_torchscript(options, tmp_path):
    eager, scripted = made(options), torch.jit.script(made(options))
    for batch in batches(10):
        assert torch.equal(eager(batch), scripted(batch))
        mask = batch > 2
        eager.update(batch, mask)
        scripted.update(batch, mask)
    torch.jit.save(scripted, str(tmp_path / "counts.pt"))
    ids = torch.arange(N)
    assert torch.equal(
        torch.jit.load(str(tmp_path / "counts.pt")).log_prob(ids), eager.log_prob(ids))
    assert torch.equal(scripted.counts(ids), eager.counts(ids))


@each
def test_casting_a_module_changes_no_count(options):
    counts = made(options)
    counts.update(torch.tensor([1, 1, 2]))
    before = [table.clone() for table in counts.buffers()]
    counts.half().double()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(counts.buffers(), before))


@each
def test_shapes(options):
    counts = made(options)
    for ids in (torch.tensor(3), torch.zeros(0, dtype=torch.int64),
                torch.zeros(0, 4, dtype=torch.int64), torch.ones(2, 3, 4, dtype=torch.int64),
                torch.arange(20)[::3], torch.arange(6).view(2, 3).t()):
        assert counts(ids).shape == counts.counts(ids).shape == ids.shape
    assert counts.log_prob(torch.tensor([29])).isneginf()


@each
def test_errors_change_nothing(options):
    counts = made(options)
    counts.update(torch.tensor([1, 2]))
    before = [table.clone() for table in counts.buffers()]
    ids = torch.tensor([1, 3])
    for error, match, call in [(TypeError, "streaming_update_: expected ids of dtype int64, got "
                                "float32", lambda: counts.update(ids.float())),
                               (TypeError, "expected mask of dtype bool",
                                lambda: counts.update(ids, ids)),
                               (ValueError, "expected mask of the shape of ids",
                                lambda: counts.update(ids, torch.tensor([True]))),
                               (TypeError, "streaming_log_prob: expected ids of dtype int64",
                                lambda: counts.log_prob(ids.int()))]:
        with pytest.raises(error, match=match):
            call()
    if options["num_ids"]:
        for call in (counts.update, counts.log_prob, counts.counts):
            for wrong in (N, -2):
                with pytest.raises(
                        IndexError, match=rf"expected ids in \[0, {N}\) or -1, got "
                        rf"{wrong} at \[1\]"):
                    call(torch.tensor([1, wrong]))
    assert all(torch.equal(a, b) for a, b in zip(counts.buffers(), before))


def test_bad_arguments_are_named():
    for error, match, arguments in [
        (ValueError, "StreamingCounts: expected num_ids of at least 1, got 0", dict(num_ids=0)),
        (TypeError, "StreamingCounts: expected num_ids of type int", dict(num_ids=2.0)),
        (ValueError, "StreamingCounts: expected half_life as a finite number above 0, got 0",
         dict(num_ids=3, half_life=0)),
        (ValueError, "half_life as a finite number above 0, got nan",
         dict(num_ids=3, half_life=math.nan)),
        (TypeError, "StreamingCounts: expected half_life as a number or None, got str",
         dict(num_ids=3, half_life="4")),
        (ValueError, r"expected alpha in \(0, 1\], got 1.5", dict(num_ids=None, alpha=1.5)),
        (ValueError, "expected alpha only with open ids and without half_life, got alpha with "
         "num_ids", dict(num_ids=3, alpha=0.5)),
        (ValueError, "got alpha with half_life", dict(num_ids=None, alpha=0.5, half_life=3)),
        (ValueError, "StreamingCounts: expected buckets of at least 1, got 0",
         dict(num_ids=None, buckets=0)),
        (ValueError, r"expected hashes in \[1, 64\], got 65", dict(num_ids=None, hashes=65))
    ]:
        with pytest.raises(error, match=match):
            StreamingCounts(**arguments)


@each
def test_opcheck(options):
    counts = made(options)
    counts.update(torch.tensor([1, 1, 2]))
    state, ids = (counts.count, counts.total, counts.last, counts.seen,
                  counts.options), torch.tensor([[1, 5], [7, 1]])
    for mask in (None, ids > 1):
        torch.library.opcheck(ops.streaming_update_.default, (ids, mask, *state))
    torch.library.opcheck(ops.streaming_count.default, (ids, *state))
    torch.library.opcheck(ops.streaming_log_prob.default, (ids, *state))
