"""A layer of causal self-attention."""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn


class TransformerLayer(nn.Module):
    """
    x [B, T, width] -> the same; each position sees itself and those before it.

    Where sequences differ in length, x is [P, width], the positions of one sequence after another, and mask bool [B, T] says which of T
    positions each has: the rows of padding exist in the attention alone. They stand last, where no position sees them.
    """

    def __init__(self, width: int, heads: int, dropout: float, inner: int, activation: type[nn.Module]):
        """inner: width of the hidden layer by which a position works on what it has seen."""
        super().__init__()
        self.heads = heads
        self.dropout_p = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), activation(), nn.Linear(inner, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        parts = self.attention_in(self.attention_norm(x))
        if mask is not None:
            parts = parts.new_zeros(mask.shape[0], mask.shape[1], parts.shape[-1]).masked_scatter(mask.unsqueeze(-1), parts)
        parts = parts.unflatten(-1, (3, self.heads, -1))  # [B, T, 3, heads, width / heads]
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.dropout_p if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True).transpose(1, 2).flatten(2)
        if mask is not None:
            attended = attended[mask]
        x = x + self.dropout(self.attention_out(attended))
        return x + self.feed_forward(x)
