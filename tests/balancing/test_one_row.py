"""Batches of one row, balanced part by part, against the general way through a Gram matrix."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import BALANCERS, reloaded, same_state
from torch import nn

from ordain import Deterministic, GraB
from ordain.balancing import BalanceState
from ordain.balancing.one_row import sign_row
from ordain.gradients import Dense

N, EPOCHS = 15, 3  # odd: the last of an epoch has no partner
SIZES = (4, 1, 7)


class WithoutParts(Dense):
    """The slow twin: nothing is known of its parts."""

    def one_row(self) -> None:
        return None


def rows(offset: float = 0.5, dtype: type = np.float64) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(EPOCHS, N, sum(SIZES))) + offset).astype(dtype)


def observe(order: GraB, form: type[Dense], gradients: np.ndarray, *, steps: int | None = None) -> None:
    for epoch in range(EPOCHS):
        for index in order.sampler:
            parts = np.split(gradients[epoch][index : index + 1], np.cumsum(SIZES)[:-1], axis=1)
            order.observe(form([torch.from_numpy(part.copy()) for part in parts]))
            if steps is not None and (steps := steps - 1) == 0:
                return


def orders(order: GraB) -> list[list[int]]:
    list(order.sampler)
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


def both(balancer: str, centering: str, gradients: np.ndarray) -> tuple[GraB, GraB]:
    made = [GraB(None, N, centering=centering, balancer=BALANCERS[balancer]) for _ in range(2)]
    for order, form in zip(made, (Dense, WithoutParts), strict=True):
        observe(order, form, gradients)
    return made[0], made[1]


@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("balancer", BALANCERS)
def test_part_by_part_gives_the_same_orders(balancer: str, centering: str) -> None:
    fast, slow = both(balancer, centering, rows())
    assert fast.failures == slow.failures
    fast_state, slow_state = fast.state_dict(), slow.state_dict()
    np.testing.assert_allclose(fast_state["counters"], slow_state["counters"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(fast_state["balancer_state"], slow_state["balancer_state"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fast_state["vectors"], slow_state["vectors"])
    assert orders(fast) == orders(slow)


@pytest.mark.parametrize("position", [4, 5])  # the first and the second of a pair
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.filterwarnings("ignore::ordain.errors.OrdainWarning")
def test_a_row_that_is_not_finite_is_set_aside(centering: str, position: int) -> None:
    gradients = rows()
    gradients[1, list(GraB(None, N).sampler)[position], 9] = np.inf
    fast, slow = both("deterministic", centering, gradients)
    assert fast.set_aside == slow.set_aside == 1
    assert orders(fast) == orders(slow)


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_digits_lost_in_float32_are_found_in_float64(centering: str) -> None:
    fast, slow = both("deterministic", centering, rows(1e4, np.float32))
    assert fast.state_dict()["vectors"]["table"].dtype is slow.state_dict()["vectors"]["table"].dtype is torch.float64
    assert orders(fast) == orders(slow)


@pytest.mark.parametrize("steps", [N + 3, N + 4])  # in the middle of a pair, and between two
def test_a_pair_may_be_resumed_and_its_buffer_is_not_a_saved_states(steps: int) -> None:
    whole, resumed = (GraB(None, N, centering="pair") for _ in range(2))
    observe(whole, Dense, rows(), steps=steps)
    state = whole.state_dict()
    kept = copy.deepcopy(state)
    resumed.load_state_dict(reloaded(state))
    for order in (whole, resumed):
        observe(order, Dense, rows(2.0))
    assert same_state(whole.state_dict(), resumed.state_dict())
    assert same_state(state, kept)


def test_nothing_changes_where_the_general_way_is_needed() -> None:
    state = BalanceState(Deterministic(), paired=False, count=N, seed=0)
    table = state.allocate(3, torch.float64, torch.device("cpu"))
    bad = [torch.tensor([1.0, torch.nan], dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    assert sign_row(state, table, bad, np.arange(1), 0) is None
    assert not state.changing
    assert not table.any()
    assert state.rule.tolist() == [0.0, 0.0, 0.0]


def spoil_by_clipping(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def spoil_by_zeroing(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def spoil_through_numpy(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.numpy()[:] = 7.0


@pytest.mark.parametrize("spoil", [spoil_by_clipping, spoil_by_zeroing, spoil_through_numpy])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_writing_to_the_gradients_before_the_step_changes_nothing(centering: str, spoil) -> None:
    """They are shared with ``p.grad`` until somebody writes; what is written must still reach ``p.grad``."""

    def run(change) -> list[list[int]]:
        torch.manual_seed(0)
        x, y = torch.randn(40, 6), torch.randn(40, 2)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        order = GraB(model, 40, centering=centering, gradients="microbatch", group=4)
        for _ in range(EPOCHS):
            for batch in torch.tensor(list(order.sampler)).split(4):
                model.zero_grad()
                nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
                if change is not None:
                    before = [p.grad.clone() for p in model.parameters()]
                    change(model)
                    assert not any(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
                order.step()
        return orders(order)

    assert run(spoil) == run(None)
