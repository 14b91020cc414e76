"""What the rules do not do is refused by name, with the module's path and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from settings_sequence import Calls, ids, itself
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from ordain.errors import UnsupportedModuleError
from ordain.gradients import ExactSource


def step(model: nn.Module, *inputs: Tensor, **options: Any) -> None:
    model.train()
    source = ExactSource(model, **options)
    try:
        out = model(*inputs)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        source.collect()
    finally:
        source.detach()


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(pack_padded_sequence(x, [3] * len(x), batch_first=True))[0].data  # type: ignore[no-any-return]


def first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]  # type: ignore[no-any-return]


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def placed(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(torch.arange(x.shape[1]))  # type: ignore[no-any-return]


def merged(layer: nn.Module, x: Tensor) -> Tensor:
    """Two sequences an example, in one dimension with the examples."""
    return layer(x.reshape(-1, 3, 4))[0].reshape(len(x), -1)  # type: ignore[no-any-return]


NUMBERS, IDS = (torch.randn(4, 6, 4),), (ids(4, 3),)
REFUSED: list[tuple[str, nn.Module, Callable[..., Any], tuple[Tensor, ...], str]] = [
    ("freq", nn.Embedding(7, 3, scale_grad_by_freq=True), plain, IDS, "scale_grad_by_freq=False"),
    ("max-norm", nn.Embedding(7, 3, max_norm=1.0), plain, IDS, "max_norm=None"),
    ("sparse", nn.Embedding(7, 3, sparse=True), plain, IDS, "sparse=False"),
    ("positions", nn.Embedding(9, 4), placed, NUMBERS, "torch.arange(steps)[None]"),
    ("bag-sparse", nn.EmbeddingBag(7, 3, sparse=True), plain, IDS, "sparse=False"),
    ("bag-freq", nn.EmbeddingBag(7, 3, scale_grad_by_freq=True), plain, IDS, "scale_grad_by_freq=False"),
    ("bag-max", nn.EmbeddingBag(7, 3, mode="max"), plain, IDS, "nn.Embedding"),
    ("lstm-dropout", nn.LSTM(4, 3, 2, dropout=0.5), first, NUMBERS, "nn.Dropout between"),
    ("gru-packed", nn.GRU(4, 3, batch_first=True), packed, NUMBERS, "padded tensor"),
    ("rnn-over-examples", nn.RNN(4, 3), first, NUMBERS, "batch_first=False"),
    ("lstm-one-sequence", nn.LSTM(4, 3), lambda m, x: m(x[:, 0])[0], NUMBERS, "where the layer has its sequences"),
    ("lstm-merged", nn.LSTM(4, 3, batch_first=True), merged, NUMBERS, "a dimension of their own"),
    ("cell-merged", nn.GRUCell(4, 3), lambda m, x: m(x.reshape(-1, 4)).view(4, -1), NUMBERS, "one row an example"),
    ("bias-kv", nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), itself, NUMBERS, "add_bias_kv=False"),
    ("over-examples", nn.MultiheadAttention(4, 2), itself, NUMBERS, "batch_first=False"),
]


@pytest.mark.parametrize(
    ("layer", "how", "inputs", "remedy"), [pytest.param(*rest, id=name) for name, *rest in REFUSED]
)
def test_refused_by_name(layer: nn.Module, how: Callable[..., Any], inputs: tuple[Tensor, ...], remedy: str) -> None:
    with pytest.raises(UnsupportedModuleError) as error:
        step(Calls(layer, how), *inputs)
    message = str(error.value)
    assert type(layer).__name__ in message
    assert "'layer'" in message
    assert remedy in message


def test_dropout_between_no_layers_is_no_dropout() -> None:
    with pytest.warns(UserWarning, match="dropout option"):
        layer = nn.LSTM(4, 3, 1, dropout=0.5, batch_first=True)
    step(Calls(layer, first), *NUMBERS)


def test_left_out_layers_are_not_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    step(model, ids(4, 3), params=lambda name: not name.startswith("0"))
