"""What ordering adds to a training step: the same loop under each order, interleaved, one thread.

Batches are made beforehand, so that a step is forward, loss, backward, ordering and optimizer, and the drawing of
indices; ``with a loader`` takes single examples from a DataLoader instead. ``whole batches`` are units of the size of a
batch, ordered by ``gradients="microbatch"``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from benchmarks.models import logistic, mlp, tiny_bert
from benchmarks.timing import interleaved, median_ratio
from ordain import GraB, Order, RandomReshuffling
from ordain.study.tasks.images import lenet
from ordain.study.tasks.language import LanguageModel

ROUNDS = 30  # short ones: a machine that others use is slow for seconds at a time
WARM_UP = 40  # steps
BATCHES = 8  # different ones: of one batch again and again, whole gradients differ by nothing but rounding


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and how many steps make a round."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    size: int
    steps: int
    loader: bool = False


def images(*shape: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, *shape), torch.randint(0, classes, (size,)))


def tokens(length: int, vocabulary: int, *, classes: int | None = None) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Words as frequent as in a text: the r-th with weight 1/r."""
    weights = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.multinomial(weights, size * length, replacement=True).view(size, length)
        return x, x.roll(-1, dims=1) if classes is None else torch.randint(0, classes, (size,))

    return batch


CASES = {
    "logistic": Case(logistic, images(784), 64, 40),
    "logistic with a loader": Case(logistic, images(784), 64, 20, loader=True),
    "mlp": Case(mlp, images(1024), 64, 4),  # as many as wait for each other
    "lenet": Case(lenet, images(3, 32, 32), 64, 4),
    "bert": Case(tiny_bert, tokens(32, 30_522, classes=2), 32, 4),
    "lstm": Case(lambda: LanguageModel(10_000), tokens(35, 10_000), 20, 4),
}
Build = Callable[[nn.Module, int], Order]
ORDERS: dict[str, Build] = {
    "rr": lambda model, n: RandomReshuffling(n),
    "mean": lambda model, n: GraB(model, n),
    "pair": lambda model, n: GraB(model, n, centering="pair"),
    "not learned": lambda model, n: GraB(model, n, learn=lambda epoch: False),  # an epoch that does not learn
}


def whole_batches(size: int) -> dict[str, Build]:
    def build(centering: Literal["mean", "pair"], *, last: bool = False) -> Build:
        def order(model: nn.Module, n: int) -> Order:
            params = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:] if last else None
            return GraB(model, n, centering=centering, params=params, gradients="microbatch", group=size)

        return order

    return {
        "whole batches, mean": build("mean"),
        "whole batches, pair": build("pair"),
        "whole batches, pair, last layer": build("pair", last=True),
    }


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), y.flatten())


def job(case: Case, build: Build) -> Callable[[], Any]:
    """A function that makes a round of training steps."""
    torch.manual_seed(0)
    model = case.build()
    n = case.size * (case.steps * (ROUNDS + 1) + WARM_UP)  # one epoch: its end comes rarely
    order = build(model, n)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    several = [case.batch(n if case.loader else case.size) for _ in range(1 if case.loader else BATCHES)]

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        if case.loader:
            yield from DataLoader(TensorDataset(*several[0]), batch_size=case.size, sampler=order.sampler)
        else:
            for _, batch in zip(BatchSampler(order.sampler, case.size, drop_last=False), cycle(several), strict=False):
                yield batch

    batches = draw()

    def go() -> None:
        for inputs, labels in islice(batches, case.steps):
            loss_of(model(inputs), labels).backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()

    return go


def run(names: list[str] | None = None) -> dict[str, float]:
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    for name in names or CASES:
        case = CASES[name]
        jobs = {order: job(case, build) for order, build in (ORDERS | whole_batches(case.size)).items()}
        for _ in range(WARM_UP // case.steps):  # the first passes are inspected, later ones rarely
            for one in jobs.values():
                one()
        seconds = interleaved(jobs, rounds=ROUNDS)
        base = statistics.median(seconds["rr"]) / case.steps
        ratios = {order: median_ratio(seconds[order], seconds["rr"]) for order in jobs if order != "rr"}
        results |= {f"{name}, {order}": ratio for order, ratio in ratios.items()}
        said = "; ".join(f"{order} {ratio:.2f}x" for order, ratio in ratios.items())
        print(f"  {name}, B={case.size}: RR {base * 1e3:.3f} ms a step; {said}")
    return results
