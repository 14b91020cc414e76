"""Runs on several numbers of ranks: their curves on top of each other, and what a step takes and sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from ordain.study.report.content import Section, Table
from ordain.study.report.curves import FONTS, WIDTH, draw_curves
from ordain.study.report.figures import draw
from ordain.study.report.text import NOTHING, bytes_text, number, places, plain
from ordain.study.report.views import TRAIN, Entry, View
from ordain.study.runs.records import Job, Run
from ordain.study.style import DASHES, LEGEND, Style, style

__all__ = ["ranks_section", "ranks_table"]

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
    "All have the same global batch, initial weights and first epoch. In the exact mode every number of ranks visits "
    "the examples as one process does; rounding may part them where a sign is close to a tie. Time is rank 0's, the "
    "median over epochs and seeds: with more ranks than cores it says nothing of how training scales. What an order "
    "sends is rank 0's, in bytes a step without the gradients that are averaged anyway."
)


def ranks_section(view: View) -> Section | None:
    """Training loss of all orders that ran on more than one rank; None if there are none."""
    figure = _figure(view)
    if figure is None:
        return None
    text = "Training loss against epochs, on one and on several ranks: a panel for each order"
    return Section("Ranks", _NOTE, [draw(f"{view.name}-ranks", text, figure)])


def _figure(view: View) -> Figure | None:
    """A panel an order; one process is a broad pale line, so that what lies on it can be seen."""
    shown = _shown(view)
    kinds = sorted({_kind(entry) for entry in shown.values()})
    panels: dict[str, dict[str, Entry]] = {}
    for name, entry in shown.items():
        panels.setdefault(_base(name), {})[name] = replace(entry, arm=replace(entry.arm, label=_words(*_kind(entry))))
    if not panels:
        return None
    looks = {kind: _ALONE if kind[0] == 1 else _look(place) for place, kind in enumerate(kinds)}
    with rc_context(FONTS):
        figure = Figure(figsize=(WIDTH, 0.6 + 2.1 * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (base, entries) in zip(rows, panels.items(), strict=True):
            drawn = {name: looks[_kind(entry)] for name, entry in entries.items()}
            draw_curves(axes, replace(view, entries=entries), drawn, get=TRAIN.get)
            axes.set_title(plain(shown[base].arm.label if base in shown else base))
            axes.set_ylabel(TRAIN.title)
            axes.label_outer()
        figure.align_ylabels()
        found = {label: line for axes in rows for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        labels = [_words(*kind) for kind in kinds]
        figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=3, **LEGEND)
    return figure


def _look(place: int) -> Style:
    """Each thinner than those under it, and with gaps."""
    width = max(1.2, 3.6 - 0.8 * place)
    return replace(style(place + 1), linestyle=DASHES[(place - 1) % len(DASHES)], linewidth=width)


def _kind(entry: Entry) -> tuple[int, str]:
    job = _any(entry)
    return job.ranks, job.mode or ""


def _words(ranks: int, mode: str) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks" + ("" if mode == "exact" else f" ({mode})")


def ranks_table(run: Run, view: View) -> Table | None:
    """A line for each of them; None if no job had more than one rank."""
    shown = _shown(view)
    if not shown:
        return None
    n, batch = run.header.problem.get("train"), run.config.get("batch_size")
    steps = -(-n // batch) if isinstance(n, int) and isinstance(batch, int) and batch > 0 else 0
    decimals = places([value for entry in shown.values() for value in entry.finals(TRAIN)], digits=6)
    lines = [_line(view, name, entry, steps, decimals) for name, entry in shown.items()]
    return Table("Ranks: numbers", _HEADINGS, lines)


def _line(view: View, name: str, entry: Entry, steps: int, decimals: int) -> tuple[str, ...]:
    job, epochs = _any(entry), [epoch for job in entry.jobs.values() for epoch in job.epochs[1:]]
    finals = entry.finals(TRAIN)
    sent = [epoch.sent_bytes for epoch in epochs if epoch.sent_bytes is not None]
    return (
        entry.arm.label,
        str(job.ranks),
        job.mode or NOTHING,
        number(float(np.mean(finals)) if finals else None, decimals),
        _apart(entry, view.entries.get(_base(name))) if job.ranks > 1 else NOTHING,
        _milliseconds([epoch.training_seconds for epoch in epochs], steps),
        _milliseconds([epoch.seconds.get("ordering", 0.0) for epoch in epochs], steps),
        bytes_text(float(np.median(sent)) if sent else None),
    )


def _apart(entry: Entry, alone: Entry | None) -> str:
    """The largest difference over epochs and seeds from the training loss of one process."""
    gaps = [
        abs(ours.train_loss - theirs.train_loss)
        for seed, job in entry.jobs.items()
        if alone is not None and seed in alone.jobs
        for ours, theirs in zip(job.epochs, alone.jobs[seed].epochs, strict=False)
        if ours.train_loss is not None and theirs.train_loss is not None
    ]
    return f"{max(gaps):.1e}" if gaps else NOTHING


def _milliseconds(seconds: list[float], steps: int) -> str:
    return f"{1000 * float(np.median(seconds)) / steps:.2f} ms" if seconds and steps else NOTHING


def _shown(view: View) -> dict[str, Entry]:
    """What ran on several ranks, each after what it is compared with on one."""
    bases = {_base(name) for name, entry in view.shown.items() if _any(entry).ranks > 1}
    return {name: entry for name, entry in view.shown.items() if _base(name) in bases}


def _base(name: str) -> str:
    """The arm on one rank.

    >>> _base("grab@8+2-sum")
    'grab@8'
    """
    return name.partition("+")[0]


def _any(entry: Entry) -> Job:
    return next(iter(entry.jobs.values()))
