"""Sequence layers where the loop is no judge: drawn dropout, modes, errors, batches of nothing but padding."""

from __future__ import annotations

import pytest
import torch
from engine import check_operations, losses, relative
from faulty_run import plain_hooks
from settings_sequence import Calls, Transformer, ids, itself
from torch import nn

from ordain.gradients import ExactSource


def test_a_batch_of_nothing_but_padding() -> None:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 2))
    source = ExactSource(model, params=lambda name: name.startswith("0"))
    model(torch.zeros(4, 3, dtype=torch.long)).square().mean().backward()
    ((batch, _),) = source.collect()
    source.detach()
    assert not batch.gram().any()
    assert not batch.dot(torch.ones(2, batch.dim)).any()
    assert not batch.weighted_sum(torch.ones(2, 4)).any()
    assert not batch.select(torch.tensor([3, 1])).gram().any()


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
    ((batch, _),) = source.collect()
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
        ((batch, _),) = source.collect()
        mean = batch.weighted_sum(torch.full((1, 5), 0.2, dtype=torch.float64))[0]
        wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert relative(mean, wanted) < 1e-12
    source.detach()


def test_under_a_default_device() -> None:
    """A default device is a mode that wraps torch's functions too."""
    with torch.device("cpu"):
        model = Transformer().double()
        source = ExactSource(model)
        model(ids(4, 4, high=9), ids(4, 3, high=9)).square().mean().backward()
        assert len(source.collect()) == 1
        source.detach()


def test_an_error_in_attention_leaves_no_mode_behind() -> None:
    model = Calls(nn.MultiheadAttention(4, 2, batch_first=True), itself)
    source = ExactSource(model)
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(torch.randn(4, 6, 5))
    assert torch.overrides._get_current_function_mode() is None
    model(torch.randn(4, 6, 4))[0].square().mean().backward()
    assert len(source.collect()) == 1
    source.detach()
    assert not any(plain_hooks(model))


def test_no_gradient_is_left_behind() -> None:
    """The walk back through time is not a backward of the model's."""
    model = Calls(nn.LSTM(4, 3, 2, batch_first=True), lambda layer, x: layer(x)[0])
    source = ExactSource(model)
    model(torch.randn(4, 6, 4)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        ((batch, _),) = source.collect()
        batch.gram()
    source.detach()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
