"""The figures of a training report: their order on the page, and its bar charts with one row per arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ordain.study.report.arm_rows import Row, rows
from ordain.study.report.curves import FONTS, WIDTH, by_epoch, curve_figure, rate_figure, styles
from ordain.study.report.number_text import bytes_text, plain, seconds_text
from ordain.study.report.statistics import verdict
from ordain.study.report.views import ACCURACY, HERDING, STALENESS, TRAIN, VALID, VALID_ACCURACY, Metric, View, metrics
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.record_lines import PARTS
from ordain.study.runs.records import Run
from ordain.study.style import COLOURS, LEGEND, Drawn, Style, draw, finish, grid_figure

# Figures shown in Markdown: few enough to keep in a repository. The HTML page shows all figures.
_MAIN = ("difference", "train-loss-epochs", "valid-loss-epochs", "herding", "stale-fresh", "rates")
Named = tuple[str, str, Figure | None]  # file name, alternative text, and the figure (None if there is no data)


def training_figures(run: Run, found: list[View]) -> dict[str, list[Drawn]]:
    """Figures by section: one section per view ("own", "rr"), and "costs"."""
    looks = styles(run)
    wanted = ("memory",) if run.config.get("study") == "memory" else _MAIN
    sections = {view.name: _of_view(run, view, looks) for view in found} | {"costs": _of_costs(run, found[0], looks)}
    return {
        section: [
            draw(name, text, figure, main=name.removeprefix(f"{section}-") in wanted)
            for name, text, figure in named
            if figure
        ]
        for section, named in sections.items()
    }


def _of_costs(run: Run, view: View, looks: dict[str, Style]) -> Iterator[Named]:
    table = rows(view)
    for name, metric in (("rates", TRAIN), ("valid-rates", VALID)):
        yield name, f"Final {metric.title} of each order at every learning rate", rate_figure(run, view, looks, metric)
    yield "goal", "Epochs and seconds of training until RR's best training loss", goal_figure(table, looks)
    yield "time", "Seconds per epoch by part of the step", time_figure(view)
    yield "memory", "Memory of the order and of the job", memory_figure(table, looks)


def _of_view(run: Run, view: View, looks: dict[str, Style]) -> Iterator[Named]:
    text = "Final training loss minus RR's, for each order"
    yield f"{view.name}-difference", text, difference_figure(view, TRAIN, looks)
    for metric in (TRAIN, VALID, ACCURACY if ACCURACY in metrics(run) else VALID_ACCURACY):
        for seconds in (False, True):
            what, against = metric.title.capitalize(), "time" if seconds else "epochs"
            title = f"{what.partition(',')[0]} against {against}"
            figure = curve_figure(view, looks, metric, title=title, seconds=seconds)
            yield f"{view.name}-{metric.name}-{against}", f"{what} against {against}", figure
    herding = curve_figure(view, looks, HERDING, title="Herding objective per epoch")
    yield f"{view.name}-herding", "Herding objective against epochs", herding
    staleness = curve_figure(view, looks, STALENESS, title="Staleness of gradients")
    yield f"{view.name}-stale-fresh", "Cosine similarity of gradients in consecutive epochs", staleness


_HATCHES = ("", "///", "...", "xx", "\\\\\\")  # distinguishable without colour
_FAINT = "#666666"


@rc_context(FONTS)
def difference_figure(view: View, metric: Metric, looks: Mapping[str, Style]) -> Figure | None:
    """Difference of the final value from RR's: each seed, the mean, and its 99 % confidence interval."""
    compared = {name: found for name, found in view.comparisons(metric).items() if found.difference is not None}
    if not compared:
        return None
    figure, axes = _one_line_each([view.entries[name].arm.label for name in compared])
    axes.axvline(0, color="black", linewidth=1.6)
    for place, (name, found) in enumerate(compared.items()):
        baseline, look = view.baseline(name) or view.entries[name], looks[name]
        ours, theirs = (entry.final(metric)[list(found.seeds)] for entry in (view.entries[name], baseline))
        each = metric.scale * (ours - theirs)
        axes.plot(each, [place] * len(each), look.marker, color=look.color, alpha=0.45, markersize=5)
        if found.interval:
            low, high = (metric.scale * end for end in found.interval)
            axes.plot([low, high], [place] * 2, color=look.color, linewidth=2.4, solid_capstyle="butt")
        axes.plot(each.mean(), place, "|", color=look.color, markersize=15, markeredgewidth=2.6)
        said = verdict(found, lower_is_better=metric.lower_is_better).partition(" (")[0]
        axes.text(1.02, place, said, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=_FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    better = "left" if metric.lower_is_better else "right"
    axes.set(title=f"Final {metric.title}, minus RR's", xlabel=f"{better} is better; bars: mean and 99 % interval")
    return figure


@rc_context(FONTS)
def time_figure(view: View) -> Figure | None:
    """Time per epoch by part of the step: median over seeds, mean over epochs."""
    shown = [entry for entry in view.shown.values() if entry.jobs.epoch.iloc[0] > 0]
    if not shown:
        return None
    figure, axes = _one_line_each([entry.arm.label for entry in shown], more=0.5)
    left = np.zeros(len(shown))
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6, "height": 0.68}
    for part, colour, hatch in zip(PARTS, COLOURS, _HATCHES, strict=False):
        width = np.array([by_epoch(entry, part).median(axis=1).mean() for entry in shown])
        axes.barh(range(len(shown)), width, left=left, label=part, color=colour, hatch=hatch, **look)
        left += width
    axes.set_xlim(0, 1.16 * float(left.max()) or 1.0)
    for place, total in enumerate(left):
        axes.text(total, place, f" {seconds_text(float(total))}", va="center", fontsize=8, color=_FAINT)
    axes.set(title="Time per epoch", xlabel="seconds of training, without evaluation")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, **(LEGEND | {"handlelength": 1.4}))
    return figure


