"""Embeddings, recurrent layers and attention with their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine import Setting
from torch import Tensor, nn


def ids(*shape: int, high: int = 7) -> Tensor:
    return torch.randint(0, high, shape)


class Calls(nn.Module):
    """A layer and a way to call it."""

    def __init__(self, layer: nn.Module, how: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, *inputs: Any) -> Any:
        return self.how(self.layer, *inputs)


def calls(build: Callable[[], nn.Module], how: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Calls(build(), how)


class Tied(nn.Module):
    """A language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())  # type: ignore[no-any-return]


class Positions(nn.Module):
    """One row of positions for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        return self.head(self.embed(x) + self.position(input=places))  # type: ignore[no-any-return]


def frozen(build: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


def ragged(layer: nn.Module, x: Tensor) -> Any:
    """Bags of 0, 1, 2, 3, 0, ... of each row's first ids, as one row with offsets.

    How many depends on the row's first id, so that the examples alone have the same bags.
    """
    rows = [row[: int(row[0]) % 4] for row in x]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    last = layer.include_last_offset
    return layer(torch.cat(rows), offsets if last else offsets[:-1])


def weighted(layer: nn.Module, x: Tensor, w: Tensor) -> Any:
    return layer(x.flatten(), torch.arange(len(x)) * x.shape[1], per_sample_weights=w.flatten())


EMBEDDINGS = [
    Setting("embedding", lambda: nn.Embedding(7, 4), lambda b: (ids(b, 6),)),
    Setting("embedding-1d", lambda: nn.Embedding(7, 4), lambda b: (ids(b),)),
    Setting("embedding-3d", lambda: nn.Embedding(7, 4), lambda b: (ids(b, 2, 3),)),
    Setting("embedding-int32", lambda: nn.Embedding(7, 4), lambda b: (ids(b, 6).int(),)),
    Setting("embedding-large", lambda: nn.Embedding(500, 3), lambda b: (ids(b, 9, high=500),)),
    Setting("embedding-padding", lambda: nn.Embedding(4, 3, padding_idx=1), lambda b: (ids(b, 6, high=4),)),
    Setting("embedding-sequence-first", lambda: nn.Embedding(7, 4), lambda b: (ids(5, b),), batch_dim=1),
    Setting("embedding-sequence-of-one", lambda: nn.Embedding(7, 4), lambda b: (ids(1, b),), batch_dim=1),
    Setting(
        "embedding-twice",
        calls(lambda: nn.Embedding(7, 4), lambda layer, x, y: layer(x) * layer(input=y)),
        lambda b: (ids(b, 3), ids(b, 3)),
    ),
    Setting("embedding-tied", Tied, lambda b: (ids(b, 5, high=9),)),
    Setting("embedding-positions", Positions, lambda b: (ids(b, 5, high=9),)),
    *[
        Setting(f"bag-{mode}", lambda mode=mode: nn.EmbeddingBag(7, 3, mode=mode), lambda b: (ids(b, 4),))
        for mode in ("sum", "mean")
    ],
    *[
        Setting(
            f"bag-{mode}-padding-offsets-{last}",
            calls(
                lambda mode=mode, last=last: nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2, include_last_offset=last),
                ragged,
            ),
            lambda b: (ids(b, 4, high=5),),
        )
        for mode in ("sum", "mean")
        for last in (False, True)
    ],
    Setting(
        "bag-weights",
        lambda: nn.EmbeddingBag(7, 3, mode="sum", padding_idx=2),
        lambda b: {"input": ids(b, 4), "per_sample_weights": torch.randn(b, 4)},
    ),
    Setting(
        "bag-weights-offsets",
        calls(lambda: nn.EmbeddingBag(7, 3, mode="sum"), weighted),
        lambda b: (ids(b, 4), torch.randn(b, 4)),
    ),
    Setting(
        "bag-twice",
        calls(lambda: nn.EmbeddingBag(7, 3), lambda layer, x, y: layer(x) * layer(y)),
        lambda b: (ids(b, 4), ids(b, 2)),
    ),
]

SETTINGS = [*EMBEDDINGS]
