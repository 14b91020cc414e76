"""From runs to the rows of a table: what each order reached, what it cost, and whether that is luck."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_rel

from ordain.study.demo import ARMS, BASELINE, Run

__all__ = ["HEADINGS", "Row", "cells", "summarise"]

_LEVEL = 0.01
HEADINGS = (
    "order",
    "final train loss",
    "test acc. %",
    "epochs to RR's best",
    "order's state",
    "time / RR",
    "p",
    "verdict",
)


@dataclass(frozen=True)
class Row:
    """One order over all seeds; None where there is nothing to say.

    Attributes:
        name: the order's name in the registry.
        label: what people call it.
        train_loss: mean over seeds after the last epoch.
        train_loss_sd: standard deviation over seeds (n - 1).
        test_accuracy: mean over seeds after the last epoch.
        test_accuracy_sd: its standard deviation.
        epochs_to_baseline: the first epoch with at most RR's lowest loss of the same seed; median.
        order_bytes: see :class:`~ordain.study.demo.Run`; the largest over seeds.
        time_ratio: to the RR run of the same seed; median.
        p: of a paired t-test of the final train loss against RR.
        verdict: the test in words, at p < 0.01.
    """

    name: str
    label: str
    train_loss: float
    train_loss_sd: float | None
    test_accuracy: float
    test_accuracy_sd: float | None
    epochs_to_baseline: float | None
    order_bytes: int
    time_ratio: float
    p: float | None
    verdict: str


def summarise(runs: dict[str, list[Run]]) -> list[Row]:
    """A row for each arm, in the order of the registry."""
    return [_row(name, runs[name], runs[BASELINE]) for name in runs]


def _row(name: str, runs: list[Run], baseline: list[Run]) -> Row:
    losses, accuracies = [run.train_loss[-1] for run in runs], [run.test_accuracy[-1] for run in runs]
    differences = np.subtract(losses, [run.train_loss[-1] for run in baseline])
    p = None
    if len(runs) > 1 and differences.any():
        p = float(ttest_rel(losses, [run.train_loss[-1] for run in baseline]).pvalue)
    verdict = "cannot tell"
    if name == BASELINE:
        verdict = "the baseline"
    elif p is not None and p < _LEVEL:
        verdict = "lower than RR" if differences.mean() < 0 else "higher than RR"
    reached = float(
        np.median([_first_at_most(a.train_loss, min(b.train_loss)) for a, b in zip(runs, baseline, strict=True)])
    )
    return Row(
        name=name,
        label=ARMS[name],
        train_loss=float(np.mean(losses)),
        train_loss_sd=_sd(losses),
        test_accuracy=float(np.mean(accuracies)),
        test_accuracy_sd=_sd(accuracies),
        epochs_to_baseline=reached if math.isfinite(reached) else None,
        order_bytes=max(run.order_bytes for run in runs),
        time_ratio=float(np.median([a.seconds / b.seconds for a, b in zip(runs, baseline, strict=True)])),
        p=p,
        verdict=verdict,
    )


def _first_at_most(losses: list[float], goal: float) -> float:
    return next((float(epoch) for epoch, loss in enumerate(losses) if loss <= goal), math.inf)


def _sd(values: list[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, under :data:`HEADINGS`."""
    return (
        row.label,
        _spread(row.train_loss, row.train_loss_sd, ".4f"),
        _spread(100 * row.test_accuracy, None if row.test_accuracy_sd is None else 100 * row.test_accuracy_sd, ".1f"),
        "-" if row.epochs_to_baseline is None else f"{row.epochs_to_baseline:g}",
        f"{row.order_bytes:,} B" if row.order_bytes < 1024 else f"{row.order_bytes / 1024:,.1f} KiB",
        f"{row.time_ratio:.2f}",
        "-" if row.p is None else f"{row.p:.2g}",
        row.verdict,
    )


def _spread(mean: float, sd: float | None, form: str) -> str:
    return f"{mean:{form}}" if sd is None else f"{mean:{form}} ± {sd:{form}}"
