"""A GPT: RMSNorm, rotary positions, attention of PyTorch, and no output layer, which is the loss's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns pairs of features by angles that grow with the position (Su et al., 2021)."""
    def __init__(self, width: int, context: int):
        super().__init__()
        rates = 10000.0**-torch.linspace(0, 1, width // 2 + 1)[:-1]
        angles = torch.arange(context)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes x [B, heads, T, width]."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = (part[:x.shape[-2]].to(x.dtype) for part in (self.cos, self.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and added to its input."""
    def __init__(self, width: int, heads: int, rotary: Rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_forward_out = nn.Linear(4 * width, width, bias=False)
        for layer in (self.attention_out, self.feed_forward_out):  # begins as the identity
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, width / heads]
        attended = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value,
                                                  is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward_out(F.gelu(self.feed_forward_in(self.feed_forward_norm(x))))


class Body(nn.Module):
    """Maps embedded tokens [B, T, width] to hidden states of the same shape."""
    def __init__(self, width: int, layers: int, heads: int, context: int):
        super().__init__()
        rotary = Rotary(width // heads, context)
        self.first_norm, self.last_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, rotary) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        return self.last_norm(x)


class GPT(nn.Module):
    """Maps token ids [B, T] to hidden states [B, T, width].

    The embedding is outside of `body`, because torch.compile cannot return a sparse gradient.
    """
    def __init__(self, num_tokens: int, width: int, layers: int, heads: int, context: int,
                 sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width, sparse=sparse)
        self.body = Body(width, layers, heads, context)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small logits, if tied

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embedding(ids).float())
