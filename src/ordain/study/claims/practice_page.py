"""What the results page shows of tuned orders: a sentence, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ordain.orders import ORDERS
from ordain.study.claims.practice import LEVEL, MEASURES, Point, at_best_schedule, validates_better
from ordain.study.report.curves import FONTS, legend_below
from ordain.study.report.number_text import NOTHING, counted, p_equals, p_text
from ordain.study.report.page import Table
from ordain.study.report.statistics import ENOUGH_SEEDS, Comparison, compare, holm
from ordain.study.runs.arms import BASELINE, parse
from ordain.study.style import finish, grid_figure, style
from ordain.study.tasks import TASKS

_JUDGED = ("test", "accuracy")  # at equal processor time; rates are not chosen for a low training loss
_STRATIFIED = "stratified"
_BASELINES = (BASELINE, f"{BASELINE}-ema", "flipflop", _STRATIFIED)  # do not look at gradients
_BY_HEAD, _BY_ALL, _OTHERS = "#D55E00", "#0072B2", "#888888"  # colours
_LEAST_GAIN, _LEAST_POINTS = 0.005, 0.3  # smaller differences in loss and accuracy are of no use, significant or not
_LEAST_RANGE = 0.02  # of a figure's axis, as a share: smaller differences should look small


def better(comparison: Comparison | None, measure: str) -> bool | None:
    """Whether a significant difference is an improvement; None if there is none, or none that is large enough."""
    if comparison is None or comparison.difference is None or len(comparison.seeds) < ENOUGH_SEEDS:
        return None
    p, accuracy = comparison.decides, measure == "accuracy"
    small = abs(comparison.difference) < _LEAST_POINTS if accuracy else abs(comparison.relative or 0.0) < _LEAST_GAIN
    return None if p is None or p >= LEVEL or small else (comparison.difference > 0) == accuracy


def title(point: Point) -> str:
    """The task, with what is unusual about it."""
    task, size, limit = point.problem
    usual = TASKS[task].defaults.batch_size
    parts = [TASKS[task].title]
    if size != str(usual):
        parts.append(f"batches of {size}")
    if limit != "None":
        parts.append(f"{int(limit):,} examples")
    return ", ".join(parts)


def main_points(found: Sequence[Point]) -> list[Point]:
    """Each order at its best schedule, on problems on which RR was run at several lengths or which are alone."""
    shown = at_best_schedule(found)
    lengths = {
        problem: {p.epochs for p in shown if (p.problem, p.arm) == (problem, BASELINE)} for problem in _of(shown)
    }
    tasks = [problem[0] for problem in lengths]
    return [point for point in shown if len(lengths[point.problem]) > 1 or tasks.count(point.problem[0]) == 1]


def headline(found: Sequence[Point]) -> str:
    """One sentence: on how many tasks the order in the table beats RR at equal processor time, and by how much."""
    rows = _rows(found)
    tested = [point for row in rows for point in row if point.equal and point.arm not in _BASELINES]
    if not tested:
        return ""
    outcomes = {measure: [better(point.equal.get(measure), measure) for point in tested] for measure in _JUDGED}
    told = []
    for measure, words in zip(_JUDGED, (("lower", "higher"), ("higher", "lower")), strict=True):
        wins = [point.equal[measure] for point, won in zip(tested, outcomes[measure], strict=True) if won]
        lost = outcomes[measure].count(False)
        told.append(
            f"{MEASURES[measure].removesuffix(', %')} is {words[0]} on {len(wins) or 'none'}{_by(wins, measure)} and "
            f"{words[1]} on {lost or 'none'}"
        )
    won = [point for point, *both in zip(tested, *outcomes.values(), strict=True) if True in both and False not in both]
    only = "only " if 0 < len(won) <= len(tested) / 2 else ""
    compared = "at the same processor time as random reshuffling with its own best rate and schedule"
    on = f"{only}on {len(won) or 'none'} of {counted(len(tested), 'task')}"
    free = [
        _against_free(point, other) for point in won for row in rows for other in row if _is_stratified(other, point)
    ]
    return " ".join([f"Ordering pays {on}: {compared}, {'; '.join(told)}.", *free])


def _is_stratified(other: Point, point: Point) -> bool:
    """Whether this is stratified order on the same problem, of as many epochs."""
    return (other.problem, other.epochs, other.arm) == (point.problem, point.epochs, _STRATIFIED)


def _against_free(point: Point, stratified: Point) -> str:
    """How an order that learns compares with stratified order, which costs nothing."""
    found = compare(point.values["test"], stratified.values["test"])
    size = f"{100 * abs(found.relative or 0.0):.1f} % {'lower' if (found.relative or 0.0) < 0 else 'higher'}"
    what = {True: "it is better than", False: "it is worse than", None: "there is no clear difference from"}
    than = f"{what[better(found, 'test')]} stratified order, which costs nothing"
    return f"On {title(point)}, {than} (test loss {size}, {p_equals(found.p)})."


def _by(wins: Sequence[Comparison], measure: str) -> str:
    """The sizes of improvements, in brackets."""
    accuracy = measure == "accuracy"
    sizes = sorted(abs((win.difference if accuracy else 100 * (win.relative or 0.0)) or 0.0) for win in wins)
    if not sizes:
        return ""
    ends = dict.fromkeys(f"{size:.1f}" for size in (sizes[0], sizes[-1]))
    return f" (by {' to '.join(ends)} {'points' if accuracy else '%'})"


def table(found: Sequence[Point]) -> Table:
    """For each task, the best order that learns, next to RR of as many epochs and of more time, over common seeds."""
    rows = []
    shown = main_points(found)
    for told in _rows(found):
        seeds = sorted(set.intersection(*(set(point.values["valid"].index) for point in told)))
        for number, point in enumerate(told):
            loss, accuracy = (point.values[measure][seeds].mean() for measure in _JUDGED)
            rows.append(
                (
                    "" if number else title(point),
                    point.label + (f": {call}" if (call := ORDERS[parse(point.arm).order].call) else ""),
                    str(point.epochs),
                    _time(shown, point),
                    f"{loss:.3f}",
                    f"{accuracy:.1f}",
                    _judged(point),
                )
            )
    headings = ["task", "what you do", "epochs", "processor time", "test loss", "test accuracy, %"]
    return Table("Does it pay?", [*headings, "against RR for the same time"], rows)


def _rows(found: Sequence[Point]) -> list[list[Point]]:
    """The rows of the table, by task; the p of all differences that it judges are corrected for their number."""
    shown = main_points(found)
    rows = [_best_and_rr([point for point in shown if point.problem == problem]) for problem in _of(shown)]
    for measure in _JUDGED:
        equal = [point.equal.get(measure) for row in rows for point in row]
        ps = iter(holm([None if of is None else of.decides for of in equal]))
        rows = [[_with_p(point, measure, next(ps)) for point in row] for row in rows]
    return rows


def _with_p(point: Point, measure: str, p: float | None) -> Point:
    """The point with a corrected p of the difference at equal processor time."""
    if measure not in point.equal:
        return point
    return replace(point, equal={**point.equal, measure: replace(point.equal[measure], holm=p)})


def _best_and_rr(mine: Sequence[Point]) -> list[Point]:
    """RR of as many epochs as the best order that learns, and of its time or more; stratified order; and that order."""
    rr = [point for point in mine if point.arm == BASELINE]
    others = [point for point in mine if point.arm not in _BASELINES]
    if not others:
        return rr
    best = reduce(lambda one, other: other if validates_better(other, one) else one, others)
    longer = sorted((point for point in rr if point.seconds >= best.seconds), key=lambda point: point.seconds)[:1]
    shown = [point for point in rr if point.epochs == best.epochs or point in longer]
    return [*shown, *(p for p in mine if (p.arm, p.epochs) == (_STRATIFIED, best.epochs)), best]


def _judged(point: Point) -> str:
    """Whether each measure is better than RR's at equal processor time."""
    if point.arm == BASELINE:
        return NOTHING
    told = [_word(point.equal.get(measure), measure) for measure in _JUDGED]
    if len(set(told)) == 1:
        return told[0]
    names = (MEASURES[measure].removeprefix("test ").removesuffix(", %") for measure in _JUDGED)
    return ", ".join(f"{name} {word}" for name, word in zip(names, told, strict=True))


