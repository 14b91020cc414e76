"""``ordain simulate-ranks``: what W ranks must tell each other to find a good order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ordain.study.commands.plain import plain_errors
from ordain.study.progress import reporting

__all__ = ["simulate_ranks"]

_NAME = "simulate-ranks"


def simulate_ranks(
    out: Annotated[Path, typer.Option(help="The folder of its records; the same command goes on with it.")] = Path(
        "runs/simulate-ranks"
    ),
    plot: Annotated[Path | None, typer.Option(help="Draw its figures into this folder, as PNG and SVG.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; 2 by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In small.")] = False,
) -> None:
    """Simulate ranks that order one data set together: how good their order is, and what they send for it."""
    from ordain.study.vectors import STUDIES, run_study
    from ordain.study.vectors.rank_figures import traffic_table

    study = STUDIES[_NAME]
    with plain_errors(), reporting(_NAME, lines=True) as tell:
        run_study(_NAME, out, report=tell, seeds=seeds, quick=quick)
    with plain_errors():
        for text in study.sentences(out):
            typer.echo(text)
        headings, rows = traffic_table(study.configure(quick=quick))
        typer.echo("\nBytes that a rank contributes to a step:")
        widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
        for row in (headings, *rows):
            first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            typer.echo("  ".join((first.strip().ljust(widths[0]), *rest)))
        if plot:
            from ordain.study.files import write_bytes  # matplotlib takes a while to import
            from ordain.study.style import png, svg

            plot.mkdir(parents=True, exist_ok=True)
            for name, figure in study.figures(out).items():
                write_bytes(plot / f"{name}.png", png(figure))
                write_bytes(plot / f"{name}.svg", svg(figure))
