"""Trained class tables to search. Vectors are trained with xsoftmax on generated or recorded
interactions."""

import sys
from pathlib import Path

import torch

import xsoftmax as xs

HISTORY = 8  # number of items in a query


class Stream:
    """Generated users who choose items. Each item belongs to a subtopic (about a hundred items),
    which belongs to a topic (about fifty subtopics). A user likes two subtopics in each of two
    topics, and chooses 60 % of the items from these, 25 % from the topics and 15 % from all items,
    in each case by popularity, which decreases as 1 / rank^0.9."""
    def __init__(self, num_items: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        subtopics, topics = max(8, num_items // 100), max(4, num_items // 5000)
        # for each item
        self.subtopic = torch.randint(subtopics, (num_items,),
                                      generator=self.generator).sort().values
        # items of a subtopic are consecutive, and subtopics of a topic too
        self.first = torch.searchsorted(self.subtopic, torch.arange(subtopics + 1))
        self.topic_first = torch.arange(topics + 1) * subtopics // topics
        rank = torch.randperm(num_items, generator=self.generator) + 1
        self.popularity = rank.double().pow(-0.9)
        self.below = torch.cat([torch.zeros(1, dtype=torch.double), self.popularity.cumsum(0)])
        self.num_items, self.topics = num_items, topics

    def users(self, count: int, length: int, held_out: bool = False) -> torch.Tensor:
        """Returns the choices of new users in order, [count, length]. held_out is ignored, because
        every user is new."""
        def uniform(*shape):
            return torch.rand(*shape, generator=self.generator, dtype=torch.double)

        topic = torch.searchsorted(self.below[self.first[self.topic_first]][1:-1].contiguous(),
                                   uniform(count, 2) * self.below[-1], right=True)
        first, end = self.topic_first[topic], self.topic_first[topic + 1]
        liked = (first.repeat_interleave(2, 1) +
                 (uniform(count, 4) *
                  (end - first).repeat_interleave(2, 1)).long()).clamp_(max=len(self.first) - 2)
        which, kind = (uniform(count, length) * 4).long(), uniform(count, length)
        subtopic, of_topic = liked.gather(1, which), topic.gather(1, which // 2)
        begin = torch.where(kind < .6, self.first[subtopic], self.first[self.topic_first[of_topic]])
        stop = torch.where(kind < .6, self.first[subtopic + 1],
                           self.first[self.topic_first[of_topic + 1]])
        begin, stop = begin.masked_fill(kind >= .85,
                                        0), stop.masked_fill(kind >= .85, self.num_items)
        low, high = self.below[begin], self.below[stop]
        return (torch.searchsorted(self.below, low + uniform(count, length) *
                                   (high - low), right=True) - 1).clamp_(0, self.num_items - 1)


class Recorded:
    """Users from a file with one line each: the user, then its items. Every tenth is held out."""
    def __init__(self, path: Path, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lines = [[int(item) for item in line.split()[1:]] for line in path.read_text().splitlines()]
        lines = [torch.tensor(line) for line in lines if len(line) > HISTORY]
        self.parts = {
            held_out: [line for i, line in enumerate(lines) if (i % 10 == 0) == held_out]
            for held_out in (False, True)
        }
        self.popularity = torch.bincount(torch.cat(lines)).double()
        self.num_items = len(self.popularity)

    def users(self, count: int, length: int, held_out: bool = False) -> torch.Tensor:
        """Returns distinct items of randomly drawn users, [count, length]."""
        lines = self.parts[held_out]
        chosen = torch.randint(len(lines), (count,), generator=self.generator).tolist()
        return torch.stack([
            lines[i][torch.randperm(len(lines[i]), generator=self.generator)[:length]]
            for i in chosen
        ])


def train(stream: "Stream | Recorded", width: int, steps: int, num_queries: int,
          seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns `weight` [num_items, width], and `queries` [num_queries, width] of held-out users.

    A query is a linear map of the mean vector of a user's last items, in the same table as the
    classes. The target is the next item."""
    torch.manual_seed(seed)
    num_items = stream.num_items
    items = torch.nn.Embedding(num_items, width, sparse=True)
    torch.nn.init.normal_(items.weight, std=0.25 * width**-0.5)
    loss = xs.SampledSoftmaxLoss(
        width, num_items, sampler=xs.samplers.UnigramSampler(stream.popularity.float(), 1024))
    loss.linear.weight = items.weight
    encoder = torch.nn.Linear(width, width)
    torch.nn.init.eye_(encoder.weight)
    optimizer = xs.optim.RowAdam([*loss.parameters(), *encoder.parameters()], lr=1e-2)
    for step in range(1, steps + 1):
        chosen = stream.users(4096, HISTORY + 1)
        value = loss(encoder(items(chosen[:, :-1]).mean(1)), chosen[:, -1])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {value.item():.3f}", file=sys.stderr, flush=True)
    loss.eval()
    with torch.no_grad():
        queries = encoder(items(stream.users(num_queries, HISTORY, held_out=True)).mean(1))
    return {"weight": loss.linear.weight.detach().clone(), "queries": queries}


def trained(out: Path, name: str, items: int | Path, width: int = 64, steps: int = 2000,
            num_queries: int = 20_000) -> dict[str, torch.Tensor]:
    """Returns the result of `train`, stored in the folder `out`. `items` is the number of items of
    a Stream, or a file of users."""
    path = out / f"{name}.pt"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        torch.save(
            train(
                Recorded(items) if isinstance(items, Path) else Stream(items), width, steps,
                num_queries), path)
    return torch.load(path)