def _word(found: Comparison | None, measure: str) -> str:
    if found is None:
        return "RR was not run for as long"
    if len(found.seeds) < ENOUGH_SEEDS:
        return f"too few seeds ({len(found.seeds)})"
    return {True: "better", False: "worse", None: "no clear difference"}[better(found, measure)]


def _time(found: Sequence[Point], point: Point) -> str:
    """Processor time over that of RR's shortest run."""
    base = [other.seconds for other in found if (other.problem, other.arm) == (point.problem, BASELINE)]
    return f"{point.seconds / min(base, default=point.seconds):.2f}"


def details(found: Sequence[Point]) -> Table:
    """Every order with its rate, its spread over seeds and its p."""
    rows = [
        (
            title(point),
            point.decay,
            point.label,
            str(point.epochs),
            f"{point.rate:g}{'*' if point.edge else ''}",
            str(len(point.values["valid"])),
            _time(found, point),
            *(_value(point, measure) for measure in MEASURES),
            NOTHING if point.same_rate is None else f"{100 * (point.same_rate - 1):+.1f} %",
            *(_p(of.get(measure)) for measure in _JUDGED for of in (point.same, point.equal)),
        )
        for point in found
    ]
    headings = ["task", "schedule", "order", "epochs", "rate", "seeds", "processor time", *MEASURES.values()]
    headings += ["training loss / RR's at this rate"]
    headings += [f"p, {what}, {when}" for what in ("test loss", "accuracy") for when in ("same epochs", "same time")]
    return Table("Rates, spread and p", headings, rows)


