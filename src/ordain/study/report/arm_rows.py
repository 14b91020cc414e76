"""The main table of a report: final losses, costs and verdicts of each arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from ordain.study.report.number_text import NOTHING, bytes_text, number, p_text, places, seconds_text, spread
from ordain.study.report.statistics import Comparison, number_or_none, verdict
from ordain.study.report.views import ACCURACY, TRAIN, VALID, VALID_ACCURACY, Entry, Metric, View
from ordain.study.runs.arms import is_baseline


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; None if undefined."""

    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class Row:
    """One arm, summarized over seeds; None if not available."""

    name: str  # the arm's name
    label: str  # display name
    rate: float | None  # the learning rate
    train: Spread  # final train loss
    valid: Spread  # final validation loss
    accuracy: Spread  # final test accuracy in % (validation accuracy if there is no test set)
    epochs_to_goal: float | None  # median number of epochs to RR's lowest train loss of the same seed
    seconds_to_goal: float | None  # median training time to that epoch
    time_ratio: float | None  # median ratio of training time to RR's with the same seed
    cpu_ratio: float | None  # the same ratio for CPU time, which is less affected by other load
    # Share of order.step() in the training time; hooks in forward and backward are not included.
    ordering: float | None
    order_bytes: float | None  # maximum over seeds and epochs
    job_bytes: float | None  # maximum memory that the job added to its process
    comparison: Comparison | None  # of the final train loss with RR's
    verdict: str  # the verdict in words


def rows(view: View) -> list[Row]:
    """One row per arm, including arms without a finished job."""
    comparisons = view.comparisons(TRAIN)
    return [_row(entry, view.baseline(name), comparisons.get(name)) for name, entry in view.entries.items()]


def reached(epochs: pd.DataFrame, goal: pd.Series, *, seconds: str, first: int = 0) -> pd.DataFrame:
    """For each seed, the first ``epoch`` (from ``first`` on) with a train loss of at most ``goal``, and ``seconds``.

    ``seconds`` names the column to sum over all epochs up to that one. NaN if the goal is never reached.
    """
    spent = epochs[seconds].groupby("seed").cumsum()
    at = epochs.index.get_level_values("epoch")
    there = (epochs.train_loss <= goal.reindex(epochs.index, level="seed")) & (at >= first)
    found = pd.DataFrame({"epoch": at, "seconds": spent})[there].droplevel("epoch")
    return found[~found.index.duplicated()].reindex(goal.index).astype(float)


def _row(entry: Entry, baseline: Entry | None, comparison: Comparison | None) -> Row:
    epochs = entry.epochs
    theirs = baseline.epochs if baseline else epochs.iloc[:0]
    goal = theirs.train_loss.groupby("seed").min().reindex(entry.jobs.index).dropna()
    until = reached(epochs, goal, seconds="training_seconds").fillna(np.inf)
    training = epochs.training_seconds.sum()
    accuracy = ACCURACY if entry.final(ACCURACY).notna().any() else VALID_ACCURACY
    return Row(
        name=entry.arm.name,
        label=entry.arm.label,
        rate=entry.rate,
        train=final_spread(entry, TRAIN),
        valid=final_spread(entry, VALID),
        accuracy=final_spread(entry, accuracy),
        epochs_to_goal=number_or_none(until.epoch.median()),
        seconds_to_goal=number_or_none(until.seconds.median()),
        time_ratio=_ratio(epochs.training_seconds, theirs.training_seconds),
        cpu_ratio=_ratio(epochs.cpu_seconds, theirs.cpu_seconds),
        ordering=epochs.ordering.sum() / training if training else None,
        order_bytes=number_or_none(epochs.order_bytes.max()),
        job_bytes=number_or_none(epochs.job_bytes.max()),
        comparison=comparison,
        verdict=_verdict(entry, comparison),
    )


def _ratio(ours: pd.Series, theirs: pd.Series) -> float | None:
    """Median over seeds of the ratio of total times; seeds without a recorded time are skipped."""
    totals = [of.groupby("seed").agg(lambda seconds: seconds.sum(skipna=False)) for of in (ours, theirs)]
    return number_or_none((totals[0] / totals[1].replace(0.0, np.nan)).replace(0.0, np.nan).median())


def final_spread(entry: Entry, metric: Metric) -> Spread:
    """Mean and standard deviation of the final values, scaled for display."""
    finals = metric.scale * entry.final(metric).dropna()
    return Spread(number_or_none(finals.mean()), number_or_none(finals.std()))


def _verdict(entry: Entry, comparison: Comparison | None) -> str:
    if not entry.seeds:
        return entry.reason
    said = "no RR baseline" if comparison is None else verdict(comparison)
    said = "the baseline" if is_baseline(entry.arm.name) else said
    return f"{said}; {entry.reason}" if entry.reason else said


# Each heading with the function that formats a row's cell, given the decimals of train and validation loss.
COLUMNS: dict[str, Callable[[Row, int, int], str]] = {
    "order": lambda row, *_: row.label,
    "verdict": lambda row, *_: row.verdict,
    "rate": lambda row, *_: NOTHING if row.rate is None else f"{row.rate:g}",
    "final train loss": lambda row, train, _: spread(*row.train, train),
    "p": lambda row, *_: p_text(row.comparison.p if row.comparison else None),
    "Holm p": lambda row, *_: p_text(row.comparison.holm if row.comparison else None),
    "valid loss": lambda row, _, valid: spread(*row.valid, valid),
    "test acc. %": lambda row, *_: spread(row.accuracy.mean, row.accuracy.sd, 2),
    "epochs to RR's best": lambda row, *_: NOTHING if row.epochs_to_goal is None else f"{row.epochs_to_goal:g}",
    "time to RR's best": lambda row, *_: seconds_text(row.seconds_to_goal),
    "time / RR": lambda row, *_: number(row.time_ratio, 2),
    "CPU time / RR": lambda row, *_: number(row.cpu_ratio, 2),
    "order.step() / time": lambda row, *_: NOTHING if row.ordering is None else f"{100 * row.ordering:.0f} %",
    "order's state": lambda row, *_: bytes_text(row.order_bytes),
    "job's memory": lambda row, *_: bytes_text(row.job_bytes),
}


def cells(table: Sequence[Row]) -> list[tuple[str, ...]]:
    """Format the rows, one cell per column in :data:`COLUMNS`."""
    losses = [row.train.mean for row in table], [row.valid.mean for row in table]
    train, valid = (places([mean for mean in column if mean is not None]) for column in losses)
    return [tuple(text(row, train, valid) for text in COLUMNS.values()) for row in table]
