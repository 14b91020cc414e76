"""``ordain claims``: the paper's claims, and what a folder of runs says on each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ordain.study.commands.plain import plain_errors

__all__ = ["claims"]


def claims(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, named after their tasks and studies.")],
) -> None:
    """Hold the paper's claims against a folder of runs: writes README.md and index.html into it."""
    with plain_errors():
        from ordain.study.claims import write_claims  # imports matplotlib and scipy

        page = write_claims(folder)
        typer.echo(page.headline)
        for claim, finding in page.found:
            typer.echo(f"- {claim.title}: {finding.verdict}")
        typer.echo(f"The page: {folder / 'index.html'}")
