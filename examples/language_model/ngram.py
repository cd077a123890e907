"""Which words are likely after a word, counted in a text: what CANE takes as candidates (Han et al., 2018, section 5, its last suggestion)."""

import torch
from torch import Tensor


def successors(text: Tensor, num_words: int, k: int) -> Tensor:
    """[num_words, k]: the k words that most often follow each one; where fewer do, the most frequent ones fill up. text: ids by falling frequency."""
    pairs, counts = torch.unique(text[:-1] * num_words + text[1:], return_counts=True)
    frequent = (torch.arange(num_words)[:, None] * num_words + torch.arange(k)).flatten()
    frequent = frequent[~torch.isin(frequent, pairs)]
    pairs, counts = torch.cat([pairs, frequent]), torch.cat([counts, torch.zeros_like(frequent)])
    pairs = pairs[torch.argsort(counts, descending=True, stable=True)]
    pairs = pairs[torch.argsort(pairs // num_words, stable=True)]
    first = pairs // num_words
    rank = torch.arange(len(pairs)) - torch.searchsorted(first, first)
    return (pairs[rank < k] % num_words).reshape(num_words, k)
