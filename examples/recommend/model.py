"""Encoders that map a user's items to hidden states, one after each item, as the query for the next
item."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from examples.common.attention import TransformerLayer, padded, unpadded


class Encoder(nn.Module):
    """Base class. Maps the concatenated items [P] of all users, and the number of items per user,
    `lengths` [B], to hidden states [P, width]."""
    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(num_items, width, sparse=sparse)
        self.dropout = nn.Dropout(dropout)
        # Small rows suit a tied output layer, because items then start with similar scores. The
        # normalisation scales them to the size of the layers' outputs.
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.input_norm = nn.LayerNorm(width)


class SASRec(Encoder):
    """Causal self-attention over items and positions (Kang and McAuley, "Self-Attentive Sequential
    Recommendation").

    Fastest if the sequences are sorted by length."""

    BLOCK = 32

    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool, layers: int,
                 heads: int, max_length: int):
        super().__init__(num_items, width, dropout, sparse)
        self.position = nn.Parameter(torch.zeros(max_length, width))
        self.layers = nn.ModuleList(
            [TransformerLayer(width, heads, dropout, width, nn.ReLU) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        # The cost of attention depends on the longest sequence of a block, so small blocks keep
        # short sequences apart from long ones.
        masks = [real(block) for block in lengths.split(self.BLOCK)]
        place = torch.cat([mask.nonzero()[:, 1] for mask in masks])
        x = self.dropout(self.input_norm(self.embedding(items) + self.position[place]))
        for layer in self.layers:
            x = layer(x, masks)
        return self.norm(x)


class GRU4Rec(Encoder):
    """A recurrent network (Hidasi et al., "Session-based Recommendations with Recurrent Neural
    Networks")."""
    def __init__(self, num_items: int, width: int, dropout: float, sparse: bool, layers: int):
        super().__init__(num_items, width, dropout, sparse)
        self.gru = nn.GRU(width, width, layers, dropout=dropout if layers > 1 else 0.0,
                          batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        mask = real(lengths)
        x = self.dropout(self.input_norm(self.embedding(items)))
        hidden, _ = self.gru(
            pack_padded_sequence(padded(x, mask), lengths.cpu(), batch_first=True,
                                 enforce_sorted=False))
        return self.norm(
            self.dropout(unpadded(pad_packed_sequence(hidden, batch_first=True)[0], mask)))


def real(lengths: Tensor) -> Tensor:
    """Returns the mask of items, bool [B, T], in rows padded at the end."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths.unsqueeze(1)


ENCODERS = {"sasrec": SASRec, "gru4rec": GRU4Rec}
