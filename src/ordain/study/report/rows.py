"""The table: what each arm reached, what it cost, and whether that is luck."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ordain.study.report.statistics import Comparison, mean, sd, verdict
from ordain.study.report.text import NOTHING, bytes_text, number, p_text, places, seconds_text, spread
from ordain.study.report.views import ACCURACY, TRAIN, VALID, VALID_ACCURACY, Entry, Metric, View
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.records import Job

__all__ = ["HEADINGS", "Row", "cells", "rows", "to_goal"]

HEADINGS = (
    "order",
    "verdict",
    "rate",
    "final train loss",
    "valid loss",
    "test acc. %",
    "epochs to RR's best",
    "time to RR's best",
    "time / RR",
    "CPU time / RR",
    "order.step() / time",
    "order's state",
    "job's memory",
    "p",
    "Holm p",
)


@dataclass(frozen=True)
class Row:
    """One arm over its seeds; None where there is nothing to say.

    Attributes:
        name: of the arm.
        label: what people call it.
        rate: the learning rate.
        train: mean and standard deviation over seeds of the final train loss.
        valid: the same of the validation loss.
        accuracy: the same of the test accuracy (validation's where there is no test set), in %.
        epochs_to_goal: the first epoch with at most RR's lowest train loss of the same seed; median.
        seconds_to_goal: of training up to that epoch; median.
        time_ratio: of training, to the RR run of the same seed; median.
        cpu_ratio: the same of the processor's time, which other work on the machine changes less.
        ordering: share of ``order.step()`` in the time of training; hooks inside forward and backward are not in it.
        order_bytes: the largest over seeds and epochs.
        job_bytes: the same of what the job added to its process.
        comparison: of the final train loss with RR's.
        verdict: in words.
    """

    name: str
    label: str
    rate: float | None
    train: tuple[float | None, float | None]
    valid: tuple[float | None, float | None]
    accuracy: tuple[float | None, float | None]
    epochs_to_goal: float | None
    seconds_to_goal: float | None
    time_ratio: float | None
    cpu_ratio: float | None
    ordering: float | None
    order_bytes: int | None
    job_bytes: int | None
    comparison: Comparison | None
    verdict: str


def rows(view: View) -> list[Row]:
    """One for each arm, those without a finished job included."""
    comparisons = view.comparisons(TRAIN)
    return [_row(entry, view.baseline(name), comparisons.get(name)) for name, entry in view.entries.items()]


def to_goal(job: Job, goal: float) -> tuple[float, float]:
    """Epochs and seconds of training until the train loss is at most ``goal``; infinite if never."""
    seconds = 0.0
    for epoch in job.epochs:
        seconds += epoch.training_seconds
        if epoch.train_loss is not None and epoch.train_loss <= goal:
            return float(epoch.epoch), seconds
    return math.inf, math.inf


def _row(entry: Entry, baseline: Entry | None, comparison: Comparison | None) -> Row:
    jobs = list(entry.jobs.values())
    pairs = _pairs(entry, baseline)
    reached = [to_goal(ours, _lowest(theirs)) for ours, theirs in pairs]
    ratios = [ours.training_seconds / theirs.training_seconds for ours, theirs in pairs if theirs.training_seconds]
    epochs = [epoch for job in jobs for epoch in job.epochs]
    training = sum(job.training_seconds for job in jobs)
    accuracy = ACCURACY if entry.finals(ACCURACY) else VALID_ACCURACY
    return Row(
        name=entry.arm.name,
        label=entry.arm.label,
        rate=entry.rate,
        train=_summary(entry, TRAIN),
        valid=_summary(entry, VALID),
        accuracy=_summary(entry, accuracy),
        epochs_to_goal=_median([epochs for epochs, _ in reached]),
        seconds_to_goal=_median([seconds for _, seconds in reached]),
        time_ratio=_median(ratios),
        cpu_ratio=_median([_cpu(ours) / _cpu(theirs) for ours, theirs in pairs if _cpu(ours) and _cpu(theirs)]),
        ordering=sum(epoch.seconds.get("ordering", 0.0) for epoch in epochs) / training if training else None,
        order_bytes=max((epoch.order_bytes for epoch in epochs if epoch.order_bytes is not None), default=None),
        job_bytes=max((epoch.job_bytes for epoch in epochs if epoch.job_bytes is not None), default=None),
        comparison=comparison,
        verdict=_verdict(entry, comparison),
    )


def _pairs(entry: Entry, baseline: Entry | None) -> list[tuple[Job, Job]]:
    if baseline is None:
        return []
    return [(job, baseline.jobs[seed]) for seed, job in entry.jobs.items() if seed in baseline.jobs]


def _cpu(job: Job) -> float:
    """Of all epochs; 0 where one has none recorded."""
    found = [epoch.cpu_seconds for epoch in job.epochs]
    return 0.0 if None in found else sum(seconds or 0.0 for seconds in found)


def _lowest(job: Job) -> float:
    return min((epoch.train_loss for epoch in job.epochs if epoch.train_loss is not None), default=-math.inf)


def _median(values: Sequence[float]) -> float | None:
    """None of nothing, and where the median seed never got there."""
    found = float(np.median(values)) if values else math.inf
    return found if math.isfinite(found) else None


def _summary(entry: Entry, metric: Metric) -> tuple[float | None, float | None]:
    finals = [metric.scale * value for value in entry.finals(metric)]
    return mean(finals), sd(finals)


def _verdict(entry: Entry, comparison: Comparison | None) -> str:
    if not entry.jobs:
        return entry.reason
    if is_baseline(entry.arm.name):
        said = "the baseline"
    elif comparison is None:
        said = "no RR to compare with"
    else:
        said = verdict(comparison)
    return f"{said}; {entry.reason}" if entry.reason else said


def cells(table: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text, under :data:`HEADINGS`."""
    train, valid = (_decimals(table, get) for get in (lambda row: row.train[0], lambda row: row.valid[0]))
    return [
        (
            row.label,
            row.verdict,
            NOTHING if row.rate is None else f"{row.rate:g}",
            spread(*row.train, train),
            spread(*row.valid, valid),
            spread(*row.accuracy, 2),
            NOTHING if row.epochs_to_goal is None else f"{row.epochs_to_goal:g}",
            seconds_text(row.seconds_to_goal),
            number(row.time_ratio, 2),
            number(row.cpu_ratio, 2),
            NOTHING if row.ordering is None else f"{100 * row.ordering:.0f} %",
            bytes_text(row.order_bytes),
            bytes_text(row.job_bytes),
            p_text(row.comparison.p if row.comparison else None),
            p_text(row.comparison.holm if row.comparison else None),
        )
        for row in table
    ]


def _decimals(table: Sequence[Row], get: Callable[[Row], float | None]) -> int:
    return places([value for row in table if (value := get(row)) is not None])
