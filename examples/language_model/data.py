"""Text as streams of word ids, with a vocabulary in order of decreasing frequency."""

import re
import sysconfig
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.common.errors import DataError

UNKNOWN, END_OF_LINE, NUMBER = "<unk>", "<eos>", "<number>"

# Runs of letters, runs of digits, single symbols. All non-ASCII characters count as letters, so
# that a tokeniser for UTF-8 bytes (Completer.encode in model.py, in TorchScript) splits at the same
# positions.
TOKENS = re.compile(r"[A-Za-z\x80-\U0010ffff]+|[0-9]+|[!-/:-@\[-`{-~]")


@dataclass
class Corpus:
    name: str
    words: list[str]  # by decreasing frequency, so that the first ids form the head
    counts: Tensor  # count of each word in the training text
    train: Tensor
    valid: Tensor
    test: Tensor
    pretokenised: bool  # words are separated by spaces

    @property
    def sizes(self) -> str:
        return (f"{len(self.words):,} words, {len(self.train):,} tokens to train, "
                f"{len(self.valid):,} to validate, {len(self.test):,} to test")

    @property
    def fingerprint(self) -> int:
        """A checksum of the vocabulary and the streams, to which a checkpoint is bound."""
        crc = zlib.crc32("\n".join(self.words).encode())
        for ids in (self.train, self.valid, self.test):
            crc = zlib.crc32(ids.numpy().tobytes(), crc)
        return crc


def tokenise(text: str, pretokenised: bool = False):
    """Yields the tokens of the text, and <eos> after each non-empty line."""
    for line in text.split("\n"):
        tokens = line.split() if pretokenised else TOKENS.findall(line)
        if tokens:
            for token in tokens:
                yield token if pretokenised or not "0" <= token[0] <= "9" else NUMBER
            yield END_OF_LINE


