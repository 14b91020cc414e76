"""A saved state belongs to the model it was saved with: to its parameters' names, shapes and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import reloaded
from runs import listed
from torch import nn

from ordain import GraB, Herding, RandomReshuffling
from ordain.errors import StateError

N = 8


def trained(model: nn.Module, **options: Any) -> Any:
    """An order that has seen the first half of an epoch."""
    order = options.pop("order", GraB)(model, N, **options)
    list(order.sampler)
    p = next(model.parameters())
    size = options.get("group", N // 2)
    model(torch.randn(size, 4, dtype=p.dtype)).float().square().mean().backward()
    order.step()
    return order


def two(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, sizes[0], bias=False), nn.Linear(sizes[0], sizes[1], bias=False))


WAYS: list[dict[str, Any]] = [
    {},
    {"centering": "pair"},
    {"sketch": 16},
    {"order": Herding},
    {"gradients": "func"},
    {"gradients": "microbatch", "group": 4},
]


@pytest.mark.parametrize("options", WAYS)
def test_a_state_of_another_precision_is_refused(options: dict[str, Any]) -> None:
    for here, there in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        state = reloaded(trained(two(3, 2).to(here), **options).state_dict())
        order = trained(two(3, 2).to(there), **options)
        before = listed(order.state_dict())
        with pytest.raises(StateError, match=f"'{here}'; expected {there}"):
            order.load_state_dict(state)
        assert listed(order.state_dict()) == before
        order.load_state_dict(state | dict.fromkeys({"vectors", "stored"} & state.keys()))  # as with vectors=False


def test_sums_may_be_wider_than_the_gradients() -> None:
    """As they are where float32 loses digits; a state from before the dtype was saved loads if they are no narrower."""
    order = trained(two(3, 2))
    state = order.state_dict()
    state["vectors"] = {name: vector.double() for name, vector in state["vectors"].items()}
    order.load_state_dict(state)
    del state["dtype"]
    order.load_state_dict(state)
    double = trained(two(3, 2).double()).state_dict()
    del double["dtype"]
    double["vectors"] = {name: vector.float() for name, vector in double["vectors"].items()}
    with pytest.raises(StateError, match=r"'torch\.float32'; expected torch\.float64"):
        trained(two(3, 2).double()).load_state_dict(double)
    with pytest.raises(StateError, match="gradients of a list"):
        order.load_state_dict(order.state_dict() | {"dtype": [1]})


@pytest.mark.parametrize("options", WAYS[::5])
def test_half_precision_is_summed_in_float32_and_goes_with_it(options: dict[str, Any]) -> None:
    state = reloaded(trained(two(3, 2).bfloat16(), **options).state_dict())
    order = trained(two(3, 2), **options)
    order.load_state_dict(state)
    assert order.state_dict()["taken"] == 4


@pytest.mark.parametrize("options", WAYS)
def test_a_state_of_another_model_of_the_same_length_is_refused(options: dict[str, Any]) -> None:
    """4 x 3 + 3 x 2 and 4 x 2 + 2 x 5 are 18 numbers both."""
    state = reloaded(trained(two(3, 2), **options).state_dict())
    order = trained(two(2, 5), **options)
    before = listed(order.state_dict())
    with pytest.raises(StateError, match=r"'0\.weight \[3, 4\]'; expected '0\.weight \[2, 4\]'"):
        order.load_state_dict(state)
    assert listed(order.state_dict()) == before
    order.load_state_dict(order.state_dict())


def test_the_first_difference_is_named() -> None:
    model = two(3, 3)
    state = GraB(model, N).state_dict()
    named = nn.Sequential()
    named.add_module("0", nn.Linear(4, 3, bias=False))
    named.add_module("head", nn.Linear(3, 3, bias=False))
    with pytest.raises(StateError, match=r"'1\.weight \[3, 3\]'; expected 'head\.weight \[3, 3\]'"):
        GraB(named, N).load_state_dict(state)
    with pytest.raises(StateError, match=r"'0\.weight \[3, 4\]'; expected '1\.weight"):
        GraB(two(4, 3), N, params=lambda name: name.startswith("1")).load_state_dict(
            GraB(two(3, 3), N, params=lambda name: name.startswith("0")).state_dict()
        )


def test_states_without_the_names_load_still() -> None:
    """As saved before they were kept, or by an order that watches no model."""
    order = trained(two(3, 2))
    state = order.state_dict()
    assert state.pop("parameters") == ["0.weight [3, 4]", "1.weight [2, 3]"]
    trained(two(2, 5)).load_state_dict(state)
    assert "parameters" not in GraB(None, N).state_dict()
    assert "parameters" not in RandomReshuffling(N).state_dict()
    GraB(None, N).load_state_dict(order.state_dict())
    for bad in (None, 3, [1], ["a", None], {"0.weight": [3, 4]}, "0.weight"):
        with pytest.raises(StateError, match="parameters"):
            order.load_state_dict(order.state_dict() | {"parameters": bad})


def test_what_wraps_a_model_does_not_change_its_names() -> None:
    model = two(3, 2)
    state = GraB(model, N).state_dict()
    compiled: Any = torch.compile(two(3, 2), backend="eager")
    GraB(compiled, N).load_state_dict(state)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_stored_gradients_that_are_not_finite_are_refused(value: float) -> None:
    order = trained(two(3, 2), order=Herding)
    state = order.state_dict()
    state["stored"][0, 1] = value
    with pytest.raises(StateError, match="not finite"):
        order.load_state_dict(state)
