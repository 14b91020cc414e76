"""Is a difference between two orders more than luck? Paired t tests over seeds, and Holm's correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_rel

__all__ = ["CANNOT_TELL", "ENOUGH_SEEDS", "FEW_SEEDS", "HELPS", "LEVEL", "SAME", "WORSE", "Comparison"]
__all__ += ["compare", "corrected", "holm", "mean", "sd", "verdict"]

LEVEL = 0.01
ENOUGH_SEEDS = 5
HELPS, WORSE, CANNOT_TELL = "helps", "does not help (worse)", "cannot tell"
SAME = "no different"  # to the last digit, in every seed
FEW_SEEDS = f"cannot tell (needs {ENOUGH_SEEDS} seeds)"


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline, paired over the seeds both have.

    Attributes:
        seeds: the common ones.
        difference: arm minus baseline, mean over them; None without a finite pair for each.
        interval: the 99 % confidence interval of the difference; it leaves out zero where p < 0.01.
        p: of the paired t test; None where there is nothing to test (one seed, or no difference in any).
        holm: p corrected for the number of arms compared (Holm 1979).
    """

    seeds: tuple[int, ...]
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    holm: float | None = None


def compare(arm: Mapping[int, float | None], baseline: Mapping[int, float | None]) -> Comparison:
    """Paired over common seeds. A value that is missing or not finite in one of them leaves no comparison:

    to drop such a seed would favour the arm that diverged in it.
    """
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    ours = np.array([_number(arm[seed]) for seed in seeds])
    theirs = np.array([_number(baseline[seed]) for seed in seeds])
    differences = ours - theirs
    if not seeds or not np.isfinite(differences).all():
        return Comparison(seeds)
    difference = float(differences.mean())
    if len(seeds) < 2 or not differences.any():
        return Comparison(seeds, difference)
    error = float(differences.std(ddof=1)) / math.sqrt(len(seeds))
    half = float(student.ppf(1 - LEVEL / 2, len(seeds) - 1)) * error
    return Comparison(seeds, difference, (difference - half, difference + half), _p(ours, theirs))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _p(
    ours: np.ndarray[tuple[int], np.dtype[np.float64]], theirs: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    with warnings.catch_warnings():  # differences that are all alike: p is 0, and the warning says no more
        warnings.simplefilter("ignore")
        p = float(ttest_rel(ours, theirs).pvalue)
    return 0.0 if math.isnan(p) else p


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None (nothing was tested) stays None and does not count.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    tested = sorted((p, place) for place, p in enumerate(ps) if p is not None and not math.isnan(p))
    found: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))  # never below that of a smaller p
        found[place] = largest
    return found


def corrected(comparisons: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """The same with Holm's p over all of them."""
    ps = holm([comparison.p for comparison in comparisons.values()])
    return {name: replace(old, holm=p) for (name, old), p in zip(comparisons.items(), ps, strict=True)}


def verdict(comparison: Comparison, *, lower_is_better: bool = True) -> str:
    """In words; that it helps or is worse at p < 0.01 alone, and not with fewer than five seeds."""
    if comparison.difference is None:
        return CANNOT_TELL
    if comparison.difference == 0 and comparison.p is None:
        return SAME
    if len(comparison.seeds) < ENOUGH_SEEDS:
        return FEW_SEEDS
    if comparison.p is None or not comparison.p < LEVEL:
        return CANNOT_TELL
    return HELPS if (comparison.difference < 0) == lower_is_better else WORSE


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return float(np.mean(values)) if values else None


def sd(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds (n - 1); None of fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
