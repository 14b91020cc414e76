"""Writing reports: HTML page, figures and Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from ordain.errors import InputError, OrdainError
from ordain.study import vectors
from ordain.study.files import write_bytes
from ordain.study.report.page import embedded, render
from ordain.study.report.page_content import Content, Section, Table, Telling, commands, made_with
from ordain.study.report.training_content import training_content
from ordain.study.report.training_figures import draw
from ordain.study.report.verdict_sentences import Sentence
from ordain.study.runs.records import read_run
from ordain.study.runs.run_folder import TRAINING, Header, read_header, run_folders


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
        figure = embedded(content.figures[0]) if content.figures else None
        title = content.title if content.title.startswith(run.name) else f"{run.name}: {content.title}"
        said = {"facts": content.facts, "tellings": content.tellings, "figure": figure}
        parts.append(nothing | {"title": title, "link": f"{quote(run.name)}/index.html"} | said)
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "index.html", render("overview.html", parts=parts))
    return failures


def write_content(content: Content, out: Path) -> None:
    """Write the HTML page, the figures and the Markdown report."""
    out.mkdir(parents=True, exist_ok=True)
    for figure in content.figures:
        write_bytes(out / f"{figure.name}.png", figure.png)
        write_bytes(out / f"{figure.name}.svg", figure.svg)
    figures = {figure.name: embedded(figure) for figure in content.figures}
    write_bytes(out / "index.html", render("report.html", content=content, figures=figures))
    write_bytes(out / "report.md", render("report.md", content=content))


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
        made_with=made_with(header),
        commands=commands(header),
    )
