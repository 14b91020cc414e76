"""When does ordering pay? What GraB gains over RR at each learning rate, in epochs and in processor seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullFormatter, NullLocator

from ordain.orders import ORDERS
from ordain.study.claims.evidence import Evidence
from ordain.study.report.curves import FONTS
from ordain.study.report.statistics import Comparison, compare
from ordain.study.report.views import TRAIN
from ordain.study.runs.arms import BASELINE
from ordain.study.runs.records import DONE, Job, Run
from ordain.study.style import LEGEND, finish, style

__all__ = ["Gain", "gains", "pays_figure", "tasks_figure"]

_PARTS = {"epochs": "epochs", "seconds": "processor seconds"}
ARMS = {"grab": 1, "grab-pair": 2}  # and the place of each style
_LEAST, _MOST = 1 / 8, 8.0  # of a ratio that is drawn in its place
_NEAR = 1e-3  # of RR's lowest loss: at small rates all orders end that close, and which is lower is chance
_ALONE = {"markersize": 9, "markeredgecolor": "white", "zorder": 5}  # one mark, which no line may hide


@dataclass(frozen=True)
class Gain:
    """One arm at one rate over RR at the same rate, by seed.

    Attributes:
        run: the run's name.
        arm: which order.
        rate: of both.
        best: is it RR's own best rate?
        epochs: of RR's until its lowest training loss (within a thousandth), over the arm's; 0 if it never gets there.
        seconds: the same of the processor's time; empty where that was not recorded.
        loss: of the final training losses.
        relative: mean difference of the final training loss, as a share of RR's.
    """

    run: str
    arm: str
    rate: float
    best: bool
    epochs: tuple[float, ...]
    seconds: tuple[float, ...]
    loss: Comparison
    relative: float

    @property
    def label(self) -> str:
        """What people call the order."""
        return ORDERS[self.arm].label

    def median(self, part: str) -> float | None:
        """Over seeds, of ``"epochs"`` or ``"seconds"``; None where that was not recorded."""
        ratios: tuple[float, ...] = getattr(self, part)
        return float(np.median(ratios)) if ratios else None


def gains(evidence: Evidence, names: Sequence[str]) -> list[Gain]:
    """Of every run in ``names`` that is there, every rate at which both have finished."""
    found = []
    for name in names:
        run, view = evidence.run(name), evidence.at_rr(name)
        if run is None or view is None or BASELINE not in run.arms:
            continue
        best = view.entries[BASELINE].rate
        for arm in ARMS:
            for rate in sorted(run.arms[BASELINE].rates):
                gain = _gain(run, name, arm, rate, best) if arm in run.arms else None
                if gain is not None:
                    found.append(gain)
    return found


def _gain(run: Run, name: str, arm: str, rate: float, best: float | None) -> Gain | None:
    ours, theirs = (
        {seed: job for seed, job in run.arms[of].rates.get(rate, {}).items() if job.state == DONE}
        for of in (arm, BASELINE)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    ratios = [_ratios(ours[seed], theirs[seed]) for seed in seeds]
    loss = compare(*({seed: TRAIN.get(jobs[seed].epochs[-1]) for seed in seeds} for jobs in (ours, theirs)))
    base = float(np.mean([TRAIN.get(theirs[seed].epochs[-1]) or math.nan for seed in seeds]))
    return Gain(
        name,
        arm,
        rate,
        rate == best,
        tuple(epochs for epochs, _ in ratios),
        tuple(seconds for _, seconds in ratios if seconds is not None),
        loss,
        math.nan if loss.difference is None else loss.difference / base,
    )


def _ratios(ours: Job, theirs: Job) -> tuple[float, float | None]:
    """RR's epochs and processor seconds until near its lowest training loss, over those of the other; 0 if never."""
    goal = (1 + _NEAR) * min(epoch.train_loss for epoch in theirs.epochs if epoch.train_loss is not None)
    mine, rr = _until(ours, goal), _until(theirs, goal)
    if mine is None or rr is None:
        return 0.0, None if rr is None or not rr[1] else 0.0
    return rr[0] / max(mine[0], 1), (rr[1] / mine[1] if rr[1] and mine[1] else None)


