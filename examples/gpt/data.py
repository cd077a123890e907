"""Text as a stream of token ids: words, or byte pairs of a tokenizer that is trained on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor

from examples.common.errors import DataError
from examples.language_model.data import find_texts, load_corpus, split_stream


@dataclass
class Text:
    name: str
    unit: str  # "words" or "byte pairs"
    counts: Tensor  # [num_tokens], how often the training text has each token
    train: Tensor
    valid: Tensor
    test: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.counts)


def load_words(path: str | None, min_count: int, max_tokens: int | None) -> Text:
    corpus = load_corpus(path, min_count, max_tokens)
    return Text(corpus.name, "words", corpus.counts, corpus.train, corpus.valid, corpus.test)


def load_byte_pairs(path: str | None, num_tokens: int, tokenizer: Path | None,
                    max_tokens: int | None) -> Text:
    """Loads a text as byte pairs.

    Args:
        path, max_tokens: as for load_corpus.
        num_tokens: the size of the vocabulary of a tokenizer that is trained.
        tokenizer: a file in the format of the package tokenizers, with any vocabulary. If it does
            not exist, a byte-level tokenizer is trained on the training text, or on a file as a
            whole, and written there.
    """
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
    except ImportError as error:
        raise DataError(
            f"--tokens byte_pairs: expected the package tokenizers ({error})") from error
    name, _, texts = find_texts(path)
    if tokenizer is not None and tokenizer.exists():
        try:
            coder = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # the package raises no narrower type
            raise DataError(f"--tokenizer: expected a file of the package tokenizers, got "
                            f"{tokenizer} ({error})") from error
    else:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(pieces(texts.get("train", texts.get("all"))), num_tokens,
                                    min_frequency=2, show_progress=False)
        if tokenizer is not None:
            tokenizer.parent.mkdir(parents=True, exist_ok=True)
            trained.save(str(tokenizer))
        coder = trained._tokenizer
    streams = split_stream({split: encode(coder, files) for split, files in texts.items()})
    streams = {
        split: ids[:max_tokens if split == "train" or max_tokens is None else max_tokens // 10]
        for split, ids in streams.items()
    }
    counts = torch.bincount(streams["train"], minlength=coder.get_vocab_size())
    return Text(name, "byte pairs", counts, **streams)


def encode(coder: Any, files: list[Path]) -> Tensor:
    parts = coder.encode_batch_fast(list(pieces(files)), add_special_tokens=False)
    return torch.cat([torch.tensor(part.ids, dtype=torch.long) for part in parts])


def pieces(files: list[Path], size: int = 1 << 16) -> Iterator[str]:
    """Yields the texts in pieces of whole lines, of about `size` characters."""
    for file in files:
        lines, length = [], 0
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            lines.append(line)
            length += len(line)
            if length >= size:
                yield "".join(lines)
                lines, length = [], 0
        if lines:
            yield "".join(lines)


class Windows:
    """A stream cut into windows of `context` tokens, shuffled for every epoch in an order that
    depends on the seed alone, so that all losses see the same batches."""
    def __init__(self, ids: Tensor, context: int, seed: int):
        self.ids, self.context, self.seed = ids, context, seed
        self.count = (len(ids) - 1) // context
        self.epoch, self.order = -1, torch.empty(0)

    def batch(self, step: int, batch_size: int, part: slice) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets [B, context] of a step: the part of this rank."""
        steps = self.count // batch_size
        epoch, position = divmod(step, steps)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) & (2**63 - 1))
            self.epoch, self.order = epoch, torch.randperm(self.count, generator=generator)
        return self.at(self.order[position * batch_size:(position + 1) * batch_size][part])

    def at(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        places = windows[:, None] * self.context + torch.arange(self.context + 1)
        rows = self.ids[places.to(self.ids.device)]
        return rows[:, :-1], rows[:, 1:]
