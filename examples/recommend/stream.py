"""
Trains on a stream of users' actions in which items come up that were never seen, and compares what gives raw item ids their rows of a table.

    python examples/recommend/stream.py --rows id_table hashed full

    id_table  xs.IdTable in front of a table of --capacity rows: an item has a row once it was seen --admission times, and gives way to others
    hashed    a table of --capacity rows, shared by the items whose ids have the same hash
    full      a row for each item of the stream, known beforehand: what a table without limits comes to

The stream is made of users' sequences, which have no dates: users begin one after another at even intervals, in random order (another for each seed) or in
that of the file (--order), and each acts at even intervals, --pace beginnings of users apart.

Each batch is ranked before it is trained on. All items that were seen up to then, but for others that the user had, are ranked by the scores of their rows,
items of one row in random order: Recall@10 is the expectation over these orders. Items of an IdTable without a row come last. An item that was never seen is
not found. A user's first action is not asked for.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout: this file may be started from anywhere

from examples.common.arguments import positive, report_errors
from examples.common.errors import DataError, UsageError
from examples.common.report import markdown, mean_and_error, write_text
from examples.recommend import data

PLACES = 10
NO_ROW = 0  # of an IdTable: the row of all items without one


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="of lines `user item item ...` in time order (default: generated sequences)")
    parser.add_argument("--order", choices=["random", "file"], default="random", help="in which users begin (default: %(default)s)")
    parser.add_argument("--pace", type=positive(float), default=200, metavar="N", help="beginnings of users between two actions of one (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--capacity", type=positive(int, 2), help="rows of id_table and hashed (default: a quarter of the items)")
    parser.add_argument("--admission", type=positive(int), default=2, help="default: %(default)s")
    parser.add_argument("--eviction", choices=["lfu", "lru"], default="lfu", help="who gives way (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive(int), default=256, help="default: %(default)s")
    parser.add_argument("--samples", type=positive(int), default=512, help="negatives drawn for a step, uniformly (default: %(default)s)")
    parser.add_argument("--width", type=positive(int), default=64, help="default: %(default)s")
    parser.add_argument("--history", type=positive(int), default=10, help="items of a user that count, at most (default: %(default)s)")
    parser.add_argument("--lr", type=positive(float), default=0.1, help="of Adagrad (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=positive(int))
    parser.add_argument("--output", type=Path, default=Path("out/stream"), help="default: %(default)s")
    return parser.parse_args(argv)


@dataclass
class Stream:
    """Actions in the order of time."""

    items: Tensor  # int64 [P], numbers below the number of different items, user by user as the file has them
    raw: Tensor  # int64, the id of each item
    first: Tensor  # int64 [P], where the user's items begin
    order: Tensor  # int64 [P], the actions of time 0, 1, ...

    @classmethod
    def of(cls, rows: list[list[int]], order: str, pace: float, seed: int) -> "Stream":
        sequences = data.Sequences.of(rows)
        raw, items = sequences.items.unique(return_inverse=True)
        user = sequences.rows()
        first = (sequences.ends - sequences.lengths)[user]
        begin = torch.arange(len(rows)) if order == "file" else torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        time = begin[user] + pace * (torch.arange(len(user)) - first).double()
        return cls(items, raw, first, time.argsort(stable=True))

    def before(self, action: Tensor, most: int | None = None) -> data.Sequences:
        """The user's items before each action, of which the last `most` count."""
        lengths = action - self.first[action]
        if most is not None:
            lengths = lengths.clamp(max=most)
        return data.Sequences(self.items[data.spans(action - lengths, lengths)], lengths)


class Ids:
    """Rows by xs.IdTable. `rows` counts the items of a batch, `find` does not."""

    unranked = ignored = NO_ROW

    def __init__(self, raw: Tensor, capacity: int, args: argparse.Namespace):
        self.capacity = capacity
        self.table = xs.IdTable(capacity, eviction=args.eviction, admission=args.admission)

    def attach(self, *modules: nn.Module):
        self.table.attach(*modules)

    def rows(self, items: Tensor) -> Tensor:
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
        mixed = items * -7046029254386353131  # wraps around: near ids part
        return ((mixed ^ (mixed >> 32)) & (2**62 - 1)) % self.capacity

    def rows(self, items: Tensor) -> Tensor:
        return self.find(items)


class Full(Hashed):
    def __init__(self, raw: Tensor, capacity: int, args: argparse.Namespace):
        self.known, self.capacity = raw, len(raw)

    def find(self, items: Tensor) -> Tensor:
        return torch.searchsorted(self.known, items)


ROWS = {"id_table": Ids, "hashed": Hashed, "full": Full}


