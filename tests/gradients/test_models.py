"""Whole models through the exact engine, against the loop where there is one."""

from __future__ import annotations

import pytest
import torch
from engine import Setting, call, check, combinations, doubled, losses, relative
from settings_models import SETTINGS, Encoder, bert, masked, words
from torch import Tensor, nn

from ordain.gradients import ExactSource, memory

# Wide beside their number of steps, so that the Gram matrix comes from the factors.
WIDE = [Setting("wide", lambda: nn.Linear(24, 24), lambda b: (torch.randn(b, 3, 24),))]


@pytest.mark.parametrize(("setting", "size", "reduction"), combinations(SETTINGS))
def test_a_model_is_the_loop(setting: Setting, size: int, reduction: str) -> None:
    check(setting, size, reduction)


@pytest.mark.parametrize("chunk", [1, 200])
@pytest.mark.parametrize("setting", [*SETTINGS, *WIDE], ids=lambda s: s.name)
def test_a_little_at_a_time_is_the_same(setting: Setting, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_NUMBERS", chunk)
    check(setting, max(setting.sizes), "mean")


DROPPING = [
    Setting("encoder", lambda: Encoder(dropout=0.1), words(6)),
    Setting("bert", lambda: bert(dropout=0.1), masked(6)),
]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("setting", DROPPING, ids=lambda s: s.name)
def test_with_dropout_gradients_add_up_and_nothing_is_disturbed(setting: Setting, size: int) -> None:
    """The loop would draw other masks; the sum over the batch, and what the optimizer sees, are known."""
    torch.manual_seed(0)
    model = setting.build().double().train()
    inputs = doubled(setting.inputs(size))

    def train(steps: int) -> list[Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(steps):
            model.zero_grad()
            losses(call(model, inputs), size, 0).mean().backward()
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
        return found

    plain = train(3)
    source = ExactSource(model)
    watched = train(3)
    batches = [batch for batch, _ in source.collect()]
    source.detach()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not torch.equal(plain[0], plain[1])  # there was dropout
    assert [batch.size for batch in batches] == [size] * 3
    ones = torch.full((1, size), 1 / size, dtype=torch.float64)
    for batch, wanted in zip(batches, watched, strict=True):
        assert relative(batch.weighted_sum(ones)[0], wanted) < 1e-9
