"""A small GPT in the shape of nanoGPT, on the characters of a module of the standard library.

    python examples/nanogpt.py

Learned positions, tied embeddings, dropout, AdamW. What is different from reshuffling is marked with (1) to (3).
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from ordain import GraB

LENGTH, TOKENS, WIDTH, HEADS, LAYERS, DROPOUT = 32, 128, 32, 2, 2, 0.1


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT * self.training, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(nn.Module):
    """Returns logits; the loss is taken outside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Dropout(DROPOUT)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight  # tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        return self.lm_head(self.norm(self.blocks(x)))


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description="A small GPT in GraB's order.")
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    codes = torch.tensor([min(ord(one), TOKENS - 1) for one in inspect.getsource(argparse)])
    data = TensorDataset(codes[: options.examples * (LENGTH + 1)].view(-1, LENGTH + 1))
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = GraB(model, len(data), centering="pair")  # (1)
    loader = DataLoader(data, batch_size=16, sampler=order.sampler)  # (2) not shuffle=True
    for epoch in range(options.epochs):
        for (ids,) in loader:
            loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
            loss.backward()
            order.step()  # (3)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f} of the last batch, {order}")


if __name__ == "__main__":
    main()
