"""What a run was asked for and has not begun: nothing that was asked for is dropped without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ordain.orders import ORDERS
from ordain.study.report.views import Problem, View, gathered
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.records import Arm, Run

__all__ = ["absent", "with_asked"]


def with_asked(run: Run) -> Run:
    """The same with an empty arm for each that the configuration names and that has no record yet."""
    names = [name for name in _list(run, "arms") if isinstance(name, str) and name not in run.arms]
    empty = {name: Arm(name, ORDERS[name].label if name in ORDERS else name, name, {}) for name in names}
    return replace(run, arms={**run.arms, **empty})


def absent(run: Run, found: Sequence[View]) -> list[Problem]:
    """Jobs that the configuration asks for and that have no record."""
    seeds = [seed for seed in _list(run, "seeds") if isinstance(seed, int)]
    rates = [float(rate) for rate in _list(run, "rates") if isinstance(rate, int | float)]
    missing: dict[tuple[str, str, str], dict[float, list[int]]] = {}
    for name in (name for name in _list(run, "arms") if isinstance(name, str)):
        arm = run.arms[name]
        for rate in _rates_of(name, rates, run, found):
            left = [seed for seed in seeds if seed not in arm.rates.get(rate, {})]
            if left:
                missing.setdefault((arm.label, "not started", ""), {})[rate] = left
    return gathered(missing)


def _rates_of(name: str, rates: list[float], run: Run, found: Sequence[View]) -> list[float]:
    """Under the paper's protocol all but RR run at their RR's best rate alone, which is known once that is done."""
    if run.config.get("protocol") != "paper" or is_baseline(name):
        return rates
    baseline = found[0].baseline(name)
    return [baseline.rate] if baseline and baseline.rate is not None else []


def _list(run: Run, key: str) -> list[Any]:
    value = run.config.get(key)
    return value if isinstance(value, list) else []
