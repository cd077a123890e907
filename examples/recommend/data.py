"""Users' item sequences, with items in order of decreasing popularity."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.common.errors import DataError

SPLITS = ("train", "valid", "test")


def spans(begin: Tensor, lengths: Tensor) -> Tensor:
    """Concatenates the ranges begin[i] .. begin[i] + lengths[i] - 1 of all i."""
    return torch.repeat_interleave(begin - lengths.cumsum(0) + lengths, lengths) + torch.arange(
        int(lengths.sum()))


@dataclass
class Sequences:
    """Concatenated rows of different lengths."""

    items: Tensor  # int64 [P]
    lengths: Tensor  # int64 [number of rows]

    def __post_init__(self):
        self.ends = self.lengths.cumsum(0)

    @classmethod
    def of(cls, rows: list[list[int]]) -> "Sequences":
        return cls(torch.tensor([item for row in rows for item in row], dtype=torch.long),
                   torch.tensor([len(row) for row in rows], dtype=torch.long))

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: Tensor, longest: int | None = None) -> "Sequences":
        """Returns the selected rows, each cut to its last `longest` items."""
        lengths = self.lengths[rows] if longest is None else self.lengths[rows].clamp(max=longest)
        return Sequences(self.items[spans(self.ends[rows] - lengths, lengths)], lengths)

    def shuffled(self, random: torch.Generator) -> "Sequences":
        """Shuffles the items within each row."""
        order = (self.rows() +
                 torch.rand(len(self.items), dtype=torch.float64, generator=random)).argsort()
        return Sequences(self.items[order], self.lengths)

    def rows(self) -> Tensor:
        """Returns the row of each item, int64 [P]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def split(self) -> tuple[Tensor, ...]:
        return self.items.split(self.lengths.tolist())


@dataclass
class Queries:
    """The known items and the target items of each user."""

    known: Sequences
    truth: Sequences


@dataclass
class Dataset:
    name: str
    # ids in the files, by decreasing popularity in the training data, so that the first ids form
    # the head
    items: list[int]
    counts: Tensor  # count of each item in the training sequences
    train: Sequences
    valid: Queries
    test: Queries

    @property
    def actions(self) -> dict[str, int]:
        return {
            "train": len(self.train.items), "valid": len(self.valid.truth.items),
            "test": len(self.test.truth.items)
        }

    @property
    def sizes(self) -> str:
        actions = self.actions
        return (f"{len(self.train):,} users, {len(self.items):,} items, "
                f"{actions['train']:,} actions to train, {actions['valid']:,} to validate, "
                f"{actions['test']:,} to test")

    @property
    def fingerprint(self) -> int:
        """A checksum of the sequences, to which a checkpoint is bound."""
        crc = zlib.crc32(repr(self.items).encode())
        for part in (self.train, self.valid.known, self.valid.truth, self.test.known,
                     self.test.truth):
            crc = zlib.crc32(part.lengths.numpy().tobytes(),
                             zlib.crc32(part.items.numpy().tobytes(), crc))
        return crc


def load_dataset(path: str | None) -> Dataset:
    """Loads sequences and splits them into training, validation and test data.

    Args:
        path: a file of lines `user item item ...` in time order (the last item of each user is the
            test target, the second to last the validation target, all others are for training); a
            folder with train.txt, valid.txt and test.txt of such lines; or None for generated
            sequences.
    """
    if path is None:
        return leave_one_out("generated sequences", generate())
    if Path(path).is_dir():
        return folder(Path(path))
    if Path(path).is_file():
        return leave_one_out(
            path,
            list(read(Path(path), 3, "one to train, one to validate and one "
                      "to test").values()))
    raise DataError(f"--data: {path} is neither a file nor a folder")


