"""Measures updates and look-ups of streaming counts, and the effect of collisions on the estimates
of open ids.

    python benchmarks/streaming_counts.py --threads 1

Medians are for batches of 4,096 out of 10^7 ids. For collisions, both kinds of counts see the same
stream of ids with Zipf frequencies, without forgetting, and the estimates of the 1,000 most
frequent ids are compared with their frequencies in the stream.
"""

import torch

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

Counts = xs.samplers.StreamingCounts
IDS, BATCH, LOOKED_AT = 10_000_000, 4096, 1000


def bench_cost(args) -> list[dict]:
    """An update and a look-up of 4,096 ids"""
    made = {
        "10,000 dense ids": Counts(10_000, half_life=1e6),
        "10^7 dense ids": Counts(IDS, half_life=1e6), "10^7 dense ids for ever": Counts(IDS)
    }
    made |= {
        f"open ids, hashes={hashes}": Counts(None, half_life=1e6, hashes=hashes)
        for hashes in (1, 2, 4)
    }
    batches = [(torch.rand(BATCH)**3 * IDS).long() for _ in range(50)]
    turn = [0]

    def run(call, counts):
        turn[0] += 1
        call(batches[turn[0] % len(batches)] % (counts.num_ids or IDS))

    runs = {
        f"{name}, {what}": (lambda counts=counts, what=what: run(getattr(counts, what), counts))
        for name, counts in made.items()
        for what in ("update", "log_prob")
    }
    return [{"figure": f"{name}, ms", "value": 1e3 * median}
            for name, median in interleave(runs, 10 * args.repeats).items()]


def bench_collisions(args) -> list[dict]:
    """Errors of ids that share a bucket"""
    figures = []
    for number in (100_000, 1_000_000, IDS):
        distribution = 1 / torch.arange(1, number + 1, dtype=torch.float64)
        draw = xs.samplers.UnigramSampler(distribution, 2**20, power=1.0, distinct=False)
        names, exact, opened = torch.randint(-2**63, 2**63 - 1, [number]), Counts(number), {
            hashes: Counts(None, hashes=hashes)
            for hashes in (1, 2, 4)
        }
        for _ in range(args.batches):
            ids = draw.sample(torch.zeros(1, 1))[0].ids
            for counts in (exact, *opened.values()):
                counts.update(ids if counts is exact else names[ids])
        for hashes, counts in opened.items():
            excess = (counts.log_prob(names[:LOOKED_AT]) -
                      exact.log_prob(torch.arange(LOOKED_AT))).exp() - 1
            figures += [{
                "figure": f"{number:,} ids, hashes={hashes}: largest relative error of q",
                "value": excess.max().item()
            }, {
                "figure": f"{number:,} ids, hashes={hashes}: ids of 1,000 more than 5 % "
                "too high", "value": (excess > 0.05).sum().item()
            }]
    return figures


if __name__ == "__main__":
    run_benches(
        __doc__, {"cost": bench_cost, "collisions": bench_collisions},
        question="What does counting a stream of ids cost, and how exact is it?",
        against="exact counts of the same stream", extra=lambda parser: parser.add_argument(
            "--batches", type=int, default=40, help="number of batches of 2^20 ids for collisions"))
