"""RR's best rate: what the paper's protocol gives to every other arm of the same units."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ordain.errors import InputError
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.config import RunConfig
from ordain.study.runs.fields import Fields
from ordain.study.runs.job import Job
from ordain.study.runs.writer import end_of, lines_of

__all__ = ["baseline_rates", "best_rate"]


def best_rate(losses: dict[float, list[float | None]]) -> float | None:
    """The rate of the lowest mean; a rate with a None (a seed that diverged) is out, and the larger of two equals wins.

    >>> best_rate({0.1: [0.5, None], 0.01: [0.3, 0.2], 0.001: [0.25, 0.25]})
    0.01
    """
    means = {lr: float(np.mean([x for x in of if x is not None])) for lr, of in losses.items() if of and None not in of}
    return min(means, key=lambda lr: (means[lr], -lr)) if means else None


def baseline_rates(config: RunConfig, out: Path) -> dict[str, float] | None:
    """Of each RR (``"rr"``, ``"rr@8"``) the best rate; None as long as a job of one of them is unfinished."""
    found: dict[str, float] = {}
    for arm in filter(is_baseline, config.arms):
        best = _rate(arm, config, out)
        if best is None:
            return None
        found[arm] = best
    return found


def _rate(arm: str, config: RunConfig, out: Path) -> float | None:
    """The best by the validation loss after the last epoch."""
    losses: dict[float, list[float | None]] = {}
    for lr in config.rates:
        for seed in config.seeds:
            path = Job(arm, lr, seed).record(out)
            end = end_of(path)
            if end is None:
                return None
            last = None
            if end["state"] == "done":
                *_, measured, _ = {}, *lines_of(path)
                last = Fields(measured, f"{path}, the line before the end").number("valid_loss")
            losses.setdefault(lr, []).append(last)
    best = best_rate(losses)
    if best is None:
        raise InputError(
            f"a random reshuffling ({arm}) that diverged at every rate",
            expected="one rate at which it trains",
            remedy="Add smaller rates: --lr 0.001.",
        )
    return best