class Model(nn.Module):
    """A user is the mean of the vectors of the last items, through a layer; an item has a row of the embedding and one of the loss."""

    def __init__(self, capacity: int, ignored: int, args: argparse.Namespace):
        super().__init__()
        self.embedding = nn.EmbeddingBag(capacity, args.width, mode="mean", sparse=True)
        self.layer = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU(), nn.Linear(args.width, args.width))
        self.loss = xs.SampledSoftmaxLoss(args.width, capacity, sampler="uniform", num_samples=min(args.samples, capacity), bias=True, ignore_index=ignored)

    def hidden(self, rows: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(rows, lengths.cumsum(0) - lengths)
        return x + self.layer(x)


def expected_recall(scores: Tensor, target: Tensor, items_of_row: Tensor, query: Tensor, left_out: Tensor) -> Tensor:
    """
    The probability of each target to be among the first PLACES, where items stand by the scores of their rows, those of one row in random order.

    scores: [Q, C]; target: int64 [Q], rows; items_of_row: int64 [C], how many items have each; left_out: rows of other items that are not ranked for `query`
    """
    own = scores.gather(1, target.unsqueeze(1))
    items_of_row = items_of_row.float()  # whose sums are exact below 2^24
    above, equal = (scores > own).float() @ items_of_row, (scores == own).float() @ items_of_row
    theirs, mine = scores[query, left_out], own[query, 0]
    above -= torch.bincount(query[theirs > mine], minlength=len(target))
    equal -= torch.bincount(query[theirs == mine], minlength=len(target))
    return ((PLACES - above) / equal).clamp(0, 1)


@torch.no_grad()
def rank(model: Model, table, stream: Stream, action: Tensor, seen: Tensor, history: int) -> Tensor:
    """The expected Recall@10 of each action's item. seen: bool, the items that are ranked."""
    recent, had = stream.before(action, history), stream.before(action)
    scores = model.loss.linear(model.hidden(table.find(stream.raw[recent.items]), recent.lengths))
    if table.unranked is not None:
        scores[:, table.unranked] = -torch.inf
    items_of_row = torch.bincount(table.find(stream.raw[seen]), minlength=table.capacity)
    query, items = torch.stack([had.rows(), had.items])[:, seen[had.items]].unique(dim=1)
    others = items != stream.items[action][query]
    return expected_recall(scores, table.find(stream.raw[stream.items[action]]), items_of_row, query[others], table.find(stream.raw[items[others]]))


def follow(name: str, rows: list[list[int]], args: argparse.Namespace, seed: int) -> dict:
    """Recall@10 of all actions but the first of each user, and of those of each quarter of the stream."""
    torch.manual_seed(seed)
    stream = Stream.of(rows, args.order, args.pace, seed)
    table = ROWS[name](stream.raw, capacity_of(stream, args), args)
    model = Model(table.capacity, table.ignored, args)
    table.attach(model.embedding, model.loss)
    optimizer = xs.optim.RowAdagrad(model.parameters(), lr=args.lr)
    seen = torch.zeros(len(stream.raw), dtype=torch.bool)
    recalls, parts = [], stream.order.split(args.batch_size)
    for action in tqdm(parts, desc=name, unit="batch", disable=not sys.stderr.isatty(), leave=False):
        asked = action[action > stream.first[action]]  # nothing is known of a user who begins
        recall = torch.zeros(len(asked))
        can_be_found = seen[stream.items[asked]]
        if can_be_found.any():
            recall[can_be_found] = rank(model, table, stream, asked[can_be_found], seen, args.history)
        recalls.append(recall)
        seen[stream.items[action]] = True
        table.rows(stream.raw[stream.items[action]])
        if len(asked) > 0:
            recent = stream.before(asked, args.history)
            hidden = model.hidden(table.find(stream.raw[recent.items]), recent.lengths)
            optimizer.zero_grad()
            model.loss(hidden, table.find(stream.raw[stream.items[asked]])).backward()
            optimizer.step()
    quarters = [torch.cat(recalls[len(parts) * i // 4:len(parts) * (i + 1) // 4]) for i in range(4)]
    return {"rows of": name, "seed": seed, "rows": table.capacity, "Recall@10": float(torch.cat(recalls).mean()),
            **{f"quarter {i + 1}": float(part.mean()) for i, part in enumerate(quarters)}}


def capacity_of(stream: Stream, args: argparse.Namespace) -> int:
    return args.capacity or max(2, len(stream.raw) // 4)


def new_items(stream: Stream) -> list[int]:
    """How many items come up first in each quarter of the stream."""
    items, quarter = stream.items[stream.order], torch.arange(len(stream.order)) * 4 // len(stream.order)
    first = torch.full_like(stream.raw, 3).scatter_reduce(0, items, quarter, "amin")
    return torch.bincount(first, minlength=4).tolist()


def table_of(runs: list[dict]) -> str:
    """A line a table: means over seeds, and their standard errors where there are several."""
    rows = []
    for name in dict.fromkeys(run["rows of"] for run in runs):
        mine = [run for run in runs if run["rows of"] == name]
        row = {"rows of": name, "rows": f"{mine[0]['rows']:,}"}
        rows.append(row | {figure: mean_and_error([run[figure] for run in mine]) for figure in ("Recall@10", *(f"quarter {i + 1}" for i in range(4)))})
    return markdown(rows)


def compare(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    if args.data is None:
        name, rows = "generated sequences", data.generate()
    elif Path(args.data).is_file():
        name, rows = args.data, list(data.read(Path(args.data), 1, "to follow").values())
    else:
        raise DataError(f"--data: expected a file, got {args.data}")
    if max(map(len, rows)) < 2:
        raise DataError("expected a user with at least two items, got none")
    stream = Stream.of(rows, args.order, args.pace, args.seeds[0])
    if args.batch_size > len(stream.order) // 4:  # a figure is that of a quarter
        raise UsageError(f"--batch-size: expected at most a quarter of the {len(stream.order):,} actions, got {args.batch_size}")
    new = ", ".join(f"{count:,}" for count in new_items(stream))
    print(f"{name}: {len(rows):,} users, {len(stream.raw):,} items, of which {new} come up in the quarters of the stream; {len(stream.order):,} actions",
          flush=True)
    runs = []
    for seed in args.seeds:
        for name in args.rows:
            runs.append(follow(name, rows, args, seed))
            print(json.dumps(runs[-1]), flush=True)
            arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            write_text(args.output / "runs.json", json.dumps({"arguments": arguments, "runs": runs}, indent=2) + "\n")
            write_text(args.output / "table.md", table_of(runs))
    print(f"\n{table_of(runs)}{args.output}: runs.json, table.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(compare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
