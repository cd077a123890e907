"""Two towers, one for a user's items and one for an item with its features; their training pairs
and their evaluation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from examples.common.errors import DataError
from examples.recommend import data

PLACES = 10
FEATURES = 4  # number of features per item
BUCKETS = 1000  # number of distinct features


def hashed_features(num_items: int) -> Tensor:
    """Returns the features of each item, int64 [num_items, FEATURES] in [0, BUCKETS)."""
    item = torch.arange(num_items).unsqueeze(1) + 1
    return (item * (2654435761 + 40503 * torch.arange(FEATURES)) % 4294967291) % BUCKETS


class Towers(nn.Module):
    """A user tower and an item tower. All tables have row-sparse gradients: a step touches only the
    rows of its items."""
    def __init__(self, num_items: int, width: int):
        super().__init__()
        self.num_items = num_items
        self.seen = nn.EmbeddingBag(num_items, width, mode="mean", sparse=True)
        self.item_table = nn.Embedding(num_items, width, sparse=True)
        self.feature_table = nn.EmbeddingBag(BUCKETS, width, mode="sum", sparse=True)
        for table in (self.seen, self.item_table, self.feature_table):
            nn.init.normal_(table.weight, std=0.1)
        self.of_user, self.of_item = (nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(),
                                                    nn.Linear(2 * width, width)) for _ in range(2))
        self.register_buffer("features", hashed_features(num_items))

    def users(self, items: Tensor, lengths: Tensor) -> Tensor:
        x = self.seen(items, lengths.cumsum(0) - lengths)
        return F.normalize(x + self.of_user(x), dim=1)

    def items(self, ids: Tensor) -> Tensor:
        x = self.item_table(ids) + self.feature_table(self.features[ids])
        return F.normalize(x + self.of_item(x), dim=1)

    def all_items(self) -> Tensor:
        return self.items(torch.arange(self.num_items))


class Pairs:
    """Training pairs: an item of a user as the target, and other items of the user as the input.
    These are the items before it or, for unordered data, any others."""
    def __init__(self, train: data.Sequences, unordered: bool, history: int):
        self.train, self.unordered, self.history = train, unordered, history
        first = 0 if unordered else 1  # the first item has no earlier ones
        row = train.rows()
        place = torch.arange(len(row)) - (train.ends - train.lengths)[row]
        self.wanted = ((place >= first) & (train.lengths[row] > 1)).nonzero().squeeze(1)
        self.row, self.place = row, place
        if len(self.wanted) == 0:
            raise DataError("expected a user with at least two items in training, got none")

    def batches(self, size: int, random: torch.Generator):
        for part in self.wanted[torch.randperm(len(self.wanted), generator=random)].split(size):
            yield self.batch(part)

    def batch(self, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the users' input items, concatenated; their number per user; and the targets."""
        row, place = self.row[wanted], self.place[wanted]
        begin = self.train.ends[row] - self.train.lengths[row]
        if not self.unordered:
            lengths = place.clamp(max=self.history)
            return self.train.items[data.spans(begin + place - lengths,
                                               lengths)], lengths, self.train.items[wanted]
        lengths = (self.train.lengths[row] - 1).clamp(max=self.history)
        # A cyclic range of the user's items that starts after the target. It serves as a sample,
        # because the order in the file has no meaning.
        step = data.spans(torch.ones_like(lengths), lengths)
        each = torch.repeat_interleave(torch.arange(len(row)), lengths)
        return self.train.items[begin[each] + (place[each] + step) %
                                self.train.lengths[row][each]], lengths, self.train.items[wanted]


@torch.no_grad()
def rank(towers: Towers, queries: data.Queries, history: int) -> dict[str, float]:
    """Computes NDCG@10 and Recall@10 of the ranking of all items except those the user has."""
    every = towers.all_items()
    users = ((queries.truth.lengths > 0) & (queries.known.lengths > 0)).nonzero().squeeze(1)
    found = []
    for part in users.split(512):
        known = queries.known.select(part)
        recent = known.select(torch.arange(len(known)), history)
        scores = towers.users(recent.items, recent.lengths) @ every.T
        scores[known.rows(), known.items] = -math.inf
        found.append(scores.topk(min(PLACES, scores.shape[1]))[1])
    predictions, truth = torch.cat(found), queries.truth.select(users).split()
    return {
        "NDCG@10": xs.metrics.ndcg_at_k(predictions, truth, PLACES),
        "Recall@10": xs.metrics.recall_at_k(predictions, truth, PLACES)
    }
