"""Balancing where the gradients are not on the CPU: the same signs, and the host waits once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import BALANCERS
from hypothesis import given
from hypothesis import strategies as st
from pretend_device import PretendDevice

from ordain import Balancer, Deterministic, GraB, SelfBalancingWalk, _rng
from ordain.balancing import BalanceState, balance
from ordain.gradients import Factored, as_gradients
from ordain.gradients.param_grads import OuterProduct
from ordain.kernels.signs import batch_signs
from ordain.kernels.torch_signs import torch_signs

N, DIM, EPOCHS = 23, 6, 2


@pytest.mark.parametrize("name", BALANCERS)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 12), zeros=st.booleans())
def test_the_torch_program_gives_the_compiled_loops_signs(name: str, seed: int, size: int, zeros: bool) -> None:
    rng, balancer = np.random.default_rng(seed), BALANCERS[name]
    z, s = rng.normal(size=(size, 4)) * (0 if zeros else 1), rng.normal(size=4)
    kind, param = balancer.kind, balancer.parameter(n=50, d=4)
    u, before = _rng.uniforms(size, seed=seed, stream=0), np.array([s @ s, 2.0, 1.5])
    asked: list[int] = []

    def sup(signs: np.ndarray) -> float:
        asked.append(len(signs))
        return float(np.abs(s + signs @ z[: len(signs)]).max())

    after = before.copy()
    wanted, _ = batch_signs(kind, z @ s, z @ z.T, u, after, param, True, sup)
    given = (torch.from_numpy(array) for array in (z @ s, np.triu(z @ z.T), u))
    signs, state, unsure = torch_signs(kind, *given, before.tolist(), param)
    assert bool(unsure) == bool(asked)
    if not asked:
        assert signs.tolist() == wanted.tolist()
        np.testing.assert_allclose(state.numpy(), after, rtol=1e-9, atol=1e-9)


def gradients(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(EPOCHS, N, DIM)) + 0.5


def places(state: BalanceState, batches: list, rows: np.ndarray, sizes: np.ndarray | None, device=None) -> list:
    """The places of all epochs; on ``device`` with how often the host waited in each step."""
    found = []
    for epoch in range(EPOCHS):
        for batch in batches:
            grads = torch.from_numpy(rows[epoch][batch])
            before = 0 if device is None else len(device.waits)
            decision = balance(
                state,
                as_gradients(grads if device is None else device.put(grads)),
                batch if sizes is None else batch // 3,
                sizes=None if sizes is None else sizes[batch],
                stream=epoch,
            )
            waits = 0 if device is None else len(device.waits) - before
            found.append((decision.slots.tolist(), decision.places.tolist(), decision.not_finite, waits))
        state.next_pass()
    return found


def both(balancer: Balancer, paired: bool, size: int, group: int, rows: np.ndarray) -> tuple[list, list]:
    batches = np.array_split(np.arange(N), range(size, N, size))
    sizes = np.array([min(3, N - 3 * (i // 3)) for i in range(N)]) if group == 3 else None
    units = -(-N // group)
    states = [BalanceState(balancer, paired=paired, count=units // 2 if paired else units, seed=3) for _ in range(2)]
    here = places(states[0], batches, rows, sizes)
    with PretendDevice() as device:
        there = places(states[1], batches, rows, sizes, device)
    assert states[0].failures == states[1].failures
    for name in ("surplus", "mean_inner", "mean_square"):
        assert getattr(states[0], name) == pytest.approx(getattr(states[1], name), rel=1e-9, abs=1e-9)
    return here, there


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", ["deterministic", "walk", "halving"])
def test_the_same_signs_elsewhere_and_one_wait_a_step(name: str, paired: bool, size: int, group: int) -> None:
    """With batches that leave the first of a pair, or part of a unit, for the next one."""
    here, there = both(BALANCERS[name], paired, size, group, gradients())
    assert [step[:3] for step in there] == [step[:3] for step in here]
    assert [step[3] for step in there] == [1] * len(there)


@pytest.mark.parametrize("paired", [False, True])
def test_a_walk_that_must_know_its_largest_number_asks_for_it(paired: bool) -> None:
    here, there = both(SelfBalancingWalk(c=0.7), paired, 5, 1, gradients())
    assert [step[:3] for step in there] == [step[:3] for step in here]
    assert max(step[3] for step in there) > 1


@pytest.mark.parametrize("paired", [False, True])
def test_what_is_not_finite_is_set_aside_elsewhere_too(paired: bool) -> None:
    rows = gradients()
    rows[1, 7] = np.nan
    here, there = both(Deterministic(), paired, 5, 1, rows)
    assert [step[:3] for step in there] == [step[:3] for step in here]
    assert sum(step[2] for step in there) == 1


@pytest.mark.parametrize("paired", [False, True])
def test_sums_that_cancel_are_held_in_float64_elsewhere_too(paired: bool) -> None:
    here, there = both(Deterministic(), paired, 5, 1, np.float32(gradients() + 1e4))
    assert [step[:3] for step in there] == [step[:3] for step in here]


@dataclass(frozen=True)
class Alternating(Balancer):
    """A balancer from elsewhere."""

    def signs(self, dots, gram, *, n, d, state, u=None, sup=None, fallback=True):
        assert isinstance(dots, np.ndarray)
        assert (gram == gram.T).all()
        return np.where(np.arange(len(dots)) % 2, 1, -1)


def test_a_balancer_from_elsewhere_gets_numpy_arrays() -> None:
    here, there = both(Alternating(), True, 4, 1, gradients())
    assert [step[:3] for step in there] == [step[:3] for step in here]


@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_layers_factors_are_summed_without_a_wait(centering: str) -> None:
    """The factors of a linear layer, seen at several positions: its sums by sign are a shortcut of the CPU's."""
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(size=(N, 2, width))) for width in (4, 3))

    def observed(order: GraB, put) -> list[list[int]]:
        for _ in range(EPOCHS):
            for batch in torch.tensor(list(order.sampler)).split(5):
                factors = OuterProduct(put(a[batch]), put(b[batch]))
                like = put(torch.empty(0, dtype=torch.float64))
                order.observe(Factored([(0, factors)], dim=12, size=len(batch), scale=1.0, like=like))
        list(order.sampler)
        return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]

    wanted = observed(GraB(None, N, centering=centering), lambda tensor: tensor)
    with PretendDevice() as device:
        assert observed(GraB(None, N, centering=centering), device.put) == wanted
    steps, epochs = EPOCHS * len(range(0, N, 5)), EPOCHS
    assert len(device.waits) <= steps + epochs  # and once an epoch for |m|^2
