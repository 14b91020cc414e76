"""How the cost of ordering grows with n, d, B and T: seconds of processor time, and exponents fitted to them.

Cost is the order's own work: an epoch of draws and of ``observe()`` on given gradients less the same draws alone, or a
training step with the order less the same step without. Rounds go through all sizes in turn. An exponent is the
slope of a least-squares line through log seconds against log size, over the upper half of the range on a log scale:
below it constant costs of a call prevail.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from benchmarks.charts import growth_chart
from ordain import GraB, Order, RandomReshuffling, herding
from ordain.study.runs.run_folder import provenance

FILE = Path("results/peers/growth.json")
ROUNDS = 5
LONG = 2.0  # seconds: what takes longer is run twice only
BATCH = 256  # for n
D, WIDTH = 4096, 256  # length of given gradients for B; the linear layer's sides for B and T


@dataclass(frozen=True)
class Curve:
    """What is measured at each size: a function of the size makes the work, whose seconds it returns."""

    panel: str
    sizes: Sequence[int]
    seconds: Callable[[int], float]


def timed(go: Callable[[], object]) -> float:
    start = time.process_time()
    go()
    return time.process_time() - start


def visit(order: Order, size: int, grads: Tensor | None) -> None:
    """An epoch, and the first draw of the next, which adopts the next order."""
    for batch in BatchSampler(order.sampler, size, drop_last=False):
        if grads is not None:
            order.observe(grads[: len(batch)])
    next(iter(order.sampler))


def drawing(n: int) -> float:
    return timed(lambda: visit(RandomReshuffling(n), BATCH, None))


def observing(centering: Any, n: int, *, d: int = 4, size: int = BATCH) -> float:
    """Seconds that observing an epoch adds to drawing it."""
    grads = torch.randn(size, d)
    order = GraB(None, n, centering=centering)
    plain = timed(lambda: visit(RandomReshuffling(n), size, None))
    return timed(lambda: visit(order, size, grads)) - plain


def observing_batches(centering: Any, *, d: int, size: int) -> float:
    """Seconds a batch, from one epoch of eight batches after one that makes the order's vectors."""
    grads = torch.randn(size, d)
    order = GraB(None, 8 * size, centering=centering)
    visit(order, size, grads)
    return timed(lambda: visit(order, size, grads)) / 8


def linear_layer(centering: Any, *, size: int, length: int) -> float:
    """Seconds that the order adds to a step of two linear layers: the median of the differences of sixteen steps."""
    x = torch.randn(size, length, WIDTH)
    plain, ordered = (stepped(x, order) for order in (None, centering))
    for _ in range(8):  # the first passes are inspected
        plain(), ordered()
    return statistics.median(timed(ordered) - timed(plain) for _ in range(16))


def stepped(x: Tensor, centering: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    model, n = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 32 * len(x)
    order: Order = RandomReshuffling(n) if centering is None else GraB(model, n, centering=centering)
    draws = iter(BatchSampler(order.sampler, len(x), drop_last=False))

    def go() -> None:
        next(draws)
        model(x).square().mean().backward()
        order.step()
        model.zero_grad()

    return go


def herding_seconds(n: int, tolerance: float) -> float:
    z = np.random.default_rng(0).standard_normal((n, 128), dtype=np.float32)
    return timed(lambda: herding.herd(z, rounds=10, tolerance=tolerance))


def powers(base: int, first: int, last: int) -> list[int]:
    return [base**k for k in range(first, last + 1)]


def half_decades(first: int, last: int) -> list[int]:
    return [round(10 ** (k / 2)) for k in range(2 * first, 2 * last + 1)]


CURVES: dict[str, Curve] = {
    "drawing": Curve("n", half_decades(3, 7), drawing),
    "observe, mean": Curve("n", half_decades(3, 7), lambda n: observing("mean", n)),
    "observe, pair": Curve("n", half_decades(3, 7), lambda n: observing("pair", n)),
    "herd, ten rounds": Curve("n", half_decades(3, 6), lambda n: herding_seconds(n, 0.0)),
    "herd, tolerance 0.02": Curve("n", half_decades(3, 6), lambda n: herding_seconds(n, 0.02)),
    "given, mean, by d": Curve("d", half_decades(2, 6), lambda d: observing_batches("mean", d=d, size=64)),
    "given, pair, by d": Curve("d", half_decades(2, 6), lambda d: observing_batches("pair", d=d, size=64)),
    "given, mean, by B": Curve("B", powers(2, 3, 11), lambda size: observing_batches("mean", d=D, size=size)),
    "given, pair, by B": Curve("B", powers(2, 3, 11), lambda size: observing_batches("pair", d=D, size=size)),
    "layers, mean, by B": Curve("B", powers(2, 3, 11), lambda size: linear_layer("mean", size=size, length=1)),
    "layers, pair, by B": Curve("B", powers(2, 3, 11), lambda size: linear_layer("pair", size=size, length=1)),
    "layers, mean, by T": Curve("T", powers(2, 0, 10), lambda length: linear_layer("mean", size=16, length=length)),
    "layers, pair, by T": Curve("T", powers(2, 0, 10), lambda length: linear_layer("pair", size=16, length=length)),
}


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope in log-log over the upper half of the range."""
    middle = math.sqrt(sizes[0] * sizes[-1])
    upper = [(math.log(size), math.log(s)) for size, s in zip(sizes, seconds, strict=True) if size >= middle]
    x, y = zip(*upper, strict=True)
    return statistics.linear_regression(x, y).slope


def measure(curve: Curve) -> list[float]:
    found: dict[int, list[float]] = {size: [] for size in curve.sizes}
    curve.seconds(curve.sizes[0])  # compiled once
    for number in range(ROUNDS):
        for size, seconds in found.items():
            if number < 2 or seconds[0] < LONG:
                seconds.append(curve.seconds(size))
    return [max(statistics.median(seconds), 1e-9) for seconds in found.values()]


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    record = json.loads(FILE.read_text()) if FILE.exists() else {}
    record = record or provenance("python -m benchmarks growth") | {"load": {}, "curves": {}}
    results = {}
    for name, curve in CURVES.items():
        if name not in record["curves"]:
            seconds = measure(curve)
            record["curves"][name] = {"panel": curve.panel, "sizes": list(curve.sizes), "seconds": seconds}
            record["load"][name] = os.getloadavg()[0]
            FILE.parent.mkdir(parents=True, exist_ok=True)
            FILE.write_text(json.dumps(record, indent=1) + "\n")
        one = record["curves"][name]
        results[name] = one["exponent"] = exponent(one["sizes"], one["seconds"])
        shown = ", ".join(f"{size:,}: {s:.4g}" for size, s in zip(one["sizes"], one["seconds"], strict=True))
        print(f"  {name}: {curve.panel}^{results[name]:.2f}; seconds by {curve.panel}: {shown}", flush=True)
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    growth_chart(record["curves"], Path("docs/images/growth.png"))
    return results
