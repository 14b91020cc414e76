"""Why an order gains little somewhere: how stale gradients were, how the last iterates wander, what the rate does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ordain.study.claims.evidence import Evidence
from ordain.study.claims.pays import Gain
from ordain.study.report.statistics import HELPS, WORSE, mean, verdict
from ordain.study.report.views import Entry
from ordain.study.runs.arms import BASELINE

__all__ = ["LAST", "reasons"]

_BEST = " (RR's best)"
LAST = 5  # epochs, over which the loss of a run at its end wanders


def reasons(evidence: Evidence, names: Sequence[str], found: Sequence[Gain]) -> list[str]:
    """What was measured of the three, in sentences."""
    stale = ("mnist-stale", "cifar10-stale", "digits")
    lines = [_rate(name, [gain for gain in found if (gain.run, gain.arm) == (name, "grab")]) for name in names]
    lines += [_wander(name, evidence.entry(name, BASELINE), evidence.entry(name, "grab")) for name in names]
    lines += [_stale(name, evidence.entry(name, BASELINE), evidence.entry(name, "grab")) for name in stale]
    return [line for line in lines if line]


def _rate(name: str, gains: Sequence[Gain]) -> str:
    """Does what GraB gains depend on the learning rate?"""
    if len(gains) < 2:
        return ""
    words = {HELPS: "clearly", WORSE: "clearly"}
    told = [
        f"{gain.rate:g}{_BEST if gain.best else ''}: {_share(gain.relative)}"
        f" ({words.get(verdict(gain.loss), 'could be luck')})"
        for gain in gains
    ]
    return f"Learning rate, {name}: GraB's final training loss against RR's at the same rate. {'; '.join(told)}."


def _share(relative: float) -> str:
    return f"{100 * abs(relative):.2g} % {'lower' if relative < 0 else 'higher'}"


def _wander(name: str, theirs: Entry | None, ours: Entry | None) -> str:
    """How far the training loss of the last epochs is from a line, as a share of it."""
    if theirs is None or ours is None:
        return ""
    sizes = [_wandering(entry) for entry in (ours, theirs)]
    if None in sizes:
        return ""
    return (
        f"Last iterates, {name}, rate {theirs.rate:g}: over the last {LAST} epochs the training loss leaves its trend "
        f"by {100 * (sizes[0] or 0):.2f} % under GraB and {100 * (sizes[1] or 0):.2f} % under RR (mean over seeds). "
        f"The lowest of RR's epochs is {_share(_lowest(theirs) / _lowest(ours) - 1)} than the lowest of GraB's."
    )


def _lowest(entry: Entry) -> float:
    """The lowest training loss of any epoch, mean over seeds."""
    return (
        mean([min(e.train_loss for e in job.epochs if e.train_loss is not None) for job in entry.jobs.values()]) or 0.0
    )


def _wandering(entry: Entry) -> float | None:
    found = []
    for job in entry.jobs.values():
        losses = np.array([epoch.train_loss for epoch in job.epochs[1:] if epoch.train_loss is not None][-LAST:])
        if len(losses) < LAST:
            return None
        at = np.arange(LAST)
        trend = np.polyval(np.polyfit(at, losses, 1), at)
        found.append(float(np.std(losses - trend) / losses.mean()))
    return mean(found)


def _stale(name: str, theirs: Entry | None, ours: Entry | None) -> str:
    """Of a run with ``--herding``."""
    if theirs is None or ours is None:
        return ""
    told = [e.stale_fresh for job in ours.jobs.values() for e in job.epochs[1:] if e.stale_fresh is not None]
    ends = [
        mean([job.epochs[-1].herding or 0.0 for job in entry.jobs.values() if job.epochs[-1].herding is not None])
        for entry in (ours, theirs)
    ]
    if not told or ends[0] is None or ends[1] is None:
        return ""
    return (
        f"Staleness, {name}, rate {ours.rate:g}: an example's gradients in one epoch and the next correlate by "
        f"{min(told):.2f} to {max(told):.2f} (mean {mean(told):.2f}); in the last epoch GraB's order has a herding "
        f"objective of {ends[0]:.3g}, RR's {ends[1]:.3g}."
    )
