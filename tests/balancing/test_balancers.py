"""Balancers see inner products only, and give the signs of one vector at a time."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import BALANCERS, reference_rule
from hypothesis import given
from hypothesis import strategies as st

from ordain import Deterministic, SelfBalancingWalk, _rng, reference
from ordain.errors import BalancingFailedError


@pytest.mark.parametrize("name", BALANCERS)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_signs_of_batches_are_signs_of_vectors(name: str, seed: int, cuts: list[int]) -> None:
    n, d = sum(cuts), 4
    z = np.random.default_rng(seed).normal(size=(n, d))
    u = _rng.uniforms(n, seed=seed, stream=0)
    balancer = BALANCERS[name]
    state, s, found, start = balancer.start(), np.zeros(d), [], 0
    for size in cuts:
        batch = z[start : start + size]

        def sup(signs: np.ndarray, s: np.ndarray = s, batch: np.ndarray = batch) -> float:
            return float(np.abs(s + signs @ batch[: len(signs)]).max())

        signs = balancer.signs(batch @ s, batch @ batch.T, n=n, d=d, state=state, u=u[start : start + size], sup=sup)
        s = s + signs @ batch
        found += signs.tolist()
        start += size
    rule, total, wanted = reference_rule(balancer, n, d), np.zeros(d), []
    for t in range(n):
        sign = rule(total, z[t], float(u[t]))
        sign = reference.deterministic(total, z[t]) if sign is None else sign
        wanted.append(sign)
        total = total + sign * z[t]
    assert found == wanted


def test_a_tie_gives_minus_one() -> None:
    signs = Deterministic().signs(np.zeros(2), np.zeros((2, 2)), n=2, d=1, state=np.zeros(3))
    assert signs.tolist() == [-1, -1]


def test_inputs_are_left_alone_and_failures_reported() -> None:
    dots, gram = np.array([5.0, 1.0]), np.eye(2)
    walk, state = SelfBalancingWalk(c=1.0), np.zeros(3)
    assert walk.signs(dots, gram, n=2, d=2, state=state, u=np.zeros(2)).tolist()[0] == -1
    assert state[1] == 1  # one failure, decided by Algorithm 5
    assert dots.tolist() == [5.0, 1.0]
    with pytest.raises(BalancingFailedError, match="larger than c = 1 at vector 0"):
        walk.signs(dots, gram, n=2, d=2, state=np.zeros(3), u=np.zeros(2), fallback=False)


def test_random_numbers_belong_to_positions() -> None:
    whole = _rng.uniforms(100, seed=7, stream=3)
    pieces = np.concatenate([_rng.uniforms(b - a, seed=7, stream=3, start=a) for a, b in ((0, 1), (1, 50), (50, 100))])
    assert (whole == pieces).all()
    assert not (whole == _rng.uniforms(100, seed=7, stream=4)).any()
    assert 0.4 < _rng.uniforms(10_000, seed=1, stream=0).mean() < 0.6


def test_the_global_generators_are_left_alone() -> None:
    import torch

    from ordain import herding

    before = (np.random.get_state()[1].copy(), torch.get_rng_state())  # noqa: NPY002
    herding.herd(np.random.default_rng(0).random((20, 3)), balancer=SelfBalancingWalk())
    after = (np.random.get_state()[1], torch.get_rng_state())  # noqa: NPY002
    assert (before[0] == after[0]).all()
    assert torch.equal(before[1], after[1])
