"""Theorem 1 (SGD with offline herding, Alg. 2) and Theorem 3 (GraB, Alg. 4): step sizes and bounds.

``n`` examples, ``epochs`` = K, constant step size alpha. Each theorem has two cases: smooth and non-convex,
where the mean over epochs of |grad f(w_k)|^2 is bounded, and PL (the names that end in ``_pl``), where
f(w) - f* after the last epoch is.

A ``*_step`` is the theorem's step size and a ``*_bound`` its right-hand side, both as stated. A ``*_proved`` is
the inequality that the proof reaches before it chooses alpha, at any alpha the proof allows: what the stated
bound should follow from. docs/theory.md lists where it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ordain.errors import InputError
from ordain.theory.constants import Constants, lambert_w


@dataclass(frozen=True)
class _Setting:
    """The arguments of the formulas; ``reach`` is H (Assumption 4) or A (Assumption 5), called ``name``."""

    c: Constants
    n: int
    K: int
    reach: float
    name: str

    def __post_init__(self) -> None:
        counts = (("n", self.n, "Pass len(dataset)."), ("epochs", self.K, "Pass the number of epochs K."))
        for name, count, remedy in counts:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{name}={count!r}", expected="an integer, at least 1", remedy=remedy)
        if not 0 < self.reach < math.inf:
            raise InputError(
                f"{self.name}={self.reach!r}", expected="a positive number", remedy="See walk_bound() for the paper's."
            )

    @property
    def noise(self) -> float:
        """H^2 varsigma^2 L_{2,inf}^2, or A^2 ..."""
        return (self.reach * self.c.varsigma * self.c.L_2inf) ** 2

    @property
    def mu(self) -> float:
        if self.c.mu is None:
            raise InputError("constants without mu", expected="a PL constant", remedy="Pass Constants(..., mu=...).")
        return self.c.mu

    def step(self, factor: float) -> float:
        """The alpha that balances the first and the last term of the non-convex bound, or the limit."""
        best = float((self.c.F / (factor * self.n * self.noise * self.K)) ** (1 / 3)) if self.noise else math.inf
        return min(self.limit(), best)

    def lambert(self, factor: float) -> float:
        """W_0((F + varsigma^2) n^2 mu^3 K^2 / (factor H^2 L_{2,inf}^2 varsigma^2))."""
        top = (self.c.F + self.c.varsigma**2) * self.n**2 * self.mu**3 * self.K**2
        return lambert_w(top / (factor * self.noise)) if self.noise else math.inf

    def step_pl(self, factor: float) -> float:
        return min(self.limit_pl(), 2 / (self.n * self.mu * self.K) * self.lambert(factor))

    def bound(self, leading: float, smooth: float, reaching: float) -> float:
        """The non-convex case, with the three numbers in which the theorems differ."""
        c = self.c
        rest = smooth * c.F * (c.L + c.L_2inf + c.L_inf) + c.varsigma**2
        rest += reaching * c.F * self.reach * c.L_2inf / self.n
        return float(leading * (self.noise * (c.F / (self.n * self.K)) ** 2) ** (1 / 3) + rest / self.K)

    def bound_pl(self, factor: float, inside: float) -> float:
        w = self.lambert(inside) if self.noise else 0.0
        return factor * self.noise / (self.n**2 * self.mu**3 * self.K**2) * w * (1 + w)

    def proved(self, step: float | None, factor: float, *, first: float, every: float) -> float:
        """Lemma 1 with the sum of Delta_k^2 bounded by Lemma 3 (Theorem 1) or Lemma 4 (Theorem 3)."""
        alpha = _allowed(self.step(factor) if step is None else step, self.limit())
        c, square = self.c, (alpha * self.n * self.c.L_2inf) ** 2
        right = 2 * c.F / (alpha * self.n * self.K)
        right += first * square * c.varsigma**2 / self.K + every * alpha**2 * self.noise
        return right / (1 - 48 * square)  # the left side's share; alpha <= limit() keeps it above 0

    def proved_pl(self, step: float | None, factor: float, *, first: float, every: float) -> float:
        alpha = _allowed(self.step_pl(factor) if step is None else step, self.limit_pl())
        c, rho = self.c, 1 - alpha * self.n * self.mu / 2
        start = c.F + first * alpha * self.n * (alpha * self.n * c.L_2inf * c.varsigma) ** 2
        return float(rho**self.K * start + every * alpha**2 * self.noise / self.mu)

    def limit(self, factor: int = 1) -> float:
        """The largest alpha that the proof allows."""
        c, n, reach = self.c, self.n, self.reach
        if self.name == "herding":
            return min(1 / (8 * n * (c.L + c.L_2inf)), 1 / (32 * n * c.L_inf), 1 / (16 * reach * c.L_2inf))
        return min(1 / (n * c.L), 1 / (26 * factor * (n + reach) * c.L_2inf), 1 / (260 * factor * n * c.L_inf))

    def limit_pl(self) -> float:
        c, n, largest = self.c, self.n, 1 / (self.n * self.mu)
        if self.name == "herding":
            return min(largest, 1 / (48 * self.reach * c.L_2inf), 1 / (96 * n * (c.L + c.L_2inf + c.L_inf)))
        return min(largest, self.limit(2))


def _allowed(alpha: float, limit: float) -> float:
    if not 0 < alpha <= limit * (1 + 1e-12):
        raise InputError(
            f"a step size of {alpha!r}",
            expected=f"0 < alpha <= {limit:.6g}, the largest that the proof allows here",
            remedy="Leave step=None for the theorem's step size.",
        )
    return alpha


# --- Theorem 1: offline herding -----------------------------------------------------------------------


def herding_step(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's alpha for smooth non-convex f, given the herding bound H (Assumption 4).

    >>> c = Constants(L=1.0, L_2inf=2.0, L_inf=1.0, varsigma=1.0, F=1.0)
    >>> herding_step(c, n=100, epochs=10, herding=4.0) == 1 / (32 * 100 * 1.0)
    True
    """
    return _Setting(c, n, epochs, herding, "herding").step(24)


