"""When ordering pays: the speed-up of GraB over RR at each learning rate, in epochs and in CPU time.

Possible explanations: learning rate, noise of the last iterates, and staleness of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter, NullLocator

from ordain.orders import ORDERS
from ordain.study.claims.evidence import Evidence
from ordain.study.report.arm_rows import reached
from ordain.study.report.curves import FONTS, legend_below
from ordain.study.report.statistics import HELPS, WORSE, Comparison, compare, corrected, verdict
from ordain.study.report.views import Entry
from ordain.study.runs.arms import BASELINE
from ordain.study.runs.records import Run, select
from ordain.study.style import finish, grid_figure, style

_BEST = " (RR's best)"
LAST = 5  # number of epochs at the end of a run
_PARTS = {"epochs": "epochs", "seconds": "processor seconds"}
ARMS = {"grab": 1, "grab-pair": 2}  # with the position of their style
_LEAST, _MOST = 1 / 8, 8.0  # limits of the drawn ratios
_NEAR = 1e-3  # relative tolerance to RR's lowest loss: at small rates all orders end this close
_ALONE = {"markersize": 9, "markeredgecolor": "white", "zorder": 5}  # a single marker, drawn above all lines


@dataclass(frozen=True)
class Gain:
    """The gain of one arm over RR at the same learning rate, by seed."""

    run: str  # the run's name
    arm: str  # which order
    rate: float  # learning rate of both
    best: bool  # whether it is RR's best rate
    edge: bool  # whether it is the smallest or the largest rate that RR was run at
    # RR's epochs to its lowest training loss (within 0.1 %) divided by the arm's; 0 if never reached.
    epochs: tuple[float, ...]
    seconds: tuple[float, ...]  # the same ratio for CPU time; empty if not recorded
    loss: Comparison  # comparison of final training losses

    @property
    def label(self) -> str:
        """Display name of the order."""
        return ORDERS[self.arm].label

    @property
    def relative(self) -> float:
        """Mean difference of the final training loss relative to RR's."""
        return math.nan if self.loss.relative is None else self.loss.relative

    @property
    def medians(self) -> list[float | None]:
        """Medians over seeds of ``epochs`` and ``seconds``: 0 if the loss was never reached, None if not recorded."""
        return [float(np.median(ratios)) if ratios else None for ratios in (self.epochs, self.seconds)]


def gains(evidence: Evidence, names: Sequence[str]) -> list[Gain]:
    """The gains for every available run in ``names`` at every rate that both orders have finished."""
    found: list[Gain] = []
    for name in names:
        run, view = evidence.run(name), evidence.at_rr(name)
        if run is None or view is None or BASELINE not in run.arms:
            continue
        best = view.entries[BASELINE].rate
        arms = [arm for arm in ARMS if arm in run.arms]
        own = [_gain(run, name, arm, rate, best) for arm in arms for rate in run.arms[BASELINE].rates]
        found += _corrected([gain for gain in own if gain])
    return found


def _corrected(own: Sequence[Gain]) -> list[Gain]:
    """Correct the p of a run for its number of orders and rates."""
    losses = corrected({str(place): gain.loss for place, gain in enumerate(own)})
    return [replace(gain, loss=losses[str(place)]) for place, gain in enumerate(own)]


def _gain(run: Run, name: str, arm: str, rate: float, best: float | None) -> Gain | None:
    ours, theirs = (select(run.done, of, rate) for of in (arm, BASELINE))
    seeds = ours.index.intersection(theirs.index).sort_values()
    if seeds.empty:
        return None
    mine, rr = (select(run.epochs, of, rate) for of in (arm, BASELINE))
    goal = (1 + _NEAR) * rr.train_loss.groupby("seed").min()[seeds]
    until, rr_until = (reached(of, goal, seconds="cpu_seconds", first=1) for of in (mine, rr))
    never = until.epoch.isna()
    epochs = (rr_until.epoch / until.epoch).fillna(0.0)
    seconds = (rr_until.seconds / until.seconds).mask(never, 0.0)[rr_until.seconds > 0]
    loss = compare(ours.train_loss, theirs.train_loss)
    tried = run.arms[BASELINE].rates
    edge = rate in (tried[0], tried[-1])
    return Gain(name, arm, rate, rate == best, edge, tuple(epochs), tuple(seconds[np.isfinite(seconds)]), loss)


