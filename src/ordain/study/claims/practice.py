"""Does it pay against tuned, decaying rates? Each order at its own rate and length, by processor time.

See results/PROTOCOL.md. The runs are those with ``--protocol each``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from ordain import Every
from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.report.curves import FONTS, legend_below
from ordain.study.report.number_text import NOTHING, counted, p_text
from ordain.study.report.page import Table
from ordain.study.report.statistics import ENOUGH_SEEDS, Comparison, compare, corrected
from ordain.study.report.views import Entry, at_rate, views
from ordain.study.runs.arms import BASELINE, parse
from ordain.study.runs.records import Run, read_run
from ordain.study.runs.run_folder import TRAINING, read_header, run_folders
from ordain.study.style import finish, grid_figure, style
from ordain.study.tasks import TASKS

LEVEL = 0.05  # of Holm's p
COSTS = "costs.json"  # seconds of an epoch by task and arm, from `python -m benchmarks.costs`
Costs = Mapping[str, Mapping[str, float]]
_JUDGED = ("test", "accuracy")  # at equal processor time; rates are not chosen for a low training loss
_LEAST_RANGE = 0.02  # of a figure's axis, as a share: smaller differences should look small
_MEASURES = {"train": "training loss", "test": "test loss", "accuracy": "test accuracy, %"}


@dataclass(frozen=True)
class Point:
    """An order at its best rate in one run, by seed."""

    setting: tuple[str, ...]  # task, decay, batch size, limit: what lengths are compared within
    arm: str
    label: str
    epochs: int
    rate: float
    edge: bool  # whether the rate is the smallest or largest of those tried
    seconds: float  # of processor time for the whole run
    values: Mapping[str, pd.Series]  # by measure and seed
    same: Mapping[str, Comparison]  # with RR of as many epochs
    same_rate: float | None  # training loss over RR's of as many epochs at this very rate, on the seeds of both
    equal: Mapping[str, Comparison]  # with RR of as much processor time

    @property
    def title(self) -> str:
        """The task and how its rate decays."""
        task, decay, size, limit = self.setting
        usual = str(TASKS[task].defaults.batch_size)
        more = [f"batches of {size}"] * (size != usual) + [f"{limit} examples"] * (limit != "None")
        return ", ".join([TASKS[task].title, f"{decay} rate", *more])


def points(folder: Path) -> list[Point]:
    """All orders of all runs in ``folder`` that were tuned each by itself."""
    found: list[Point] = []
    costs = _costs(folder)
    for path in run_folders(folder):
        header = read_header(path)
        if header.kind == TRAINING and header.config.get("protocol") == "each":
            found += _of_run(read_run(path), costs)
    return list(
        _at_equal_time(sorted(found, key=lambda point: (point.setting, point.arm != BASELINE, point.arm, point.epochs)))
    )


def _costs(folder: Path) -> Costs:
    path = folder / COSTS
    if not path.is_file():
        return {}
    costs = json.loads(path.read_text())
    if not isinstance(costs, dict) or not isinstance(costs.get("seconds"), dict):
        raise InputError(f"{path}", expected="what python -m benchmarks.costs writes", remedy="Remove or recreate it.")
    found: Costs = costs["seconds"]
    return found


def _of_run(run: Run, costs: Costs) -> Iterator[Point]:
    config = run.config
    task, decay = str(config["task"]), str(config.get("decay", "constant"))
    setting = (task, decay, str(config["batch_size"]), str(config.get("limit")))
    examples = TASKS[task].examples
    share = min(int(config.get("limit") or examples), examples) / examples  # of the epoch whose cost was measured
    shown = views(run)[0].shown
    values = {name: final_values(entry, decay) for name, entry in shown.items()}
    same: dict[str, dict[str, Comparison]] = {}
    for measure in _MEASURES:
        if BASELINE in values:
            others = {name: of[measure] for name, of in values.items() if name != BASELINE}
            pairs = {name: compare(of, values[BASELINE][measure]) for name, of in others.items()}
            same[measure] = corrected(pairs)
    for name, entry in shown.items():
        tried = entry.arm.rates
        own = float(entry.epochs.cpu_seconds.drop(index=0, level="epoch").median()) * run.length
        yield Point(
            setting,
            name,
            entry.arm.label,
            run.length,
            entry.rate or 0.0,
            entry.rate in (tried[0], tried[-1]),
            _seconds(costs.get(task, {}), name, run.length) * share or own,
            values[name],
            {measure: of[name] for measure, of in same.items() if name in of},
            _over_rr_at_same_rate(run, entry, decay) if name != BASELINE else None,
            {},
        )


def _seconds(costs: Mapping[str, float], arm: str, epochs: int) -> float:
    """Processor seconds of a run, from those of an epoch; 0 if they were not measured."""
    epoch, learn = costs.get(arm, 0.0), ORDERS[parse(arm).order].learn
    if not epoch or not isinstance(learn, Every):
        return epoch * epochs
    # Measured over k epochs, of which one learns; a run learns in more, since it begins with some that do.
    learned = sum(map(learn, range(epochs)))
    return costs[BASELINE] * epochs + (epoch - costs[BASELINE]) * learn.k * learned


def _over_rr_at_same_rate(run: Run, entry: Entry, decay: str) -> float | None:
    """A lower training loss at another rate would be the rate's, not the order's: validation chooses the rates."""
    rr = at_rate(run, entry.rate).entries.get(BASELINE) if entry.rate is not None else None
    found = compare(*(final_values(one, decay)["train"] for one in (entry, rr))).relative if rr else None
    return None if found is None else 1 + found


def final_values(entry: Entry, decay: str) -> dict[str, pd.Series]:
    """The measures of the protocol, by seed; epoch 0 is no candidate."""
    epochs = entry.epochs.drop(index=0, level="epoch")
    last = max(1, len(epochs.index.unique("epoch")) // 5) if decay == "constant" else 1
    kept = epochs.loc[epochs.valid_loss.groupby("seed").idxmin()].droplevel("epoch")
    return {
        "train": epochs.train_loss.groupby("seed").agg(lambda of: of.tail(last).mean()),
        "test": kept.test_loss,
        "accuracy": 100 * kept.test_accuracy,
    }


def _at_equal_time(found: Sequence[Point]) -> Iterator[Point]:
    """Add the comparison with RR's values at the same processor time, between its lengths; Holm's p over the orders."""
    for setting in dict.fromkeys(point.setting for point in found):
        own = [point for point in found if point.setting == setting]
        rr = sorted((point for point in own if point.arm == BASELINE), key=lambda point: point.seconds)
        inside = {
            number
            for number, point in enumerate(own)
            if point.arm != BASELINE and len(rr) > 1 and rr[0].seconds <= point.seconds <= rr[-1].seconds
        }
        equal = {
            measure: corrected(
                {
                    str(number): compare(own[number].values[measure], _between(rr, measure, own[number].seconds))
                    for number in inside
                }
            )
            for measure in _MEASURES
        }
        for number, point in enumerate(own):
            mine = {measure: of[str(number)] for measure, of in equal.items() if number in inside}
            yield replace(point, equal=mine)


def _between(rr: Sequence[Point], measure: str, seconds: float) -> pd.Series:
    """RR's value at a processor time, by seed: linear in the logarithm of time between two lengths."""
    table = pd.DataFrame({np.log(point.seconds): point.values[measure] for point in rr}).dropna()
    return table.apply(lambda row: float(np.interp(np.log(seconds), table.columns, row)), axis=1)


