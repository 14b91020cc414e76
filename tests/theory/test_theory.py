"""Theorems 1 and 3 against formulas written out again, minima found numerically, and an actual run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from ordain import theory
from ordain.errors import InputError
from ordain.theory import Constants

C = Constants(L=2.0, L_2inf=3.0, L_inf=1.5, varsigma=0.7, F=5.0, mu=0.5)
REACH = 4.0
LARGE = 10**12  # epochs after which no limit but the optimal alpha binds


@pytest.mark.parametrize("exponent", np.linspace(-12, 300, 60))
def test_lambert_w(exponent: float) -> None:
    x = 10.0**exponent
    assert theory.lambert_w(x) == pytest.approx(float(lambertw(x).real), rel=1e-13)


def test_lambert_w_at_zero() -> None:
    assert theory.lambert_w(0.0) == 0.0


def test_walk_bound() -> None:
    assert theory.walk_bound(10**6, 100, delta=0.01) == pytest.approx(30 * math.log(1e10))
    assert theory.walk_bound(50, 100) == 50


@pytest.mark.parametrize("epochs", [1, 10**4, LARGE])
def test_step_sizes_as_stated(epochs: int) -> None:
    n = 20
    noise = REACH**2 * 0.7**2 * 3.0**2
    assert theory.herding_step(C, n=n, epochs=epochs, herding=REACH) == pytest.approx(
        min((5 / (24 * n * noise * epochs)) ** (1 / 3), 1 / (8 * n * 5), 1 / (32 * n * 1.5), 1 / (16 * REACH * 3))
    )
    assert theory.grab_step(C, n=n, epochs=epochs, balancing=REACH) == pytest.approx(
        min((5 / (32 * n * noise * epochs)) ** (1 / 3), 1 / (n * 2), 1 / (26 * (n + 4) * 3), 1 / (260 * n * 1.5))
    )
    top = (5 + 0.49) * n**2 * 0.125 * epochs**2
    last = [2 / (n * 0.5 * epochs) * float(lambertw(top / (factor * noise)).real) for factor in (192, 256)]
    assert theory.herding_step_pl(C, n=n, epochs=epochs, herding=REACH) == pytest.approx(
        min(1 / (n * 0.5), 1 / (48 * REACH * 3), 1 / (96 * n * 6.5), last[0])
    )
    assert theory.grab_step_pl(C, n=n, epochs=epochs, balancing=REACH) == pytest.approx(
        min(1 / (n * 0.5), 1 / (n * 2), 1 / (52 * (n + 4) * 3), 1 / (520 * n * 1.5), last[1])
    )


def test_bounds_as_stated() -> None:
    n, epochs = 20, 30
    root = (REACH**2 * 0.49 * 9 * 25 / (n * epochs) ** 2) ** (1 / 3)
    assert theory.herding_bound(C, n=n, epochs=epochs, herding=REACH) == pytest.approx(
        36 * root + 0.49 / epochs + 32 * 5 * 6.5 / epochs + 64 * 5 * REACH * 3 / (n * epochs)
    )
    assert theory.grab_bound(C, n=n, epochs=epochs, balancing=REACH) == pytest.approx(
        11 * root + 0.49 / epochs + 65 * 5 * 6.5 / epochs + 8 * 5 * REACH * 3 / (n * epochs)
    )
    for bound, outside, inside in ((theory.herding_bound_pl, 288, 192), (theory.grab_bound_pl, 320, 256)):
        noise = REACH**2 * 9 * 0.49
        w = float(lambertw((5 + 0.49) * n**2 * 0.125 * epochs**2 / (inside * noise)).real)
        found = bound(C, n=n, epochs=epochs, **{"herding" if outside == 288 else "balancing": REACH})
        assert found == pytest.approx(outside * noise / (n**2 * 0.125 * epochs**2) * w * (1 + w))


def _best_alpha(every: float, n: int) -> float:
    """Where the proof's last expression for PL is smallest, found numerically."""
    noise, scale = REACH**2 * C.L_2inf**2 * C.varsigma**2, 1 / (n * LARGE)

    def value(scaled: float) -> float:
        alpha = scaled * scale
        return (C.F + C.varsigma**2) * math.exp(-alpha * n * 0.5 * LARGE / 2) + every * alpha**2 * noise / 0.5

    return float(minimize_scalar(value, bounds=(1, 1000), method="bounded").x * scale)


def test_lambert_step_is_the_minimum_for_herding_and_not_for_grab() -> None:
    n = 20
    herding = theory.herding_step_pl(C, n=n, epochs=LARGE, herding=REACH)
    assert herding == pytest.approx(_best_alpha(24.0, n), rel=1e-4)
    noise = REACH**2 * C.L_2inf**2 * C.varsigma**2
    argument = (C.F + C.varsigma**2) * n**2 * 0.125 * LARGE**2 / noise
    proofs = 2 / (n * 0.5 * LARGE) * theory.lambert_w(argument / 960)  # what 120 leads to
    assert proofs == pytest.approx(_best_alpha(120.0, n), rel=1e-4)
    stated = theory.grab_step_pl(C, n=n, epochs=LARGE, balancing=REACH)
    assert proofs < 0.99 * stated


