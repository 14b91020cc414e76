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

__all__ = [
    "grab_bound",
    "grab_bound_pl",
    "grab_proved",
    "grab_proved_pl",
    "grab_step",
    "grab_step_pl",
    "herding_bound",
    "herding_bound_pl",
    "herding_proved",
    "herding_proved_pl",
    "herding_step",
    "herding_step_pl",
]


@dataclass(frozen=True)
class _Setting:
    """What a formula is evaluated at; ``reach`` is H (Assumption 4) or A (Assumption 5)."""

    c: Constants
    n: int
    K: int
    reach: float

    @property
    def noise(self) -> float:
        """H^2 varsigma^2 L_{2,inf}^2, or A^2 ..."""
        return (self.reach * self.c.varsigma * self.c.L_2inf) ** 2

    @property
    def mu(self) -> float:
        if self.c.mu is None:
            raise InputError("constants without mu", expected="a PL constant", remedy="Pass Constants(..., mu=...).")
        return self.c.mu

    def cube_root(self, factor: float) -> float:
        """The alpha that balances the first and the last term of the non-convex bound."""
        if not self.noise:
            return math.inf
        return float((self.c.F / (factor * self.n * self.noise * self.K)) ** (1 / 3))

    def lambert(self, factor: float) -> float:
        """W_0((F + varsigma^2) n^2 mu^3 K^2 / (factor H^2 L_{2,inf}^2 varsigma^2))."""
        top = (self.c.F + self.c.varsigma**2) * self.n**2 * self.mu**3 * self.K**2
        return lambert_w(top / (factor * self.noise)) if self.noise else math.inf

    def leading(self, factor: float) -> float:
        return float(factor * (self.noise * (self.c.F / (self.n * self.K)) ** 2) ** (1 / 3))

    def closed_pl(self, factor: float, inside: float) -> float:
        if not self.noise:
            return 0.0
        w = self.lambert(inside)
        return factor * self.noise / (self.n**2 * self.mu**3 * self.K**2) * w * (1 + w)

    def within(self, alpha: float, limits: tuple[float, ...]) -> None:
        limit = min(limits)
        if not 0 < alpha <= limit * (1 + 1e-12):
            raise InputError(
                f"a step size of {alpha!r}",
                expected=f"0 < alpha <= {limit:.6g}, the largest that the proof allows here",
                remedy="Leave step=None for the theorem's own.",
            )

    def proved(self, alpha: float, *, first: float, every: float) -> float:
        """Lemma 1 with the sum of Delta_k^2 bounded by Lemma 3 (Theorem 1) or Lemma 4 (Theorem 3)."""
        c, square = self.c, (alpha * self.n * self.c.L_2inf) ** 2
        left = 1 - 48 * square  # what |grad f|^2 keeps when the right side's share is moved to the left
        if left <= 0:
            raise InputError(
                f"a step size of {alpha!r}",
                expected=f"48 (alpha n L_2inf)^2 < 1, that is alpha < {1 / (math.sqrt(48) * self.n * c.L_2inf):.6g}",
                remedy="Above it the proof says nothing.",
            )
        right = 2 * c.F / (alpha * self.n * self.K)
        right += first * square * c.varsigma**2 / self.K + every * alpha**2 * self.noise
        return right / left

    def proved_pl(self, alpha: float, *, first: float, every: float) -> float:
        c, rho = self.c, 1 - alpha * self.n * self.mu / 2
        start = c.F + first * alpha * self.n * (alpha * self.n * c.L_2inf * c.varsigma) ** 2
        return float(rho**self.K * start + every * alpha**2 * self.noise / self.mu)


def _setting(c: Constants, n: int, epochs: int, reach: float, name: str) -> _Setting:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"n={n!r}", expected="the number of examples, at least 1", remedy="Pass len(dataset).")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError(f"epochs={epochs!r}", expected="an integer >= 1", remedy="Pass the number of epochs K.")
    if not 0 < reach < math.inf:
        raise InputError(f"{name}={reach!r}", expected="a positive number", remedy="See walk_bound() for the paper's.")
    return _Setting(c, n, epochs, reach)


# --- Theorem 1: offline herding -----------------------------------------------------------------------


def _herding_limits(s: _Setting) -> tuple[float, ...]:
    c = s.c
    return (1 / (8 * s.n * (c.L + c.L_2inf)), 1 / (32 * s.n * c.L_inf), 1 / (16 * s.reach * c.L_2inf))


def _herding_limits_pl(s: _Setting) -> tuple[float, ...]:
    c = s.c
    return (1 / (s.n * s.mu), 1 / (48 * s.reach * c.L_2inf), 1 / (96 * s.n * (c.L + c.L_2inf + c.L_inf)))


