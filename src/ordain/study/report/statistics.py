"""Significance of differences between orders: paired t-tests over seeds and Holm's correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

LEVEL = 0.01
ENOUGH_SEEDS = 5
HELPS, WORSE, CANNOT_TELL = "helps", "worse", "inconclusive"
SAME = "identical"  # bitwise equal for every seed
FEW_SEEDS = f"inconclusive (needs {ENOUGH_SEEDS} seeds)"


@dataclass(frozen=True)
class Comparison:
    """Comparison of an arm with its baseline, paired over common seeds."""

    seeds: tuple[int, ...]  # common seeds
    difference: float | None = None  # mean of arm minus baseline; None if a value is missing
    # 99 % confidence interval of the difference; it excludes zero exactly if p < 0.01.
    interval: tuple[float, float] | None = None
    # p-value of the paired t-test; None if there is only one seed, or no difference for any seed.
    p: float | None = None
    holm: float | None = None  # p corrected for the number of arms compared (Holm 1979)
    relative: float | None = None  # the difference as a share of the baseline's mean over the common seeds

    @property
    def decides(self) -> float | None:
        """The p that verdicts go by: Holm's, or p itself if there was nothing to correct for."""
        return self.p if self.holm is None else self.holm


def compare(
    arm: pd.Series | Mapping[int, float | None], baseline: pd.Series | Mapping[int, float | None]
) -> Comparison:
    """Compare values by seed, paired over common seeds.

    There is no comparison if a value is missing or not finite: skipping its seed would favour an arm that diverged.
    """
    both = pd.concat([pd.Series(of, dtype=float) for of in (arm, baseline)], axis=1, join="inner").sort_index()
    seeds, (ours, theirs) = tuple(map(int, both.index)), both.to_numpy().T
    differences = ours - theirs
    if not seeds or not np.isfinite(differences).all():
        return Comparison(seeds)
    difference, base = float(differences.mean()), float(theirs.mean())
    found = Comparison(seeds, difference, relative=difference / base if base else None)
    if len(seeds) < 2 or not differences.any():
        return found
    with warnings.catch_warnings():  # SciPy warns if all differences are equal
        warnings.simplefilter("ignore")
        test = ttest_rel(ours, theirs)
        interval = test.confidence_interval(1 - LEVEL)
    if math.isnan(test.pvalue):
        return replace(found, interval=(difference, difference), p=0.0)
    return replace(found, interval=(float(interval.low), float(interval.high)), p=float(test.pvalue))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None (not tested) stays None and does not count.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    tested = pd.Series(ps, dtype=float).dropna().sort_values(kind="stable")
    adjusted = (tested * np.arange(len(tested), 0, -1)).clip(upper=1.0).cummax()  # adjusted p-values are monotone
    return [float(adjusted[place]) if place in adjusted else None for place in range(len(ps))]


def corrected(comparisons: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """Add Holm-corrected p-values over all comparisons."""
    ps = holm([comparison.p for comparison in comparisons.values()])
    return {name: replace(old, holm=p) for (name, old), p in zip(comparisons.items(), ps, strict=True)}


def verdict(comparison: Comparison, *, lower_is_better: bool = True) -> str:
    """The verdict in words; "helps" and "worse" require Holm's p < 0.01 and at least five seeds."""
    if comparison.difference is None:
        return CANNOT_TELL
    if comparison.difference == 0 and comparison.p is None:
        return SAME
    if len(comparison.seeds) < ENOUGH_SEEDS:
        return FEW_SEEDS
    if comparison.decides is None or not comparison.decides < LEVEL:
        return CANNOT_TELL
    return HELPS if (comparison.difference < 0) == lower_is_better else WORSE


def number_or_none(value: float) -> float | None:
    """Convert NaN and infinities (e.g. the mean of nothing) to None."""
    return float(value) if math.isfinite(value) else None
