"""Mixed precision: torch's gradient scaler, whose scale changes in mid-epoch, and steps that it skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import small_model
from runs import Indexed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ordain import GraB, Herding
from ordain.errors import InputError

N, BATCH, EPOCHS = 26, 4, 3
BROKEN = {2, 9, 10}  # steps at which the loss overflows
ORDERS: dict[str, Any] = {
    "mean": lambda model, n: GraB(model, n),
    "pair": lambda model, n: GraB(model, n, centering="pair"),
    "head": lambda model, n: GraB(model, n, params="head"),
    "herding": lambda model, n: Herding(model, n),
}


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2, **options)


def trained(build: Any, *, scaled: bool, told: Any = lambda scaler: scaler) -> tuple[list[list[int]], set[float], Any]:
    """Orders and scales of a run; without a scaler, steps that it would skip are skipped by hand."""
    model = small_model().double()
    order, grads = build(model, N), scaler(enabled=scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, number = set(), 0
    for _ in range(EPOCHS):
        for x, y, _ in DataLoader(Indexed(N), batch_size=BATCH, sampler=order.sampler):
            loss = cross_entropy(model(x.double()), y)
            if number in BROKEN:
                loss = loss * torch.inf
            scales.add(grads.get_scale())
            grads.scale(loss).backward()
            order.step(loss_scale=told(grads))
            if scaled or number not in BROKEN:
                grads.step(optimizer)
            grads.update()
            optimizer.zero_grad()
            number += 1
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)], scales, order


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("told", [lambda one: one, lambda one: one.get_scale()], ids=["the scaler", "its scale"])
@pytest.mark.parametrize("name", ORDERS)
def test_scales_that_change_give_the_orders_of_none(name: str, told: Any) -> None:
    """The scales are powers of two: not a bit of any gradient differs."""
    plain, _, _ = trained(ORDERS[name], scaled=False)
    found, scales, order = trained(ORDERS[name], scaled=True, told=told)
    assert len(scales) > 4
    assert found == plain
    assert len({tuple(one) for one in found}) == EPOCHS + 1
    assert order.set_aside == len(BROKEN) * BATCH


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_without_it_scales_are_mixed() -> None:
    assert trained(ORDERS["mean"], scaled=True, told=lambda one: 1.0)[0] != trained(ORDERS["mean"], scaled=False)[0]


def test_gradients_that_are_unscaled_already() -> None:
    """unscale_() changes what the optimizer sees, not what the layers saw: the scale is still to be told."""
    model, data = small_model(), Indexed(N).data
    x, y = data.x[:BATCH], data.y[:BATCH]
    order, grads = GraB(model, N), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = [index for index, _ in zip(order.sampler, range(BATCH), strict=False)]
    grads.scale(cross_entropy(model(x), y)).backward()
    grads.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    order.step(taken, loss_scale=grads)
    other = small_model()
    twin = GraB(other, N)
    list(zip(twin.sampler, range(BATCH), strict=False))
    cross_entropy(other(x), y).backward()
    twin.step(taken)
    assert all(torch.equal(a, b) for a, b in zip(vectors(order), vectors(twin), strict=True))


def vectors(order: Any) -> list[Tensor]:
    return [one for one in order.state_dict().values() if isinstance(one, Tensor)]


@pytest.mark.parametrize("wrong", [object(), "2", None, True])
def test_what_is_no_scale(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"a finite number > 0, or a torch.amp.GradScaler"):
        GraB(small_model(), N).step(loss_scale=wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_autocast(dtype: torch.dtype, centering: Any) -> None:
    """Signs are those of the rows that the half-precision backward has, whatever the scale."""
    found = []
    for scale in (2.0**4, 2.0**9):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        order, grads = GraB(model, N, centering=centering), torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(EPOCHS):
            for x, y, _ in DataLoader(Indexed(N), batch_size=BATCH, sampler=order.sampler):
                with torch.autocast("cpu", dtype=dtype):
                    loss = cross_entropy(model(x.float()), y)
                grads.scale(loss).backward()
                order.step(loss_scale=grads)
        next(iter(order.sampler))
        found.append([order.history(epoch).tolist() for epoch in range(EPOCHS + 1)])
        assert order.set_aside == 0
    if dtype is torch.bfloat16:  # no number is too small for it
        assert found[0] == found[1]
    assert all(sorted(one) == list(range(N)) for one in found[1])