@rc_context(FONTS)
def pays_figure(found: Sequence[Gain], titles: Mapping[str, str]) -> Figure | None:
    """GraB's speed-up in all runs, against the learning rate relative to RR's best rate."""
    best = {gain.run: gain.rate for gain in found if gain.best}
    names = [name for name in titles if name in best]
    if not names:
        return None
    figure, (both,) = grid_figure(7.6, 3.5 + 0.2 * ((len(names) + 1) // 2), columns=2, sharey=True)
    for axes, part in zip(both, _PARTS, strict=True):
        _scales(axes)
        axes.axvline(1, color="#999999", linewidth=6, alpha=0.3)
        for place, name in enumerate(names, 1):
            of = [gain for gain in found if (gain.run, gain.arm) == (name, "grab") and getattr(gain, part)]
            at = [gain.rate / best[name] for gain in of]
            look = style(place).line(1) | (_ALONE if len(at) == 1 else {})
            axes.plot(at, [_drawn(gain, part) for gain in of], label=titles[name], **look)
        axes.set(title=f"Speed-up over RR, {_PARTS[part]}", xlabel="learning rate / RR's best rate")
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(NullLocator())
        finish(axes)
    both[0].set_ylabel("above 1: GraB faster; below 1: RR faster")
    legend_below(figure)
    return figure


@rc_context(FONTS)
def tasks_figure(found: Sequence[Gain], titles: Mapping[str, str]) -> Figure | None:
    """One row per run: every seed of GraB and GraB pairs, against the learning rate."""
    names = list(dict.fromkeys(gain.run for gain in found))
    if not names:
        return None
    figure, grid = grid_figure(7.6, 1.75 * len(names) + 1.1, rows=len(names), columns=2, sharey=True)
    for row, name in enumerate(names):
        of = [gain for gain in found if gain.run == name]
        for axes, part in zip(grid[row], _PARTS, strict=True):
            _panel(axes, of, part)
        grid[row, 0].set_title(titles.get(name, name), fontsize=9.5)
    grid[0, 1].set_title(f"the same in {_PARTS['seconds']}", fontsize=9.5)
    for axes in grid[-1]:
        axes.set_xlabel("learning rate")
    legend_below(figure, columns=3, font=None)
    figure.supylabel("speed-up until RR's lowest training loss at that rate", fontsize=9.5)
    return figure


def _panel(axes: Axes, of: Sequence[Gain], part: str) -> None:
    """Draw each seed faintly and connect the medians."""
    rates = sorted({gain.rate for gain in of})
    _scales(axes)
    axes.set_xlim(rates[0] / 1.8, rates[-1] * 1.8)
    best = [gain.rate for gain in of if gain.best]
    if best:
        axes.axvline(best[0], color="#999999", linewidth=6, alpha=0.3, label="RR's best rate")
    for arm, place in ARMS.items():
        look = style(place)
        mine = [gain for gain in of if gain.arm == arm and getattr(gain, part)]
        aside = 1.03 if place == 1 else 1 / 1.03
        for gain in mine:
            each = np.clip(getattr(gain, part), _LEAST, _MOST)
            axes.plot([gain.rate * aside] * len(each), each, look.marker, color=look.color, alpha=0.35, markersize=4)
        if mine:
            at = [gain.rate * aside for gain in mine]
            axes.plot(at, [_drawn(gain, part) for gain in mine], label=mine[0].label, **look.line(1))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    finish(axes)


def _scales(axes: Axes) -> None:
    """Use log scales, with a line at ratio 1."""
    ticks = (_LEAST, 0.25, 0.5, 1.0, 2.0, 4.0, _MOST)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_ylim(_LEAST / 1.25, _MOST * 1.25)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, ["never", "1/4", "1/2", "1", "2", "4", "8+"])
    axes.axhline(1, color="black", linewidth=1.2)


def _drawn(gain: Gain, part: str) -> float:
    return float(np.clip(np.median(getattr(gain, part)), _LEAST, _MOST))


def reasons(evidence: Evidence, names: Sequence[str], found: Sequence[Gain]) -> list[str]:
    """Sentences on learning rate, last iterates and staleness, as far as they were measured."""
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
        f"{gain.rate:g}{_BEST if gain.best else ''}: {share(gain.relative)}"
        f" ({words.get(verdict(gain.loss), 'inconclusive')})"
        for gain in gains
    ]
    return f"Learning rate, {name}: GraB's final training loss compared with RR's at the same rate. {'; '.join(told)}."


def share(relative: float) -> str:
    """A relative difference in words."""
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
        f"The lowest of RR's epochs is {share(lowest[1] / lowest[0] - 1)} than the lowest of GraB's."
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
