"""Small problems whose constants are known exactly: f_i(w) = h(w) - <b_i, w>, where the b_i sum to zero.

h is a sum over coordinates with its minimum 0 at w = 0, and equals the mean loss f. An example's gradient differs from
the mean gradient by b_i at every w, so Assumption 3 holds on all of R^d, which is true of few problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ordain.theory import Constants

Floats = NDArray[np.float64]

LABELS = {
    "quadratic": "quadratic, strongly convex",
    "kinked": "kinked, strongly convex",
    "sine": "PL, not convex",
    "noisy": "PL, not convex, noisy",
}
QUADRATIC, KINKED, SINE = range(3)  # the kinds of h in the compiled loop
SINE_MU = 0.1755  # of x^2 + 3 sin(x)^2: min of h'^2/2h, at x = 2.2017 (tests); the literature has 1/32


@dataclass(frozen=True)
class Objective:
    """``kind`` is one of the compiled loop's; ``low`` and ``high`` are curvatures ``[d]``.

    - quadratic: h_j = low_j x^2 / 2.
    - kinked: h_j = high_j x^2 / 2 for x < 0, low_j x^2 / 2 for x >= 0. A random walk around the kink feels a
      force on average, unlike at the minimum of a smooth function with small steps: RR's rate is tight here.
    - sine: h_j = x^2 + 3 sin(x)^2, with curvatures from -4 to 8, started where they are negative.
    """

    kind: int
    low: Floats
    high: Floats
    b: Floats
    start: Floats

    @cached_property
    def constants(self) -> Constants:
        """Exact: Hessians are diagonal, so |H|_inf is the largest curvature and |H v|_2 is largest at v = 1."""
        return Constants(
            L=float(self.high.max()),
            L_2inf=float(np.linalg.norm(self.high)),
            L_inf=float(self.high.max()),
            varsigma=float(np.linalg.norm(self.b, axis=1).max()),
            F=self.gap(self.start),
            mu=SINE_MU if self.kind == SINE else float(self.low.min()),
        )

    def gap(self, w: Floats) -> float:
        """f(w) - f*, which is h(w)."""
        if self.kind == SINE:
            return float((w**2 + 3 * np.sin(w) ** 2).sum())
        return float((self._curvature(w) * w**2).sum() / 2)

    def gradient(self, w: Floats) -> Floats:
        """Grad f(w)."""
        return 2 * w + 3 * np.sin(2 * w) if self.kind == SINE else self._curvature(w) * w

    def _curvature(self, w: Floats) -> Floats:
        return np.where(w < 0, self.high, self.low)


def objective(name: str, *, n: int, d: int, seed: int) -> Objective:
    """One of :data:`LABELS` with n random examples."""
    b = np.random.default_rng([n, d, seed]).normal(size=(n, d))
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    b -= b.mean(axis=0)
    one = np.ones(d)
    if name == "quadratic":
        q = np.linspace(0.25, 1.0, d)
        return Objective(QUADRATIC, q, q, b, one / np.sqrt(d))
    if name == "kinked":
        return Objective(KINKED, 0.25 * one, one, b, one / np.sqrt(d))
    # "noisy": varsigma^2 far above F L, so that small mean gradients take small steps, as the non-convex rates assume.
    return Objective(SINE, -4 * one, 8 * one, (1000 if name == "noisy" else 4) * b, 1.5 * one)
