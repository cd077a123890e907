"""Trains on a stream of user actions in which new items appear, and compares ways to assign rows of
a table to raw item ids.

    python examples/recommend/stream.py --rows id_table hashed full

    id_table  xs.IdTable in front of a table of --capacity rows: an item gets a row when it
              has been seen --admission times, and may be evicted for another
    hashed    a table of --capacity rows; items whose ids have the same hash share a row
    full      a row for each item of the stream, known in advance: the result of a table
              without limits

The stream is built from users' sequences, which have no dates. Users start one after another
at even intervals, in random order (which depends on the seed) or in the order of the file
(--order). Each user acts at even intervals, in which --pace other users start.

Each batch is ranked before it is trained on. The ranking contains all items seen so far,
except other items that the user has had, ordered by the scores of their rows. Items that share
a row are in random order: Recall@10 is the expectation over these orders. Items without a row
in an IdTable come last. An item that was never seen before is not found. A user's first action
is not evaluated.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.arguments import plain, positive, report_errors
from examples.common.errors import DataError, UsageError
from examples.common.report import markdown, mean_and_error, write_text
from examples.recommend import data

PLACES = 10
NO_ROW = 0  # the row of an IdTable for all items without a row of their own


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", metavar="FILE", help="a file of lines `user item item ...` in time "
        "order (default: generated sequences)")
    parser.add_argument("--order", choices=["random", "file"], default="random",
                        help="the order in which users start (default: %(default)s)")
    parser.add_argument(
        "--pace", type=positive(float), default=200, metavar="N",
        help="number of users that start between two actions of a user (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument(
        "--capacity", type=positive(int, 2), help="number of rows of id_table and "
        "hashed (default: a quarter of the "
        "items)")
    parser.add_argument("--admission", type=positive(int), default=2, help="default: %(default)s")
    parser.add_argument("--eviction", choices=["lfu", "lru"], default="lfu",
                        help="eviction policy of id_table (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive(int), default=256, help="default: "
                        "%(default)s")
    parser.add_argument(
        "--samples", type=positive(int), default=512, help="number of negatives "
        "sampled uniformly per step "
        "(default: %(default)s)")
    parser.add_argument("--width", type=positive(int), default=64, help="default: %(default)s")
    parser.add_argument(
        "--history", type=positive(int), default=10, help="number of a user's last "
        "items that the model reads "
        "(default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.1, help="learning rate of Adagrad "
                        "(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=positive(int))
    parser.add_argument("--output", type=Path, default=Path("out/stream"),
                        help="default: %(default)s")
    return parser.parse_args(argv)


@dataclass
class Stream:
    """Actions in time order."""

    # int64 [P], indices into `raw`, grouped by user as in the file
    items: Tensor
    raw: Tensor  # int64, the raw id of each distinct item
    first: Tensor  # int64 [P], index of the first action of the same user
    order: Tensor  # int64 [P], the actions in time order

    @classmethod
    def of(cls, rows: list[list[int]], order: str, pace: float, seed: int) -> "Stream":
        sequences = data.Sequences.of(rows)
        raw, items = sequences.items.unique(return_inverse=True)
        user = sequences.rows()
        first = (sequences.ends - sequences.lengths)[user]
        begin = torch.arange(len(rows)) if order == "file" else torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(seed))
        time = begin[user] + pace * (torch.arange(len(user)) - first).double()
        return cls(items, raw, first, time.argsort(stable=True))

    def before(self, action: Tensor, most: int | None = None) -> data.Sequences:
        """Returns the user's items before each action; only the last `most`, if given."""
        lengths = action - self.first[action]
        if most is not None:
            lengths = lengths.clamp(max=most)
        return data.Sequences(self.items[data.spans(action - lengths, lengths)], lengths)


class Ids:
    """Assigns rows with xs.IdTable. `insert` counts the items of a batch, `find` does not."""

    unranked = ignored = NO_ROW

    def __init__(self, raw: Tensor, capacity: int, args: argparse.Namespace):
        self.capacity = capacity
        self.table = xs.IdTable(capacity, eviction=args.eviction, admission=args.admission)

    def attach(self, *modules: nn.Module):
        self.table.attach(*modules)

    def insert(self, items: Tensor) -> Tensor:
        return self.table.insert(items)[0]

    def find(self, items: Tensor) -> Tensor:
        return self.table.find(items)


class Hashed:
    unranked, ignored = None, -100

    def __init__(self, raw: Tensor, capacity: int, args: argparse.Namespace):
        self.capacity = capacity

    def attach(self, *modules: nn.Module):
        pass

    def find(self, items: Tensor) -> Tensor:
        mixed = items * -7046029254386353131  # wraps around, which separates similar ids
        return ((mixed ^ (mixed >> 32)) & (2**62 - 1)) % self.capacity

    def insert(self, items: Tensor) -> Tensor:
        return self.find(items)


class Full(Hashed):
    def __init__(self, raw: Tensor, capacity: int, args: argparse.Namespace):
        self.known, self.capacity = raw, len(raw)

    def find(self, items: Tensor) -> Tensor:
        return torch.searchsorted(self.known, items)


ROWS = {"id_table": Ids, "hashed": Hashed, "full": Full}


class Model(nn.Module):
    """A user is the mean of the vectors of their last items, followed by a layer. An item has one
    row in the embedding and one in the loss."""
    def __init__(self, capacity: int, ignored: int, args: argparse.Namespace):
        super().__init__()
        self.embedding = nn.EmbeddingBag(capacity, args.width, mode="mean", sparse=True)
        self.layer = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(),
                                   nn.Linear(args.width, args.width))
        self.loss = xs.SampledSoftmaxLoss(args.width, capacity, sampler="uniform",
                                          num_samples=min(args.samples, capacity), bias=True,
                                          ignore_index=ignored)

    def hidden(self, rows: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(rows, lengths.cumsum(0) - lengths)
        return x + self.layer(x)


def expected_recall(scores: Tensor, target: Tensor, items_of_row: Tensor, query: Tensor,
                    left_out: Tensor) -> Tensor:
    """Returns the probability of each target to be among the first PLACES items, ordered by the
    scores of their rows, with items of the same row in random order.

    Args:
        scores: [Q, C].
        target: int64 [Q], the rows of the targets.
        items_of_row: int64 [C], the number of items of each row.
        query, left_out: rows of other items that are excluded from the ranking of `query`.
    """
    target_score = scores.gather(1, target.unsqueeze(1))
    items_of_row = items_of_row.float()  # sums are exact below 2^24
    above, equal = (scores > target_score).float() @ items_of_row, (
        scores == target_score).float() @ items_of_row
    theirs, mine = scores[query, left_out], target_score[query, 0]
    above -= torch.bincount(query[theirs > mine], minlength=len(target))
    equal -= torch.bincount(query[theirs == mine], minlength=len(target))
    return ((PLACES - above) / equal).clamp(0, 1)


@torch.no_grad()
def rank(model: Model, table, stream: Stream, action: Tensor, seen: Tensor, history: int) -> Tensor:
    """Returns the expected Recall@10 of each action's item. `seen` marks the items to rank."""
    recent, had = stream.before(action, history), stream.before(action)
    scores = model.loss.linear(model.hidden(table.find(stream.raw[recent.items]), recent.lengths))
    if table.unranked is not None:
        scores[:, table.unranked] = -torch.inf
    items_of_row = torch.bincount(table.find(stream.raw[seen]), minlength=table.capacity)
    query, items = torch.stack([had.rows(), had.items])[:, seen[had.items]].unique(dim=1)
    others = items != stream.items[action][query]
    return expected_recall(scores, table.find(stream.raw[stream.items[action]]), items_of_row,
                           query[others], table.find(stream.raw[items[others]]))


def follow(name: str, rows: list[list[int]], args: argparse.Namespace, seed: int) -> dict:
    """Returns Recall@10 of all actions except the first of each user, in total and for each quarter
    of the stream."""
    torch.manual_seed(seed)
    stream = Stream.of(rows, args.order, args.pace, seed)
    table = ROWS[name](stream.raw, capacity_of(stream, args), args)
    model = Model(table.capacity, table.ignored, args)
    table.attach(model.embedding, model.loss)
    optimizer = xs.optim.RowAdagrad(model.parameters(), lr=args.lr)
    seen = torch.zeros(len(stream.raw), dtype=torch.bool)
    recalls, parts = [], stream.order.split(args.batch_size)
    for action in tqdm(parts, desc=name, unit="batch", disable=not sys.stderr.isatty(),
                       leave=False):
        ranked = action[action > stream.first[action]]  # nothing is known before the first action
        recall = torch.zeros(len(ranked))
        can_be_found = seen[stream.items[ranked]]
        if can_be_found.any():
            recall[can_be_found] = rank(model, table, stream, ranked[can_be_found], seen,
                                        args.history)
        recalls.append(recall)
        seen[stream.items[action]] = True
        table.insert(stream.raw[stream.items[action]])
        if len(ranked) > 0:
            recent = stream.before(ranked, args.history)
            hidden = model.hidden(table.find(stream.raw[recent.items]), recent.lengths)
            optimizer.zero_grad()
            model.loss(hidden, table.find(stream.raw[stream.items[ranked]])).backward()
            optimizer.step()
    quarters = [torch.cat(recalls[len(parts) * i // 4:len(parts) * (i + 1) // 4]) for i in range(4)]
    return {
        "table": name, "seed": seed, "rows": table.capacity,
        "Recall@10": float(torch.cat(recalls).mean()),
        **{f"quarter {i + 1}": float(part.mean())
           for i, part in enumerate(quarters)}
    }


def capacity_of(stream: Stream, args: argparse.Namespace) -> int:
    return args.capacity or max(2, len(stream.raw) // 4)


def new_items(stream: Stream) -> list[int]:
    """Returns how many items first appear in each quarter of the stream."""
    items, quarter = stream.items[stream.order], torch.arange(len(stream.order)) * 4 // len(
        stream.order)
    first = torch.full_like(stream.raw, 3).scatter_reduce(0, items, quarter, "amin")
    return torch.bincount(first, minlength=4).tolist()


def table_of(runs: list[dict]) -> str:
    """Formats one line per table: means over seeds, with standard errors if there are several."""
    rows = []
    for name in dict.fromkeys(run["table"] for run in runs):
        mine = [run for run in runs if run["table"] == name]
        row = {"table": name, "rows": f"{mine[0]['rows']:,}"}
        rows.append(
            row | {
                figure: mean_and_error([run[figure] for run in mine])
                for figure in ("Recall@10", *(f"quarter {i + 1}" for i in range(4)))
            })
    return markdown(rows)


def compare(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)  # fails before the training instead of after it
    if args.data is None:
        name, rows = "generated sequences", data.generate()
    elif Path(args.data).is_file():
        name, rows = args.data, list(data.read(Path(args.data), 1, "to follow").values())
    else:
        raise DataError(f"--data: expected a file, got {args.data}")
    if max(map(len, rows)) < 2:
        raise DataError("expected a user with at least two items, got none")
    stream = Stream.of(rows, args.order, args.pace, args.seeds[0])
    if args.batch_size > len(stream.order) // 4:  # a batch must not exceed a quarter
        raise UsageError(f"--batch-size: expected at most a quarter of the {len(stream.order):,} "
                         f"actions, got {args.batch_size}")
    new = ", ".join(f"{count:,}" for count in new_items(stream))
    print(
        f"{name}: {len(rows):,} users, {len(stream.raw):,} items, of which {new} come up in the "
        f"quarters of the stream; {len(stream.order):,} actions", flush=True)
    runs = []
    for seed in args.seeds:
        for name in args.rows:
            runs.append(follow(name, rows, args, seed))
            print(json.dumps(runs[-1]), flush=True)
            write_text(args.output / "runs.json",
                       json.dumps({"arguments": plain(args), "runs": runs}, indent=2) + "\n")
            write_text(args.output / "table.md", table_of(runs))
    print(f"\n{table_of(runs)}{args.output}: runs.json, table.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(compare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
