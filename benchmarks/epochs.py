"""Whole epochs of the settings that are meant to pay, over epochs of reshuffling; and the fixed cost of a step.

All work of an order is in it: drawing, hooks, signs or stored rows, and what is done at the turn of an epoch. Processor
time of one thread, each round an epoch of every order in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from benchmarks.models import logistic, mlp, tiny_bert
from benchmarks.step import images, loss_of, tokens
from benchmarks.timing import median_ratio
from ordain import Every, GraB, Herding, Order, RandomReshuffling
from ordain.study.tasks.images import lenet, resnet
from ordain.study.tasks.language import Gpt, LanguageModel

ROUNDS = 10
STEPS = 40  # an epoch
WARM_UP = 2  # epochs: the first passes are inspected


Batch = Callable[[int], tuple[Tensor, Tensor]]
CASES: dict[str, tuple[Callable[[], nn.Module], Batch, int]] = {
    "logistic": (logistic, images(784), 64),
    "lenet, B = 16": (lenet, images(3, 32, 32), 16),
    "lenet, B = 64": (lenet, images(3, 32, 32), 64),
    "resnet": (resnet, images(3, 32, 32), 64),
    "bert": (tiny_bert, tokens(32, 30_522, classes=2), 32),
    "gpt": (Gpt, tokens(64, 128), 16),
    "mlp": (mlp, images(1024), 64),
    "lstm": (lambda: LanguageModel(10_000), tokens(35, 10_000), 20),
}


def part(model: nn.Module) -> str:
    """What to order by: the head, or the recurrent layer where the only linear one is over the vocabulary."""
    return "lstm" if hasattr(model, "lstm") else "head"


ORDERS: dict[str, Callable[[nn.Module, int], Order]] = {
    "rr": lambda model, n: RandomReshuffling(n),
    "herding": lambda model, n: Herding(model, n, params=part(model), sketch=1024),
    "grab": lambda model, n: GraB(model, n, params=part(model), centering="pair"),
    "herding, lazy": lambda model, n: Herding(model, n, params=part(model), sketch=1024, learn=Every(3)),
    "grab, lazy": lambda model, n: GraB(model, n, params=part(model), centering="pair", learn=Every(5)),
}
CYCLES = {"herding, lazy": 3, "grab, lazy": 5}  # epochs, of which one learns


def epoch_of(build: Callable[[], nn.Module], batch: Batch, size: int, order_of: Any, steps: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = build()
    order: Order = order_of(model, size * steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = [batch(size) for _ in range(8)]

    def go() -> None:
        for number, _ in enumerate(BatchSampler(order.sampler, size, drop_last=False)):
            x, y = batches[number % len(batches)]
            loss_of(model(x), y).backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()

    return go


def timed(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(WARM_UP + rounds):
        for name, job in jobs.items():
            began = time.thread_time()
            job()
            if number >= WARM_UP:
                seconds[name].append(time.thread_time() - began)
    return seconds


def fixed() -> dict[str, float]:
    """Milliseconds a step where there is next to nothing to order by: a 64-10 head, B = 64."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def hooked() -> nn.Module:
        model = build()
        model.register_forward_pre_hook(lambda *_: None)
        model[2].register_forward_hook(lambda *_: None)
        model[2].register_full_backward_hook(lambda *_: None)
        return model

    steps, rr = 100, ORDERS["rr"]
    jobs = {name: epoch_of(build, images(64), 64, order_of, steps) for name, order_of in ORDERS.items()}
    jobs["empty hooks"] = epoch_of(hooked, images(64), 64, rr, steps)
    seconds = timed(jobs, 15)
    base = statistics.median(seconds["rr"])
    extra = {name: (statistics.median(times) - base) / steps * 1e3 for name, times in seconds.items() if name != "rr"}
    print(f"  a step of reshuffling {base / steps * 1e3:.3f} ms; more for:")
    for name, milliseconds in extra.items():
        print(f"    {name}: {milliseconds:.3f} ms")
    return {f"fixed cost, {name}, ms": extra[name] for name in ("herding", "grab")}


def run(names: list[str] | None = None) -> dict[str, float]:
    torch.set_num_threads(1)
    results = fixed()
    for name in names or CASES:
        build, batch, size = CASES[name]
        jobs = {order: epoch_of(build, batch, size, order_of, STEPS) for order, order_of in ORDERS.items()}
        seconds = timed(jobs, ROUNDS)
        base = statistics.median(seconds["rr"]) / STEPS
        said = []
        for order in ORDERS:
            if order != "rr":
                pairs = seconds[order], seconds["rr"]
                if cycle := CYCLES.get(order):
                    whole = ROUNDS // cycle * cycle
                    pairs = [sum(seconds[order][:whole])], [sum(seconds["rr"][:whole])]
                results[f"{name}, {order}"] = median_ratio(*pairs)
                said.append(f"{order} {results[f'{name}, {order}']:.3f}x")
        print(f"  {name}: RR {base * 1e3:.2f} ms a step; {', '.join(said)}", flush=True)
    return results


if __name__ == "__main__":
    run()