def sweeps(found: Sequence[Point]) -> Table:
    """Tasks with several batch sizes or numbers of examples: every order against RR of as many epochs."""
    rows = []
    shown = at_best_schedule(found)
    tasks = [problem[0] for problem in _of(found)]
    rr = {(point.problem, point.epochs): point.seconds for point in shown if point.arm == BASELINE}
    for point in shown:
        task, size, limit = point.problem
        if tasks.count(task) > 1 and point.same and point.arm not in _BASELINES:
            cells = (_gain(point.same[measure], measure) for measure in MEASURES)
            examples = f"{TASKS[task].examples:,}" if limit == "None" else f"{int(limit):,}"
            time = f"{point.seconds / rr[point.problem, point.epochs]:.2f}"
            rows.append((TASKS[task].title, size, examples, point.label, time, *cells))
    names = [name.removesuffix(", %") for name in MEASURES.values()]
    headings = ["task", "batch size", "examples", "order", "processor time / RR's", *names]
    return Table("By batch size and number of examples, for as many epochs", headings, rows)


def _gain(comparison: Comparison, measure: str) -> str:
    """The difference to RR, with its p."""
    if comparison.difference is None:
        return NOTHING
    accuracy = measure == "accuracy"
    size = comparison.difference if accuracy else 100 * (comparison.relative or 0.0)
    return f"{size:+.2f} {'points' if accuracy else '%'} (p = {_p(comparison)})"


def _value(point: Point, measure: str) -> str:
    of = point.values[measure]
    digits = 1 if measure == "accuracy" else 4
    return f"{of.mean():.{digits}f} ± {of.std():.{digits}f}"


def _p(comparison: Comparison | None) -> str:
    return p_text(comparison.decides if comparison else None)


