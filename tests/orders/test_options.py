"""Options that do not exist, and orders in places where their sampler belongs: said with the word that was meant."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from helpers import Regression, small_model
from torch.utils.data import BatchSampler, DataLoader

import ordain
from ordain import (
    FixedOrder,
    FlipFlop,
    GraB,
    Greedy,
    Herding,
    RandomReshuffling,
    ShuffleOnce,
    Stratified,
    WithReplacement,
)
from ordain.errors import InputError, OrdainError
from ordain.orders import ORDERS, Order

N = 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraB(None, N, centring="pair"), r"GraB\(centring=.*Did you mean 'centering'"),
        (lambda: GraB(None, N, gradient="func"), r"GraB\(gradient=.*gradients="),
        (lambda: GraB(None, N, freeze_afer=1), "freeze_after="),
        (lambda: GraB(None, N, zzz=1), r"GraB\(zzz=.*expected one of balancer=, batch_dim=, centering=.*sketch="),
        (lambda: GraB(None, N, routine=None), r"GraB\(routine="),
        (lambda: Herding(None, N, memory_limits=1), r"Herding\(memory_limits=.*memory_limit="),
        (lambda: Greedy(None, N, frsh=True), r"Greedy\(frsh=.*fresh="),
        (lambda: ORDERS["grab"].build(None, N, sead=1), r"GraB\(sead=.*seed="),
        (lambda: ORDERS["rr"].build(None, N, sead=1), r"RandomReshuffling\(sead=.*seed="),
        (lambda: Order(N, arange=None), r"Order\(arange=.*arrange="),
    ],
)
def test_the_nearest_option_is_named(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert isinstance(caught.value, TypeError)  # as Python's own would be


@pytest.mark.parametrize("kind", [RandomReshuffling, ShuffleOnce, FlipFlop, WithReplacement, FixedOrder, Stratified])
def test_orders_that_list_all_their_options_leave_it_to_python(kind: Any) -> None:
    assert not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind).parameters.values())
    with pytest.raises(TypeError, match=f"{kind.__name__}.*sead"):
        kind(N, sead=1)


def test_options_of_orders_that_learn_are_nothing_to_those_that_do_not() -> None:
    """A comparison builds all of them alike."""
    for recipe in ORDERS.values():
        labels = {"labels": [0] * N} if recipe.needs_labels else {}
        recipe.build(None, N, seed=1, loss_reduction="sum", sketch=None, **labels).detach()


@pytest.mark.parametrize("make", [lambda: GraB(None, N), lambda: RandomReshuffling(N)])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_in_place_of_its_sampler(make: Any, workers: int) -> None:
    data, order = Regression(N), make()
    loaders: list[Any] = [
        DataLoader(data, batch_size=2, sampler=order, num_workers=workers),
        DataLoader(data, batch_sampler=order),
        order,
    ]
    for loader in loaders:
        with pytest.raises(OrdainError, match=r"sampler=order\.sampler") as caught:
            list(loader)
        assert isinstance(caught.value, TypeError)
    assert order


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_in_place_of_a_batch_sampler(workers: int) -> None:
    data, order = Regression(N), GraB(small_model(), N)
    with pytest.raises(OrdainError, match=r"batch_sampler=order\.sampler.*batch_size=.*sampler=order\.sampler"):
        list(DataLoader(data, batch_sampler=order.sampler, num_workers=workers))  # type: ignore[arg-type]
    batches = BatchSampler(order.sampler, 2, drop_last=False)
    assert len(list(DataLoader(data, batch_sampler=batches, num_workers=workers))) == 3
    order.detach()
    alone = RandomReshuffling(N)
    assert len(list(DataLoader(data, batch_size=None, sampler=alone.sampler))) == N
    assert len(list(DataLoader(data, batch_size=4, sampler=alone.sampler))) == 2


def test_the_error_is_public() -> None:
    assert issubclass(ordain.errors.ArgumentError, InputError)
