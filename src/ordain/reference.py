"""Literal implementations of the paper's algorithms: slow and obvious, for the tests to compare with.

One vector at a time, no Gram matrices, no blocks, no compiled code; the fast paths share nothing with them
except the stream of uniform random numbers. Everything is float64 NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Order = list[int]
# A balancing rule: (s, z, uniform number) -> +1, -1, or None where it fails.
Rule = Callable[[Vector, Vector, float], "int | None"]


def herding_objective(z: NDArray[Any], order: Sequence[int], norm: float = math.inf) -> float:
    """Eq. 3."""
    mean, total, worst = z.sum(axis=0) / len(z), np.zeros(z.shape[1]), 0.0
    for i in order:
        total = total + (z[i] - mean)
        worst = max(worst, float(np.linalg.norm(total, ord=norm)))
    return worst


def greedy(z: NDArray[Any]) -> Order:
    """Algorithm 1."""
    z = z - z.sum(axis=0) / len(z)
    s, candidates, order = np.zeros(z.shape[1]), list(range(len(z))), []
    for _ in range(len(z)):
        best = min(candidates, key=lambda j: float(np.linalg.norm(s + z[j])))
        candidates.remove(best)
        s = s + z[best]
        order.append(best)
    return order


def reorder(signs: Sequence[int], order: Sequence[int]) -> Order:
    """Algorithm 3."""
    positive: Order = []
    negative: Order = []
    for sign, index in zip(signs, order, strict=True):
        (positive if sign == +1 else negative).append(index)
    return positive + negative[::-1]


def deterministic(s: Vector, v: Vector, u: float = 0.0) -> int:
    """Algorithm 5."""
    return +1 if np.linalg.norm(s + v) < np.linalg.norm(s - v) else -1


def walk(c: float, *, largest: float = 0.0) -> Rule:
    """Algorithm 6, on vectors divided by the largest norm so far (``largest`` to begin with)."""
    bound = largest

    def rule(s: Vector, z: Vector, u: float) -> int | None:
        nonlocal bound
        candidate = max(bound, float(np.linalg.norm(z)))
        scale = candidate if candidate > 0 else 1.0
        inner = float((s / scale) @ (z / scale))
        if abs(inner) > c or float(np.abs(s / scale).max()) > c:
            return None  # Fail.
        bound = candidate
        return +1 if u < 1 / 2 - inner / (2 * c) else -1

    return rule


def kernel_halving(n: int, delta: float) -> Rule:
    """Kernel halving with a linear kernel and failure probability delta/n for each of n vectors."""
    variance = 0.0

    def rule(s: Vector, z: Vector, u: float) -> int:
        nonlocal variance
        b = float(np.linalg.norm(z))
        a = max(b * math.sqrt(variance) * math.sqrt(2 * math.log(2 * n / delta)), b * b)
        if a == 0:
            return +1 if u < 1 / 2 else -1
        variance += b * b * max(0.0, 1 + (b * b - 2 * a) * variance / (a * a))
        probability = min(1.0, max(0.0, (1 - float(s @ z) / a) / 2))
        return +1 if u < probability else -1

    return rule


def balance(z: Iterable[Vector], rule: Rule, u: Sequence[float] | None = None) -> list[int] | None:
    """Online vector balancing; None where the rule fails."""
    signs: list[int] = []
    s: Any = 0.0
    for t, vector in enumerate(z):
        s = s + np.zeros_like(vector)
        sign = rule(s, vector, u[t] if u is not None else 0.0)
        if sign is None:
            return None
        s = s + sign * vector
        signs.append(sign)
    return signs


def herd(z: NDArray[Any], *, rounds: int = 10, tolerance: float = 0.0) -> Order:
    """Algorithm 3 repeated, with Algorithm 5's signs, until a round lowers the largest prefix sum by less."""
    centred = z - z.sum(axis=0) / len(z)
    order = list(range(len(z)))
    before, bound = order, math.inf
    for _ in range(rounds):
        largest = herding_objective(z, order, norm=2)
        if tolerance and largest > (1.0 - tolerance) * bound:
            return order if largest < (1.0 - 1e-6) * bound else before
        before, bound = order, largest
        signs = balance((centred[i] for i in order), deterministic)
        assert signs is not None
        order = reorder(signs, order)
    return order


def herd_pairs(z: NDArray[Any], *, rounds: int = 10) -> Order:
    """The same on differences of consecutive vectors."""
    book = PairGraB(range(len(z)), z.shape[1])
    for _ in range(rounds):
        for i in book.sigma:
            book.see(z[i])
        book.next_order()
    return book.sigma


def _online(rule: Rule, s: Vector, z: Vector, u: float) -> int:
    """Where the rule fails there is nothing to restart: Algorithm 5 for this vector."""
    sign = rule(s, z, u)
    return deterministic(s, z) if sign is None else sign


class GraB:
    """Algorithm 4's order, fed one gradient at a time (the optimizer step is the caller's)."""

    def __init__(self, order: Sequence[int], d: int, rule: Rule = deterministic) -> None:
        self.sigma, self.rule = list(order), rule
        self.m_next = np.zeros(d)  # stale mean, m_1 = 0
        self._begin()

    def _begin(self) -> None:
        n = len(self.sigma)
        self.l, self.r, self.t = 0, n - 1, 0
        self.m, self.s, self.m_next = self.m_next, np.zeros_like(self.m_next), np.zeros_like(self.m_next)
        self.sigma_next = [-1] * n

    def see(self, gradient: Vector, u: float = 0.0) -> int:
        centred = gradient - self.m
        self.m_next = self.m_next + gradient / len(self.sigma)
        sign = _online(self.rule, self.s, centred, u)
        self.s = self.s + sign * centred
        if sign == +1:
            self.sigma_next[self.l] = self.sigma[self.t]
            self.l += 1
        else:
            self.sigma_next[self.r] = self.sigma[self.t]
            self.r -= 1
        self.t += 1
        return sign

    def next_order(self) -> Order:
        """End the epoch: sigma_{k+1}."""
        assert self.t == len(self.sigma)
        self.sigma = self.sigma_next
        self._begin()
        return list(self.sigma)


class PairGraB:
    """Pair balancing: the sign of g_first - g_second decides which of the two goes to the front."""

    def __init__(self, order: Sequence[int], d: int, rule: Rule = deterministic) -> None:
        self.sigma, self.rule = list(order), rule
        self._begin(d)

    def _begin(self, d: int) -> None:
        self.s, self.t = np.zeros(d), 0
        self.front: Order = []
        self.back: Order = []
        self.waiting: Vector | None = None

    def see(self, gradient: Vector, u: float = 0.0) -> None:
        if self.waiting is None:
            self.waiting = gradient.copy()
        else:
            z = self.waiting - gradient
            first, second = self.sigma[self.t - 1], self.sigma[self.t]
            sign = _online(self.rule, self.s, z, u)
            self.s = self.s + sign * z
            self.front.append(first if sign == +1 else second)
            self.back.append(second if sign == +1 else first)
            self.waiting = None
        self.t += 1

    def next_order(self) -> Order:
        """End the epoch; an odd last example takes the middle place."""
        assert self.t == len(self.sigma)
        middle = [self.sigma[-1]] if self.waiting is not None else []
        self.sigma = self.front + middle + self.back[::-1]
        self._begin(len(self.s))
        return list(self.sigma)