def herding_bound(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's bound on (1/K) sum_k |grad f(w_k)|^2, as stated.

    The proof gives 128 F L_inf / K where 32 F L_inf / K is stated: see :func:`herding_proved`.
    """
    return _Setting(c, n, epochs, herding, "herding").bound(36, 32, 64)


def herding_proved(c: Constants, *, n: int, epochs: int, herding: float, step: float | None = None) -> float:
    """Theorem 1's proof, at the theorem's step size or any other that it allows."""
    return _Setting(c, n, epochs, herding, "herding").proved(step, 24, first=16, every=48)


def herding_step_pl(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's alpha under the PL condition, with Lambert's W."""
    return _Setting(c, n, epochs, herding, "herding").step_pl(192)


def herding_bound_pl(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """The last line of Theorem 1's proof for PL: the closed form behind the stated O~(H^2 ... / n^2 K^2).

    It holds where the Lambert W term is the smallest in :func:`herding_step_pl`, that is for large K.
    """
    return _Setting(c, n, epochs, herding, "herding").bound_pl(288, 192)


def herding_proved_pl(c: Constants, *, n: int, epochs: int, herding: float, step: float | None = None) -> float:
    """Theorem 1's proof for PL: a bound on f - f* after K epochs at any alpha it allows."""
    return _Setting(c, n, epochs, herding, "herding").proved_pl(step, 192, first=32, every=24)


# --- Theorem 3: GraB ----------------------------------------------------------------------------------


def grab_step(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's alpha for smooth non-convex f, given the balancing bound A (Assumption 5).

    >>> c = Constants(L=1.0, L_2inf=2.0, L_inf=1.0, varsigma=1.0, F=1.0)
    >>> grab_step(c, n=100, epochs=10, balancing=4.0) == 1 / (260 * 100 * 1.0)
    True
    """
    return _Setting(c, n, epochs, balancing, "balancing").step(32)


def grab_bound(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's bound on (1/K) sum_k |grad f(w_k)|^2, as stated, with its H read as A.

    Smaller than what the proof gives (26 for 11, 1040 L_inf for 65, 104 for 8): see :func:`grab_proved`.
    """
    return _Setting(c, n, epochs, balancing, "balancing").bound(11, 65, 8)


def grab_proved(c: Constants, *, n: int, epochs: int, balancing: float, step: float | None = None) -> float:
    """Theorem 3's proof, at the theorem's step size or any other that it allows."""
    return _Setting(c, n, epochs, balancing, "balancing").proved(step, 32, first=120, every=64)


def grab_step_pl(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's alpha under the PL condition, with Lambert's W.

    The 256 inside W is as stated; the proof's own minimum has 960. Either is allowed.
    """
    return _Setting(c, n, epochs, balancing, "balancing").step_pl(256)


def grab_bound_pl(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """The last line of Theorem 3's proof for PL: the closed form behind the stated O~(A^2 ... / n^2 K^2).

    The proof's inequality at the stated alpha gives 480 where this has 320. Needs the Lambert W term to
    be the smallest in :func:`grab_step_pl`, that is large K.
    """
    return _Setting(c, n, epochs, balancing, "balancing").bound_pl(320, 256)


def grab_proved_pl(c: Constants, *, n: int, epochs: int, balancing: float, step: float | None = None) -> float:
    """Theorem 3's proof for PL: a bound on f - f* after K epochs at any alpha it allows."""
    return _Setting(c, n, epochs, balancing, "balancing").proved_pl(step, 256, first=512, every=120)
