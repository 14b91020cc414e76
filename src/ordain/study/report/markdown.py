"""The same in Markdown, for a README or a merge request."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

__all__ = ["bullets", "cell", "escape", "pictures", "table"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$])")  # wherever they stand
_FIRST = re.compile(r"^(\d*)([-+.)])")  # where a list could begin: a backslash before a digit would be seen


def escape(text: str) -> str:
    r"""``text`` as Markdown shows it: one line, no markup, no HTML, no cell's end.

    >>> print(escape("a|b <i>"))
    a\|b &lt;i&gt;
    """
    return _FIRST.sub(r"\1\\\2", cell(text))


def cell(text: str) -> str:
    """``text`` inside a line or a table's cell, where no list can begin."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; all cells are escaped, and no list begins in one. The first column is left, others right."""
    lines = ["| " + " | ".join(cell(heading) for heading in headings) + " |"]
    lines.append("| --- |" + " ---: |" * (len(headings) - 1))
    lines += ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bullets(items: Iterable[str]) -> str:
    """A list; all items are escaped."""
    return "".join(f"- {escape(item)}\n" for item in items)


def pictures(items: Iterable[tuple[str, str]]) -> str:
    """A line each of (text, file beside the Markdown); all texts are escaped."""
    return "".join(f"![{cell(text)}]({quote(file)})\n\n" for text, file in items)
