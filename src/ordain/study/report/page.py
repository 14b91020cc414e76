"""Rendering of templates to self-contained HTML and to Markdown. All values are escaped."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from ordain.study.report.training_figures import Drawn

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
