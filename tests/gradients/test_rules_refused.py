"""What the rules do not do is refused by name, with the module's path and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import Setting, check
from settings_sequence import Calls, ids, itself
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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


def first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]  # type: ignore[no-any-return]


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def placed(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(torch.arange(x.shape[1]))  # type: ignore[no-any-return]


def merged(layer: nn.Module, x: Tensor) -> Tensor:
    """Two sequences an example, in one dimension with the examples."""
    return layer(x.reshape(-1, 3, 4))[0].reshape(len(x), -1)  # type: ignore[no-any-return]


class Behind(nn.Module):
    """A layer whose weight is used once by calling it and once by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x).tanh(), self.layer.weight)


POINT = torch.randn(4, 4, dtype=torch.float64)


def WIDE(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 6, 4),)


NUMBERS, IDS = (torch.randn(4, 6, 4),), (ids(4, 3),)
REFUSED: list[tuple[str, nn.Module, str]] = [
    ("freq", nn.Embedding(7, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    ("max-norm", nn.Embedding(7, 3, max_norm=1.0), "max_norm=None"),
    ("sparse", nn.Embedding(7, 3, sparse=True), "sparse=False"),
    ("bag-sparse", nn.EmbeddingBag(7, 3, sparse=True), "sparse=False"),
    ("bag-freq", nn.EmbeddingBag(7, 3, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
]


@pytest.mark.parametrize(("layer", "remedy"), [pytest.param(*rest, id=name) for name, *rest in REFUSED])
def test_refused_by_name(layer: nn.Module, remedy: str) -> None:
    with pytest.raises(UnsupportedModuleError) as error:
        step(Calls(layer, plain), *IDS)
    message = str(error.value)
    assert type(layer).__name__ in message
    assert "'layer'" in message
    assert remedy in message


MIXING: dict[str, tuple[nn.Module, Callable[..., Any]]] = {
    "rnn": (nn.RNN(4, 3), first),
    "lstm-one-sequence": (nn.LSTM(4, 3), lambda m, x: m(x[:, 0])[0]),
    "attention": (nn.MultiheadAttention(4, 2), itself),
}


@pytest.mark.parametrize("name", MIXING)
def test_layers_that_take_another_dimension_for_the_batch(name: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"depends on the other examples.*batch_first"):
        step(Calls(*MIXING[name]), *NUMBERS)


def by_length(layer: nn.Module, x: Tensor) -> Tensor:
    """Sequences of different lengths, packed: only the steps that are there are run."""
    lengths = [min(6, 2 + int(10 * abs(float(one[0, 0]))) % 5) for one in x]
    out = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    return pad_packed_sequence(out, batch_first=True, total_length=6)[0]


NOT_BY_RULE = [
    Setting("positions", lambda: Calls(nn.Embedding(9, 4), placed), lambda b: (torch.randn(b, 6, 4),)),
    Setting("bag-max", lambda: Calls(nn.EmbeddingBag(7, 3, mode="max"), plain), lambda b: (ids(b, 3),)),
    Setting("gru-packed", lambda: Calls(nn.GRU(4, 3, batch_first=True), by_length), lambda b: (torch.randn(b, 6, 4),)),
    Setting("lstm-merged", lambda: Calls(nn.LSTM(4, 3, batch_first=True), merged), lambda b: (torch.randn(b, 6, 4),)),
    Setting(
        "cell-merged",
        lambda: Calls(nn.GRUCell(4, 3), lambda m, x: m(x.reshape(-1, 4)).view(len(x), -1)),
        lambda b: (torch.randn(b, 6, 4),),
    ),
    Setting(
        "bias-kv",
        lambda: Calls(nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), itself),
        lambda b: (torch.randn(b, 6, 4),),
    ),
    Setting("conv-unbatched", lambda: Calls(nn.Conv1d(4, 4, 3, padding=1), lambda m, x: x @ m(POINT)), WIDE),
    Setting("weight-norm", lambda: weight_norm(nn.Linear(4, 3)), lambda b: (torch.randn(b, 4),)),
    Setting("used-behind-its-module", lambda: Behind(), lambda b: (torch.randn(b, 4),)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("setting", "size"), [pytest.param(s, size, id=f"{s.name}-{size}") for s in NOT_BY_RULE for size in (1, 2, 5)]
)
def test_what_no_rule_explains_is_taken_from_the_graph(setting: Setting, size: int, reduction: str) -> None:
    check(setting, size, reduction)


def test_dropout_between_no_layers_is_no_dropout() -> None:
    with pytest.warns(UserWarning, match="dropout option"):
        layer = nn.LSTM(4, 3, 1, dropout=0.5, batch_first=True)
    step(Calls(layer, first), *NUMBERS)


def test_left_out_layers_are_not_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    step(model, ids(4, 3), params=lambda name: not name.startswith("0"))
