"""Means over seeds with their standard errors, and exponents of power laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Estimate(NamedTuple):
    """A mean over seeds and its standard error, None for a single seed.

    >>> f"{Estimate(-0.001, 0.2):.2f}"
    '0.00 ± 0.20'
    """

    mean: float
    error: float | None

    def __format__(self, form: str) -> str:
        shown = f"{self.mean:{form}}"
        shown = shown if float(shown) else shown.removeprefix("-")  # no minus before zero
        return shown if self.error is None else f"{shown} ± {self.error:{form}}"


def estimate(values: ArrayLike) -> Estimate:
    """The mean of ``values [seeds]``."""
    of = np.asarray(values, dtype=np.float64)
    return Estimate(float(of.mean()), float(of.std(ddof=1) / math.sqrt(len(of))) if len(of) > 1 else None)


def slope(x: Sequence[float], y: ArrayLike) -> Estimate:
    """Fit log y ``[seeds, points]`` to log x ``[points]`` by least squares, for each seed.

    >>> f"{slope([1, 2, 4], [[3, 12, 48], [5, 20, 80]]):.2f}"
    '2.00 ± 0.00'
    """
    rows = np.log(np.atleast_2d(np.asarray(y, dtype=np.float64)))
    at = np.log(np.asarray(x, dtype=np.float64))
    at = at - at.mean()
    return estimate(rows @ at / (at @ at))
