"""Text encoders with outputs [Q, width]."""

import torch
from torch import Tensor, nn


class BagOfWords(nn.Module):
    """The sum of feature embeddings weighted by tf-idf, followed by a residual layer.

    With begin_linear=True the residual layer starts at zero, so that the distance between two
    embeddings is initially about the distance between their tf-idf vectors.
    """
    def __init__(self, features: int, width: int, dropout: float, begin_linear: bool = False):
        super().__init__()
        self.embedding = nn.EmbeddingBag(features, width, mode="sum", sparse=True)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(),
                                    nn.Linear(width, width))
        if begin_linear:
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, columns: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        """Encodes the rows of a CSR matrix; offsets [Q] are the starts of its rows."""
        sums = self.embedding(columns, offsets, per_sample_weights=values)
        return self.norm(sums + self.layers(self.dropout(sums)))


class Transformer(nn.Module):
    """Word embeddings with positions, attention layers, and the mean over the words."""
    def __init__(self, vocabulary: int, width: int, dropout: float, layers: int = 2, heads: int = 4,
                 length: int = 64):
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary + 1, width, padding_idx=0, sparse=True)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True,
                                           norm_first=True)
        self.layers, self.norm = nn.TransformerEncoder(
            layer, layers, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """Encodes word ids [Q, T], which start at 1 and are padded with 0 at the end."""
        missing = words == 0
        missing[:, 0] = False  # keep one position for a text without words
        hidden = self.layers(
            self.embedding(words) * self.place.shape[1]**0.5 + self.place[:words.shape[1]],
            src_key_padding_mask=missing)
        kept = (~missing).unsqueeze(2).to(hidden.dtype)
        return self.norm((hidden * kept).sum(1) / kept.sum(1))
