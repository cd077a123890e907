"""Encoders of texts: [Q, width] each."""

import torch
from torch import Tensor, nn


class BagOfWords(nn.Module):
    """The sum of the embeddings of an example's features by their tf-idf, and a residual layer. begin_linear: that layer begins as nothing, so that
    the embeddings of two texts are as far apart as their tf-idf, about."""

    def __init__(self, features: int, width: int, dropout: float, begin_linear: bool = False):
        super().__init__()
        self.embedding = nn.EmbeddingBag(features, width, mode="sum", sparse=True)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        if begin_linear:
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, columns: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        """The rows of a CSR matrix: offsets [Q], where each begins."""
        sums = self.embedding(columns, offsets, per_sample_weights=values)
        return self.norm(sums + self.layers(self.dropout(sums)))


class Transformer(nn.Module):
    """Words at their places, layers of attention, the mean over the words."""

    def __init__(self, vocabulary: int, width: int, dropout: float, layers: int = 2, heads: int = 4, length: int = 64):
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary + 1, width, padding_idx=0, sparse=True)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """[Q, T] ids of words from 1, 0 behind the last."""
        missing = words == 0
        missing[:, 0] = False  # a text without words still has one place
        hidden = self.layers(self.embedding(words) * self.place.shape[1] ** 0.5 + self.place[: words.shape[1]], src_key_padding_mask=missing)
        kept = (~missing).unsqueeze(2).to(hidden.dtype)
        return self.norm((hidden * kept).sum(1) / kept.sum(1))
