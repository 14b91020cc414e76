"""What a stranger tried: each is exact, or refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import gradient_field, loop_gradients, reloaded, run_epoch
from torch import Tensor, nn

from ordain import GraB, RandomReshuffling
from ordain.errors import GradientError, InputError, StateError
from ordain.gradients import ExactSource


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


TIES: dict[str, Callable[[Three], Any]] = {
    "bias": lambda model: setattr(model.b, "bias", model.a.bias),
    "weight": lambda model: setattr(model.b, "weight", model.a.weight),
    "both": lambda model: [setattr(model.b, name, getattr(model.a, name)) for name in ("weight", "bias")],
    "bias before weight": lambda model: setattr(model.a, "bias", model.b.bias),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tie", TIES)
def test_weights_and_biases_that_layers_share(tie: str, late: bool) -> None:
    """Tied before the order is made, or after it: what two layers use is not joined with what one of them uses."""
    model, x, y = Three().double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    if not late:
        TIES[tie](model)
    source = ExactSource(model)
    if late:
        TIES[tie](model)
    nn.functional.cross_entropy(model(x), y).backward()
    ((batch, _),) = source.collect()
    source.detach()
    rows = loop_gradients(model, nn.functional.cross_entropy, x, y)
    torch.testing.assert_close(batch.gram(), rows @ rows.T)


def test_a_frozen_weight_whose_size_is_a_coincidence() -> None:
    """The bias behind a frozen weight is not taken for a part of it, whatever the sizes are."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    model[0].weight.requires_grad_(False)
    order = GraB(model, 6)
    list(order.sampler)
    nn.functional.cross_entropy(model(torch.randn(6, 4).double()), torch.arange(6) % 3).backward()
    order.step()
    assert order.state_dict()["taken"] == 6


@pytest.mark.parametrize("count", [-1, 2.5, True, None, "a", torch.tensor(2)])
@pytest.mark.parametrize("build", [lambda: GraB(None, 8), lambda: RandomReshuffling(8)])
def test_what_cannot_be_skipped(build: Any, count: Any) -> None:
    order = build()
    list(order.sampler)
    before = str(order.state_dict())
    with pytest.raises(InputError, match="count="):
        order.skip(count)
    assert str(order.state_dict()) == before
    order.skip(np.int64(2))


def test_gradients_that_change_their_dtype() -> None:
    order = GraB(None, 8)
    list(order.sampler)
    order.observe(torch.ones(2, 3))
    with pytest.raises(GradientError, match=r"gradients of torch\.float64 on cpu; expected torch\.float32 on cpu"):
        order.observe(torch.ones(2, 3, dtype=torch.float64))
    order.observe(torch.ones(2, 3))


class Gaps:
    """Learns in epochs 1 and 3 and never again."""

    def __repr__(self) -> str:
        return "Gaps()"

    def __call__(self, epoch: int) -> bool:
        return epoch in (1, 3)

    def ends(self, epoch: int) -> bool:
        return epoch > 3


def test_a_state_from_before_the_schedule_ended() -> None:
    """Loaded into an order that has stopped, it learns again where the schedule says so."""
    model = nn.Linear(3, 2)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    order = GraB(model, 8, learn=Gaps())

    def epoch() -> list[int]:
        drawn = list(order.sampler)
        for at in range(0, 8, 4):
            nn.functional.cross_entropy(model(x[drawn[at : at + 4]]), y[drawn[at : at + 4]]).backward()
            order.step()
        return drawn

    first = [epoch() for _ in range(2)]
    state = reloaded(order.state_dict())
    rest = [epoch() for _ in range(5)]
    assert order.frozen
    order.load_state_dict(state)
    assert [epoch() for _ in range(5)] == rest
    assert first[0] == first[1] != rest[0] != rest[2]


def test_fields_of_a_state_that_nobody_saved() -> None:
    field = gradient_field(9, 3)
    order = GraB(None, 9, group=2, centering="pair")
    run_epoch(order, field, 0, 3)
    state = order.state_dict()
    required = [name for name in state if name not in ("vectors", "dim")]
    for name in required:
        for bad in (None, torch.zeros(3)):
            with pytest.raises(StateError):
                order.load_state_dict(state | {name: bad})
    with pytest.raises(StateError, match="epoch"):
        order.load_state_dict(state | {"epoch": 10**10})
    for place in range(len(state["counters"])):
        counters = list(state["counters"])
        counters[place] = float("nan")
        with pytest.raises(StateError, match="counters"):
            order.load_state_dict(state | {"counters": counters})
    order.load_state_dict(state)


def test_a_watched_model_can_be_saved() -> None:
    for gradients in ("exact", "func", "microbatch"):
        model = nn.Linear(3, 2)
        order = GraB(model, 8, gradients=gradients)
        torch.save(model, io.BytesIO())
        order.detach()