def _until(job: Job, goal: float) -> tuple[int, float | None] | None:
    seconds: float | None = 0.0
    for epoch in job.epochs:
        seconds = None if seconds is None or epoch.cpu_seconds is None else seconds + epoch.cpu_seconds
        if epoch.epoch and epoch.train_loss is not None and epoch.train_loss <= goal:
            return epoch.epoch, seconds
    return None


def pays_figure(found: Sequence[Gain], titles: Mapping[str, str]) -> Figure | None:
    """All runs at once: what GraB gains, against the learning rate as a multiple of the one that RR does best at."""
    best = {gain.run: gain.rate for gain in found if gain.best}
    names = [name for name in titles if name in best]
    if not names:
        return None
    with rc_context(FONTS):
        figure = Figure(figsize=(7.6, 3.5 + 0.2 * ((len(names) + 1) // 2)), layout="constrained")
        both = figure.subplots(1, 2, sharey=True)
        for axes, part in zip(both, _PARTS, strict=True):
            _scales(axes)
            axes.axvline(1, color="#999999", linewidth=6, alpha=0.3)
            for place, name in enumerate(names, 1):
                of = [gain for gain in found if (gain.run, gain.arm) == (name, "grab") and getattr(gain, part)]
                at = [gain.rate / best[name] for gain in of]
                look = style(place).line(1) | (_ALONE if len(at) == 1 else {})
                axes.plot(at, [_drawn(gain, part) for gain in of], label=titles[name], **look)
            axes.set_title(f"{_PARTS[part].capitalize()}: times fewer than RR")
            axes.set_xlabel("learning rate / RR's best rate")
            axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.xaxis.set_minor_locator(NullLocator())
            finish(axes)
        both[0].set_ylabel("GraB sooner above 1, RR below")
        handles, labels = both[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, **LEGEND)
    return figure


def tasks_figure(found: Sequence[Gain], titles: Mapping[str, str]) -> Figure | None:
    """A row for each run: every seed, GraB and pairs, against the learning rate."""
    names = list(dict.fromkeys(gain.run for gain in found))
    if not names:
        return None
    with rc_context(FONTS):
        figure = Figure(figsize=(7.6, 1.75 * len(names) + 1.1), layout="constrained")
        grid = figure.subplots(len(names), 2, squeeze=False, sharey=True)
        for row, name in enumerate(names):
            of = [gain for gain in found if gain.run == name]
            for axes, part in zip(grid[row], _PARTS, strict=True):
                _panel(axes, of, part)
            grid[row, 0].set_title(titles.get(name, name), fontsize=9.5)
        grid[0, 1].set_title(f"the same in {_PARTS['seconds']}", fontsize=9.5)
        for axes in grid[-1]:
            axes.set_xlabel("learning rate")
        seen: dict[str, Artist] = {}
        for axes in grid.flat:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                seen.setdefault(label, handle)
        figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=3, **LEGEND)
        figure.supylabel("times fewer until RR's lowest training loss at that rate", fontsize=9.5)
    return figure


def _panel(axes: Axes, of: Sequence[Gain], part: str) -> None:
    """Each seed faint, the median joined; below the line RR is sooner."""
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
    """Ratios on a log scale, with a line where nothing is gained."""
    ticks = (_LEAST, 0.25, 0.5, 1.0, 2.0, 4.0, _MOST)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_ylim(_LEAST / 1.25, _MOST * 1.25)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, ["never", "1/4", "1/2", "1", "2", "4", "8+"])
    axes.axhline(1, color="black", linewidth=1.2)


def _drawn(gain: Gain, part: str) -> float:
    return float(np.clip(gain.median(part) or 0.0, _LEAST, _MOST))
