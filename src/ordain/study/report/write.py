"""A report as files: a page, its figures, and the same in Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ordain.errors import InputError, OrdainError
from ordain.study.files import write_bytes
from ordain.study.report import markdown
from ordain.study.report.content import Content
from ordain.study.report.page import embedded, render
from ordain.study.report.training import training_content
from ordain.study.report.vectors import vector_content
from ordain.study.runs.header import TRAINING, read_header
from ordain.study.runs.records import read_run

__all__ = ["Failure", "write_content", "write_report", "write_reports"]


@dataclass(frozen=True)
class Failure:
    """A run of several that could not be reported, and why."""

    folder: Path
    why: str


def write_report(folder: Path, out: Path | None = None) -> Content:
    """Write the report on one run into ``out``, by default ``folder/report``; gives back what it says.

    Raises:
        InputError: no run there, or records that cannot be read. Nothing has been written then.
    """
    header = read_header(folder)
    content = training_content(read_run(folder)) if header.kind == TRAINING else vector_content(folder, header)
    write_content(content, out or folder / "report")
    return content


def write_reports(folder: Path, out: Path | None = None) -> list[Failure]:
    """Write a report on each run in ``folder`` and a page over all of them; gives back those that could not be read."""
    out = out or folder / "report"
    runs = sorted(path.parent for path in folder.glob("*/config.json") if not path.parent.name.startswith("."))
    if not runs:
        raise InputError(
            f"{folder}, in which there is no run",
            expected="a run's folder (with a config.json), or a folder of such folders",
            remedy="`ordain run` writes one.",
        )
    parts: list[dict[str, Any]] = []
    failures: list[Failure] = []
    for run in runs:
        try:
            content = write_report(run, out / run.name)
        except OrdainError as error:
            failures.append(Failure(run, str(error)))
            parts.append(
                {"title": run.name, "link": None, "why": str(error), "facts": "", "tellings": [], "figure": None}
            )
            continue
        figure = embedded(content.figures[0]) if content.figures else None
        parts.append(
            {
                "title": content.title if content.title.startswith(run.name) else f"{run.name}: {content.title}",
                "link": f"{quote(run.name)}/index.html",
                "why": None,
                "facts": content.facts,
                "tellings": content.tellings,
                "figure": figure,
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "index.html", render("overview.html", parts=parts).encode())
    return failures


def write_content(content: Content, out: Path) -> None:
    """The page, its figures and the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    for figure in content.figures:
        write_bytes(out / f"{figure.name}.png", figure.png)
        write_bytes(out / f"{figure.name}.svg", figure.svg)
    figures = {figure.name: embedded(figure) for figure in content.figures}
    write_bytes(out / "index.html", render("report.html", content=content, figures=figures).encode())
    write_bytes(out / "report.md", _markdown(content).encode())


def _markdown(content: Content) -> str:
    parts = [f"# {markdown.escape(content.title)}\n", markdown.escape(content.facts) + "\n"]
    parts.append(markdown.bullets(content.warnings))
    for telling in content.tellings:
        parts.append(f"## {markdown.escape(telling.title)}\n" if telling.title else "")
        parts.append(markdown.escape(telling.headline) + "\n")
        parts.append(markdown.bullets(sentence.text for sentence in telling.sentences))
        for title, sentences in telling.more:
            parts.append(f"### {markdown.escape(title)}\n")
            parts.append(markdown.bullets(sentence.text for sentence in sentences))
    for section in content.sections:
        parts += [f"## {markdown.escape(section.title)}: figures\n", markdown.escape(section.note) + "\n"]
        parts.append(markdown.pictures((figure.text, f"{figure.name}.png") for figure in section.figures))
    for table in (*content.tables, *([content.problems] if content.problems else [])):
        parts += [f"## {markdown.escape(table.title)}\n", markdown.table(table.headings, table.rows)]
    parts += ["## How to read it\n" if content.notes else "", markdown.bullets(content.notes)]
    parts += ["## Made with\n", markdown.bullets(f"{term}: {text}" for term, text in content.made_with)]
    if content.commands:
        parts += ["### Commands\n", markdown.table(content.commands.headings, content.commands.rows)]
    return "\n".join(part for part in parts if part.strip())
