"""Is it worth learning again only when the order has gone stale? Schedules of GraB compared by loss and learned epochs.

    python -m benchmarks.schedules

Logistic regression on 10,000 images of MNIST, batches of 64, 20 epochs. "Adaptive" learns in the first two epochs, and
again once the mean loss of an epoch has changed by a share since the last epoch that learned.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler

from benchmarks.layers import images
from ordain import Always, Every, GraB, Until
from ordain.study.report.statistics import compare

EPOCHS, SIZE, SEEDS = 20, 64, 10


class Adaptive:
    """Needs the loss, so that it is no function of the epoch: a trial, not a schedule that could be saved."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._losses: list[float] = []
        self._decided: dict[int, bool] = {}

    def __call__(self, epoch: int) -> bool:
        if epoch not in self._decided:  # an order may ask more than once
            self._decided[epoch] = epoch < 2 or self._stale(epoch)
        return self._decided[epoch]

    def _stale(self, epoch: int) -> bool:
        then = self._losses[max(past for past, learned in self._decided.items() if learned)]
        return abs(self._losses[epoch - 1] - then) > self._share * then

    def tell(self, loss: float) -> None:
        self._losses.append(loss)


SCHEDULES: dict[str, Callable[[], Any]] = {
    "in every epoch": Always,
    "the first epoch": lambda: Until(1),
    "Every(3, after=2)": lambda: Every(3, after=2),
    "Every(5, after=3)": lambda: Every(5, after=3),
    "adaptive, 2 %": lambda: Adaptive(0.02),
    "adaptive, 5 %": lambda: Adaptive(0.05),
    "adaptive, 10 %": lambda: Adaptive(0.10),
}


def run(rate: float, decay: bool, schedule: Any, seed: int, data: Any) -> tuple[float, int]:
    """The final training loss, and the number of epochs that learned."""
    x, y, _, _ = data
    torch.manual_seed(seed)
    model = nn.Linear(784, 10)
    learned = set()

    def learn(epoch: int) -> bool:
        now = schedule(epoch)
        learned.update({epoch} if now else ())
        return now

    order = GraB(model, len(y), centering="pair", seed=seed, learn=learn)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    steps = EPOCHS * -(-len(y) // SIZE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decay else None
    for _ in range(EPOCHS):
        total = 0.0
        for rows in BatchSampler(order.sampler, SIZE, drop_last=False):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            order.step()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(rows)
            if scheduler is not None:
                scheduler.step()
        if isinstance(schedule, Adaptive):
            schedule.tell(total / len(y))
    order.detach()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).item(), len(learned)


def main() -> None:
    torch.set_num_threads(1)
    x, y, *rest = images("mnist", 10_000, 100)
    data = (x.flatten(1), y, *rest)
    for rate, decay in ((0.02, False), (0.02, True)):
        print(f"rate {rate}, {'cosine' if decay else 'constant'}")
        base: dict[int, float] = {}
        for name, make in SCHEDULES.items():
            found = [run(rate, decay, make(), seed, data) for seed in range(SEEDS)]
            losses = {seed: loss for seed, (loss, _) in enumerate(found)}
            base = base or losses
            p = compare(losses, base).p
            count = statistics.mean(learned for _, learned in found)
            said = "" if p is None else f", p {p:.2g}"
            print(
                f"  {name}: loss {statistics.mean(losses.values()):.5f}{said}, learned in {count:g} epochs", flush=True
            )


if __name__ == "__main__":
    main()
