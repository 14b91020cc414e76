"""Possible explanations: learning rate, noise of the last iterates, and staleness of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ordain.study.claims.evidence import Evidence
from ordain.study.claims.pays import Gain
from ordain.study.report.statistics import HELPS, WORSE, verdict
from ordain.study.report.views import Entry
from ordain.study.runs.arms import BASELINE

_BEST = " (RR's best)"
LAST = 5  # number of epochs at the end of a run


def reasons(evidence: Evidence, names: Sequence[str], found: Sequence[Gain]) -> list[str]:
    """Sentences on all three, as far as they were measured."""
    lines = [_rate(name, [gain for gain in found if (gain.run, gain.arm) == (name, "grab")]) for name in names]
    for say, runs in ((_wander, names), (_stale, ("mnist-stale", "cifar10-stale", "digits"))):
        for name in runs:
            ours, theirs = evidence.entry(name, "grab"), evidence.entry(name, BASELINE)
            lines.append(say(name, ours, theirs) if ours and theirs else "")
    return [line for line in lines if line]


def _rate(name: str, gains: Sequence[Gain]) -> str:
    """The gain of GraB at each learning rate."""
    if len(gains) < 2:
        return ""
    words = {HELPS: "significant", WORSE: "significant"}
    told = [
        f"{gain.rate:g}{_BEST if gain.best else ''}: {_share(gain.relative)}"
        f" ({words.get(verdict(gain.loss), 'inconclusive')})"
        for gain in gains
    ]
    return f"Learning rate, {name}: GraB's final training loss compared with RR's at the same rate. {'; '.join(told)}."


def _share(relative: float) -> str:
    return f"{100 * abs(relative):.2g} % {'lower' if relative < 0 else 'higher'}"


def _wander(name: str, ours: Entry, theirs: Entry) -> str:
    """The relative deviation of the training loss from a linear trend over the last epochs."""
    losses = [entry.epochs.train_loss.drop(index=0, level="epoch").dropna() for entry in (ours, theirs)]
    if any(of.groupby("seed").size().min() < LAST for of in losses):
        return ""
    mine, rr = (of.groupby("seed").agg(_wandering).mean() for of in losses)
    lowest = [entry.epochs.train_loss.groupby("seed").min().mean() for entry in (ours, theirs)]
    return (
        f"Last iterates, {name}, rate {theirs.rate:g}: over the last {LAST} epochs the training loss deviates from a "
        f"linear trend by {100 * mine:.2f} % under GraB and {100 * rr:.2f} % under RR (mean over seeds). "
        f"The lowest of RR's epochs is {_share(lowest[1] / lowest[0] - 1)} than the lowest of GraB's."
    )


def _wandering(losses: pd.Series) -> float:
    """Relative deviation from a linear trend, for one seed."""
    last, at = losses.to_numpy()[-LAST:], np.arange(LAST)
    trend = np.polyval(np.polyfit(at, last, 1), at)
    return float(np.std(last - trend) / last.mean())


def _stale(name: str, ours: Entry, theirs: Entry) -> str:
    """Staleness and herding objective of a run with ``--herding``."""
    told = ours.epochs.stale_fresh.drop(index=0, level="epoch").dropna()
    mine, rr = ours.jobs.herding.mean(), theirs.jobs.herding.mean()
    if told.empty or np.isnan(mine) or np.isnan(rr):
        return ""
    return (
        f"Staleness, {name}, rate {ours.rate:g}: the cosine similarity of gradients in consecutive epochs is "
        f"{told.min():.2f} to {told.max():.2f} (mean {told.mean():.2f}); in the last epoch the herding objective "
        f"is {mine:.3g} for GraB and {rr:.3g} for RR."
    )
