"""Curves over epochs, time and learning rates: mean and standard deviation over seeds for each arm.

Times are medians over seeds, so that a pause of one job does not distort a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ordain.study.report.number_text import plain
from ordain.study.report.views import TRAIN, Entry, Metric, View
from ordain.study.runs.arms import BASELINE
from ordain.study.runs.record_lines import DONE
from ordain.study.runs.records import Run, select
from ordain.study.style import LEGEND, Style, finish, grid_figure, style

WIDTH = 5.6  # inches: readable on a phone without scrolling
FONTS: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
_MOST_BANDS = 8  # with more arms, the bands would overlap too much
_BESIDE = 0.2  # share of the distance to the next rate used to separate arms
_LOG_FROM = 3.0  # ranges larger than this use a log scale


def styles(run: Run) -> dict[str, Style]:
    """One style per arm, the same in every figure; only RR is black."""
    others = [name for name in run.arms if name != BASELINE]
    return {BASELINE: style(0)} | {name: style(position) for position, name in enumerate(others, 1)}


@rc_context(FONTS)
def curve_figure(
    view: View, looks: Mapping[str, Style], metric: Metric, *, title: str, seconds: bool = False
) -> Figure | None:
    """One line per arm, starting after the first epoch; None if nothing was recorded."""
    figure, ((axes,),) = grid_figure(WIDTH, _height(0))
    drawn = draw_curves(axes, view, looks, metric, seconds=seconds)
    if not drawn:
        return None
    figure.set_figheight(_height(drawn))
    axes.set(title=title, ylabel=metric.title)
    legend_below(figure)
    return figure


def draw_curves(axes: Axes, view: View, looks: Mapping[str, Style], metric: Metric, *, seconds: bool = False) -> int:
    """Draw mean and standard deviation of each arm against epochs or time; returns the number of arms drawn."""
    found = {name: metric.scale * by_epoch(entry, metric.column).dropna() for name, entry in view.shown.items()}
    series = {name: values for name, values in found.items() if len(values)}
    # Time up to each epoch.
    times = {name: by_epoch(view.entries[name], "training_seconds").median(axis=1).cumsum() for name in series}
    end = max((float(times[name][of.index[-1]]) for name, of in series.items()), default=0.0)
    unit, size = ("hours", 3600) if end > 3 * 3600 else ("minutes", 60) if end > 300 else ("seconds", 1)
    for name, values in series.items():
        at = times[name][values.index] / size if seconds else values.index
        mean, band, look = values.mean(axis=1), values.std(axis=1), looks[name]
        axes.plot(at, mean, label=plain(view.entries[name].arm.label), **look.line(max(1, len(mean) // 8)))
        if len(series) <= _MOST_BANDS and values.shape[1] > 1:
            axes.fill_between(at, mean - band, mean + band, color=look.color, alpha=0.12, linewidth=0)
    if metric.lower_is_better and series:
        _log_if_wide(axes, [values.mean(axis=1) for values in series.values()])
    axes.set_xlabel(f"{unit} of training, without evaluation" if seconds else "epochs")
    if seconds:
        axes.set_xlim(left=0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    finish(axes)
    return len(series)


@rc_context(FONTS)
def rate_figure(run: Run, chosen: View, looks: Mapping[str, Style], metric: Metric = TRAIN) -> Figure | None:
    """Final loss of each arm at every rate, with a ring around the chosen rate; None if there is only one rate."""
    rates = sorted({rate for arm in run.arms.values() for rate in arm.rates})
    if len(rates) < 2:
        return None
    figure, ((axes,),) = grid_figure(WIDTH, _height(len(run.arms)))
    means = []
    step = min(high / low for low, high in pairwise(rates)) ** (_BESIDE / len(run.arms))
    for place, (name, arm) in enumerate(run.arms.items()):
        look = looks[name]
        # Offset the arms, so that points at the same rate do not overlap.
        aside = step ** (place - (len(run.arms) - 1) / 2)
        jobs = select(run.jobs, name)
        for rate in jobs[jobs.state == "diverged"].index.get_level_values("lr"):
            mark: dict[str, Any] = {"color": look.color, "transform": axes.get_xaxis_transform(), "markersize": 6}
            axes.plot(rate * aside, 0.98 - 0.035 * (place % 12), "x", **mark)
        ends = jobs[jobs.state == DONE][metric.column].dropna().groupby("lr")
        mean, error = ends.mean(), ends.std().fillna(0.0)
        if mean.empty:
            continue
        means.append(mean)
        axes.errorbar(mean.index * aside, mean, yerr=error, label=plain(arm.label), capsize=2, **look.line(1))
        chosen_rate = chosen.entries[name].rate
        if chosen_rate in mean:
            ring: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": look.color}
            axes.plot(chosen_rate * aside, mean[chosen_rate], "o", linestyle="none", **ring)
    if not means:
        return None
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_locator(NullLocator())
    _log_if_wide(axes, means)
    axes.set(title=f"Final {metric.title} at each rate", ylabel=f"{metric.title} after the last epoch")
    axes.set_xlabel("learning rate (ring: selected; x: a seed diverged)")
    finish(axes)
    legend_below(figure)
    return figure


def legend_below(figure: Figure, *, columns: int = 2, font: float | None = 9) -> None:
    """Put one legend for all axes below the figure, in two columns, to fit narrow screens."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    lines, labels = list(found.values()), list(found)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, fontsize=font, **LEGEND)


def _height(arms: int) -> float:
    return 3.6 + 0.2 * ((arms + 1) // 2)


def by_epoch(entry: Entry, column: str) -> pd.DataFrame:
    """The column as a table with one row per epoch (without epoch 0) and one column per seed."""
    return entry.epochs[column].unstack("seed").drop(index=0, errors="ignore")


def _log_if_wide(axes: Axes, means: Sequence[pd.Series]) -> None:
    every = pd.concat(means)
    if every.min() > 0 and every.max() / every.min() > _LOG_FROM:
        axes.set_yscale("log")
        wide = every.max() / every.min() > 30
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
