"""Gradients with much in common: orders in float32 are as right as those of a plain float32 loop over the gradients.

The truth is the same loop in float64. Inputs, weights and output gradients are such that every layer's factors are
exact in float32: both have the same gradients, and only the arithmetic after them differs.
"""

from __future__ import annotations

from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from helpers import batches as batched
from helpers import reloaded, same_state
from torch import nn

from ordain import GraB, KernelHalving, reference
from ordain.gradients import per_example_loop

N, EPOCHS = 72, 2
MODELS = {
    "linear": lambda: nn.Linear(25, 1),  # the compiled pass over one layer
    "wide": lambda: nn.Linear(25, 40),
    "mlp": lambda: nn.Sequential(nn.Linear(25, 40), nn.ReLU(), nn.Linear(40, 1)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5, 5)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1)
    ),
}


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    for p in model.parameters():
        nn.init.zeros_(p) if p.ndim == 1 else p.data.copy_(2.0 * torch.randint(0, 2, p.shape) - 1.0)
    return model


def data(offset):
    """Whole numbers of which ``offset`` standard deviations are in common, and a weight near 1 for each example."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 25, generator=generator)
    return (4 * (offset + x)).round(), (64 + 64 * torch.randn(N, generator=generator) / offset).round() / 64


def loss(model, x, y):
    return (model(x).sum(dim=1) * y).mean()


@cache
def rows(name, offset, dtype):
    """``[N, d]``, each gradient by a backward of its own."""
    model = build(name).to(dtype)
    x, y = (part.to(dtype) for part in data(offset))
    return per_example_loop(lambda i: loss(model, x[i : i + 1], y[i : i + 1]), N, model.parameters()).numpy()


@cache
def plain_loop(name, offset, first, paired, dtype):
    """The orders after ``first``; all numbers are of ``dtype``."""
    gradients = rows(name, offset, dtype)
    order, orders, m = list(first), [], np.zeros_like(gradients[0])
    for _ in range(EPOCHS):
        s, following, signs = np.zeros_like(m), np.zeros_like(m), []
        for t, i in enumerate(order):
            following += gradients[i] / N
            if paired and t % 2 == 0:
                continue
            z = gradients[order[t - 1]] - gradients[i] if paired else gradients[i] - m
            sign = 1 if s @ z < 0 else -1
            s += sign * z
            signs += [sign, -sign] if paired else [sign]
        if paired:
            front, back = ([i for i, e in zip(order, signs, strict=True) if e == sign] for sign in (1, -1))
            order = front + back[::-1]
        else:
            order, m = reference.reorder(signs, order), following
        orders.append(order)
    return orders


def ordain_orders(name, offset, paired, size, observed):
    model = build(name)
    order = GraB(None if observed else model, N, centering="pair" if paired else "mean")
    x, y = data(offset)
    for _ in range(EPOCHS):
        for batch in torch.tensor(list(order.sampler)).split(size):
            if observed:
                order.observe(rows(name, offset, torch.float32)[batch.numpy()])
            else:
                loss(model, x[batch], y[batch]).backward()
                order.step()
    list(order.sampler)
    return [order.history(epoch).tolist() for epoch in range(EPOCHS + 1)]


def right(orders, truth):
    return [sum(a == b for a, b in zip(*two, strict=True)) for two in zip(orders, truth, strict=True)]


@pytest.mark.parametrize(("size", "offset"), [(1, 1e4), (8, 1), (8, 1e4), (64, 1e2), (64, 1e4)])
@pytest.mark.parametrize("centering", ["mean", "pair"])
@pytest.mark.parametrize("name", [*MODELS, "observed"])
def test_as_many_places_are_right_as_in_a_plain_loop(name, centering, offset, size):
    paired, observed = centering == "pair", name == "observed"
    name = "mlp" if observed else name
    first, *orders = ordain_orders(name, offset, paired, size, observed)
    truth, plain = (plain_loop(name, offset, tuple(first), paired, dtype) for dtype in (torch.float64, torch.float32))
    assert np.all(np.array(right(orders, truth)) >= right(plain, truth)), (right(orders, truth), right(plain, truth))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("centering", ["mean", "pair"])
def test_a_run_resumed_among_sums_in_float64_goes_on_as_it_would_have(centering, group):
    gradients = rows("mlp", 1e4, torch.float32)
    whole, resumed = (GraB(None, N, centering=centering, group=group, balancer=KernelHalving()) for _ in range(2))

    def go_on(order, batches):
        """In batches of an odd size: something is always left over."""
        for batch in islice(batched(order, 7), batches):
            order.observe(gradients[batch])

    go_on(whole, None)
    go_on(whole, 5)
    state = whole.state_dict()
    assert state["vectors"]["table"].dtype is torch.float64
    resumed.load_state_dict(reloaded(state))
    for order in (whole, resumed):
        go_on(order, None)
        go_on(order, None)
    assert same_state(resumed.state_dict(), whole.state_dict())
    assert list(resumed.sampler) == list(whole.sampler)
