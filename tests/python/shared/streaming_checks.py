"""Streams of ids, and their counts by definition."""

import math

import numpy as np
import torch

N = 30


def batches(number, seed=0, most=40):
    """Batches of different sizes, some of them empty."""
    random = np.random.default_rng(seed)
    distribution = 1 / np.arange(1, N + 1)
    return [
        torch.from_numpy(
            random.choice(N, random.integers(0, most), p=distribution / distribution.sum()))
        for _ in range(number)
    ]


def decayed(stream, half_life):
    """Counts by definition: each sighting decays with the number of ids seen after its batch."""
    counts, after = np.zeros(N), sum(len(batch) for batch in stream)
    for batch in stream:
        after -= len(batch)
        np.add.at(counts, batch.numpy(), 1.0 if half_life is None else 2.0**(-after / half_life))
    return torch.from_numpy(counts)


class Gaps:
    """Algorithm 2 of the paper for ids without hash collisions; sightings within a batch are
    processed together."""
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
                weight = n * gap / (n * gap + min(self.last[id], self.memory)
                                    ) if self.alpha is None else 1 - (1 - self.alpha)**n
                self.gap[id] = gap + weight * ((self.seen - self.last[id]) / n - gap)
            self.last[id] = self.seen


def bucket(id, k, buckets):
    """The hash in Python integers."""
    mask = 2**64 - 1
    x = (id + (k + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return ((x ^ (x >> 31)) >> 1) % buckets