def better(comparison: Comparison | None, measure: str) -> bool | None:
    """Whether a significant difference is an improvement; None if there is none."""
    if comparison is None or comparison.difference is None or len(comparison.seeds) < ENOUGH_SEEDS:
        return None
    p = comparison.p if comparison.holm is None else comparison.holm
    return None if p is None or p >= LEVEL else (comparison.difference < 0) == (measure != "accuracy")


def headline(found: Sequence[Point]) -> str:
    """One sentence: in how many settings any order beats RR at equal processor time, and by how much."""
    tested = [point for point in found if point.equal]
    settings = list(dict.fromkeys(point.setting for point in tested))
    if not settings:
        return ""
    told = []
    for measure in _JUDGED:
        name = _MEASURES[measure].removesuffix(", %")
        outcomes = [(point, better(point.equal[measure], measure)) for point in tested]
        won = {point.setting for point, outcome in outcomes if outcome}
        lost = {point.setting for point, outcome in outcomes if outcome is False} - won
        gains = [
            abs(point.equal[measure].difference or 0.0) / point.values[measure].mean()
            for point, outcome in outcomes
            if outcome
        ]
        by = f" (by at most {100 * max(gains):.1g} %)" if gains else ""
        told.append(f"{name}: better in {len(won)}{by}, worse in {len(lost)}")
    where = counted(len(settings), "setting")
    compared = "Compared with random reshuffling at a tuned rate and for the same processor time"
    return f"{compared}, in {where}: {'; '.join(told)}."


def table(found: Sequence[Point]) -> Table:
    """What you do, what it costs, and what comes out: few enough columns for a narrow page."""
    rows = []
    for number, point in enumerate(found):
        loss, accuracy = (point.values[measure].mean() for measure in _JUDGED)
        first = not number or found[number - 1].setting != point.setting
        rows.append(
            (
                point.title if first else "",
                point.label,
                str(point.epochs),
                _time(found, point),
                f"{loss:.3f}",
                f"{accuracy:.1f}",
                _judged(point),
            )
        )
    headings = ["task", "what you do", "epochs", "processor time", "test loss", "test accuracy, %"]
    return Table("Does it pay?", [*headings, "against RR for the same time"], rows)


def _judged(point: Point) -> str:
    """Whether each measure is better than RR's at equal processor time."""
    if not point.equal:
        return NOTHING
    words = {True: "better", False: "worse", None: "no difference found"}
    told = [words[better(point.equal[measure], measure)] for measure in _JUDGED]
    if len(set(told)) == 1:
        return told[0]
    names = (_MEASURES[measure].removeprefix("test ").removesuffix(", %") for measure in _JUDGED)
    return ", ".join(f"{name} {word}" for name, word in zip(names, told, strict=True))


def _time(found: Sequence[Point], point: Point) -> str:
    """Processor time over that of RR's shortest run."""
    base = [other.seconds for other in found if (other.setting, other.arm) == (point.setting, BASELINE)]
    return f"{point.seconds / min(base, default=point.seconds):.2f}"


def details(found: Sequence[Point]) -> Table:
    """Every order with its rate, its spread over seeds and its p."""
    rows = [
        (
            point.title,
            point.label,
            str(point.epochs),
            f"{point.rate:g}{'*' if point.edge else ''}",
            _time(found, point),
            *(_value(point, measure) for measure in _MEASURES),
            NOTHING if point.same_rate is None else f"{100 * (point.same_rate - 1):+.1f} %",
            *(_p(of.get(measure)) for measure in _JUDGED for of in (point.same, point.equal)),
        )
        for point in found
    ]
    headings = ["task", "order", "epochs", "rate", "processor time", *_MEASURES.values()]
    headings += ["training loss / RR's at this rate"]
    headings += [f"p, {what}, {when}" for what in ("test loss", "accuracy") for when in ("same epochs", "same time")]
    return Table("Rates, spread and p", headings, rows)


def _value(point: Point, measure: str) -> str:
    of = point.values[measure]
    digits = 1 if measure == "accuracy" else 4
    return f"{of.mean():.{digits}f} ± {of.std():.{digits}f}"


def _p(comparison: Comparison | None) -> str:
    if comparison is None or comparison.p is None:
        return NOTHING
    return p_text(comparison.p if comparison.holm is None else comparison.holm)


@rc_context(FONTS)
def pays_by_time(found: Sequence[Point]) -> Figure | None:
    """Test loss and test accuracy against processor time, one row for each setting.

    Bars are standard deviations over seeds after each seed's mean is taken out: all orders of a seed share the initial
    weights, which decide most of its result.
    """
    settings = list(dict.fromkeys(point.setting for point in found))
    if not settings:
        return None
    arms = list(dict.fromkeys(point.arm for point in found if point.arm != BASELINE))
    figure, grid = grid_figure(7.6, 2.3 * len(settings) + 0.8, rows=len(settings), columns=2)
    for row, setting in zip(grid, settings, strict=True):
        for axes, measure in zip(row, _JUDGED, strict=True):
            own = [point for point in found if point.setting == setting]
            table = pd.DataFrame({number: point.values[measure] for number, point in enumerate(own)}).dropna()
            table = table.sub(table.mean(axis=1), axis=0) + table.to_numpy().mean()
            for arm in (BASELINE, *arms):
                mine = sorted((point.seconds, number) for number, point in enumerate(own) if point.arm == arm)
                if not mine:
                    continue
                look = style(0 if arm == BASELINE else 1 + arms.index(arm))
                numbers = [number for _, number in mine]
                axes.errorbar(
                    [seconds / 60 for seconds, _ in mine],
                    table[numbers].mean(),
                    yerr=table[numbers].std(),
                    capsize=2,
                    label=own[numbers[0]].label,
                    **look.line(1),
                )
            low, high = axes.get_ylim()
            middle = (low + high) / 2
            half = max((high - low) / 2, _LEAST_RANGE * abs(middle) / 2)
            axes.set_ylim(middle - half, middle + half)
            axes.ticklabel_format(useOffset=False)
            axes.set_ylabel(_MEASURES[measure])
            finish(axes)
        row[0].set_title(next(point.title for point in found if point.setting == setting))
    for axes in grid[-1]:
        axes.set_xlabel("minutes of processor time")
    legend_below(figure)
    return figure
