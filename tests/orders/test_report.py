"""What an epoch says about ordering, against the same computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ordain import Herding, reference
from ordain.errors import StepError

N = 60


def epoch(order: Herding, z: np.ndarray, rows: int = 16) -> list[int]:
    """Observe the gradients ``z [n, d]`` of the examples in the order's order."""
    visited = list(order.sampler)
    for start in range(0, N, rows):
        order.observe(torch.from_numpy(z[visited[start : start + rows]]))
    return visited


def test_an_order_that_holds_and_one_that_does_not() -> None:
    rng = np.random.default_rng(0)
    z, other = rng.normal(size=(2, N, 3)) + np.array([1.0, 0.0, 0.0])
    for gradients, kept in ((z, True), (other, False)):
        order = Herding(None, N, seed=3)
        epoch(order, z)
        first = order.report()
        assert (first.epoch, first.examples) == (0, N)
        assert 0.6 < first.visited < 1.6  # a random order
        assert "first order is random" in str(first)
        assert first.cost is None  # gradients from elsewhere: what they cost is not known
        visited = epoch(order, gradients)
        second = order.report()
        random = np.mean([reference.herding_objective(gradients[visited], order, norm=2) for order in _permutations(3)])
        assert second.visited == pytest.approx(reference.herding_objective(gradients, visited, norm=2) / random)
        herded = reference.herd(gradients[visited], rounds=10, tolerance=0.0)
        assert second.possible == pytest.approx(
            reference.herding_objective(gradients[visited], herded, norm=2) / random
        )
        assert (second.kept > 0.8) is kept
        assert ("still holds" in str(second)) is kept
        assert ("Do not use it" in str(second)) is not kept
        centred = gradients - gradients.mean(axis=0)
        noise = (centred**2).sum(axis=1).mean() / (gradients**2).sum(axis=1).mean()
        assert second.noise == pytest.approx(noise)


def _permutations(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(N).tolist() for _ in range(5)]


def test_the_cost_of_an_epoch() -> None:
    model = nn.Linear(3, 1)
    order = Herding(model, N, seed=3)
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for rows in DataLoader(TensorDataset(x), batch_size=16, sampler=order.sampler):
            model(*rows).square().sum().backward()
            order.step()
            model.zero_grad()
        found = order.report()
        assert found.cost is not None
        assert found.cost > 0
        assert f"added {100 * found.cost:.0f} % to the time of this epoch" in str(found)
    assert f"for {1 + found.cost:.2f} times as many epochs" in replace(found, visited=found.possible).advice


def test_before_the_end_of_an_epoch() -> None:
    order = Herding(None, N)
    with pytest.raises(StepError, match=r"0 of 60 gradients of epoch 0"):
        order.report()
    z = np.random.default_rng(0).normal(size=(N, 2))
    epoch(order, z)
    before = order.state_dict()
    order.report()
    assert before["places"].equal(order.state_dict()["places"])
    assert before["stored"].equal(order.state_dict()["stored"])
    next(iter(order.sampler))
    with pytest.raises(StepError, match=r"0 of 60 gradients of epoch 1"):
        order.report()


def test_gradients_without_noise() -> None:
    order = Herding(None, N)
    epoch(order, np.ones((N, 2)))
    assert (order.report().noise, order.report().visited, order.report().kept) == (0.0, 1.0, 0.0)
