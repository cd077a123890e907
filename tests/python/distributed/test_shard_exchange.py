"""The exchange between ranks with a split class table.

The number of bytes, the choice of the exchange, and draws that follow their distribution.
"""

import pytest
import torch

import xsoftmax as xs
from ranks import needs_gloo, ranks
from shard_checks import D, N, batches, loss_of

pytestmark = needs_gloo


def bytes_of_a_step(rank, size, exchange, sampler, num_classes, samples, queries, width):
    """Returns the bytes that this rank receives from others in one step: the outputs of all
    collectives without its own part."""
    torch.manual_seed(0)
    loss = xs.distributed.shard_classes(
        xs.SampledSoftmaxLoss(width, num_classes, sampler=sampler, num_samples=samples),
        exchange=exchange)
    input = torch.randn(queries, width, requires_grad=True)
    target = torch.randint(num_classes, (queries,), generator=torch.Generator().manual_seed(rank))
    loss(input, target).backward()  # builds the index of a sampler
    received, group = 0, xs._core.ranks
    places = [(torch.distributed, "all_to_all_single"), (group, "all_gather"),
              (torch.distributed, "all_reduce"), (torch.distributed, "broadcast")]
    originals = [getattr(*place) for place in places]

    def counted(original, share):
        def call(output, *args, **options):
            nonlocal received
            received += output.nbytes * share
            return original(output, *args, **options)

        return call

    # all_reduce runs around a ring, broadcast down a tree
    shares = (size - 1) / size, (size - 1) / size, 2 * (size - 1) / size, float(rank > 0)
    for place, original, share in zip(places, originals, shares):
        setattr(*place, counted(original, share))
    try:
        loss(input, target).backward()
    finally:
        for place, original in zip(places, originals):
            setattr(*place, original)
    return received


@pytest.mark.parametrize("size", [2, 3])
def test_exchanging_rows_costs_the_same_for_any_number_of_classes(size):
    samples, queries, width = 4000, 8, 128
    for num_classes in (20_000, 200_000):
        for received in ranks(size).run(bytes_of_a_step, size, "rows", "uniform", num_classes,
                                        samples, queries, width):
            assert received == pytest.approx(
                2 * (size - 1) / size * (samples + queries) * width * 4, rel=0.05)


