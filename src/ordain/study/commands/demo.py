"""``ordain demo``: every order on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ordain.study.commands.plain import plain_errors
from ordain.study.progress import reporting

__all__ = ["demo"]

_TABLE_WIDTH = 130  # where no terminal says otherwise


def demo(
    out: Annotated[Path, typer.Option(help="The folder to write; made if need be.")] = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each order runs with.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs each run trains for.")] = 20,
) -> None:
    """Train on scikit-learn's digits under every order, and write a page with what came of it."""
    from ordain.study.demo import Settings  # these import scikit-learn and matplotlib
    from ordain.study.demo_report import write_demo
    from ordain.study.summary import HEADINGS, cells

    settings = Settings(seeds=seeds, epochs=epochs)
    with plain_errors(), reporting("training", lines=True) as report:
        rows = write_demo(out, settings, report=report)
    table = Table(*HEADINGS, title=f"Digits, learning rate {settings.lr}, {epochs} epochs, {seeds} seeds")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    console.print(table)
    console.print(
        "All orders at one rate, an illustration: no claim about the best of each. p: paired t test of the final train "
        f"loss against RR's; the verdict asks for p < 0.01. The page: {out / 'index.html'}",
        highlight=False,
        soft_wrap=True,
    )
