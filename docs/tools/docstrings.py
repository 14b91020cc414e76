"""Docstrings as Markdown: roles become links, doctests become code blocks, pages become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`(~?)([^`]+)`")
PAGE = re.compile(r"\bdocs/([a-z-]+)\.md")
DOCTEST = re.compile(r"(?:^[ \t]*>>>.*\n?(?:[ \t]*\S.*\n?)*)", re.M)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = DOCTEST.sub(_code, obj.docstring.value)
            text = ROLE.sub(lambda match: _link(obj, match[2], short=bool(match[1])), text)
            obj.docstring.value = PAGE.sub(r"[\1](\1.md)", text)


def _code(match: re.Match[str]) -> str:
    return f"```python\n{match[0].rstrip()}\n```\n"


def _link(obj: griffe.Object, name: str, *, short: bool) -> str:
    """A link where the name has an entry of its own, and the plain name elsewhere."""
    try:
        path = name if name.startswith("ordain.") else obj.resolve(name)
    except griffe.NameResolutionError:
        path = f"{obj.path}.{name}"
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
