"""A causal self-attention layer."""

from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def padded(rows: Tensor, mask: Tensor) -> Tensor:
    """Scatters rows [P, D] to the positions of [B, T, D] where mask [B, T] is set; zeros
    elsewhere."""
    at = mask.flatten().nonzero().squeeze(1)
    return rows.new_zeros(mask.numel(),
                          rows.shape[-1]).index_copy(0, at,
                                                     rows).view(mask.shape[0], mask.shape[1],
                                                                rows.shape[-1])


def unpadded(x: Tensor, mask: Tensor) -> Tensor:
    """Inverse of `padded`."""
    return x.flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(1))


class TransformerLayer(nn.Module):
    """A Transformer layer with causal attention: x [B, T, width] -> the same shape.

    For sequences of different lengths, x is [P, width], the concatenated positions of all
    sequences, and `masks` has a bool [B, T] per block of sequences that marks the positions of each
    sequence among T. Padding exists only inside the attention. It comes last, so no position
    attends to it.
    """
    def __init__(self, width: int, heads: int, dropout: float, inner: int,
                 activation: type[nn.Module]):
        """Takes `inner`, the width of the hidden layer of the feed-forward network."""
        super().__init__()
        self.heads = heads
        self.dropout_p = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width,
                                                                         inner), activation(),
                                          nn.Linear(inner, width), nn.Dropout(dropout))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, masks: Optional[List[Tensor]] = None) -> Tensor:
        parts = self.attention_in(self.attention_norm(x))
        if masks is None:
            attended = self.attend(parts)
        else:
            blocks = parts.split([int(mask.sum()) for mask in masks])
            attended = torch.cat([
                unpadded(self.attend(padded(block, mask)), mask)
                for block, mask in zip(blocks, masks)
            ])
        x = x + self.dropout(self.attention_out(attended))
        return x + self.feed_forward(x)

    def attend(self, parts: Tensor) -> Tensor:
        parts = parts.unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, width / heads]
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.dropout_p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p,
                                                  is_causal=True)
        return attended.transpose(1, 2).flatten(2)
