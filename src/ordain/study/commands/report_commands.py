"""``ordain report``, ``ordain claims`` and ``ordain pack``: process the records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ordain.study.commands.terminal import plain_errors


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or a folder of runs.")],
    out: Annotated[Path | None, typer.Option(help="Output folder; default FOLDER/report.")] = None,
) -> None:
    """Write a report on a run; for a folder of runs, one report each and an overview page."""
    with plain_errors():
        from ordain.study.report import write_report, write_reports  # these import pandas, matplotlib and scipy

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


def claims(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, named after their tasks and studies.")],
) -> None:
    """Check the paper's claims against a folder of runs, and write README.md and index.html there."""
    with plain_errors():
        from ordain.study.claims import write_claims

        page = write_claims(folder)
        typer.echo(page.headline)
        for claim, finding in page.found:
            typer.echo(f"- {claim.title}: {finding.verdict}")
        typer.echo(f"The page: {folder / 'index.html'}")


def pack(folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")]) -> None:
    """Replace the records of each run by one compressed file. Resuming the run unpacks it again."""
    with plain_errors():
        from ordain.study.lock import only_one
        from ordain.study.runs.record_lines import pack as pack_records
        from ordain.study.runs.run_folder import read_header

        for folder in folders:
            read_header(folder)
            with only_one(folder):
                packed = pack_records(folder)
            typer.echo(f"{packed}: {packed.stat().st_size:,} bytes")
