"""Embeddings, recurrent layers and attention of any small shape against the loop."""

from __future__ import annotations

from typing import Any

import torch
from engine import Setting, check
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_sequence import Calls, ids
from torch import Tensor, nn

SIZE, FEW = st.integers(2, 6), st.integers(1, 4)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 6), steps=FEW, more=FEW, rows=st.integers(2, 40), width=FEW, padding=st.booleans())
def test_embeddings(size: int, steps: int, more: int, rows: int, width: int, padding: bool) -> None:
    def build() -> nn.Module:
        return nn.Embedding(rows, width, padding_idx=0 if padding else None)

    check(Setting("embedding", build, lambda b: (ids(b, steps, more, high=rows),)), size, "mean")


@settings(max_examples=15, deadline=None)  # each goes through time once for every example
@given(
    size=st.integers(2, 4),
    steps=st.integers(1, 4),
    sizes=st.tuples(FEW, st.integers(2, 4)),
    layers=st.integers(1, 2),
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    options=st.fixed_dictionaries(
        {"bias": st.booleans(), "bidirectional": st.booleans(), "batch_first": st.booleans()}
    ),
    project=st.booleans(),
)
def test_recurrent(
    size: int,
    steps: int,
    sizes: tuple[int, int],
    layers: int,
    kind: type[nn.RNNBase],
    options: dict[str, Any],
    project: bool,
) -> None:
    extra = {"proj_size": sizes[1] - 1} if project and kind is nn.LSTM else {}

    def both(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """All outputs with the examples in front."""
        out, state = layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return (out if options["batch_first"] else out.transpose(0, 1), *(s.transpose(0, 1) for s in states))

    def examples_first(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return both(layer, x if options["batch_first"] else x.transpose(0, 1))

    def build() -> nn.Module:
        return Calls(kind(*sizes, num_layers=layers, **options, **extra), examples_first)

    check(Setting("recurrent", build, lambda b: (torch.randn(b, steps, sizes[0]),)), size, "mean")


@settings(max_examples=20, deadline=None)
@given(
    size=SIZE,
    steps=st.tuples(FEW, FEW),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kdim=st.none() | FEW,
    bias=st.booleans(),
    batch_first=st.booleans(),
    need_weights=st.booleans(),
)
def test_attention(
    size: int,
    steps: tuple[int, int],
    shape: tuple[int, int],
    kdim: int | None,
    bias: bool,
    batch_first: bool,
    need_weights: bool,
) -> None:
    heads, width = shape[0], shape[0] * shape[1]

    def how(layer: nn.Module, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x, y, z = (t if batch_first else t.transpose(0, 1) for t in (x, y, z))
        out: Tensor = layer(x, y, z, need_weights=need_weights)[0]
        return out if batch_first else out.transpose(0, 1)

    def build() -> nn.Module:
        return Calls(nn.MultiheadAttention(width, heads, kdim=kdim, bias=bias, batch_first=batch_first), how)

    def inputs(b: int) -> tuple[Tensor, ...]:
        return (
            torch.randn(b, steps[0], width),
            torch.randn(b, steps[1], kdim or width),
            torch.randn(b, steps[1], width),
        )

    check(Setting("attention", build, inputs), size, "mean")
