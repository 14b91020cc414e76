"""What the rules do not do is refused by name, with the module's path and a way out; errors leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import check_operations, losses, relative
from settings_sequence import Calls, Transformer, ids, itself
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


def test_a_batch_of_nothing_but_padding() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 2))
    source = ExactSource(model, params=lambda name: name.startswith("0"))
    model(torch.zeros(4, 3, dtype=torch.long)).square().mean().backward()
    (batch,) = source.collect()
    source.detach()
    assert not batch.gram().any()
    assert not batch.dot(torch.ones(2, batch.dim)).any()
    assert not batch.weighted_sum(torch.ones(2, 4)).any()
    assert not batch.select(torch.tensor([3, 1])).gram().any()


def test_left_out_layers_are_not_refused() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    step(model, ids(4, 3), params=lambda name: not name.startswith("0"))


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_dropout_is_the_one_that_was_drawn(need_weights: bool) -> None:
    """The gradients of each example's loss, taken one by one from a forward with the same draws."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True).double()
    model, x = Calls(layer, lambda m, x: m(x, x, x, need_weights=need_weights)[0]), torch.randn(5, 3, 4).double()
    torch.manual_seed(1)
    each = losses(model(x), 5, 0)
    wanted = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(one, list(model.parameters()), retain_graph=True)])
            for one in each
        ]
    )
    source = ExactSource(model)
    _probe = model(x)  # the first forward of a source also runs the model on a shorter batch
    torch.manual_seed(1)
    losses(model(x), 5, 0).mean().backward()
    (batch,) = source.collect()
    source.detach()
    check_operations(batch, wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_transformer_with_dropout_adds_up(dropout: float) -> None:
    torch.manual_seed(0)
    model = Transformer().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = dropout
    source = ExactSource(model)
    for _ in range(2):
        model.zero_grad()
        losses(model(ids(5, 4, high=9), ids(5, 3, high=9)), 5, 0).mean().backward()
        (batch,) = source.collect()
        mean = batch.weighted_sum(torch.full((1, 5), 0.2, dtype=torch.float64))[0]
        wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert relative(mean, wanted) < 1e-12
    source.detach()


def test_under_a_default_device() -> None:
    """A default device is a mode that wraps torch's functions too."""
    with torch.device("cpu"):
        step(Transformer().double(), ids(4, 4, high=9), ids(4, 3, high=9))


def test_an_error_in_attention_leaves_no_mode_behind() -> None:
    model = Calls(nn.MultiheadAttention(4, 2, batch_first=True), itself)
    source = ExactSource(model)
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(torch.randn(4, 6, 5))
    assert torch.overrides._get_current_function_mode() is None
    model(*NUMBERS)[0].square().mean().backward()
    assert len(source.collect()) == 1
    source.detach()
    assert not model.layer._forward_hooks
    assert not model.layer._forward_pre_hooks


def test_no_gradient_is_left_behind() -> None:
    """The walk back through time is not a backward of the model's."""
    model = Calls(nn.LSTM(4, 3, 2, batch_first=True), first)
    source = ExactSource(model)
    model(*NUMBERS).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        (batch,) = source.collect()
        batch.gram()
    source.detach()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