def read(path: Path, least: int, why: str) -> dict[int, list[int]]:
    """Reads the items of each user. Each line must have at least `least` items."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    users: dict[int, list[int]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        for word in words:
            if not (word.isascii() and word.isdigit()):
                raise DataError(f"{path}, line {number}: expected numbers of 0 or more, got "
                                f"{word!r}")
            if int(word) >= 2**63:
                raise DataError(f"{path}, line {number}: expected numbers below 2^63, got {word!r}")
        user, *items = map(int, words)
        if len(items) < least:
            raise DataError(f"{path}, line {number}: expected at least {least} items ({why}) for "
                            f"user {user}, got {len(items)}")
        if user in users:
            raise DataError(f"{path}, line {number}: expected one line a user, got user {user} "
                            "again")
        users[user] = items
    if not any(users.values()):
        raise DataError(f"{path}: expected lines `user item item ...`, got none")
    return users


def folder(path: Path) -> Dataset:
    for split in SPLITS:
        if not (path / f"{split}.txt").is_file():
            raise DataError(f"--data: expected train.txt, valid.txt and test.txt in {path}, and "
                            f"there is no {split}.txt")
    train = read(path / "train.txt", 1, "to train")
    found = {split: read(path / f"{split}.txt", 0, "") for split in SPLITS[1:]}
    for split, users in found.items():
        unknown = users.keys() - train.keys()
        if unknown:
            raise DataError(f"{path / f'{split}.txt'}: expected users of train.txt, got user "
                            f"{min(unknown)}")
    later = [[found[split].get(user, []) for user in train] for split in SPLITS[1:]]
    return make(str(path), list(train.values()), *later)


def leave_one_out(name: str, rows: list[list[int]]) -> Dataset:
    return make(name, [row[:-2] for row in rows], [row[-2:-1] for row in rows],
                [row[-1:] for row in rows])


def make(name: str, train: list[list[int]], valid: list[list[int]],
         test: list[list[int]]) -> Dataset:
    """Builds a dataset from each user's items of the three splits. For the test, the validation
    items of a user are known."""
    parts = [
        Sequences.of(rows) for rows in (train, [a + b for a, b in zip(train, valid)], valid, test)
    ]
    numbers, ids = torch.cat([part.items for part in parts]).unique(return_inverse=True)
    counts = torch.bincount(ids[:len(parts[0].items)], minlength=len(numbers))
    order = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    sequences = [
        Sequences(part, parts[i].lengths)
        for i, part in enumerate(rank[ids].split([len(part.items) for part in parts]))
    ]
    seen, seen_later, valid_truth, test_truth = sequences
    return Dataset(name, numbers[order].tolist(), counts[order], seen, Queries(seen, valid_truth),
                   Queries(seen_later, test_truth))


def generate(users: int = 4000, items: int = 5000, clusters: int = 100,
             seed: int = 0) -> list[list[int]]:
    """Generates sequences that walk between clusters of items.

    From each cluster, 4 in 5 steps lead to one of three fixed clusters, the others anywhere. Within
    a cluster, the popularity of items decreases as 1 / rank. So an item says a lot about the next
    one, but no next cluster has a probability much above 1 / 3.
    """
    random = torch.Generator().manual_seed(seed)
    size = items // clusters
    following = torch.randint(clusters, (clusters, 3), generator=random)
    popularity = 1.0 / torch.arange(1, size + 1)
    lengths = torch.randint(5, 40, (users,), generator=random)
    steps = int(lengths.max())
    cluster = torch.empty(users, steps, dtype=torch.long)
    cluster[:, 0] = torch.randint(clusters, (users,), generator=random)
    for step in range(1, steps):
        along = following[cluster[:, step - 1], torch.randint(3, (users,), generator=random)]
        anywhere = torch.randint(clusters, (users,), generator=random)
        cluster[:, step] = torch.where(torch.rand(users, generator=random) < 0.8, along, anywhere)
    within = torch.multinomial(popularity, users * steps, replacement=True,
                               generator=random).view(users, steps)
    rows = cluster * size + within
    return [row[:length] for row, length in zip(rows.tolist(), lengths.tolist())]


class Batches:
    """The training sequences in batches of batch_size, in a new order each epoch.

    A batch consists of the concatenated items of its sequences, shortest first, their lengths, and
    for each item the one that follows it. Sequences longer than `longest` are split, so that each
    item except a user's first is a target once per epoch. With `unordered`, the items of each user
    are shuffled again in every epoch.
    """
    def __init__(self, train: Sequences, batch_size: int, longest: int, unordered: bool, seed: int,
                 device: torch.device):
        self.train, self.batch_size, self.unordered = train, batch_size, unordered
        self.seed, self.device = seed, device
        targets = train.lengths - 1
        pieces = -(-targets // longest)
        row = torch.repeat_interleave(torch.arange(len(train)), pieces)
        piece = torch.arange(len(row)) - (pieces.cumsum(0) - pieces)[row]  # counted from the end
        stop = targets[row] - piece * longest
        begin = (stop - longest).clamp(min=0)
        self.begin, self.lengths = (train.ends - train.lengths)[row] + begin, stop - begin
        if len(row) == 0:
            raise DataError("expected a user with at least two items in training, got none")
        self.epoch = -1

    def __len__(self) -> int:
        return -(-len(self.begin) // self.batch_size)

    def start(self, epoch: int):
        """Prepares an epoch. The order depends only on its number and the seed, so that a run can
        be resumed within an epoch."""
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        self.order = torch.randperm(len(self.begin), generator=random)
        self.items = self.train.shuffled(random).items if self.unordered else self.train.items
        self.epoch = epoch

    def get(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns items [P], lengths [batch_size or fewer] and targets [P] of a step, counted from
        the start of training."""
        epoch, i = divmod(step, len(self))
        if epoch != self.epoch:
            self.start(epoch)
        chosen = self.order[i * self.batch_size:(i + 1) * self.batch_size]
        chosen = chosen[self.lengths[chosen].argsort(stable=True)]
        lengths = self.lengths[chosen]
        at = spans(self.begin[chosen], lengths)
        return self.items[at].to(self.device), lengths.to(self.device), self.items[at + 1].to(
            self.device)


def part_of_batch(items: Tensor, lengths: Tensor, targets: Tensor, rank: int,
                  size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the part of a batch for one of `size` ranks: consecutive sequences with about the
    same number of targets as on other ranks. If there are fewer sequences than ranks, a rank
    without any gets the first one again, with ignored targets."""
    if size == 1:
        return items, lengths, targets
    ends = lengths.cumsum(0)
    cuts = torch.searchsorted(ends, ends[-1] * torch.arange(size + 1, device=ends.device) // size,
                              right=True)
    cuts[0], cuts[size] = 0, len(lengths)
    if len(lengths) >= size:  # at least one for each rank
        places = torch.arange(size + 1, device=cuts.device)
        cuts = torch.maximum(cuts, places).minimum(len(lengths) - size + places)
    begin, end = cuts[rank:rank + 2].tolist()
    if begin == end:
        first = slice(0, int(lengths[0]))
        return items[first], lengths[:1], torch.full_like(targets[first], -100)
    here = slice(int(ends[begin] - lengths[begin]), int(ends[end - 1]))
    return items[here], lengths[begin:end], targets[here]