def load_corpus(path: str | None, min_count: int = 2, max_tokens: int | None = None,
                eval_tokens: int | None = None) -> Corpus:
    """Loads a text and splits it into training, validation and test data.

    Args:
        path: a text file (split by position into 90 % training, 5 % validation and 5 % test); a
            folder with *.train.txt, *.valid.txt and *.test.txt of words separated by spaces (the
            format of Penn Treebank); a folder of other *.txt files (one in 20 for validation, one
            in 20 for test); or None for the source of Python's standard library.
        min_count: words with a smaller count in the training text become <unk>.
        max_tokens: the largest number of training tokens; validation and test text then have at
            most a tenth of it each.
        eval_tokens: the largest number of tokens of the validation text and of the test text.
    """
    name, pretokenised, texts = find_texts(path)
    index: dict[str, int] = {UNKNOWN: 0, END_OF_LINE: 1}  # in order of appearance, sorted later
    limits = {"train": max_tokens, "all": max_tokens and max_tokens * 10 // 9}
    streams = {}
    for split, files in texts.items():
        streams[split] = read(files, pretokenised, index,
                              limits.get(split, max_tokens and max_tokens // 10))
    streams = split_stream(streams)
    if eval_tokens:
        streams |= {split: streams[split][:eval_tokens] for split in ("valid", "test")}
    for split, ids in streams.items():
        if len(ids) < 2:
            raise DataError(f"--data: the {split} part of {name} has {len(ids)} words, expected at "
                            "least 2")
    words, counts, rank = sort_by_frequency(index, streams["train"], min_count)
    return Corpus(name, words, counts,
                  *(rank[streams[split]] for split in ("train", "valid", "test")), pretokenised)


def find_texts(path: str | None) -> tuple[str, bool, dict[str, list[Path]]]:
    """Returns the name of a text, whether its words are separated by spaces, and its files by
    split: "train", "valid" and "test", or "all"."""
    if path is None:
        return "the Python standard library", False, standard_library()
    if Path(path).is_dir():
        files = sorted(Path(path).glob("*.txt"))
        pretokenised = any(file.name.endswith(".train.txt") for file in files)
        return str(path), pretokenised, folder(Path(path)) if pretokenised else split_files(
            files, Path(path), 20)
    if Path(path).is_file():
        return str(path), False, {"all": [Path(path)]}
    raise DataError(f"--data: {path} is neither a file nor a folder")


def standard_library() -> dict[str, list[Path]]:
    """Splits the modules of the running Python: one in 200 for validation, one in 200 for test."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages"}
    return split_files([
        file
        for file in root.rglob("*.py") if not skipped.intersection(file.relative_to(root).parts)
    ], root, 200)


def split_files(files: list[Path], root: Path, every: int) -> dict[str, list[Path]]:
    """Assigns one in `every` files to validation and one to test, in a pseudorandom order given by
    a hash of their names."""
    if len(files) < every:
        raise DataError(f"--data: expected one text, or a folder of at least {every}, got {root} "
                        f"with {len(files)}")
    files = sorted(files, key=lambda file:
                   (zlib.crc32(file.relative_to(root).as_posix().encode()), file))
    part = {0: "valid", 1: "test"}
    splits = {"train": [], "valid": [], "test": []}
    for i, file in enumerate(files):
        splits[part.get(i % every, "train")].append(file)
    return splits


def split_stream(streams: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits the ids of a single file: 90 % for training, then 5 % for validation, 5 % for test."""
    if "all" not in streams:
        return streams
    ids = streams["all"]
    cuts = [len(ids) * 90 // 100, len(ids) * 95 // 100]
    return {"train": ids[:cuts[0]], "valid": ids[cuts[0]:cuts[1]], "test": ids[cuts[1]:]}


def folder(path: Path) -> dict[str, list[Path]]:
    splits = {split: sorted(path.glob(f"*.{split}.txt")) for split in ("train", "valid", "test")}
    for split, files in splits.items():
        if len(files) != 1:
            raise DataError(f"--data: expected one file *.{split}.txt in {path}, found "
                            f"{len(files)}")
    return splits


def read(files: list[Path], pretokenised: bool, index: dict[str, int],
         max_tokens: int | None) -> Tensor:
    """Reads the files as one sequence of ids, and adds new words to the index."""
    ids = array("q")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        ids.extend(index.setdefault(token, len(index)) for token in tokenise(text, pretokenised))
        if max_tokens and len(ids) >= max_tokens:
            break
    return torch.tensor(ids, dtype=torch.long)[:max_tokens]


def sort_by_frequency(index: dict[str, int], train: Tensor,
                      min_count: int) -> tuple[list[str], Tensor, Tensor]:
    """Returns the kept words by decreasing count, their counts, and the new id of each old id."""
    counts = torch.bincount(train, minlength=len(index))
    kept = counts >= min_count
    kept[:2] = True  # <unk> and <eos>
    counts[0] += counts[~kept].sum()
    order = torch.argsort(counts.masked_fill(~kept, -1), descending=True,
                          stable=True)[:int(kept.sum())]
    rank = torch.empty_like(counts)
    rank[order] = torch.arange(len(order))
    rank[~kept] = rank[0].clone()
    words = list(index)
    return [words[i] for i in order.tolist()], counts[order], rank


class Batches:
    """A stream arranged as batch_size parallel columns and read bptt words at a time.

    Batch i consists of inputs and targets [batch_size, T], and continues each column where batch i
    - 1 ended. The end of the last column is padded with ignored targets, so that every word of the
    stream counts once. With several ranks, each holds some of the columns.
    """

    IGNORED = -100

    def __init__(self, ids: Tensor, batch_size: int, bptt: int, device: torch.device,
                 columns: slice = slice(None)):
        length = len(ids) - 1
        rows = -(-length // batch_size)
        inputs = torch.zeros(batch_size * rows, dtype=torch.long)
        targets = torch.full_like(inputs, self.IGNORED)
        inputs[:length] = ids[:-1]
        targets[:length] = ids[1:]
        self.inputs = inputs.view(batch_size, rows)[columns].to(device)
        self.targets = targets.view(batch_size, rows)[columns].to(device)
        self.counts = (targets.view(batch_size, rows) != self.IGNORED).sum(0)  # over all columns
        self.bptt = bptt

    def __len__(self) -> int:
        return -(-self.inputs.shape[1] // self.bptt)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        """Returns inputs, targets, and the number of targets that count in all columns."""
        window = slice(i * self.bptt, (i + 1) * self.bptt)
        return self.inputs[:, window], self.targets[:, window], int(self.counts[window].sum())
