"""
Trains two towers, one for a user's items and one for an item with its features, and compares what stands for the softmax over all items in their loss.

    python examples/recommend/two_tower.py --loss uncorrected logq refined mixed

    uncorrected  the items of the batch as candidates, all alike
    logq         candidates and positives lowered by the log of how often they are in a batch (Yi et al., 2019)
    refined      candidates alone: the positive was not drawn (Khrylchenko et al., 2025)
    mixed        refined, with a second batch that is drawn uniformly from all items (Yang et al., 2020)
    full         the softmax over all items, whose vectors each step makes anew

An item's features are hashes of its number, which say nothing of it: they stand for the categories and words that a catalog has. A user is the mean of the
vectors of items seen before the one to be found; of a file without order (--unordered) of the others.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import xsoftmax as xs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout: this file may be started from anywhere

from examples.common.arguments import positive, report_errors
from examples.common.errors import DataError
from examples.common.report import markdown, write_text
from examples.recommend import data

ESTIMATORS = {"uncorrected": "sampled_softmax", "logq": "ranking", "refined": "sampled_softmax", "mixed": "sampled_softmax"}
LOSSES = (*ESTIMATORS, "full")
PLACES = 10
FEATURES = 4  # of an item
BUCKETS = 1000  # of features


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="PATH", help="as train.py has it (default: generated sequences)")
    parser.add_argument("--unordered", action="store_true", help="the order of a user's items says nothing")
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=list(ESTIMATORS))
    parser.add_argument("--epochs", type=positive(float), help="default: 5, or as many as --max-minutes allows")
    parser.add_argument("--max-minutes", type=positive(float), help="of training, for each loss and seed")
    parser.add_argument("--batch-size", type=positive(int), default=1024)
    parser.add_argument("--negatives", type=positive(int), default=1024, help="of mixed, for a batch")
    parser.add_argument("--width", type=positive(int), default=64)
    parser.add_argument("--history", type=positive(int), default=30, help="items of a user that count, at most")
    parser.add_argument("--temperature", type=positive(float), default=0.1)
    parser.add_argument("--lr", type=positive(float), default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=positive(int))
    parser.add_argument("--output", type=Path, default=Path("out/two_tower"))
    args = parser.parse_args(argv)
    if args.epochs is None:
        args.epochs = 5.0 if args.max_minutes is None else math.inf
    return args


def hashed_features(num_items: int) -> Tensor:
    """int64 [num_items, FEATURES]: numbers below BUCKETS."""
    item = torch.arange(num_items).unsqueeze(1) + 1
    return (item * (2654435761 + 40503 * torch.arange(FEATURES)) % 4294967291) % BUCKETS


class Towers(nn.Module):
    """Both tables have row-sparse gradients: a step touches the rows of its items."""

    def __init__(self, num_items: int, width: int):
        super().__init__()
        self.seen = nn.EmbeddingBag(num_items, width, mode="mean", sparse=True)
        self.item_table = nn.Embedding(num_items, width, sparse=True)
        self.feature_table = nn.EmbeddingBag(BUCKETS, width, mode="sum", sparse=True)
        for table in (self.seen, self.item_table, self.feature_table):
            nn.init.normal_(table.weight, std=0.1)
        self.of_user, self.of_item = (nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(2))
        self.register_buffer("features", hashed_features(num_items))

    def users(self, items: Tensor, lengths: Tensor) -> Tensor:
        x = self.seen(items, lengths.cumsum(0) - lengths)
        return F.normalize(x + self.of_user(x), dim=1)

    def items(self, ids: Tensor) -> Tensor:
        x = self.item_table(ids) + self.feature_table(self.features[ids])
        return F.normalize(x + self.of_item(x), dim=1)


class Pairs:
    """Users' items, each to be found from others of the user."""

    def __init__(self, train: data.Sequences, args: argparse.Namespace):
        self.train, self.args = train, args
        first = 0 if args.unordered else 1  # nothing is known before the first
        row = train.rows()
        place = torch.arange(len(row)) - (train.ends - train.lengths)[row]
        self.wanted = ((place >= first) & (train.lengths[row] > 1)).nonzero().squeeze(1)
        self.row, self.place = row, place

    def batches(self, random: torch.Generator):
        for part in self.wanted[torch.randperm(len(self.wanted), generator=random)].split(self.args.batch_size):
            yield self.batch(part, random)

    def batch(self, wanted: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """(items of the users, one user's after another; how many of each; the items to be found)"""
        row, place = self.row[wanted], self.place[wanted]
        begin = self.train.ends[row] - self.train.lengths[row]
        if not self.args.unordered:
            lengths = place.clamp(max=self.args.history)
            return self.train.items[data.spans(begin + place - lengths, lengths)], lengths, self.train.items[wanted]
        lengths = (self.train.lengths[row] - 1).clamp(max=self.args.history)
        # A run of the user's items that comes round, behind the one to be found: a sample, as the file's order means nothing.
        step = data.spans(torch.ones_like(lengths), lengths)
        each = torch.repeat_interleave(torch.arange(len(row)), lengths)
        return self.train.items[begin[each] + (place[each] + step) % self.train.lengths[row][each]], lengths, self.train.items[wanted]


def softmax_of_all(towers: Towers, query: Tensor, target: Tensor, temperature: float) -> Tensor:
    every = towers.items(torch.arange(len(towers.features)))
    return F.cross_entropy(query @ every.T / temperature, target)


def train(name: str, dataset: data.Dataset, args: argparse.Namespace, seed: int) -> dict:
    torch.manual_seed(seed)
    num_items = len(dataset.items)
    towers, random = Towers(num_items, args.width), torch.Generator().manual_seed(seed)
    loss = None if name == "full" else xs.TwoTowerLoss(num_items, estimator=ESTIMATORS[name], temperature=args.temperature,
                                                       counts=False if name == "uncorrected" else None)
    optimizer = xs.optim.RowAdam(towers.parameters(), lr=args.lr)
    pairs, seconds, steps = Pairs(dataset.train, args), 0.0, 0
    if len(pairs.wanted) == 0:
        raise DataError("expected a user with at least two items in training, got none")
    last = args.epochs * math.ceil(len(pairs.wanted) / args.batch_size)
    limit = math.inf if args.max_minutes is None else 60 * args.max_minutes
    bar = tqdm(desc=name, unit="step", disable=not sys.stderr.isatty(), leave=False)
    while steps < last and seconds < limit:
        for known, lengths, target in pairs.batches(random):
            start = time.perf_counter()
            query = towers.users(known, lengths)
            if loss is None:
                value = softmax_of_all(towers, query, target, args.temperature)
            else:
                negatives = None
                if name == "mixed":
                    drawn = torch.randint(num_items, (args.negatives,), generator=random)
                    negatives = towers.items(drawn), drawn
                value = loss(query, towers.items(target), target, negatives)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seconds, steps = seconds + time.perf_counter() - start, steps + 1
            bar.update()
            if steps >= last or seconds >= limit:
                break
    bar.close()
    optimizer.flush()
    found = {f"{split} {metric}": figure for split in ("valid", "test") for metric, figure in rank(towers, getattr(dataset, split), args).items()}
    return {"loss": name, "seed": seed, "steps": steps, "minutes": seconds / 60, **found}


@torch.no_grad()
def rank(towers: Towers, queries: data.Queries, args: argparse.Namespace) -> dict[str, float]:
    """NDCG@10 and Recall@10 of all items but those that the user has."""
    every = towers.items(torch.arange(len(towers.features)))
    asked = ((queries.truth.lengths > 0) & (queries.known.lengths > 0)).nonzero().squeeze(1)
    found = []
    for part in asked.split(512):
        known = queries.known.select(part)
        recent = known.select(torch.arange(len(known)), args.history)
        scores = towers.users(recent.items, recent.lengths) @ every.T
        scores[known.rows(), known.items] = -math.inf
        found.append(scores.topk(min(PLACES, scores.shape[1]))[1])
    predictions, truth = torch.cat(found), queries.truth.select(asked).split()
    return {"NDCG@10": xs.metrics.ndcg_at_k(predictions, truth, PLACES), "Recall@10": xs.metrics.recall_at_k(predictions, truth, PLACES)}


def table(runs: list[dict]) -> str:
    """A line a loss: means over seeds, and their standard errors where there are several."""
    rows = []
    for name in dict.fromkeys(run["loss"] for run in runs):
        mine = [run for run in runs if run["loss"] == name]
        row = {"loss": name, "steps": f"{statistics.mean(run['steps'] for run in mine):,.0f}", "minutes": f"{statistics.mean(run['minutes'] for run in mine):.2f}"}
        for figure in [key for key in mine[0] if "@" in key]:
            values = [run[figure] for run in mine]
            error = f" +- {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
            row[figure] = f"{statistics.mean(values):.4f}{error}"
        rows.append(row)
    return markdown(rows)


def compare(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    dataset = data.load_dataset(args.data)
    print(f"{dataset.name}: {len(dataset.train):,} users, {len(dataset.items):,} items, {len(dataset.train.items):,} actions to train", flush=True)
    runs = []
    for seed in args.seeds:
        for name in args.loss:
            runs.append(train(name, dataset, args, seed))
            print(json.dumps(runs[-1]), flush=True)
            arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            write_text(args.output / "runs.json", json.dumps({"arguments": arguments, "runs": runs}, indent=2) + "\n")
            write_text(args.output / "table.md", table(runs))
    print(f"\n{table(runs)}{args.output}: runs.json, table.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(compare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