def test_stated_bounds_beside_the_proofs() -> None:
    """With the proof's own coefficients the bound follows at the theorem's alpha; as stated it need not."""
    rng = np.random.default_rng(0)
    too_small = 0
    for _ in range(300):
        values = 10 ** rng.uniform(-3, 3, 5)
        c = Constants(*(float(v) for v in values))
        n, epochs, reach = int(rng.integers(1, 1000)), int(10 ** rng.uniform(0, 14)), float(rng.uniform(0.1, 50))
        reach = min(reach, n)
        if 8 * (c.L + c.L_2inf) >= math.sqrt(96) * c.L_2inf:  # else the proof's 1/2 is 1/4
            stated = theory.herding_bound(c, n=n, epochs=epochs, herding=reach)
            proved = theory.herding_proved(c, n=n, epochs=epochs, herding=reach)
            assert proved <= (stated + 96 * c.F * c.L_inf / epochs) * (1 + 1e-9)
        proved = theory.grab_proved(c, n=n, epochs=epochs, balancing=reach)
        root = ((reach * c.varsigma * c.L_2inf * c.F / (n * epochs)) ** 2) ** (1 / 3)
        rest = c.F * (4 * c.L + 104 * c.L_2inf * (1 + reach / n) + 1040 * c.L_inf) + c.varsigma**2
        assert proved <= (26 * root + rest / epochs) * (1 + 1e-9)
        too_small += proved > theory.grab_bound(c, n=n, epochs=epochs, balancing=reach)
    assert too_small > 50


def test_proved_pl_at_the_stated_step() -> None:
    n, K = 20, LARGE
    noise = REACH**2 * C.L_2inf**2 * C.varsigma**2
    herding = theory.herding_proved_pl(C, n=n, epochs=K, herding=REACH)
    assert herding <= theory.herding_bound_pl(C, n=n, epochs=K, herding=REACH)
    w = theory.lambert_w((C.F + C.varsigma**2) * n**2 * 0.125 * K**2 / (256 * noise))
    grab = theory.grab_proved_pl(C, n=n, epochs=K, balancing=REACH)
    assert theory.grab_bound_pl(C, n=n, epochs=K, balancing=REACH) < grab
    assert grab <= 480 * noise / (n**2 * 0.125 * K**2) * w * (1 + w)


def test_proved_at_other_steps() -> None:
    """The proof's inequality is about any alpha; the theorem's is near the best of them where no limit binds."""
    at = {"n": 20, "epochs": LARGE, "balancing": REACH}
    best = theory.grab_step(C, **at)
    values = [theory.grab_proved(C, **at, step=best * factor) for factor in (0.2, 1.0, 5.0)]
    assert values[1] == theory.grab_proved(C, **at) == min(values)
    with pytest.raises(InputError, match="largest that the proof allows"):
        theory.grab_proved(C, **at, step=1.0)


@pytest.mark.parametrize(
    ("proved", "proved_pl", "name", "alpha", "first", "every", "first_pl", "every_pl"),
    [
        (theory.herding_proved, theory.herding_proved_pl, "herding", 5e-5, 16, 48, 32, 24),  # Lemma 3
        (theory.grab_proved, theory.grab_proved_pl, "balancing", 5e-5, 120, 64, 512, 120),  # Lemmas 4 and 7
    ],
)
def test_the_proofs_inequalities(
    proved: Any, proved_pl: Any, name: str, alpha: float, first: int, every: int, first_pl: int, every_pl: int
) -> None:
    n, K = 20, 30
    at = {"n": n, "epochs": K, name: REACH, "step": alpha}
    kept = 1 - 48 * alpha**2 * n**2 * 9
    right = 2 * 5 / (alpha * n * K) + first * alpha**2 * n**2 * 0.49 * 9 / K + every * alpha**2 * REACH**2 * 0.49 * 9
    assert proved(C, **at) == pytest.approx(right / kept, rel=1e-12)
    rho = 1 - alpha * n * 0.5 / 2
    start = rho**K * (5 + first_pl * alpha**3 * n**3 * 9 * 0.49)
    assert proved_pl(C, **at) == pytest.approx(start + every_pl * alpha**2 * REACH**2 * 9 * 0.49 / 0.5, rel=1e-12)


def test_no_noise() -> None:
    c = replace(C, varsigma=0.0)
    assert theory.grab_step(c, n=10, epochs=LARGE, balancing=1.0) == 1 / (260 * 10 * 1.5)
    assert theory.grab_step_pl(c, n=10, epochs=LARGE, balancing=1.0) == 1 / (520 * 10 * 1.5)
    assert theory.grab_bound_pl(c, n=10, epochs=5, balancing=1.0) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"L": 0.0}, "L=0.0"),
        ({"L_2inf": math.nan}, "L_2inf=nan"),
        ({"L_inf": math.inf}, "L_inf=inf"),
        ({"varsigma": -1.0}, "varsigma=-1.0"),
        ({"F": 0.0}, "F=0.0"),
        ({"mu": 3.0}, "mu=3.0; expected 0 < mu <= L = 2"),
        ({"mu": 0.0}, "mu=0.0"),
    ],
)
def test_bad_constants(change: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(C, **change)


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="n=0"):
        theory.grab_step(C, n=0, epochs=1, balancing=1.0)
    with pytest.raises(InputError, match=r"epochs=1\.5"):
        theory.grab_step(C, n=1, epochs=1.5, balancing=1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"herding=-1\.0"):
        theory.herding_step(C, n=1, epochs=1, herding=-1.0)
    with pytest.raises(InputError, match="without mu"):
        theory.grab_step_pl(replace(C, mu=None), n=1, epochs=1, balancing=1.0)
    with pytest.raises(InputError, match="x=-1"):
        theory.lambert_w(-1.0)
    with pytest.raises(InputError, match="delta=2"):
        theory.walk_bound(1, 1, delta=2)
    narrow = Constants(L=0.001, L_2inf=1.0, L_inf=0.001, varsigma=1.0, F=1.0)
    with pytest.raises(InputError, match="largest that the proof allows"):
        theory.herding_proved(narrow, n=10, epochs=1, herding=0.1, step=0.2)
