"""What saving costs: microseconds of ``state_dict()``, whole and without vectors, and of a loader's cursor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ordain import GraB

EPOCHS = 5
ROUNDS = 200


def microseconds(job: Callable[[], object]) -> float:
    """The median of one call."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def order_of(n: int, d: int, epochs: int) -> tuple[GraB, Any]:
    """An order some epochs old, in the middle of one, and its live iterator."""
    order = GraB(None, n, centering="pair")
    for _ in range(epochs):
        iterator = iter(order.sampler)
        next(iterator), next(iterator)
        order.observe(torch.randn(2, d))
    iterator = iter(order.sampler)
    next(iterator), next(iterator)
    order.observe(torch.randn(2, d))
    return order, iterator


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results = {}
    for n in (1_000, 50_000, 1_000_000):
        for epochs in (EPOCHS, 20 * EPOCHS):
            order, iterator = order_of(n, 10, epochs)
            small = microseconds(lambda order=order: order.state_dict(vectors=False))  # type: ignore[misc]
            smallest = microseconds(lambda order=order: order.state_dict(vectors=False, history=False))  # type: ignore[misc]
            cursor = microseconds(iterator.state_dict)
            results[f"without vectors, n={n}, {epochs} epochs"] = small
            results["cursor"] = cursor
            print(
                f"  n={n:,} after {epochs} epochs: without vectors {small:.0f} us, without history either "
                f"{smallest:.0f} us; a loader's cursor {cursor:.1f} us"
            )
    for d in (10_000, 1_000_000):
        order, _ = order_of(50_000, d, EPOCHS)
        print(f"  n=50,000, d={d:,}: whole {microseconds(order.state_dict):.0f} us")
    module = nn.Linear(1000, 1000)
    print(f"  for comparison, an nn.Linear's state_dict(): {microseconds(module.state_dict):.0f} us")
    return results
