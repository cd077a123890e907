"""The most frequent successors of each word in a text, as candidates for CANE (Han et al., 2018,
the last suggestion of section 5)."""

import torch
from torch import Tensor


def successors(text: Tensor, num_words: int, k: int) -> Tensor:
    """Returns the k words that most often follow each word, [num_words, k]; if there are fewer, the
    list is filled up with the most frequent words. `text` holds ids by decreasing frequency."""
    pairs, counts = torch.unique(text[:-1] * num_words + text[1:], return_counts=True)
    frequent = (torch.arange(num_words)[:, None] * num_words + torch.arange(k)).flatten()
    frequent = frequent[~torch.isin(frequent, pairs)]
    pairs, counts = torch.cat([pairs, frequent]), torch.cat([counts, torch.zeros_like(frequent)])
    pairs = pairs[torch.argsort(counts, descending=True, stable=True)]
    pairs = pairs[torch.argsort(pairs // num_words, stable=True)]
    first = pairs // num_words
    rank = torch.arange(len(pairs)) - torch.searchsorted(first, first)
    return (pairs[rank < k] % num_words).reshape(num_words, k)
