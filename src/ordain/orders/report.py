"""How good an epoch's order was by its gradients, how good an order can be, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from torch import Tensor

from ordain import herding
from ordain.orders.steps import Clock

_RANDOM = 5  # random orders to compare with
_HOLDS, _STALE = 0.5, 0.2


@dataclass(frozen=True)
class Report:
    """Statistics of the gradients that were observed in one epoch.

    Attributes:
        epoch: the epoch.
        examples: the number of gradients (of units, with ``group=``).
        noise: the share of a single gradient that is not the mean: tr Cov / (tr Cov + abs(mean)^2).
        visited: the largest prefix sum (Eq. 3, l2) in the order visited, relative to a random order's.
        possible: the same for the order that herding finds for them.
        cost: time of ``step()`` and of herding in this epoch, over that of everything else from its first step to its
            last (without what hooks add to forward and backward); None with ``observe()``.
    """

    epoch: int
    examples: int
    noise: float
    visited: float
    possible: float
    cost: float | None = None

    @property
    def kept(self) -> float:
        """The share of herding's possible gain that the visited order had: 1 is all, 0 is no better than random."""
        return (1 - self.visited) / (1 - self.possible) if self.possible < 1 else 0.0

    @property
    def advice(self) -> str:
        """What to do, as far as gradients can tell; whether the gain is worth the time, only a trial can."""
        more = "" if self.cost is None else f" for {1 + self.cost:.2f} times as many epochs"
        if self.epoch == 0:
            return "The first order is random: ask again after the next epoch."
        if self.kept >= _HOLDS:
            return f"Try it: the order of an epoch ago still holds. Compare with a run of random reshuffling{more}."
        if self.kept >= _STALE:
            return (
                "It may help: gradients change, so part of what the order of an epoch ago gained is lost. "
                f"Compare with a run of random reshuffling{more}."
            )
        return "Do not use it here: gradients change too much within an epoch for an order to hold."

    def __str__(self) -> str:
        said = [
            f"Epoch {self.epoch}, {self.examples:,} gradients, of which {100 * self.noise:.0f} % is noise.",
            f"Largest prefix sum, random order = 1: {self.visited:.2f} as visited, {self.possible:.2f} after herding.",
        ]
        if self.cost is not None:
            said.append(f"Ordering added {100 * self.cost:.0f} % to the time of this epoch.")
        return " ".join([*said, self.advice])


def report(epoch: int, z: Tensor, *, seed: int, clock: Clock) -> Report:
    """``z`` are gradients ``[n, d]`` in the order in which they were visited."""
    rows, n = z.double(), len(z)
    mean = rows.mean(dim=0)
    square = float(mean @ mean)
    variance = max(0.0, float(rows.square().sum(dim=1).mean()) - square)
    noise = variance / (variance + square) if variance + square else 0.0
    start = perf_counter()
    herded = herding.herd(z)
    cost = clock.cost(perf_counter() - start)
    rng = np.random.default_rng(seed)
    random = np.mean([herding.herding_objective(z, rng.permutation(n), norm=2) for _ in range(_RANDOM)])
    found = [herding.herding_objective(z, order, norm=2) for order in (np.arange(n), herded)]
    visited, possible = (float(value / random) if random else 1.0 for value in found)
    return Report(epoch, n, noise, visited, possible, cost)
