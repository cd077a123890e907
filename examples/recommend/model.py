"""Encoders that turn a user's items into hidden states, one after each item: a query for the next."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from examples.common.attention import TransformerLayer, padded, unpadded


class Encoder(nn.Module):
    """items [P], those of one user after another, and lengths [B], how many each has -> hidden [P, width]."""

    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(num_items, width, sparse=sparse)
        self.dropout = nn.Dropout(dropout)
        # Small rows suit a tied output layer: at first all items are alike. Normalised, they are as large as what the layers add to them.
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.input_norm = nn.LayerNorm(width)


class SASRec(Encoder):
    """Causal self-attention over the items and their places, as in Kang & McAuley, "Self-Attentive Sequential Recommendation".

    Quickest where the sequences stand sorted by length."""

    BLOCK = 32

    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool, layers: int, heads: int, max_length: int):
        super().__init__(num_items, width, dropout, sparse)
        self.position = nn.Parameter(torch.zeros(max_length, width))
        self.layers = nn.ModuleList([TransformerLayer(width, heads, dropout, width, nn.ReLU) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        # Attention costs what the longest sequence of a block does: blocks keep short ones apart from long ones.
        masks = [real(block) for block in lengths.split(self.BLOCK)]
        place = torch.cat([mask.nonzero()[:, 1] for mask in masks])
        x = self.dropout(self.input_norm(self.embedding(items) + self.position[place]))
        for layer in self.layers:
            x = layer(x, masks)
        return self.norm(x)


class GRU4Rec(Encoder):
    """A recurrent network, as in Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks"."""

    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool, layers: int):
        super().__init__(num_items, width, dropout, sparse)
        self.gru = nn.GRU(width, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        mask = real(lengths)
        x = self.dropout(self.input_norm(self.embedding(items)))
        hidden, _ = self.gru(pack_padded_sequence(padded(x, mask), lengths.cpu(), batch_first=True, enforce_sorted=False))
        return self.norm(self.dropout(unpadded(pad_packed_sequence(hidden, batch_first=True)[0], mask)))


def real(lengths: Tensor) -> Tensor:
    """bool [B, T]: the places of items in rows that are padded at their ends."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths.unsqueeze(1)


ENCODERS = {"sasrec": SASRec, "gru4rec": GRU4Rec}