# One bar chart in a row of several: its title, the value of each table row, and the label of a value.
_Panel = tuple[str, Callable[[Row], float | None], Callable[[float], str]]


def memory_figure(table: Sequence[Row], looks: Mapping[str, Style]) -> Figure | None:
    """Memory of the order's state and of the whole job."""
    held: _Panel = ("Order's memory", lambda row: row.order_bytes, bytes_text)
    added: _Panel = ("Job's memory", lambda row: row.job_bytes, bytes_text)
    return _panels(table, looks, [held, added], missing="not measured")


def goal_figure(table: Sequence[Row], looks: Mapping[str, Style]) -> Figure | None:
    """Epochs and time until RR's lowest train loss with the same seed."""
    if not any(is_baseline(row.name) and row.epochs_to_goal is not None for row in table):
        return None
    epochs: _Panel = ("Epochs to RR's best", lambda row: row.epochs_to_goal, "{:g}".format)
    time: _Panel = ("Time to RR's best", lambda row: row.seconds_to_goal, seconds_text)
    return _panels(table, looks, [epochs, time], missing="not reached")


@rc_context(FONTS)
def _panels(
    table: Sequence[Row], looks: Mapping[str, Style], panels: Sequence[_Panel], *, missing: str
) -> Figure | None:
    shown = [row for row in table if row.train.mean is not None]
    panels = [panel for panel in panels if any(panel[1](row) is not None for row in shown)]
    if not panels:
        return None
    figure, (both,) = grid_figure(WIDTH, 1.1 + 0.34 * len(shown), columns=len(panels), sharey=True)
    for axes, (title, get, text) in zip(both, panels, strict=True):
        values = [get(row) for row in shown]
        for place, (row, value) in enumerate(zip(shown, values, strict=True)):
            axes.barh(place, value or 0.0, color=looks[row.name].color, height=0.62)
            said = missing if value is None else text(value)
            axes.text(value or 0.0, place, f" {said}", va="center", fontsize=8, color=_FAINT)
        axes.set_xlim(0, 1.45 * max((value for value in values if value), default=1.0))
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(axis="x", labelbottom=False, length=0)  # each bar is labelled
        finish(axes)
        axes.set_axisbelow(True)
        axes.grid(visible=False, axis="y")
    _name_lines(both[0], [row.label for row in shown])
    return figure


def _one_line_each(labels: Sequence[str], *, more: float = 0.0) -> tuple[Figure, Axes]:
    figure, ((axes,),) = grid_figure(WIDTH, 1.3 + more + 0.36 * len(labels))
    _name_lines(axes, labels)
    finish(axes)
    return figure, axes


def _name_lines(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
