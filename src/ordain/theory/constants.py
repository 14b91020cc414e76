"""The constants of a problem that the theorems need, and two functions of their formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ordain.errors import InputError


@dataclass(frozen=True)
class Constants:
    """The constants of Assumptions 1 to 3, under the paper's names. All must hold at every w.

    Attributes:
        L: smoothness of the mean loss, l2 to l2 (Assumption 1).
        L_2inf: the largest smoothness of one example's loss, l-inf distances to l2 gradients (Assumption 1).
        L_inf: the same, l-inf to l-inf (Assumption 1).
        varsigma: the largest l2 distance of an example's gradient from the mean gradient (Assumption 3).
        F: f(w_1) - f*, how far training starts above the infimum.
        mu: of the PL condition, 1/2 |grad f|^2 >= mu (f - f*) (Assumption 2); None where it need not hold.
    """

    L: float
    L_2inf: float
    L_inf: float
    varsigma: float
    F: float
    mu: float | None = None

    def __post_init__(self) -> None:
        remedy = "The constants are defined in the paper's Assumptions 1 to 3."
        for name in ("L", "L_2inf", "L_inf", "F"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)!r}", expected="a positive number", remedy=remedy)
        if not 0 <= self.varsigma < math.inf:
            raise InputError(f"varsigma={self.varsigma!r}", expected="a number >= 0", remedy=remedy)
        # |grad f|^2 <= 2 L (f - f*) for every L-smooth f, so a larger mu cannot be right.
        if self.mu is not None and not 0 < self.mu <= self.L:
            raise InputError(
                f"mu={self.mu!r}",
                expected=f"0 < mu <= L = {self.L:g}, or None",
                remedy="The PL constant of a smooth function is at most its smoothness.",
            )


def lambert_w(x: float) -> float:
    """Lambert's W_0 for x >= 0: the w with w e^w = x.

    >>> w = lambert_w(10.0)
    >>> round(w * math.exp(w), 12)
    10.0
    """
    if not 0 <= x < math.inf:
        raise InputError(f"x={x!r}", expected="a number >= 0", remedy="W_0 of the theorems is taken there only.")
    if x < 1e-8:
        return x  # W(x) = x - x^2 + ...: exact in float64
    # Newton on w + log w = log x, which neither over- nor underflows and converges quadratically from here.
    w = math.log1p(x) if x < math.e else max(math.log(x) - math.log(math.log(x)), 0.5)
    for _ in range(20):
        step = (w + math.log(w) - math.log(x)) * w / (1 + w)
        w -= step
        if abs(step) <= 1e-15 * w:
            break
    return w


def walk_bound(n: int, d: int, *, delta: float = 0.01) -> float:
    """Theorem 4's balancing bound A = 30 log(nd/delta), or n where that is smaller.

    No signed sum of n vectors of norm at most 1 is longer than n, so the smaller of the two holds (with
    probability 1 - delta). It is the only bound the paper proves: none is known for Algorithm 5.
    """
    if n < 1 or d < 1 or not 0 < delta < 1:
        raise InputError(
            f"n={n}, d={d}, delta={delta}", expected="n, d >= 1 and 0 < delta < 1", remedy="See Theorem 4."
        )
    return min(float(n), 30.0 * math.log(n * d / delta))
