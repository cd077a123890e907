"""Counts of a stream against their definitions: dense ids, and open ones by gaps."""

import math

import numpy as np
import pytest
import torch

import xsoftmax as xs
from sampler_checks import zipf
from xsoftmax.samplers import StreamingCounts

ops = torch.ops.xsoftmax
N = 30
KINDS = {"never forgets": dict(num_ids=N), "half-life": dict(num_ids=N, half_life=50), "open": dict(num_ids=None, half_life=50, buckets=64),
         "open, never forgets": dict(num_ids=None, buckets=64, hashes=3), "open, alpha": dict(num_ids=None, alpha=0.1, buckets=64, hashes=1)}
each = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def made(options):
    return StreamingCounts(**options)


def batches(number, seed=0, most=40):
    """Of different sizes, some of them empty."""
    random = np.random.default_rng(seed)
    law = 1 / np.arange(1, N + 1)
    return [torch.from_numpy(random.choice(N, random.integers(0, most), p=law / law.sum())) for _ in range(number)]


def decayed(stream, half_life):
    """By the definition: each id counts by how many were seen after its batch."""
    counts, after = np.zeros(N), sum(len(batch) for batch in stream)
    for batch in stream:
        after -= len(batch)
        np.add.at(counts, batch.numpy(), 1.0 if half_life is None else 2.0 ** (-after / half_life))
    return torch.from_numpy(counts)


class Gaps:
    """Algorithm 2 of the paper for ids that share no bucket, with the sightings of a batch taken together."""

    def __init__(self, half_life=None, alpha=None):
        self.memory, self.alpha = math.inf if half_life is None else half_life / math.log(2), alpha
        self.gap, self.last, self.seen = {}, {}, 0

    def update(self, batch):
        self.seen += len(batch)
        for id, n in zip(*np.unique(batch.numpy(), return_counts=True)):
            if id not in self.gap:
                self.gap[id] = self.seen / n
            else:
                gap = self.gap[id]
                weight = n * gap / (n * gap + min(self.last[id], self.memory)) if self.alpha is None else 1 - (1 - self.alpha) ** n
                self.gap[id] = gap + weight * ((self.seen - self.last[id]) / n - gap)
            self.last[id] = self.seen


# ---- dense ids

@pytest.mark.parametrize("half_life", [None, 1, 7.5, 1000, 1e30])
def test_dense_counts_are_those_of_the_definition(half_life):
    counts, stream = StreamingCounts(N, half_life=half_life), batches(60)
    for done, batch in enumerate(stream, 1):
        counts.update(batch)
        want = decayed(stream[:done], half_life)
        torch.testing.assert_close(counts.counts(torch.arange(N)), want, rtol=1e-12, atol=0)
        torch.testing.assert_close(counts.total.double(), want.sum(), rtol=1e-12, atol=0)
        torch.testing.assert_close(counts.log_prob(torch.arange(N)), (want / want.sum().clamp(min=1)).log().float())
    assert counts.count.dtype == counts.total.dtype == (torch.int64 if half_life is None else torch.float64)


def test_a_count_that_is_long_past_keeps_its_logarithm():
    counts = StreamingCounts(3, half_life=1)
    counts.update(torch.tensor([0, 0, 0, 0]))
    for _ in range(50):
        counts.update(torch.full([100], 1))
    assert counts.counts(torch.tensor([0])) == 0
    assert counts.log_prob(torch.tensor([0])).item() == pytest.approx(math.log(4) - 5000 * math.log(2) - math.log(counts.total.item()), rel=1e-6)


# ---- open ids

@pytest.mark.parametrize("options", [dict(half_life=50), dict(), dict(alpha=0.2), dict(alpha=1.0)], ids=str)
@pytest.mark.parametrize("hashes", [1, 4])
def test_gaps_are_those_of_the_paper(options, hashes):
    """Without collisions: any int64 is an id."""
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


def bucket(id, k, buckets):
    """In Python integers."""
    mask = 2**64 - 1
    x = (id + (k + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 1) % buckets


def test_gaps_without_forgetting_are_ids_over_sightings():
    counts, stream = StreamingCounts(None), batches(50)
    sightings, at = np.zeros(N), np.zeros(N)
    for done, batch in enumerate(stream, 1):
        counts.update(batch)
        np.add.at(sightings, batch.numpy(), 1)
        at[batch.numpy()] = sum(len(part) for part in stream[:done])
    torch.testing.assert_close(counts.log_prob(torch.arange(N)).exp(), torch.from_numpy(sightings / at).float())


def test_a_bucket_counts_all_its_ids_and_the_longest_gap_is_read():
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
    torch.testing.assert_close(of_one.log_prob(ids).exp(), frequencies[0], rtol=0.2, atol=0)  # they are read at different times
    torch.testing.assert_close(of_four.log_prob(ids).exp(), frequencies.min(0).values, rtol=0.2, atol=0)


# ---- both

@each
def test_the_order_in_a_batch_and_threads_change_no_bit(options):
    stream, shuffled = batches(20, most=5000), np.random.default_rng(0)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            counts = made(options)
            for batch in stream:
                counts.update(batch if number == 1 else batch[torch.from_numpy(shuffled.permutation(len(batch)))].reshape(1, -1))
            results.append([*counts.buffers(), counts.log_prob(torch.arange(N).repeat(300))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@each
def test_what_is_masked_or_negative_changes_nothing(options):
    plain, masked = made(options), made(options)
    for batch in batches(20):
        plain.update(batch)
        among = torch.stack([batch, torch.full_like(batch, -1 if options["num_ids"] else 7)], 1)
        mask = torch.tensor([True, False]).expand(len(batch), 2)
        masked.update(among, mask)
        if options["num_ids"]:
            other = among.clone()
            other[:, 1] = 10**6  # a masked id may be anything
            masked.update(other, torch.zeros_like(mask))
            masked.update(torch.full([3], -1))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), masked.buffers()))
    if options["num_ids"]:
        assert plain.log_prob(torch.tensor([-1])).isneginf() and plain.counts(torch.tensor([-1])) == 0


@each
def test_kernels_equal_composites(options):
    results = []
    for impl in ("kernel", "reference"):
        counts = made(options)
        with xs.use_impl(impl):
            for step, batch in enumerate(batches(20)):
                counts.update(batch, None if step % 2 else batch % 3 > 0)
            results.append([*counts.buffers(), counts.counts(torch.arange(N)), counts.log_prob(torch.arange(N))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@each
def test_eval_only_reads_and_state_goes_on(options):
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
            assert q.dtype == torch.float32 and q.shape == batch.shape and q.isfinite().all() and (q <= 0).all()
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
    assert torch.equal(torch.jit.load(str(tmp_path / "counts.pt")).log_prob(ids), eager.log_prob(ids))
    assert torch.equal(scripted.counts(ids), eager.counts(ids))


@each
def test_casts_move_no_value(options):
    counts = made(options)
    counts.update(torch.tensor([1, 1, 2]))
    before = [table.clone() for table in counts.buffers()]
    counts.half().double()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(counts.buffers(), before))


@each
def test_shapes(options):
    counts = made(options)
    for ids in (torch.tensor(3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64), torch.ones(2, 3, 4, dtype=torch.int64),
                torch.arange(20)[::3], torch.arange(6).view(2, 3).t()):
        assert counts(ids).shape == counts.counts(ids).shape == ids.shape
    assert counts.log_prob(torch.tensor([29])).isneginf()


@each
def test_errors_change_nothing(options):
    counts = made(options)
    counts.update(torch.tensor([1, 2]))
    before = [table.clone() for table in counts.buffers()]
    ids = torch.tensor([1, 3])
    for error, match, call in [(TypeError, "streaming_update_: expected ids of dtype int64, got float32", lambda: counts.update(ids.float())),
                               (TypeError, "expected mask of dtype bool", lambda: counts.update(ids, ids)),
                               (ValueError, "expected mask of the shape of ids", lambda: counts.update(ids, torch.tensor([True]))),
                               (TypeError, "streaming_log_prob: expected ids of dtype int64", lambda: counts.log_prob(ids.int()))]:
        with pytest.raises(error, match=match):
            call()
    if options["num_ids"]:
        for call in (counts.update, counts.log_prob, counts.counts):
            for wrong in (N, -2):
                with pytest.raises(IndexError, match=rf"expected ids in \[0, {N}\) or ignore_index, got {wrong} at \[1\]"):
                    call(torch.tensor([1, wrong]))
    assert all(torch.equal(a, b) for a, b in zip(counts.buffers(), before))


def test_bad_arguments_are_named():
    for error, match, arguments in [
            (ValueError, "StreamingCounts: expected num_ids of at least 1, got 0", dict(num_ids=0)),
            (TypeError, "StreamingCounts: expected num_ids of type int", dict(num_ids=2.0)),
            (ValueError, "StreamingCounts: expected half_life as a finite number above 0, got 0", dict(num_ids=3, half_life=0)),
            (ValueError, "half_life as a finite number above 0, got nan", dict(num_ids=3, half_life=math.nan)),
            (TypeError, "StreamingCounts: expected half_life as a number or None, got str", dict(num_ids=3, half_life="4")),
            (ValueError, r"expected alpha in \(0, 1\], got 1.5", dict(num_ids=None, alpha=1.5)),
            (ValueError, "expected alpha with open ids alone, in the place of half_life, got one beside num_ids", dict(num_ids=3, alpha=0.5)),
            (ValueError, "got one beside half_life", dict(num_ids=None, alpha=0.5, half_life=3)),
            (ValueError, "StreamingCounts: expected buckets of at least 1, got 0", dict(num_ids=None, buckets=0)),
            (ValueError, r"expected hashes in \[1, 64\], got 65", dict(num_ids=None, hashes=65))]:
        with pytest.raises(error, match=match):
            StreamingCounts(**arguments)


# ---- a law that shifts

def shifted(ids, half_life, batch=2**16, **options):
    """The largest relative error of q among the thousand most frequent ids, ten half-lives after the law has changed. `half_life` for the least frequent of
    these: it is seen 1,900 times in a half-life, so that its estimate has a standard deviation of 1.35 %, and 5 % are 3.7 of them."""
    random = np.random.default_rng(0)
    law = zipf(len(ids), 0.25).numpy()
    before, law = law[random.permutation(len(ids))] / law.sum(), law / law.sum()
    assert half_life * law[999] == pytest.approx(1900, rel=0.01)
    counts = StreamingCounts(half_life=half_life, **options)
    for q, half_lives in ((before, 2), (law, 10)):
        for _ in range(round(half_lives * half_life / batch)):
            counts.update(ids[torch.from_numpy(np.repeat(np.arange(len(ids)), random.multinomial(batch, q)))])
    found = counts.log_prob(ids[:1000]).double().exp().numpy()
    return np.abs(found / law[:1000] - 1).max()


def test_a_law_that_shifts_is_followed():
    assert shifted(torch.arange(1200), 2_910_000, num_ids=1200) < 0.05


def test_a_law_that_shifts_is_followed_in_buckets():
    """Of 1,200 ids in 2^20 buckets about 1.4 share one, and none both."""
    ids = torch.randint(-2**63, 2**63 - 1, [1200], generator=torch.Generator().manual_seed(0))
    assert shifted(ids, 2_910_000, num_ids=None) < 0.05
