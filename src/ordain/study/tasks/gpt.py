"""A small GPT on the characters of WikiText-2."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ordain.study.data import Labelled, Splits
from ordain.study.tasks.classification import classifier
from ordain.study.tasks.task import LoadedTask, seeded

LENGTH = 64  # characters of an example
_CHARACTERS = 128  # of ASCII; all others are question marks
_WIDTH, _HEADS, _LAYERS = 64, 2, 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a normalisation and with a way past it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, width]`` to the same."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, width))
        fed: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + fed


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and a linear layer over the characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_CHARACTERS, _WIDTH), nn.Embedding(LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(Block(_WIDTH, _HEADS) for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, T]`` character codes to ``[B, T, characters]`` logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt_on_wikitext2(splits: Splits, *, limit: int | None) -> LoadedTask:
    """An example is a sequence of 64 characters."""
    words = splits.vocabulary or ()

    def encode(part: Labelled) -> tuple[Tensor, Tensor]:
        text = " ".join([words[number] for number in np.asarray(part.x)]).replace("<eos>", "\n")
        codes = torch.from_numpy(np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8).astype(np.int64))
        count = (len(codes) - 1) // LENGTH
        return codes[: count * LENGTH].view(count, LENGTH), codes[1 : count * LENGTH + 1].view(count, LENGTH)

    return classifier(
        splits,
        seeded(Gpt),
        encode=encode,
        loss=lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
        limit=limit,
        chunk=250,
        notes=(f"An example is a sequence of {LENGTH} characters.", "Accuracy is that of the next character."),
    )
