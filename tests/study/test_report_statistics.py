from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_rel

from ordain.study.report.statistics import (
    CANNOT_TELL,
    FEW_SEEDS,
    HELPS,
    SAME,
    WORSE,
    Comparison,
    compare,
    corrected,
    holm,
    number_or_none,
    verdict,
)

RR = {0: 0.50, 1: 0.52, 2: 0.51, 3: 0.50, 4: 0.53}


def less(by: float, wobble: float = 0.001) -> dict[int, float | None]:
    return {seed: value - by + wobble * (-1) ** seed for seed, value in RR.items()}


def test_paired_test_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for n in (2, 5, 12):
        a, b = rng.normal(size=n), rng.normal(0.3, 2, size=n)
        found = compare(dict(enumerate(a.tolist())), dict(enumerate(b.tolist())))
        assert found.p == pytest.approx(ttest_rel(a, b).pvalue)
        assert found.difference == pytest.approx((a - b).mean())
        interval = ttest_1samp(a - b, 0).confidence_interval(0.99)
        assert found.interval == pytest.approx((interval.low, interval.high))
        assert found.seeds == tuple(range(n))


def test_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, sd 1, t = 2 sqrt(3), 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2).
    found = compare({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0))
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_the_pairing_is_by_seed_not_by_place() -> None:
    mixed = dict(reversed(list(less(0.05).items())))
    assert compare(mixed, RR) == compare(less(0.05), RR)


def test_common_seeds_only() -> None:
    found = compare({3: 0.4, 4: 0.5, 9: 0.0}, RR)
    assert found.seeds == (3, 4)
    assert found.difference == pytest.approx((0.4 - 0.50 + 0.5 - 0.53) / 2)
    assert compare({7: 1.0}, RR) == Comparison(())


def test_values_that_are_the_same() -> None:
    same = compare(dict(RR), RR)
    assert (same.difference, same.p, same.interval) == (0.0, None, None)
    assert verdict(same) == SAME
    constant = compare({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}, {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0, 4: 6.0})
    assert constant.p == 0.0
    assert verdict(constant) == HELPS


def test_verdicts_go_by_holms_p() -> None:
    alone = Comparison(tuple(range(5)), -0.1, p=0.004)
    three = corrected({"a": alone, "b": Comparison(tuple(range(5)), -0.1, p=0.5), "c": replace(alone, p=0.6)})
    assert (verdict(alone), verdict(three["a"]), three["a"].decides) == (HELPS, CANNOT_TELL, pytest.approx(0.012))


def test_one_seed() -> None:
    found = compare({0: 0.1}, RR)
    assert found.p is None
    assert found.difference == pytest.approx(-0.4)
    assert verdict(found) == FEW_SEEDS


@pytest.mark.parametrize("hole", [None, math.nan, math.inf])
def test_a_seed_without_a_number_is_not_dropped(hole: float | None) -> None:
    found = compare(less(0.2) | {2: hole}, RR)
    assert found == Comparison((0, 1, 2, 3, 4))
    assert verdict(found) == CANNOT_TELL


def test_verdicts() -> None:
    assert verdict(compare(less(0.1), RR)) == HELPS
    assert verdict(compare(less(-0.1), RR)) == WORSE
    assert verdict(compare(less(-0.1), RR), lower_is_better=False) == HELPS
    assert verdict(compare(less(0.0005), RR)) == CANNOT_TELL
    four = {seed: value for seed, value in less(0.1).items() if seed < 4}
    assert compare(four, RR).p < 0.01  # type: ignore[operator]
    assert verdict(compare(four, RR)) == FEW_SEEDS
    assert verdict(Comparison((0, 1, 2, 3, 4), -1.0, None, 0.01)) == CANNOT_TELL  # not below the level


def test_the_interval_agrees_with_p() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        found = compare(dict(enumerate(rng.normal(1.2, 1, size=6).tolist())), dict.fromkeys(range(6), 0.0))
        assert found.interval is not None
        assert found.p is not None
        assert (found.interval[0] > 0 or found.interval[1] < 0) == (found.p < 0.01)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([None, 0.02, math.nan]) == [None, 0.02, None]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_the_closed_test(ps: list[float]) -> None:
    """Holm's p is the largest Bonferroni p over sets of the tests at least as significant."""
    found = holm(ps)
    ordered = sorted(ps)
    for p, adjusted in zip(ps, found, strict=True):
        steps = [min(1.0, (len(ps) - rank) * q) for rank, q in enumerate(ordered) if q <= p]
        assert adjusted == pytest.approx(max(steps[: ordered.index(p) + 1]))
        assert adjusted is not None
        assert p <= adjusted <= 1


def test_corrected_counts_only_what_was_tested() -> None:
    found = corrected({"a": Comparison((0,), p=0.02), "b": Comparison((0,)), "c": Comparison((0,), p=0.5)})
    assert [found[name].holm for name in "abc"] == [0.04, None, 0.5]


def test_means() -> None:
    nothing, one, two = (pd.Series(values, dtype=float) for values in ([], [1.0], [1.0, 3.0]))
    assert [number_or_none(value) for value in (nothing.mean(), nothing.std(), one.std(), math.inf)] == [None] * 4
    assert (number_or_none(two.mean()), number_or_none(two.std())) == (2.0, pytest.approx(math.sqrt(2)))
