"""Reports: the content of a training run's and of a vector study's page, and writing them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ordain.errors import InputError, OrdainError
from ordain.study import vectors
from ordain.study.files import write_bytes
from ordain.study.report import page
from ordain.study.report.arm_rows import COLUMNS, Row, cells, final_spread, rows
from ordain.study.report.number_text import NOTHING, bytes_text, capital, p_equals, places, spread
from ordain.study.report.page import Content, Section, Table, Telling, count_text, value_text
from ordain.study.report.rank_comparison import ranks_section, ranks_table
from ordain.study.report.training_figures import training_figures
from ordain.study.report.verdict_sentences import OUT, Sentence, headline, sentences
from ordain.study.report.views import (
    TRAIN,
    Problem,
    View,
    at_rate,
    metrics,
    missing_jobs,
    problems,
    views,
    with_missing_arms,
)
from ordain.study.runs.arms import is_baseline
from ordain.study.runs.records import Run, read_run
from ordain.study.runs.run_folder import TRAINING, Header, read_header, run_folders
from ordain.study.style import draw

_MEMORY = "Memory use of the orders. Losses are not compared."


def training_content(run: Run) -> Content:
    """Build the report from all records."""
    run = with_missing_arms(run)
    found = views(run)
    drawn = training_figures(run, found)
    curves = [Section(capital(view.title), "", drawn[view.name]) for view in found]
    costs = Section("Rates and costs", f"Time, memory and speed: {found[0].title}.", drawn["costs"])
    ranks, more = ranks_section(found[0]), (rates_table(run), ranks_table(run, found[0]))
    out = [*problems(run), *missing_jobs(run, found)]
    study = run.config.get("study", TRAINING)
    return Content(
        title=f"{run.header.task}: {'orders compared' if study == TRAINING else f'study of {study}'}",
        facts=_facts(run),
        warnings=_warnings(run, found, out),
        tellings=[_telling(run, view) for view in found],
        sections=[section for section in (*curves, ranks, costs) if section and section.figures],
        tables=[*map(numbers_table, found), *(table for table in more if table)],
        problems=_problem_table(out) if out else None,
        explained=True,
        made_with=page.made_with(run.header),
        commands=page.commands(run.header),
    )


def _telling(run: Run, view: View) -> Telling:
    if run.config.get("study") == "memory":  # after one epoch all orders are the same
        return Telling(capital(view.title), _MEMORY, [_held(row) for row in rows(view)])
    train, *others = metrics(run)
    more = [(f"Final {metric.title.partition(',')[0]}", sentences(view, metric)) for metric in others]
    return Telling(capital(view.title), headline(view), sentences(view, train), more)


def _held(row: Row) -> Sentence:
    if row.order_bytes is None:
        return Sentence(OUT, f"{capital(row.label)} was not measured", f"{row.verdict}.")
    job = f"; the job took at most {bytes_text(row.job_bytes)}" if row.job_bytes is not None else ""
    return Sentence("said", capital(row.label), f"the order's state takes {bytes_text(row.order_bytes)}{job}.")


def numbers_table(view: View) -> Table:
    """The numbers of each arm of a view."""
    table = rows(view)
    lines = cells(table)
    told = [place for place in range(len(COLUMNS)) if any(line[place] != NOTHING for line in lines)]
    return Table(
        f"{capital(view.title)}: numbers",
        [[*COLUMNS][place] for place in told],  # older records lack some columns
        [tuple(line[place] for place in told) for line in lines],
        [row.verdict for row in table],
    )


def _facts(run: Run) -> str:
    problem, config = run.header.problem, run.config
    sizes = {"train": "to train on", "valid": "to validate", "test": "to test"}
    examples = ", ".join(f"{count_text(problem[key])} {what}" for key, what in sizes.items() if problem.get(key))
    counts = (
        (problem, "parameters", "parameter{}"),
        (config, "epochs", "epoch{}"),
        (config, "batch_size", "example{} to a batch"),
    )
    told = [
        f"{count_text(of[key])} {unit.format('s' * (of[key] != 1))}"
        for of, key, unit in counts
        if of.get(key) is not None
    ]
    stepped = "AdamW" if config.get("optimizer") == "adamw" else ""
    return "; ".join(filter(None, [examples, *told, stepped]))


def _warnings(run: Run, found: Sequence[View], out: Sequence[Problem]) -> list[str]:
    said = []
    if (limit := run.config.get("limit")) is not None:
        said.append(f"Reduced: at most {count_text(limit)} examples of each set (limit).")
    if jobs := sum(len(problem.rates) * len(problem.seeds) for problem in out):
        said.append(f"{jobs} job{'s are' if jobs > 1 else ' is'} not compared: see “Not compared” below.")
    if not any(is_baseline(name) for name in run.arms):
        said.append("Random reshuffling (rr) was not run, so there is no baseline.")
    if any(len({entry.seeds for entry in view.shown.values()}) > 1 for view in found):
        said.append("Orders were run with different seeds; each is compared with RR over common seeds.")
    return said + _at_edges(found[0])


def _at_edges(view: View) -> list[str]:
    """Warnings about arms whose best rate is the largest or smallest one tried."""
    several, said = [entry for entry in view.shown.values() if len(entry.arm.rates) > 1], []
    for word, end in (("largest", max), ("smallest", min)):
        if names := [entry.arm.label for entry in several if entry.rate == end(entry.arm.rates)]:
            said.append(f"The best rate is the {word} tried for {'; '.join(names)}; a rate beyond it may be better.")
    return said


def _problem_table(out: Sequence[Problem]) -> Table:
    lines = [(label, value_text(rates), value_text(seeds), state, why) for label, rates, seeds, state, why in out]
    return Table("Not compared", ("order", "rates", "seeds", "state", "why"), lines, [problem.state for problem in out])


def rates_table(run: Run) -> Table | None:
    """Final training losses compared with RR at the same rate; None if there is only one rate."""
    rates = sorted({rate for arm in run.arms.values() for rate in arm.rates})
    if len(rates) < 2:
        return None
    found = [at_rate(run, rate) for rate in rates]
    decimals = places([loss for view in found for entry in view.shown.values() for loss in entry.final(TRAIN).dropna()])
    rows = [(arm.label, *(_cell(view, name, decimals) for view in found)) for name, arm in run.arms.items()]
    return Table("Every rate: final training loss", ("order", *(f"at {rate:g}" for rate in rates)), rows)


def _cell(view: View, name: str, decimals: int) -> str:
    """Mean ± standard deviation, relative difference from RR over common seeds, and its p-value."""
    entry, found = view.entries[name], view.comparisons(TRAIN).get(name)
    if not entry.seeds:
        return entry.reason
    told = spread(*final_spread(entry, TRAIN), decimals)
    if found is None or found.relative is None:
        return told
    told += f"; {100 * found.relative:+.2f} %"
    return told if found.p is None else f"{told}, {p_equals(found.p)}"


def write_report(folder: Path, out: Path | None = None) -> Content:
    """Write the report on one run to ``out`` (default: ``folder/report``), and return its content.

    Raises:
        InputError: there is no run, or its records cannot be read. Nothing is written then.
    """
    header = read_header(folder)
    content = training_content(read_run(folder)) if header.kind == TRAINING else _vector_content(folder, header)
    write_content(content, out or folder / "report")
    return content


def write_reports(folder: Path, out: Path | None = None) -> dict[Path, str]:
    """Write a report on each run in ``folder`` and an overview page; returns why runs could not be read, by folder."""
    out = out or folder / "report"
    parts: list[dict[str, Any]] = []
    failures: dict[Path, str] = {}
    nothing: dict[str, Any] = {"link": None, "why": None, "facts": "", "tellings": [], "figure": None}
    for run in run_folders(folder):
        try:
            content = write_report(run, out / run.name)
        except OrdainError as error:
            failures[run] = str(error)
            parts.append(nothing | {"title": run.name, "why": str(error)})
            continue
        figure = page.embedded(content.figures[0]) if content.figures else None
        title = content.title if content.title.startswith(run.name) else f"{run.name}: {content.title}"
        said = {"facts": content.facts, "tellings": content.tellings, "figure": figure}
        parts.append(nothing | {"title": title, "link": f"{quote(run.name)}/index.html"} | said)
    write_bytes(out / "index.html", page.render("overview.html", parts=parts))
    return failures


def write_content(content: Content, out: Path) -> None:
    """Write the HTML page, the figures and the Markdown report."""
    for figure in content.figures:
        write_bytes(out / f"{figure.name}.png", figure.png)
        write_bytes(out / f"{figure.name}.svg", figure.svg)
    figures = {figure.name: page.embedded(figure) for figure in content.figures}
    write_bytes(out / "index.html", page.render("report.html", content=content, figures=figures))
    write_bytes(out / "report.md", page.render("report.md", content=content))


def _vector_content(folder: Path, header: Header) -> Content:
    """Build the report from the study's own sentences, figures and table."""
    if header.kind not in vectors.STUDIES:
        raise InputError(
            f"a study of kind {header.kind!r} in {folder}",
            expected=f"training, {', '.join(vectors.STUDIES)}",
            remedy="Use the version of ordain that wrote it.",
        )
    study = vectors.STUDIES[header.kind]
    headings, rows = study.table(folder)
    figures = [
        draw(name, f"Figure: {name.replace('-', ' ')}", figure) for name, figure in study.figures(folder).items()
    ]
    return Content(
        title=study.kind.title,
        facts="",
        warnings=[],
        tellings=[Telling("", "", [Sentence("said", "", text) for text in study.sentences(folder)])],
        sections=[Section("Figures", "", figures)] if figures else [],
        tables=[Table("Numbers", headings, rows)] if rows else [],
        made_with=page.made_with(header),
        commands=page.commands(header),
    )
