"""The demo's page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ordain.study.summary import HEADINGS, Row, cells

__all__ = ["render"]


def render(rows: Sequence[Row], results: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    """HTML with the figures inside it; ``figures`` are PNGs by name."""
    environment = Environment(
        loader=PackageLoader("ordain.study"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("demo.html").render(
        headings=HEADINGS,
        rows=[(row.verdict, cells(row)) for row in rows],
        results=results,
        figures={name: "data:image/png;base64," + base64.b64encode(png).decode() for name, png in figures.items()},
    )
