"""HTML that needs nothing else: figures are inside it, and every word that came from a file is escaped."""

from __future__ import annotations

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ordain.study.report.figures import Drawn

__all__ = ["embedded", "render"]


_WIDE = 6.5  # inches: a wider figure would be too small to read on a phone, which scrolls it


def embedded(drawn: Drawn) -> dict[str, Any]:
    """What a template needs of a figure. An SVG inside an ``img`` runs no script and loads nothing."""
    return {
        "wide": drawn.inches > _WIDE,
        "name": drawn.name,
        "text": drawn.text,
        "src": "data:image/svg+xml;base64," + base64.b64encode(drawn.svg).decode(),
    }


def render(template: str, **values: Any) -> str:
    """A page from one of the templates beside this package."""
    environment = Environment(
        loader=PackageLoader("ordain.study"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
