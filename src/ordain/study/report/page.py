"""Pages from templates: HTML that needs nothing else, and the same in Markdown. Every word from a file is escaped."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from ordain.study.report.training_figures import Drawn

_WIDE = 6.5  # inches: a wider figure would be too small to read on a phone, which scrolls it
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")  # wherever they stand
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FIRST = re.compile(r"^(\d*)([-+.)])")  # where a list could begin: a backslash before a digit would be seen


def embedded(drawn: Drawn) -> dict[str, Any]:
    """What a template needs of a figure. An SVG inside an ``img`` runs no script and loads nothing."""
    return {
        "wide": drawn.inches > _WIDE,
        "name": drawn.name,
        "text": drawn.text,
        "src": "data:image/svg+xml;base64," + base64.b64encode(drawn.svg).decode(),
    }


def render(template: str, **values: Any) -> bytes:
    """A page from one of the templates beside this package; one that ends in ``.md`` escapes by its filters."""
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
    r"""``text`` as Markdown shows it: one line, no markup, no HTML, no cell's end.

    >>> print(markdown_line("a|b <i>"))
    a\|b &lt;i&gt;
    """
    return _FIRST.sub(r"\1\\\2", markdown_cell(text))


def markdown_cell(text: str) -> str:
    """``text`` inside a line or a table's cell, where no list can begin."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def markdown_row(cells: Sequence[str]) -> str:
    """A line of a table, its cells escaped."""
    return "| " + " | ".join(markdown_cell(text) for text in cells) + " |"


def unmarked(note: str) -> str:
    """A note's words, without the little Markdown that it may have.

    >>> unmarked("See [the figure](a.png) of `mnist`.")
    'See the figure of mnist.'
    """
    return _LINK.sub(r"\1", note).replace("`", "")
