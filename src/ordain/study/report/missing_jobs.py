"""Jobs that a run was asked for and has not begun: nothing that was asked for is dropped without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ordain.orders import ORDERS
from ordain.study.report.views import Problem, View, gathered
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.records import Arm, Run


def with_missing_arms(run: Run) -> Run:
    """The same with an empty arm for each that the configuration names and that has no record yet."""
    names = [name for name in _list(run, "arms", str) if name not in run.arms]
    empty = {name: Arm(name, ORDERS[name].label if name in ORDERS else name, name) for name in names}
    return replace(run, arms={**run.arms, **empty})


def missing_jobs(run: Run, found: Sequence[View]) -> list[Problem]:
    """Jobs that the configuration asks for and that have no record."""
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
    """Under the paper's protocol all but RR run at their RR's best rate alone, which is known once that is done."""
    if run.config.get("protocol") != "paper" or is_baseline(name):
        return [float(rate) for rate in _list(run, "rates", (int, float))]
    baseline = found[0].baseline(name)
    return [baseline.rate] if baseline and baseline.rate is not None else []


def _list(run: Run, key: str, kind: Any) -> list[Any]:
    """What the settings list there; nothing of another kind."""
    value = run.config.get(key)
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []
