"""Stands in for nanoGPT's model.py: the same layers, ways of sharing and calls, in our own words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class Norm(nn.Module):
    """A module of its own around F.layer_norm, as there: no rule for a layer knows it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.p = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.out, self.drop = nn.Linear(config.n_embd, config.n_embd, bias=config.bias), nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, bias = config.n_embd, config.bias
        self.first, self.second, self.attention = Norm(config), Norm(config), Attention(config)
        wide, narrow = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(config.dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Positions of shape ``[T]`` that all examples share, and a head that is tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte, self.wpe = (nn.Embedding(rows, config.n_embd) for rows in (config.vocab_size, config.block_size))
        self.drop, self.norm = nn.Dropout(config.dropout), Norm(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.lm_head(self.norm(x)[:, [-1], :]), None
        logits = self.lm_head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.Optimizer:
        decayed, others = ([p for p in self.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
