"""A decoder-only transformer over characters, small enough for two cores."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a LayerNorm and added back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, width] to the same."""
        batch, positions, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, positions, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, positions, width))
        out: torch.Tensor = x + self.feed_forward(self.before_feed_forward(x))
        return out


class CharTransformer(nn.Module):
    """Gives the mean cross-entropy, in nats a character, of guessing `targets` from `inputs`."""

    def __init__(
        self, vocabulary: int, positions: int, *, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Both [batch, positions], integers; the targets are the inputs one character later."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.norm(self.blocks(self.characters(inputs) + self.positions(places)))
        return functional.cross_entropy(self.output(hidden).flatten(0, 1), targets.flatten())
