"""Table of every order at every learning rate."""

from __future__ import annotations

from ordain.study.report.arm_rows import final_spread
from ordain.study.report.number_text import p_equals, places, spread
from ordain.study.report.page_content import Table
from ordain.study.report.statistics import Comparison
from ordain.study.report.verdict_sentences import mean_over
from ordain.study.report.views import TRAIN, Entry, View, at_rate
from ordain.study.runs.records import Run


def rates_table(run: Run) -> Table | None:
    """Final training losses compared with RR at the same rate; None if there is only one rate."""
    rates = sorted({rate for arm in run.arms.values() for rate in arm.rates})
    if len(rates) < 2:
        return None
    views = [at_rate(run, rate) for rate in rates]
    decimals = places([loss for view in views for entry in view.shown.values() for loss in entry.final(TRAIN).dropna()])
    columns = [_column(view, decimals) for view in views]
    rows = [(arm.label, *cells) for arm, *cells in zip(run.arms.values(), *columns, strict=True)]
    return Table("Every rate: final training loss", ("order", *(f"at {rate:g}" for rate in rates)), rows)


def _column(view: View, decimals: int) -> list[str]:
    found = view.comparisons(TRAIN)
    return [_cell(entry, view.baseline(name), found.get(name), decimals) for name, entry in view.entries.items()]


def _cell(entry: Entry, baseline: Entry | None, found: Comparison | None, decimals: int) -> str:
    """Mean ± standard deviation, relative difference from RR over common seeds, and its p-value."""
    if not entry.seeds:
        return entry.reason
    finals = final_spread(entry, TRAIN)
    told = spread(finals.mean, finals.sd, decimals)
    if baseline is None or found is None or found.difference is None:
        return told
    base = mean_over(baseline, TRAIN, found.seeds)
    if base:
        told += f"; {100 * found.difference / base:+.2f} %"
    return told if found.p is None else f"{told}, {p_equals(found.p)}"
