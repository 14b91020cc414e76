"""The models that steps are timed on, at the sizes of the paper's studies."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def logistic() -> nn.Module:
    return nn.Linear(784, 10)


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


class Block(nn.Module):
    """A transformer encoder layer written out: what BERT has, without its library."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (layer(x).view(b, t, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(nn.functional.gelu(self.up(x))))


class TinyBert(nn.Module):
    """Two layers, 128 wide, two heads: BERT-Tiny's shape."""

    def __init__(self, vocabulary: int = 30_522, width: int = 128, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.blocks(self.norm(self.tokens(ids) + self.positions(where)))
        return self.head(self.pool(x[:, 0]).tanh())


def tiny_bert() -> nn.Module:
    return TinyBert()
