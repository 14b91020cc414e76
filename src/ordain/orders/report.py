"""How good an epoch's order was by its gradients, and how good an order can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ordain import herding

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
    """

    epoch: int
    examples: int
    noise: float
    visited: float
    possible: float

    @property
    def kept(self) -> float:
        """The share of herding's possible gain that the visited order had: 1 is all, 0 is no better than random."""
        return (1 - self.visited) / (1 - self.possible) if self.possible < 1 else 0.0

    def __str__(self) -> str:
        said = [
            f"Epoch {self.epoch}, {self.examples:,} gradients, of which {100 * self.noise:.0f} % is noise.",
            f"Largest prefix sum, random order = 1: {self.visited:.2f} as visited, {self.possible:.2f} after herding.",
        ]
        if self.epoch == 0:
            said.append("The first order is random. After the next epoch this says how much of the gain is left.")
        elif self.kept >= _HOLDS:
            said.append("The order that was found an epoch ago still holds: gradients change slowly enough.")
        elif self.kept >= _STALE:
            said.append("Gradients change, so part of what the order found an epoch ago gained is lost.")
        else:
            said.append("Gradients change too much within an epoch for an order to hold: do not expect a gain here.")
        return " ".join(said)


def report(epoch: int, z: Tensor, *, seed: int) -> Report:
    """``z`` are gradients ``[n, d]`` in the order in which they were visited."""
    rows, n = z.double(), len(z)
    mean = rows.mean(dim=0)
    square = float(mean @ mean)
    variance = max(0.0, float(rows.square().sum(dim=1).mean()) - square)
    rng = np.random.default_rng(seed)
    random = np.mean([herding.herding_objective(z, rng.permutation(n), norm=2) for _ in range(_RANDOM)])
    found = [herding.herding_objective(z, order, norm=2) for order in (np.arange(n), herding.herd(z))]
    visited, possible = (float(value / random) if random else 1.0 for value in found)
    return Report(epoch, n, variance / (variance + square) if variance + square else 0.0, visited, possible)