def _of(found: Sequence[Point]) -> list[tuple[str, ...]]:
    """The problems, each once."""
    return list(dict.fromkeys(point.problem for point in found))


@rc_context(FONTS)
def training_by_time(found: Sequence[Point], *, columns: int = 3) -> Figure | None:
    """Training loss against processor time, one panel for each task."""
    shown = main_points(found)
    problems = _of(shown)
    if not problems:
        return None
    columns = min(columns, len(problems))
    rows = -(-len(problems) // columns)
    figure, grid = grid_figure(3.1 * columns, 2.3 * rows + 0.9, rows=rows, columns=columns)
    for axes, problem in zip(grid.flat, problems, strict=False):
        _panel(axes, shown, problem, "train")
        axes.set_title(fill(title(next(point for point in shown if point.problem == problem)), 36), fontsize=8.5)
    for axes in grid[:, 0]:
        axes.set_ylabel(MEASURES["train"])
    for axes in grid.flat[len(problems) :]:
        axes.set_visible(False)
    return _labelled(figure, grid)


@rc_context(FONTS)
def pays_by_time(found: Sequence[Point]) -> Figure | None:
    """Test loss and test accuracy against processor time, one row for each task with RR at several lengths."""
    shown = main_points(found)
    problems = _of([point for point in shown if point.equal]) or _of(shown)
    if not problems:
        return None
    figure, grid = grid_figure(7.6, 2.1 * len(problems) + 0.9, rows=len(problems), columns=2)
    for row, problem in zip(grid, problems, strict=True):
        for axes, measure in zip(row, _JUDGED, strict=True):
            _panel(axes, shown, problem, measure)
            axes.set_ylabel(MEASURES[measure])
        row[0].set_title(title(next(point for point in shown if point.problem == problem)))
    return _labelled(figure, grid)


def _panel(axes: Axes, shown: Sequence[Point], problem: tuple[str, ...], measure: str) -> None:
    """One line for each order through its lengths.

    Bars are standard deviations over seeds after each seed's mean is taken out: all orders of a seed share the initial
    weights, which decide most of its result.
    """
    own = [point for point in shown if point.problem == problem]
    table = pd.DataFrame({number: point.values[measure] for number, point in enumerate(own)}).dropna()
    table = table.sub(table.mean(axis=1), axis=0) + table.to_numpy().mean()
    for arm, look in _looks(shown).items():
        mine = sorted((point.seconds, number) for number, point in enumerate(own) if point.arm == arm)
        if mine:
            numbers = [number for _, number in mine]
            mean, error = table[numbers].mean(), table[numbers].std()
            at = [seconds for seconds, _ in mine]
            axes.errorbar(at, mean, yerr=error, capsize=2, label=own[numbers[0]].label, **look)
    axes.set_xlim(0, 1.06 * max(point.seconds for point in own))  # from 0, so that costs can be compared by eye
    low, high = axes.get_ylim()
    half = max((high - low) / 2, _LEAST_RANGE * abs(low + high) / 4)
    axes.set_ylim((low + high) / 2 - half, (low + high) / 2 + half)
    axes.ticklabel_format(useOffset=False)
    finish(axes)


def _looks(shown: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """How each order is drawn: coloured by whether it learns, and what from; each with its own marker."""
    found = {BASELINE: style(0).line(1)}
    for place, arm in enumerate(sorted({point.arm for point in shown} - {BASELINE})):
        colour = _BY_HEAD if "head" in arm else _BY_ALL if arm.startswith(("grab", "herding")) else _OTHERS
        found[arm] = style(1 + place).line(1) | {"color": colour, "linestyle": "--"}
    return found


def _labelled(figure: Figure, grid: Any) -> Figure:
    for column in grid.T:
        [axes for axes in column if axes.get_visible()][-1].set_xlabel("seconds of processor time")
    legend_below(figure)
    return figure
