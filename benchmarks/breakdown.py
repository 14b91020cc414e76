"""Where a training step's time goes under ours, at B = 64: milliseconds of processor time, by part.

Timers stand around the parts of ``order.step()``; ``hooks`` is what forward and backward take more than under
reshuffling. Steps of all orders are interleaved, and each number is a median over steps.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import BatchSampler

from benchmarks.contenders import CASES, optimizer_of
from ordain import GraB, Herding, Order, RandomReshuffling
from ordain.gradients import Factored, Sketch
from ordain.gradients.sources.exact import ExactSource
from ordain.kernels import linear_layer, signs
from ordain.orders.offline_herding import HerdingLearner
from ordain.study.runs.run_folder import provenance

FILE = Path("results/peers/breakdown.json")
SIZE, WARM_UP, STEPS = 64, 40, 60
ORDERS: dict[str, Callable[[nn.Module, int], Order]] = {
    "RR": lambda model, n: RandomReshuffling(n),
    "mean": lambda model, n: GraB(model, n),
    "pair": lambda model, n: GraB(model, n, centering="pair"),
    "pair, head": lambda model, n: GraB(model, n, params="head", centering="pair"),
    "herding, head": lambda model, n: Herding(model, n, params="head", sketch=1024),
}
# The compiled pass of a single linear layer computes products, signs and sums together.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "collect": [(ExactSource, "collect")],
    "products": [(Factored, "products"), (Factored, "paired_products")],
    "signs": [(signs, "batch_signs")],
    "sums": [(Factored, "add_signed"), (Factored, "weighted_sum")],
    "one pass": [(linear_layer, "layer_signs")],
    "store": [(Sketch, "__call__"), (HerdingLearner, "learn")],
}


class Timers:
    """Seconds spent in each part; a part inside another counts as the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = False

    @contextmanager
    def standing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, places in PARTS.items():
                for owner, name in places:
                    stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside, start = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds[part] += time.process_time() - start
                self._inside = False

        return timed


def stepper(case: str, make: Callable[[nn.Module, int], Order]) -> Callable[[], dict[str, float]]:
    """A function that makes a step and returns the milliseconds of each of its parts."""
    build, batch = CASES[case]
    torch.manual_seed(0)
    model = build()
    order = make(model, SIZE * (WARM_UP + STEPS + 1))
    optimizer, (x, y) = optimizer_of(model), batch(SIZE)
    draws = iter(BatchSampler(order.sampler, SIZE, drop_last=False))
    clock = time.process_time

    def step() -> dict[str, float]:
        timers = Timers()
        with timers.standing():
            marks = [clock()]
            next(draws)
            marks.append(clock())
            nn.functional.cross_entropy(model(x), y).backward()
            marks.append(clock())
            order.step()
            marks.append(clock())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(clock())
        spent = dict(
            zip(
                ("draw", "forward and backward", "order", "optimizer"), (b - a for a, b in pairwise(marks)), strict=True
            )
        )
        rest = spent["order"] - sum(timers.seconds.values())
        return {part: s * 1e3 for part, s in (spent | timers.seconds | {"rest": rest}).items()}

    return step


def measure(case: str) -> dict[str, dict[str, float]]:
    steppers = {name: stepper(case, make) for name, make in ORDERS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ORDERS}
    for number in range(WARM_UP + STEPS):
        for name, step in steppers.items():
            one = step()
            if number >= WARM_UP:
                found[name].append(one)
    spent = {
        name: {part: statistics.median(one[part] for one in each) for part in each[0]} for name, each in found.items()
    }
    for parts in spent.values():
        parts["hooks"] = parts["forward and backward"] - spent["RR"]["forward and backward"]
    return spent


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    record = provenance("python -m benchmarks breakdown") | {"load": [], "spent": {}}
    columns = ("hooks", *PARTS, "rest")
    print(f"  ms a step, B={SIZE}; RR: the whole step")
    print(f"  {'':25}{'RR':>9}" + "".join(f"{column:>10}" for column in columns))
    for case in CASES:
        record["spent"][case] = spent = measure(case)
        record["load"].append(os.getloadavg()[0])
        base = sum(spent["RR"][part] for part in ("draw", "forward and backward", "order", "optimizer"))
        for name, parts in spent.items():
            if name != "RR":
                print(f"  {case:10}{name:15}{base:9.3f}" + "".join(f"{parts[c]:10.3f}" for c in columns), flush=True)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    return {}
