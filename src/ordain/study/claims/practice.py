"""Does it pay against tuned, decaying rates? Each order at its own rate, schedule and length, by processor time.

See results/PROTOCOL.md. The runs are those with ``--protocol each``; the pages are made in ``practice_page``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ordain import Every
from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.report.statistics import Comparison, compare, corrected
from ordain.study.report.views import Entry, at_rate, views
from ordain.study.runs.arms import BASELINE, parse
from ordain.study.runs.records import Run, read_run
from ordain.study.runs.run_folder import TRAINING, read_header, run_folders
from ordain.study.tasks import TASKS

LEVEL = 0.05  # of Holm's p
SAME_TIME = 0.01  # costs are not measured more exactly
COSTS = "costs.json"  # seconds of an epoch by task and arm, from `python -m benchmarks.costs`
Costs = Mapping[tuple[str, int], Mapping[str, float]]  # by task and batch size
MEASURES = {"train": "training loss", "test": "test loss", "accuracy": "test accuracy, %"}
VALID = {"train": "valid", "test": "valid", "accuracy": "valid accuracy"}  # by what lengths are chosen for a measure


@dataclass(frozen=True)
class Point:
    """An order at its best rate in one run, by seed."""

    problem: tuple[str, ...]  # task, batch size, limit: what orders are compared on
    decay: str
    arm: str
    label: str
    epochs: int
    rate: float
    edge: bool  # whether the rate is the smallest or largest of those tried
    seconds: float  # of processor time for the whole run
    values: Mapping[str, pd.Series]  # by seed: the measures, and validation loss and accuracy of the epoch that is kept
    same: Mapping[str, Comparison]  # with RR of as many epochs
    same_rate: float | None  # training loss over RR's of as many epochs at this very rate, on the seeds of both
    equal: Mapping[str, Comparison]  # with RR of as much processor time


def points(folder: Path) -> list[Point]:
    """All orders of all runs in ``folder`` that were tuned each by itself."""
    found: list[Point] = []
    costs = _costs(folder)
    for path in run_folders(folder):
        header = read_header(path)
        if header.kind == TRAINING and header.config.get("protocol") == "each":
            found += _of_run(read_run(path), costs)
    order = sorted(
        found, key=lambda point: (point.problem, point.decay, point.arm != BASELINE, point.arm, point.epochs)
    )
    return list(_at_equal_time(order))


def at_best_schedule(found: Sequence[Point]) -> list[Point]:
    """Each order of each length with the schedule of the lowest validation loss; RR first."""
    best: dict[tuple[Any, ...], Point] = {}
    for point in found:
        key = point.problem, point.arm, point.epochs
        if key not in best or validates_better(point, best[key]):
            best[key] = point
    return sorted(best.values(), key=lambda point: (point.problem, point.arm != BASELINE, point.arm, point.epochs))


def validates_better(one: Point, other: Point, measure: str = "test") -> bool:
    """Whether ``one`` has the better mean validation loss (or accuracy) over the seeds of both.

    Initial weights decide most of a result, so that means over different seeds cannot be compared.
    """
    by = VALID[measure]
    found = compare(one.values[by], other.values[by]).difference or 0.0
    return found > 0 if measure == "accuracy" else found < 0


def _costs(folder: Path) -> Costs:
    path = folder / COSTS
    if not path.is_file():
        return {}
    costs = json.loads(path.read_text())
    if not isinstance(costs, dict) or not isinstance(costs.get("seconds"), dict):
        raise InputError(f"{path}", expected="what python -m benchmarks.costs writes", remedy="Remove or recreate it.")
    sizes = costs.get("batch_sizes", {})
    return {(task, sizes.get(task, TASKS[task].defaults.batch_size)): of for task, of in costs["seconds"].items()}


def _of_run(run: Run, costs: Costs) -> Iterator[Point]:
    config = run.config
    task, decay = str(config["task"]), str(config.get("decay", "constant"))
    problem = (task, str(config["batch_size"]), str(config.get("limit")))
    examples = TASKS[task].examples
    share = min(int(config.get("limit") or examples), examples) / examples  # of the epoch whose cost was measured
    shown = views(run)[0].shown
    values = {name: final_values(entry, decay) for name, entry in shown.items()}
    same: dict[str, dict[str, Comparison]] = {}
    for measure in MEASURES:
        if BASELINE in values:
            others = {name: of[measure] for name, of in values.items() if name != BASELINE}
            pairs = {name: compare(of, values[BASELINE][measure]) for name, of in others.items()}
            same[measure] = corrected(pairs)
    for name, entry in shown.items():
        own = float(entry.epochs.cpu_seconds.groupby("seed").sum().median())
        yield Point(
            problem,
            decay,
            name,
            entry.arm.label,
            run.length,
            entry.rate or 0.0,
            entry.at_edge,
            _seconds(costs.get((task, config["batch_size"]), {}), name, run.length) * share or own,
            values[name],
            {measure: of[name] for measure, of in same.items() if name in of},
            _over_rr_at_same_rate(run, entry, decay) if name != BASELINE else None,
            {},
        )


def _seconds(costs: Mapping[str, float], arm: str, epochs: int) -> float:
    """Processor seconds of a run, from those of an epoch; 0 if they were not measured."""
    epoch, learn = costs.get(arm, 0.0), ORDERS[parse(arm).order].learn
    if not epoch or not isinstance(learn, Every):
        return epoch * epochs
    # Measured over k epochs, of which one learns; a run learns in more, since it begins with some that do.
    learned = sum(map(learn, range(epochs)))
    return costs[BASELINE] * epochs + (epoch - costs[BASELINE]) * learn.k * learned


def _over_rr_at_same_rate(run: Run, entry: Entry, decay: str) -> float | None:
    """A lower training loss at another rate would be the rate's, not the order's: validation chooses the rates."""
    rr = at_rate(run, entry.rate).entries.get(BASELINE) if entry.rate is not None else None
    found = compare(*(final_values(one, decay)["train"] for one in (entry, rr))).relative if rr else None
    return None if found is None else 1 + found


def final_values(entry: Entry, decay: str) -> dict[str, pd.Series]:
    """The measures of the protocol, by seed; epoch 0 is no candidate."""
    epochs = entry.epochs.drop(index=0, level="epoch")
    last = max(1, len(epochs.index.unique("epoch")) // 5) if decay == "constant" else 1
    kept = epochs.loc[epochs.valid_loss.groupby("seed").idxmin()].droplevel("epoch")
    return {
        "train": epochs.train_loss.groupby("seed").agg(lambda of: of.tail(last).mean()),
        "test": kept.test_loss,
        "accuracy": 100 * kept.test_accuracy,
        "valid": kept.valid_loss,
        "valid accuracy": 100 * kept.valid_accuracy,
    }


def _at_equal_time(found: Sequence[Point]) -> Iterator[Point]:
    """Add the comparison with RR's values at the same processor time, each length at its best schedule.

    Holm's p is over the orders, and their lengths, with one schedule.
    """
    curves: dict[tuple[str, ...], list[Point]] = {}
    for point in at_best_schedule(found):
        if point.arm == BASELINE:
            curves.setdefault(point.problem, []).append(point)
    for (problem, _), mine in groupby(found, key=lambda point: (point.problem, point.decay)):
        own, rr = list(mine), sorted(curves.get(problem, ()), key=lambda point: point.seconds)
        equal = {measure: corrected(_equal(own, rr, measure)) for measure in MEASURES}
        for n, point in enumerate(own):
            yield replace(point, equal={measure: of[str(n)] for measure, of in equal.items() if str(n) in of})


def _equal(own: Sequence[Point], rr: Sequence[Point], measure: str) -> dict[str, Comparison]:
    """Each order, by its place in ``own``, against RR of the same time; none outside RR's lengths."""
    # Runs that validate worse than a shorter one are left out: nobody would choose them.
    worth = [
        one for number, one in enumerate(rr) if all(validates_better(one, other, measure) for other in rr[:number])
    ]
    least = rr[0].seconds * (1 - SAME_TIME) if rr else math.inf
    # If the last run is left out, more epochs do not help RR.
    most = rr[-1].seconds * (1 + SAME_TIME) if worth and worth[-1] is rr[-1] else math.inf
    return {
        str(n): compare(point.values[measure], _at(point.seconds, worth, measure))
        for n, point in enumerate(own)
        if point.arm != BASELINE and least <= point.seconds <= most
    }


def _at(seconds: float, rr: Sequence[Point], measure: str) -> pd.Series:
    """RR's value at a processor time, by seed: linear in the logarithm of time between two lengths."""
    after = next((number for number, point in enumerate(rr) if point.seconds >= seconds), None)
    around = rr[-1:] if after is None else rr[max(0, after - 1) : after + 1]
    around = [point for point in around if abs(point.seconds / seconds - 1) < SAME_TIME] or around
    table = pd.DataFrame({np.log(point.seconds): point.values[measure] for point in around}).dropna()
    return table.apply(lambda row: float(np.interp(np.log(seconds), table.columns, row)), axis=1)