def herding_step(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's alpha for smooth non-convex f, given the herding bound H (Assumption 4).

    >>> c = Constants(L=1.0, L_2inf=2.0, L_inf=1.0, varsigma=1.0, F=1.0)
    >>> herding_step(c, n=100, epochs=10, herding=4.0) == 1 / (32 * 100 * 1.0)
    True
    """
    s = _setting(c, n, epochs, herding, "herding")
    return min(s.cube_root(24), *_herding_limits(s))


def herding_bound(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's bound on (1/K) sum_k |grad f(w_k)|^2, as stated.

    The proof gives 128 F L_inf / K where 32 F L_inf / K is stated: see :func:`herding_proved`.
    """
    s = _setting(c, n, epochs, herding, "herding")
    rest = 32 * c.F * (c.L + c.L_2inf + c.L_inf) + c.varsigma**2 + 64 * c.F * herding * c.L_2inf / n
    return s.leading(36) + rest / epochs


def herding_proved(c: Constants, *, n: int, epochs: int, herding: float, step: float | None = None) -> float:
    """Theorem 1's proof, at the theorem's step size or any other that it allows."""
    s = _setting(c, n, epochs, herding, "herding")
    alpha = herding_step(c, n=n, epochs=epochs, herding=herding) if step is None else step
    s.within(alpha, _herding_limits(s))
    return s.proved(alpha, first=16, every=48)


def herding_step_pl(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """Theorem 1's alpha under the PL condition, with Lambert's W."""
    s = _setting(c, n, epochs, herding, "herding")
    return min(2 / (n * s.mu * epochs) * s.lambert(192), *_herding_limits_pl(s))


def herding_bound_pl(c: Constants, *, n: int, epochs: int, herding: float) -> float:
    """The last line of Theorem 1's proof for PL: the closed form behind the stated O~(H^2 ... / n^2 K^2).

    It holds where the Lambert W term is the smallest in :func:`herding_step_pl`, that is for large K.
    """
    return _setting(c, n, epochs, herding, "herding").closed_pl(288, 192)


def herding_proved_pl(c: Constants, *, n: int, epochs: int, herding: float, step: float | None = None) -> float:
    """Theorem 1's proof for PL: a bound on f - f* after K epochs at any alpha it allows."""
    s = _setting(c, n, epochs, herding, "herding")
    alpha = herding_step_pl(c, n=n, epochs=epochs, herding=herding) if step is None else step
    s.within(alpha, _herding_limits_pl(s))
    return s.proved_pl(alpha, first=32, every=24)


# --- Theorem 3: GraB ----------------------------------------------------------------------------------


def _grab_limits(s: _Setting, factor: int = 1) -> tuple[float, ...]:
    c = s.c
    balanced = 1 / (26 * factor * (s.n + s.reach) * c.L_2inf)
    return (1 / (s.n * c.L), balanced, 1 / (260 * factor * s.n * c.L_inf))


def _grab_limits_pl(s: _Setting) -> tuple[float, ...]:
    return (1 / (s.n * s.mu), *_grab_limits(s, 2))


def grab_step(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's alpha for smooth non-convex f, given the balancing bound A (Assumption 5).

    >>> c = Constants(L=1.0, L_2inf=2.0, L_inf=1.0, varsigma=1.0, F=1.0)
    >>> grab_step(c, n=100, epochs=10, balancing=4.0) == 1 / (260 * 100 * 1.0)
    True
    """
    s = _setting(c, n, epochs, balancing, "balancing")
    return min(s.cube_root(32), *_grab_limits(s))


def grab_bound(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's bound on (1/K) sum_k |grad f(w_k)|^2, as stated, with its H read as A.

    Smaller than what the proof gives (26 for 11, 1040 L_inf for 65, 104 for 8): see :func:`grab_proved`.
    """
    s = _setting(c, n, epochs, balancing, "balancing")
    rest = 65 * c.F * (c.L + c.L_2inf + c.L_inf) + c.varsigma**2 + 8 * c.F * balancing * c.L_2inf / n
    return s.leading(11) + rest / epochs


def grab_proved(c: Constants, *, n: int, epochs: int, balancing: float, step: float | None = None) -> float:
    """Theorem 3's proof, at the theorem's step size or any other that it allows."""
    s = _setting(c, n, epochs, balancing, "balancing")
    alpha = grab_step(c, n=n, epochs=epochs, balancing=balancing) if step is None else step
    s.within(alpha, _grab_limits(s))
    return s.proved(alpha, first=120, every=64)


def grab_step_pl(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """Theorem 3's alpha under the PL condition, with Lambert's W.

    The 256 inside W is as stated; the proof's own minimum has 960. Either is allowed.
    """
    s = _setting(c, n, epochs, balancing, "balancing")
    return min(2 / (n * s.mu * epochs) * s.lambert(256), *_grab_limits_pl(s))


def grab_bound_pl(c: Constants, *, n: int, epochs: int, balancing: float) -> float:
    """The last line of Theorem 3's proof for PL: the closed form behind the stated O~(A^2 ... / n^2 K^2).

    The proof's inequality at the stated alpha gives 480 where this has 320. Needs the Lambert W term to
    be the smallest in :func:`grab_step_pl`, that is large K.
    """
    return _setting(c, n, epochs, balancing, "balancing").closed_pl(320, 256)


def grab_proved_pl(c: Constants, *, n: int, epochs: int, balancing: float, step: float | None = None) -> float:
    """Theorem 3's proof for PL: a bound on f - f* after K epochs at any alpha it allows."""
    s = _setting(c, n, epochs, balancing, "balancing")
    alpha = grab_step_pl(c, n=n, epochs=epochs, balancing=balancing) if step is None else step
    s.within(alpha, _grab_limits_pl(s))
    return s.proved_pl(alpha, first=512, every=120)
