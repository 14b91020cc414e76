"""Writing reports: HTML page, figures and Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ordain.errors import OrdainError
from ordain.study.files import write_bytes
from ordain.study.report.page import embedded, render
from ordain.study.report.page_content import Content
from ordain.study.report.training_content import training_content
from ordain.study.report.vector_content import vector_content
from ordain.study.runs.records import read_run
from ordain.study.runs.run_folder import TRAINING, read_header, run_folders


@dataclass(frozen=True)
class Failure:
    """A run that could not be reported, and the reason."""

    folder: Path
    why: str


def write_report(folder: Path, out: Path | None = None) -> Content:
    """Write the report on one run to ``out`` (default: ``folder/report``), and return its content.

    Raises:
        InputError: there is no run, or its records cannot be read. Nothing is written then.
    """
    header = read_header(folder)
    content = training_content(read_run(folder)) if header.kind == TRAINING else vector_content(folder, header)
    write_content(content, out or folder / "report")
    return content


def write_reports(folder: Path, out: Path | None = None) -> list[Failure]:
    """Write a report on each run in ``folder`` and an overview page; returns the runs that could not be read."""
    out = out or folder / "report"
    parts: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for run in run_folders(folder):
        part: dict[str, Any] = {
            "title": run.name,
            "link": None,
            "why": None,
            "facts": "",
            "tellings": [],
            "figure": None,
        }
        try:
            content = write_report(run, out / run.name)
        except OrdainError as error:
            failures.append(Failure(run, str(error)))
            parts.append(part | {"why": str(error), "figure": None})
            continue
        figure = embedded(content.figures[0]) if content.figures else None
        title = content.title if content.title.startswith(run.name) else f"{run.name}: {content.title}"
        said = {"facts": content.facts, "tellings": content.tellings, "figure": figure}
        parts.append(part | {"title": title, "link": f"{quote(run.name)}/index.html"} | said)
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
