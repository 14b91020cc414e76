"""What Greedy would take, before it is begun: its O(n^2 d) work is hours where n is tens of thousands."""

from __future__ import annotations

from ordain.study.runs.arms import Arm
from ordain.study.runs.config import RunConfig

__all__ = ["greedy_seconds", "too_slow"]

_PER_SECOND = 2e9  # products of two numbers, on one thread of a 2.8 GHz Xeon, at n = 2,000 and d = 7,850


def greedy_seconds(units: int, d: int) -> float:
    """One epoch's herding: each of n choices updates <s, z> for what is left, n^2 d / 2 products in all (Alg. 1).

    That is how Greedy works where the n x n Gram matrix does not fit; where it does, it is several times faster.
    """
    return units * units * d / 2 / _PER_SECOND


def too_slow(arm: Arm, config: RunConfig, n: int, d: int) -> str | None:
    """Why a Greedy job is refused: its herding would take longer than ``config.greedy_hours``.

    The last epoch herds nothing: no epoch follows it.
    """
    if arm.order != "greedy":
        return None
    units = -(-n // arm.group)
    hours = greedy_seconds(units, d) / 3600
    if hours * (config.epochs - 1) <= config.greedy_hours:
        return None
    most = config.greedy_hours
    return (
        f"greedy herding of {units:,} gradients of {d:,} numbers would take about {hours:.2g} hours an epoch; "
        f"expected at most {most:g} hour{'s' * (most != 1)} for the {config.epochs - 1} epochs that herd. Raise "
        "--greedy-hours, order larger units (greedy@64), train on fewer examples with --limit, or use GraB, whose "
        "work is O(nd)."
    )