@pytest.mark.parametrize("sampler, samples", [("uniform", 100), ("uniform", 2000), ("midx", 10)])
@pytest.mark.parametrize("size", [2, 3])
def test_exchanging_queries_costs_the_same_for_any_number_of_candidates(size, sampler, samples):
    queries, width = 512, 128
    for received in ranks(size).run(bytes_of_a_step, size, "queries", sampler, 20_000, samples,
                                    queries, width):
        assert received == pytest.approx(
            2 * (size - 1) * queries * width * 4 + 24 * (size - 1) * queries, rel=0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_of_exchanging_rows_with_a_sampler_that_follows_the_table(size):
    """In addition to rows, ranks send the number and class of each draw, and the class and cell of
    each target."""
    samples, queries, width = 20, 40, 512
    for received in ranks(size).run(bytes_of_a_step, size, "rows", "midx", 200_000, samples,
                                    queries, width):
        assert received == pytest.approx(
            2 * (size - 1) / size * (samples + 1) * queries * (width * 4 + 12) + 5056, rel=0.05)


def queries_drawn_for(rank, sampler):
    loss = xs.distributed.shard_classes(loss_of(sampler, "plain"), exchange="rows")
    numbers, propose = [], loss.propose
    loss.propose = lambda queries, *rest: numbers.append(len(queries)) or propose(queries, *rest)
    loss(*batches(2, 0)[rank])
    return numbers


@pytest.mark.parametrize("sampler, whole", [("unigram private", False), ("midx", False),
                                            ("midx union", False), ("union", False),
                                            ("complement", False), ("in_batch", True),
                                            ("unigram streamed", True), ("midx pq shared", True)])
def test_ranks_that_fetch_rows_sample_for_their_own_queries(sampler, whole):
    sizes = [len(target) for _, target in batches(2, 0)]
    assert ranks(2).run(queries_drawn_for,
                        sampler) == [[sum(sizes) if whole else size] for size in sizes]


def exchange_of(rank, sampler, samples, queries):
    if "midx" in sampler:
        made = xs.samplers.MidxSampler(500, D, samples, codewords=3,
                                       shared=sampler == "midx shared")
    else:
        made = xs.samplers.UniformSampler(500, samples, shared=sampler == "shared")
    loss = xs.distributed.shard_classes(xs.SampledSoftmaxLoss(D, 500, sampler=made))
    taken = []
    for name in ("_loss_by_queries", "_loss_by_rows"):
        setattr(loss, name, lambda *args, name=name: taken.append(name) or torch.zeros([]))
    loss(torch.randn(queries, D), torch.arange(queries))
    return taken


@pytest.mark.parametrize("sampler, samples, queries, taken", [("shared", 100, 90, "queries"),
                                                              ("shared", 100, 110, "rows"),
                                                              ("private", 2, 8, "queries"),
                                                              ("private", 1, 8, "rows"),
                                                              ("midx", 2, 8, "queries"),
                                                              ("midx", 1, 8, "rows"),
                                                              ("midx shared", 100, 110, "queries")])
def test_auto_takes_the_smaller_exchange(sampler, samples, queries, taken):
    # Queries win if 2 b < S + b (shared) or 2 < P + 1 (private), with b queries on each of 2 ranks.
    # A shared MIDX set depends on all queries, so every rank needs them.
    assert ranks(2).run(exchange_of, sampler, samples, queries) == [["_loss_by_" + taken]] * 2


def draws_of_midx(rank, queries, weight, calls):
    """Returns how often each class was drawn for each query, log expected counts, and estimates of
    the normalizer."""
    loss = xs.distributed.shard_classes(midx_loss(weight))
    loss.sampler.refresh(loss.linear.weight)
    shards, counts, normalizers = loss._shards, torch.zeros(len(queries), N), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        part, = loss.sampler.sample(queries, None, generator)
        is_local = shards.contains(part.ids)
        counts.scatter_add_(1, torch.where(is_local, part.ids, 0), is_local.float())
        scores = (queries.unsqueeze(1) * weight[part.ids]).sum(2)
        normalizers.append(torch.where(is_local, (scores - part.log_count).exp(), 0.0).sum(1))
    return counts, loss.sampler.log_count(queries, torch.arange(N)), torch.stack(normalizers)


def midx_loss(weight):
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.MidxSampler(N, D, 1000, codewords=3))
    loss.load_state_dict({"linear.weight": weight}, strict=False)
    return loss


def test_draws_of_ranks_follow_the_distribution():
    from scipy.stats import chisquare
    generator = torch.Generator().manual_seed(3)
    queries, weight, calls = torch.randn(3, D, generator=generator), torch.randn(
        N, D, generator=generator), 200
    results = ranks(3).run(draws_of_midx, queries, weight, calls)
    counts = sum(result[0] for result in results).double()
    log_count = torch.stack([result[1] for result in results]).amax(0).double()
    assert (counts.sum(1) == 1000 * calls).all()  # each draw belongs to one rank
    expected = log_count.exp() * calls
    torch.testing.assert_close(expected.sum(1), counts.sum(1), rtol=1e-5, atol=0.0)
    for got, want in zip(counts, expected):
        assert chisquare(got, want * got.sum() / want.sum()).pvalue > 1e-4
    estimates, exact = sum(result[2] for result in results), (queries @ weight.t()).exp().sum(1)
    error = estimates.std(0) / calls**0.5
    assert ((estimates.mean(0) - exact).abs() < 4.5 * error).all() and (error < 0.01 * exact).all()


def bad_table(rank):
    loss = xs.distributed.shard_classes(loss_of("midx", "plain"))
    if rank == 1:
        loss.linear.weight.data[0, 0] = float("nan")
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    for call in (lambda: loss(torch.randn(2, D), torch.tensor([1, 2]), generator),
                 lambda: loss.sampler.refresh(loss.linear.weight)):
        with pytest.raises(
                ValueError, match="prepare: expected weight with finite values, got an "
                "infinity or NaN on one of the ranks"):
            call()
    assert rank > 0 or torch.equal(generator.get_state(), state)
    assert loss.sampler.step == 0 and loss.sampler.codewords1.eq(0).all()


def test_a_table_with_nan_is_refused_on_all_ranks():
    ranks(2).run(bad_table)
