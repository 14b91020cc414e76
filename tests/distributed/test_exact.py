"""Exact mode: W ranks of B examples are one process that sees the same global batches."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

from ordain import Every, GraB, SelfBalancingWalk
from ordain.distributed import Distributed

MODELS = {
    "linear": lambda: nn.Linear(6, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    ),
}


def data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 6, generator=generator).double(), torch.randint(3, (n,), generator=generator)


def one_process(make: Any, n: int, batch: int, epochs: int, **options: Any) -> tuple[list[list[int]], nn.Module]:
    torch.manual_seed(0)
    model = make().double()
    x, y = data(n)
    order = GraB(model, n, distributed=False, **options)
    for _ in range(epochs):
        indices = iter(order.sampler)
        while drawn := list(islice(indices, batch)):
            cross_entropy(model(x[drawn]), y[drawn]).backward()
            order.step()
            descend(model, [p.grad for p in model.parameters()])
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(epochs + 1)], model


def descend(model: nn.Module, grads: list[Any]) -> None:
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p -= 0.1 * grad
            p.grad = None


def a_rank(ranks: ThreadRanks, make: Any, n: int, batch: int, epochs: int, **options: Any) -> Any:
    model = copy.deepcopy(make)
    x, y = data(n)
    order = GraB(model, n, distributed=Distributed(ranks=ranks), **options)
    for _ in range(epochs):
        indices = iter(order.sampler)
        while drawn := list(islice(indices, batch)):
            cross_entropy(model(x[drawn]), y[drawn]).backward()
            order.step()
            grads = [p.grad * len(drawn) for p in model.parameters()]
            total = ranks.gather(torch.tensor(len(drawn))).sum()
            for grad in grads:
                ranks.add(grad)
            descend(model, [grad / total for grad in grads])
    next(iter(order.sampler))
    return [order.history(epoch).tolist() for epoch in range(epochs + 1)], model


OPTIONS: list[dict[str, Any]] = [{}, {"centering": "pair"}, {"balancer": SelfBalancingWalk(c=2.0)}, {"group": 3}]
OPTIONS += [{"learn": Every(2)}, {"learn": Every(2), "centering": "pair"}]
SIZES = [(1, 20, 4), (2, 24, 4), (3, 30, 3), (4, 32, 3), (2, 22, 3)]  # W, n, B
# What is sent depends on the layers, and on the centring; what is done with it does not depend on the layers.
CASES = [("mlp", options, size) for options in OPTIONS for size in (SIZES[1], SIZES[4])]
CASES += [("mlp", options, size) for options in OPTIONS[:2] for size in (SIZES[0], SIZES[2], SIZES[3])]
CASES += [(kind, options, SIZES[1]) for kind in ("linear", "conv") for options in OPTIONS[:2]]


@pytest.mark.parametrize(("kind", "options", "size"), CASES)
def test_equal_to_one_process(kind: str, options: dict[str, Any], size: tuple[int, int, int]) -> None:
    ranks, n, batch = size
    make = MODELS[kind]
    expected, model = one_process(make, n, ranks * batch, 3, **options)
    torch.manual_seed(0)
    start = make().double()
    answers = run_ranks(ranks, lambda one: a_rank(one, start, n, batch, 3, **options))
    for histories, trained in answers:
        assert histories == expected
        for p, q in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert len({tuple(one) for one in expected}) > 1
