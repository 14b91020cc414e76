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

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis
        self.embed, self.position = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1 - self.axis]).unsqueeze(self.axis)
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
    Setting("embedding-positions-first", lambda: Positions(1), lambda b: (ids(5, b, high=9),), batch_dim=1),
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


def state(*parts: Callable[[Any], Any]) -> Callable[..., Any]:
    """Call with only some of the outputs used."""
    return lambda layer, *inputs: tuple(part(layer(*inputs)) for part in parts)


def begun(layer: nn.RNNBase, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """With initial states ``[B, layers, features]`` that a batch of examples can be cut from."""
    h, c = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
    return layer(x, (h, c)) if isinstance(layer, nn.LSTM) else layer(x, hx=h)


def sequences(b: int) -> tuple[Tensor, ...]:
    return (torch.randn(b, 5, 3),)


def with_states(layers: int, h: int, c: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda b: (torch.randn(b, 5, 3), torch.randn(b, layers, h), torch.randn(b, layers, c))


def cell(layer: nn.RNNCellBase, x: Tensor) -> Any:
    """A cell, step by step."""
    hidden = None
    for t in range(x.shape[1]):
        hidden = layer(x[:, t], hidden)
    return hidden


# The number of states, layers x directions, is never a batch size: the harness tells examples by it.
KINDS: list[tuple[str, type[nn.RNNBase], dict[str, Any]]] = [
    ("lstm", nn.LSTM, {}),
    ("lstm-proj", nn.LSTM, {"proj_size": 2}),
    ("gru", nn.GRU, {}),
    ("rnn", nn.RNN, {}),
    ("rnn-relu", nn.RNN, {"nonlinearity": "relu"}),
]
RECURRENT = [
    setting
    for name, kind, options in KINDS
    for setting in (
        Setting(name, lambda k=kind, o=options: k(3, 4, **o), lambda b: (torch.randn(5, b, 3),), batch_dim=1),
        Setting(f"{name}-no-bias", lambda k=kind, o=options: k(3, 4, batch_first=True, bias=False, **o), sequences),
        Setting(
            f"{name}-deep-both-ways",
            lambda k=kind, o=options: k(3, 4, num_layers=2, bidirectional=True, batch_first=True, **o),
            sequences,
        ),
        Setting(
            f"{name}-begun",
            calls(lambda k=kind, o=options: k(3, 4, num_layers=3, batch_first=True, **o), begun),
            with_states(3, options.get("proj_size", 4), 4),
        ),
        Setting(
            f"{name}-output-only",
            calls(lambda k=kind, o=options: k(3, 4, num_layers=2, batch_first=True, **o), state(lambda out: out[0])),
            sequences,
        ),
        Setting(
            f"{name}-state-only",
            calls(
                lambda k=kind, o=options: k(3, 4, num_layers=2, bidirectional=True, **o),
                state(lambda out: out[1]),
            ),
            lambda b: (torch.randn(6, b, 3),),
            batch_dim=1,
        ),
        Setting(
            f"{name}-twice",
            calls(
                lambda k=kind, o=options: k(3, 4, batch_first=True, **o),
                lambda layer, x, y: (layer(x)[0], layer(y)[0]),
            ),
            lambda b: (torch.randn(b, 5, 3), torch.randn(b, 2, 3)),
        ),
        Setting(
            f"{name}-frozen",
            frozen(lambda k=kind, o=options: k(3, 4, 3, batch_first=True, **o), "weight_ih_l0", "bias_hh_l1"),
            sequences,
        ),
        Setting(f"{name}-one-step", lambda k=kind, o=options: k(3, 4, **o), lambda b: (torch.randn(1, b, 3),), 1),
    )
] + [
    Setting(
        "lstm-cell-memory-only",
        calls(lambda: nn.LSTM(3, 4), state(lambda out: out[1][1])),
        lambda b: (torch.randn(5, b, 3),),
        1,
    ),
    *[
        Setting(f"cell-{kind.__name__}", calls(lambda kind=kind: kind(3, 4), cell), sequences)
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    ],
]


def heads(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(4, 2, **{"batch_first": True, **options})


def itself(layer: nn.Module, x: Tensor, *rest: Any, **options: Any) -> Any:
    return layer(x, x, x, *rest, **options)


def causal(steps: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(steps, dtype=torch.float64)


def padded(layer: nn.Module, x: Tensor, keep: Tensor) -> Any:
    """The last steps of each example are padding."""
    return layer(x, x, x, key_padding_mask=torch.arange(x.shape[1]) > keep[:, None], need_weights=False)


def crossed(layer: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Both self-attention, with the weight whole, and cross-attention, with the weight in two parts."""
    return layer(x, x, x)[0] + layer(query=x, key=y, value=y)[0]


class Transformer(nn.Module):
    """Tokens and positions, an encoder layer, a decoder layer, and a head tied to the embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(9, 4), nn.Embedding(6, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **options)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **options)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (self.embed(z) + self.position(torch.arange(z.shape[1])[None]) for z in (x, y))
        return self.head(self.decoder(y, self.encoder(x), tgt_mask=causal(y.shape[1])))  # type: ignore[no-any-return]


def one(b: int) -> tuple[Tensor, ...]:
    return (torch.randn(b, 3, 4),)


def two(b: int) -> tuple[Tensor, ...]:
    return torch.randn(b, 3, 4), torch.randn(b, 6, 4)


ATTENTION = [
    Setting("attention", calls(heads(), itself), one),
    Setting("attention-no-bias", calls(heads(bias=False), itself), one),
    Setting("attention-no-weights", calls(heads(), lambda layer, x: layer(x, x, value=x, need_weights=False)[0]), one),
    Setting("attention-of-heads", calls(heads(), lambda layer, x: layer(x, x, x, average_attn_weights=False)), one),
    Setting("attention-weights-only", calls(heads(), lambda layer, x: layer(x, x, x)[1]), one),
    Setting(
        "attention-sequence-first",
        calls(heads(batch_first=False), lambda layer, x: layer(x, x, x)[0]),
        lambda b: (torch.randn(3, b, 4),),
        batch_dim=1,
    ),
    Setting("attention-causal", calls(heads(), lambda layer, x: itself(layer, x, attn_mask=causal(3))), one),
    Setting(
        "attention-causal-hint",
        calls(heads(), lambda layer, x: itself(layer, x, attn_mask=causal(3), is_causal=True, need_weights=False)),
        one,
    ),
    Setting("attention-padded", calls(heads(), padded), lambda b: (torch.randn(b, 3, 4), torch.randint(0, 3, (b,)))),
    Setting("attention-zero", calls(heads(add_zero_attn=True), itself), one),
    Setting("attention-cross", calls(heads(), lambda layer, x, y: layer(x, y, y)), two),
    Setting("attention-cross-three", calls(heads(), lambda layer, x, y: layer(x, y, y.sin())), two),
    Setting(
        "attention-other-sizes",
        calls(heads(kdim=3, vdim=5), lambda layer, x, y, z: layer(x, y, z)),
        lambda b: (torch.randn(b, 3, 4), torch.randn(b, 6, 3), torch.randn(b, 6, 5)),
    ),
    Setting(
        "attention-other-sizes-no-bias",
        calls(heads(kdim=3, vdim=5, bias=False), lambda layer, x, y, z: layer(x, y, z)),
        lambda b: (torch.randn(b, 3, 4), torch.randn(b, 6, 3), torch.randn(b, 6, 5)),
    ),
    Setting("attention-twice", calls(heads(), crossed), two),
    Setting("attention-frozen", frozen(calls(heads(), itself), "layer.in_proj_weight", "layer.out_proj.bias"), one),
    Setting(
        "attention-only-last",
        frozen(calls(heads(), itself), "layer.in_proj_weight", "layer.in_proj_bias"),
        one,
    ),
    Setting(
        "attention-bias-kv-frozen", frozen(calls(heads(add_bias_kv=True), itself), "layer.bias_k", "layer.bias_v"), one
    ),
    Setting(
        "encoder-layer",
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True),
        one,
    ),
    Setting(
        "encoder-layer-sequence-first",
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
        lambda b: (torch.randn(3, b, 4),),
        batch_dim=1,
    ),
    Setting("decoder-layer", lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True), two),
    Setting("transformer", Transformer, lambda b: (ids(b, 4, high=9), ids(b, 3, high=9))),
]

SETTINGS = [*EMBEDDINGS, *RECURRENT, *ATTENTION]
