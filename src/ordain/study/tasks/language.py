"""Language models on WikiText-2: an LSTM on its words (the paper's third task), and a small GPT on its characters."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.study.data import Labelled, Splits
from ordain.study.tasks.classification import classifier
from ordain.study.tasks.task import LoadedTask, seeded

LENGTH = 35  # words of an example: the paper's bptt
_WIDTH, _LAYERS = 32, 2
_CHUNK = 4  # one sequence's logits are 35 x 33,278 numbers: more than fit in the cache take twice as long
CHARACTERS_LENGTH = 64
_CHARACTERS = 128  # of ASCII; all others are question marks
_GPT_WIDTH, _HEADS, _GPT_LAYERS = 64, 2, 2


def sequences(ids: Any, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """``[n, length]`` words (or characters) and those that follow them; a shorter remainder is left out.

    >>> x, y = sequences(np.arange(75))
    >>> x[:, 0].tolist(), y[:, -1].tolist()
    ([0, 35], [35, 70])
    """
    numbers = torch.from_numpy(np.array(ids, dtype=np.int64))
    count = (len(numbers) - 1) // length
    if count < 1:
        raise InputError(
            f"a text of {len(numbers)} words",
            expected=f"more than {length}, one sequence",
            remedy="Use the whole file.",
        )
    return numbers[: count * length].view(count, length), numbers[1 : count * length + 1].view(count, length)


def _each_token(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder. Each sequence starts with a zero state, so gradients do not depend on the order."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, _WIDTH)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, _LAYERS, batch_first=True)
        self.decoder = nn.Linear(_WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, T]`` word ids to ``[B, T, vocabulary]`` logits."""
        logits: Tensor = self.decoder(self.lstm(self.tokens(ids))[0])
        return logits


def lstm(splits: Splits, *, limit: int | None) -> LoadedTask:
    """The LSTM; an example is a sequence of 35 words."""
    notes = (
        f"An example is a sequence of {LENGTH} words; the hidden state starts anew for each.",
        "Accuracy is that of the next word.",
    )
    build = seeded(partial(LanguageModel, len(splits.vocabulary or ())))
    how: Any = {"encode": lambda part: sequences(part.x), "loss": _each_token, "chunk": _CHUNK}
    return classifier(splits, build, limit=limit, notes=notes, **how)


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
        self.tokens, self.positions = nn.Embedding(_CHARACTERS, _GPT_WIDTH), nn.Embedding(CHARACTERS_LENGTH, _GPT_WIDTH)
        self.blocks = nn.Sequential(*(Block(_GPT_WIDTH, _HEADS) for _ in range(_GPT_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_GPT_WIDTH), nn.Linear(_GPT_WIDTH, _CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, T]`` character codes to ``[B, T, characters]`` logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(splits: Splits, *, limit: int | None) -> LoadedTask:
    """The GPT; an example is a sequence of 64 characters."""
    words = splits.vocabulary or ()
    notes = (f"An example is a sequence of {CHARACTERS_LENGTH} characters.", "Accuracy is that of the next character.")

    def encode(part: Labelled) -> tuple[Tensor, Tensor]:
        text = " ".join([words[number] for number in np.asarray(part.x)]).replace("<eos>", "\n")
        return sequences(np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8), CHARACTERS_LENGTH)

    return classifier(splits, seeded(Gpt), encode=encode, loss=_each_token, limit=limit, chunk=250, notes=notes)
