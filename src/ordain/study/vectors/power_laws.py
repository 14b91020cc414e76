"""Power laws: exponents fitted for each seed, with their mean and standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Slope", "mean_and_error", "slope", "spread"]


@dataclass(frozen=True)
class Slope:
    """The mean exponent over seeds and its standard error, None for a single seed."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return spread(self.mean, self.error, ".2f")


def slope(x: Sequence[float], y: ArrayLike) -> Slope:
    """Fit log y ``[seeds, points]`` to log x ``[points]`` by least squares, for each seed.

    >>> print(slope([1, 2, 4], [[3, 12, 48], [5, 20, 80]]))
    2.00 ± 0.00
    """
    rows = np.log(np.atleast_2d(np.asarray(y, dtype=np.float64)))
    at = np.log(np.asarray(x, dtype=np.float64))
    at = at - at.mean()
    return Slope(*mean_and_error(rows @ at / (at @ at)))


def mean_and_error(values: ArrayLike) -> tuple[float, float | None]:
    """The mean over seeds and its standard error."""
    of = np.asarray(values, dtype=np.float64)
    return float(of.mean()), float(of.std(ddof=1) / math.sqrt(len(of))) if len(of) > 1 else None


def spread(mean: float, error: float | None, form: str = ".3g") -> str:
    """``mean ± error`` as text."""
    shown = f"{mean:{form}}"
    shown = shown if float(shown) else shown.removeprefix("-")  # no minus before zero
    return shown if error is None else f"{shown} ± {error:{form}}"
