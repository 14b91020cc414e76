"""What every order must do, run over the registry: a new order inherits all of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    PERMUTATIONS,
    Regression,
    batches,
    build,
    gradient_field,
    is_permutation,
    reloaded,
    run,
    run_epoch,
    same_state,
    small_model,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from ordain.errors import GradientError, StateError
from ordain.orders import ORDERS


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 9, 10])
def test_deterministic_from_its_seed(name: str, n: int) -> None:
    field = gradient_field(n, 3)
    first, again, other = (run(build(name, n, seed=seed), field, 3, batch_size=4) for seed in (1, 1, 2))
    assert first == again
    assert n < 9 or first != other
    if ORDERS[name].is_permutation:
        assert all(is_permutation(epoch, n) for epoch in first)
    assert all(len(epoch) == n for epoch in first)


@pytest.mark.parametrize("name", [name for name in PERMUTATIONS if not ORDERS[name].needs_labels])
def test_same_seed_same_first_epoch(name: str) -> None:
    assert list(build(name, 50, seed=3).sampler) == list(build("rr", 50, seed=3).sampler)


@pytest.mark.parametrize("name", [name for name in ORDERS if name not in ("so",)])
def test_an_order_changes_with_default_arguments(name: str) -> None:
    n = 30
    orders = run(build(name, n), gradient_field(n, 4), 2, batch_size=4)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", ORDERS)
def test_global_generators_are_left_alone(name: str) -> None:
    state = torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()  # noqa: NPY002
    run(build(name, 10), gradient_field(10, 3), 2, batch_size=3)
    assert torch.equal(state, torch.get_rng_state())
    assert (legacy == np.random.get_state()[1]).all()  # noqa: NPY002


def train(
    name: str, *, workers: int = 0, n: int = 23, epochs: int = 3, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """The five-line loop; returns the orders and the final weights."""
    data = Regression(n)
    model = small_model()
    order = build(name, n, seed=1, model=model)
    loader = DataLoader(data, batch_size=5, sampler=order.sampler, num_workers=workers, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()
    orders = [order.history(epoch).tolist() for epoch in range(order.epoch + 1)]
    order.detach()
    return orders, nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("name", ORDERS)
def test_the_loop_does_not_depend_on_workers(name: str) -> None:
    wanted = train(name, epochs=2)
    assert len(wanted[0]) == 2
    assert train(name, workers=2, prefetch_factor=4, epochs=2) == wanted


@pytest.mark.parametrize("name", ["grab", "grab-pair", "rr"])
def test_persistent_workers_change_nothing(name: str) -> None:
    assert train(name, workers=1, persistent_workers=True) == train(name)


@pytest.mark.parametrize("name", ORDERS)
def test_a_peek_costs_nothing(name: str) -> None:
    n = 20
    data = Regression(n)
    order = build(name, n)
    loader = DataLoader(data, batch_size=3, sampler=order.sampler)
    next(iter(loader))  # a look at the data
    field = gradient_field(n, 3)
    assert run(order, field, 3, batch_size=4) == run(build(name, n), field, 3, batch_size=4)


@pytest.mark.parametrize("name", ORDERS)
def test_iterators_that_are_never_drawn_from_change_nothing(name: str) -> None:
    order = build(name, 12)
    made = [iter(order.sampler) for _ in range(3)]
    assert list(made[1]) == list(build(name, 12).sampler)


@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
@pytest.mark.parametrize("name", PERMUTATIONS)
@given(data=st.data())
def test_a_permutation_after_every_fault(name: str, data: st.DataObject) -> None:
    """Draw, observe, break off, raise, save and load in any sequence: nothing is lost."""
    n = data.draw(st.integers(1, 12), label="n")
    order, field = build(name, n), gradient_field(n, 2)
    for epoch in range(3):
        size = data.draw(st.integers(1, 5), label="batch size")
        stop = data.draw(st.integers(0, n), label="batches before a break")
        drop_last = data.draw(st.booleans(), label="drop_last")
        for number, batch in enumerate(batches(order, size)):
            if number == stop or (drop_last and len(batch) < size):
                break
            grads = np.stack([field(i, epoch) for i in batch])
            fault = data.draw(st.sampled_from(["none", "none", "nan", "wrong length", "not observed"]), label="fault")
            if fault == "nan":
                with np.errstate(all="ignore"):
                    grads[data.draw(st.integers(0, len(batch) - 1))] = np.nan
            if fault == "wrong length":
                grads = grads[:, :1]
            if fault != "not observed":
                observe(order, grads)
            if data.draw(st.booleans(), label="save and load"):
                order.load_state_dict(reloaded(order.state_dict()))
                go_on(order, min((number + 1) * size, n))
                break
    assert is_permutation(order.history(order.epoch), n)
    assert is_permutation(drawn(order, n), n)
    for vector in (order.state_dict().get("vectors") or {}).values():
        assert torch.isfinite(vector).all()


def go_on(order: Any, done: int) -> None:
    try:
        order.resume()
    except StateError:  # an order that sees no gradients must be told
        order.resume(done)


def drawn(order: Any, n: int) -> list[int]:
    order.load_state_dict(order.state_dict())  # what is tested is a whole epoch, not the tail of one
    return list(order.sampler)


def observe(order: Any, grads: np.ndarray) -> None:
    try:
        order.observe(grads)
    except GradientError as error:
        assert "length" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_saved_and_loaded_it_goes_on_the_same(name: str, stop: int) -> None:
    n, size, field = 22, 4, gradient_field(22, 3)
    wanted = run(build(name, n), field, 4, batch_size=size)

    order = build(name, n)
    run_epoch(order, field, 0, size)
    tail: list[int] = []
    for number, batch in enumerate(batches(order, size)):
        if number == stop:
            break
        observe(order, np.stack([field(i, 1) for i in batch]))
        tail += batch
    state = order.state_dict()
    kept = copy.deepcopy(state)
    run_epoch(order, field, 1, size)
    assert same_state(state, kept)  # no views of what training goes on to change

    other = build(name, n)
    other.load_state_dict(reloaded(state))
    other.resume(stop * size)
    tail += run_epoch(other, field, 1, size)
    assert tail == wanted[1]
    assert run_epoch(other, field, 2, size) == wanted[2]
    assert run_epoch(other, field, 3, size) == wanted[3]
    assert [other.history(e).tolist() for e in range(4)] == wanted[:4]
