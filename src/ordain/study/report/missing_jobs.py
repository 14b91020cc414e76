"""Jobs that the configuration asks for but that have not been started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ordain.orders import ORDERS
from ordain.study.report.views import Problem, View, gathered
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.records import Arm, Run


def with_missing_arms(run: Run) -> Run:
    """Add an empty arm for each configured arm without records."""
    names = [name for name in _list(run, "arms", str) if name not in run.arms]
    empty = {name: Arm(name, ORDERS[name].label if name in ORDERS else name, name) for name in names}
    return replace(run, arms={**run.arms, **empty})


def missing_jobs(run: Run, found: Sequence[View]) -> list[Problem]:
    """The configured jobs without a record."""
    return gathered(
        [
            Problem(run.arms[name].label, (rate,), (seed,), "not started")
            for name in _list(run, "arms", str)
            for rate in _rates_of(name, run, found)
            for seed in _list(run, "seeds", int)
            if (name, rate, seed) not in run.jobs.index
        ]
    )


def _rates_of(name: str, run: Run, found: Sequence[View]) -> list[float]:
    """The rates an arm runs at; under protocol ``"paper"`` only the best rate of its RR, once that is known."""
    if run.config.get("protocol") != "paper" or is_baseline(name):
        return [float(rate) for rate in _list(run, "rates", (int, float))]
    baseline = found[0].baseline(name)
    return [baseline.rate] if baseline and baseline.rate is not None else []


def _list(run: Run, key: str, kind: Any) -> list[Any]:
    """The items of a setting that have the expected type."""
    value = run.config.get(key)
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []
