"""Comparison of runs with different numbers of ranks: loss curves, and time and traffic per step."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from ordain.study.report.curves import FONTS, WIDTH, draw_curves
from ordain.study.report.number_text import NOTHING, bytes_text, number, places, plain
from ordain.study.report.page import Section, Table
from ordain.study.report.statistics import number_or_none
from ordain.study.report.views import TRAIN, Entry, View
from ordain.study.runs.records import Arm, Run
from ordain.study.style import DASHES, LEGEND, Style, draw, grid_figure, style

_HEADINGS = (
    "order",
    "ranks",
    "mode",
    "final train loss",
    "largest difference from one process",
    "time / step",
    "order.step() / step",
    "order sends / step",
)
_ALONE = Style("#BBBBBB", "-", "", 6.0)
_NOTE = (
    "All runs share the global batch size, initial weights and first epoch. In exact mode, every number of ranks "
    "visits the examples in the order of a single process, except where rounding decides a sign. Times are those of "
    "rank 0, medians over epochs and seeds; with more ranks than cores they do not show how training scales. Traffic "
    "is the number of bytes that the order of rank 0 sends per step, not counting the averaging of gradients."
)


def ranks_section(view: View) -> Section | None:
    """Figure of the training loss of all orders that ran on more than one rank; None if there are none."""
    figure = _figure(view)
    if figure is None:
        return None
    text = "Training loss against epochs on one and on several ranks, one panel per order"
    return Section("Ranks", _NOTE, [draw(f"{view.name}-ranks", text, figure)])


@rc_context(FONTS)
def _figure(view: View) -> Figure | None:
    """One panel per order; a single process is a broad pale line, so that lines on top of it stay visible."""
    shown = _shown(view)
    kinds = sorted({_kind(entry.arm) for entry in shown.values()})
    panels: dict[str, dict[str, Entry]] = {}
    for name, entry in shown.items():
        told = replace(entry, arm=replace(entry.arm, label=_words(*_kind(entry.arm))))
        panels.setdefault(_base(name), {})[name] = told
    if not panels:
        return None
    looks = {}
    for place, kind in enumerate(kinds):  # later lines are thinner and dashed, so that earlier ones stay visible
        dashes, width = DASHES[(place - 1) % len(DASHES)], max(1.2, 3.6 - 0.8 * place)
        looks[kind] = _ALONE if kind[0] == 1 else replace(style(place + 1), linestyle=dashes, linewidth=width)
    figure, rows = grid_figure(WIDTH, 0.6 + 2.1 * len(panels), rows=len(panels), sharex=True)
    for (axes,), (base, entries) in zip(rows, panels.items(), strict=True):
        drawn = {name: looks[_kind(entry.arm)] for name, entry in entries.items()}
        draw_curves(axes, replace(view, entries=entries), drawn, TRAIN)
        axes.set(title=plain(shown[base].arm.label if base in shown else base), ylabel=TRAIN.title)
        axes.label_outer()
    figure.align_ylabels()
    found = {label: line for (axes,) in rows for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [_words(*kind) for kind in kinds]
    figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=3, **LEGEND)
    return figure


def _kind(arm: Arm) -> tuple[int, str]:
    return arm.ranks, arm.mode or ""


def _words(ranks: int, mode: str) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks" + ("" if mode == "exact" else f" ({mode})")


def ranks_table(run: Run, view: View) -> Table | None:
    """Table of all orders that ran on more than one rank; None if there are none."""
    shown = _shown(view)
    if not shown:
        return None
    n, batch = run.header.problem.get("train"), run.config.get("batch_size")
    steps = -(-n // batch) if isinstance(n, int) and isinstance(batch, int) and batch > 0 else 0
    decimals = places([value for entry in shown.values() for value in entry.final(TRAIN).dropna()], digits=6)
    lines = [_line(view, name, entry, steps, decimals) for name, entry in shown.items()]
    return Table("Ranks: numbers", _HEADINGS, lines)


def _line(view: View, name: str, entry: Entry, steps: int, decimals: int) -> tuple[str, ...]:
    arm, alone = entry.arm, view.entries.get(_base(name))
    trained = entry.epochs.drop(index=0, level="epoch", errors="ignore")
    gaps = (entry.epochs.train_loss - alone.epochs.train_loss).abs() if alone and arm.ranks > 1 else pd.Series()
    medians = (trained[part].median() for part in ("training_seconds", "ordering"))
    return (
        arm.label,
        str(arm.ranks),
        arm.mode or NOTHING,
        number(number_or_none(entry.final(TRAIN).mean()), decimals),
        f"{gaps.max():.1e}" if gaps.notna().any() else NOTHING,  # over common epochs and seeds
        *(f"{1000 * part / steps:.2f} ms" if steps and len(trained) else NOTHING for part in medians),
        bytes_text(number_or_none(trained.sent_bytes.median())),
    )


def _shown(view: View) -> dict[str, Entry]:
    """Orders that ran on several ranks, together with their single-process runs."""
    bases = {_base(name) for name, entry in view.shown.items() if entry.arm.ranks > 1}
    return {name: entry for name, entry in view.shown.items() if _base(name) in bases}


def _base(name: str) -> str:
    """The name of the arm on one rank.

    >>> _base("grab@8+2-independent")
    'grab@8'
    """
    return name.partition("+")[0]
