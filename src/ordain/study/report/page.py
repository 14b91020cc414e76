"""The content of a page, and its rendering to self-contained HTML and to Markdown. All values are escaped."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from ordain.study.report.verdict_sentences import Sentence
from ordain.study.runs.run_folder import Header
from ordain.study.style import Drawn

_WIDE = 6.5  # inches: wider figures scroll on small screens
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")  # characters that are special everywhere
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FIRST = re.compile(r"^(\d*)([-+.)])")  # list markers at the start of a line


def embedded(drawn: Drawn) -> dict[str, Any]:
    """A figure for a template, as a data URI. An SVG in an ``img`` element cannot run scripts or load files."""
    return {
        "wide": drawn.inches > _WIDE,
        "name": drawn.name,
        "text": drawn.text,
        "src": "data:image/svg+xml;base64," + base64.b64encode(drawn.svg).decode(),
    }


def render(template: str, **values: Any) -> bytes:
    """Render a template of ``ordain.study``. Markdown templates (``.md``) escape values with the filters below."""
    environment = Environment(
        loader=PackageLoader("ordain.study"),
        autoescape=not template.endswith(".md"),  # noqa: S701 (Markdown has its own)
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"line": markdown_line, "cell": markdown_cell, "row": markdown_row}
    environment.filters |= {"quote": quote, "unmarked": unmarked}
    return environment.get_template(template).render(**values).encode()


def markdown_line(text: str) -> str:
    r"""Escape ``text`` for a line of Markdown: no markup, no HTML, no list marker.

    >>> print(markdown_line("a|b <i>"))
    a\|b &lt;i&gt;
    """
    return _FIRST.sub(r"\1\\\2", markdown_cell(text))


def markdown_cell(text: str) -> str:
    """Escape ``text`` inside a line or a table cell, where no list can begin."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def markdown_row(cells: Sequence[str]) -> str:
    """Format a table row with escaped cells."""
    return "| " + " | ".join(markdown_cell(text) for text in cells) + " |"


def unmarked(note: str) -> str:
    """Remove links and code marks from a Markdown note.

    >>> unmarked("See [the figure](a.png) of `mnist`.")
    'See the figure of mnist.'
    """
    return _LINK.sub(r"\1", note).replace("`", "")


_LONGEST = 2000


@dataclass(frozen=True)
class Telling:
    """Sentences with a heading; ``more`` holds further lists of sentences with their headings."""

    title: str
    headline: str
    sentences: Sequence[Sentence]
    more: Sequence[tuple[str, Sequence[Sentence]]] = ()


@dataclass(frozen=True)
class Table:
    """A table of text; ``verdicts`` has one word per row, used to colour it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdicts: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """Figures with a heading."""

    title: str
    note: str
    figures: Sequence[Drawn]


@dataclass(frozen=True)
class Content:
    """A whole report."""

    title: str  # title of the page
    facts: str  # one line about what was run
    warnings: Sequence[str]  # e.g. a reduced data set, an unfinished run
    tellings: Sequence[Telling]  # the sentences
    sections: Sequence[Section]  # the figures
    tables: Sequence[Table]  # the numbers
    made_with: Sequence[tuple[str, str]]  # provenance as (term, text)
    problems: Table | None = None  # jobs that are not compared
    commands: Table | None = None  # all commands, if there were several
    explained: bool = False  # include the notes on how to read a training report
    lead: str = ""  # the main result, in a sentence or two

    @property
    def figures(self) -> list[Drawn]:
        """The figures of all sections."""
        return [figure for section in self.sections for figure in section.figures]


def made_with(header: Header) -> list[tuple[str, str]]:
    """Provenance as (term, text) pairs."""
    notes = header.problem.get("notes")
    found = [
        ("Command", header.command),
        ("Started", header.started),
        ("Revision", header.revision or "unknown"),
        ("Machine", value_text(header.machine)),
        ("Versions", value_text(header.versions)),
        ("Settings", value_text(header.config)),
        ("Data", " ".join(value_text(note) for note in notes) if isinstance(notes, list) else ""),
    ]
    return [(term, text) for term, text in found if text]


def commands(header: Header) -> Table | None:
    """A table of all commands that wrote to the folder; None if there was only one."""
    first, *others = header.made
    if not others:
        return None
    before, lines = {**first.machine, **first.versions}, []
    for made in header.made:
        now = {**made.machine, **made.versions}
        changes = value_text({name: value for name, value in now.items() if before.get(name) != value})
        lines.append((made.command or "", made.started or "", made.revision or "unknown", changes or "none"))
    return Table("Commands", ("command", "started", "revision", "changes since the first"), lines)


def value_text(value: object) -> str:
    """Format a JSON value for reading."""
    if isinstance(value, dict):
        text = ", ".join(
            f"{str(key).replace('_', ' ')} {value_text(of)}" for key, of in value.items() if of is not None
        )
    elif isinstance(value, list | tuple):
        text = _seeds(value) or " ".join(value_text(of) for of in value)
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _seeds(values: Sequence[object]) -> str:
    """``0-4`` for 0, 1, 2, 3, 4."""
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(whole) < 3 or len(whole) < len(values) or whole != list(range(whole[0], whole[0] + len(whole))):
        return ""
    return f"{whole[0]}-{whole[-1]}"


def count_text(value: object) -> str:
    """Format a count with thousands separators; other values as text."""
    return f"{value:,}" if isinstance(value, int) else value_text(value)
