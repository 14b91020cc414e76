"""``ordain report``: a page on what runs have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ordain.study.commands.plain import plain_errors

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a folder of several runs.")],
    out: Annotated[Path | None, typer.Option(help="The folder to write; by default FOLDER/report.")] = None,
) -> None:
    """Write a page, figures and a table of a run; of several, one for each and a page over all."""
    with plain_errors():
        from ordain.study.report import write_report, write_reports  # these import matplotlib and scipy

        if (folder / "config.json").exists():
            content = write_report(folder, out)
            for telling in content.tellings:
                typer.echo(f"{telling.title}: {telling.headline}" if telling.title else telling.headline)
                for sentence in telling.sentences:
                    typer.echo(f"- {sentence.text}")
            failures = []
        else:
            failures = write_reports(folder, out)
        typer.echo(f"The page: {(out or folder / 'report') / 'index.html'}")
    for failure in failures:
        typer.echo(f"ordain: {failure.folder}: {failure.why}", err=True)
    if failures:
        raise typer.Exit(2)
