"""A loss that is multiplied by another number at every step gives the orders of one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import same_state, small_model
from runs import Indexed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ordain import GraB, Until
from ordain.errors import InputError

N, BATCH, EPOCHS = 22, 4, 3
SCALES = [1.0, 0.25, 3.7, 1e-3, 1024.0]
SOURCES: dict[str, dict[str, Any]] = {
    "exact": {},
    "func": {"gradients": "func"},
    "microbatch": {"gradients": "microbatch", "group": BATCH},
    "sum": {"loss_reduction": "sum"},
    "sketch": {"sketch": 16},
    "an epoch that does not learn": {"learn": Until(1)},
}


def orders(scaled: bool, **options: Any) -> list[list[int]]:
    model = small_model().double()
    order = GraB(model, N, **options)
    for _ in range(EPOCHS):
        for number, (x, y, _) in enumerate(DataLoader(Indexed(N), batch_size=BATCH, sampler=order.sampler)):
            scale = SCALES[number % len(SCALES)] if scaled else 1.0
            (scale * cross_entropy(model(x.double()), y)).backward()
            order.step(loss_scale=scale)
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_orders(source: str) -> None:
    found = orders(True, **SOURCES[source])
    assert found == orders(False, **SOURCES[source])
    assert len({tuple(one) for one in found}) > 1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True, "2", torch.tensor(2.0), None])
def test_refused_before_anything_changes(scale: Any) -> None:
    model = small_model()
    order = GraB(model, N)
    x, y, _ = next(iter(DataLoader(Indexed(N), batch_size=BATCH, sampler=order.sampler)))
    cross_entropy(model(x), y).backward()
    before = order.state_dict()
    with pytest.raises(InputError, match=r"loss_scale=.*a finite number > 0"):
        order.step(loss_scale=scale)
    assert same_state(order.state_dict(), before)
    order.step()
