"""``ordain demo``, ``ordain report``, ``ordain claims`` and ``ordain pack``: pages, and the records behind them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ordain.study.commands.terminal import compared, plain_errors, show
from ordain.study.progress import displaying


def demo(
    out: Annotated[Path, typer.Option(help="Output folder; created if needed.")] = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per order.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Run every order.")] = False,
) -> None:
    """Train on scikit-learn's digits in a few orders, and write a page with the results."""
    with plain_errors():
        from ordain.study.demo import RATE, demo_config, write_demo  # these import scikit-learn and matplotlib
        from ordain.study.report.number_text import counted

        words = ["ordain", "demo", "--out", str(out), "--seeds", str(seeds), "--epochs", str(epochs)]
        command = shlex.join([*words, "--all"] if every else words)
        config = demo_config(seeds=seeds, epochs=epochs, every=every)
        with displaying(epochs) as report:
            content = write_demo(out, config, report=report, command=command)
    for told in (content.lead, content.facts):
        typer.echo(told)
    (numbers,) = content.tables
    counts = f"{counted(epochs, 'epoch')}, {counted(seeds, 'seed')}"
    note = (
        "An illustration: all orders use the same learning rate, not their best. p: paired t-test of the final train "
        f"loss against RR's; a verdict requires Holm's p < 0.01 and five seeds. The page: {out / 'index.html'}"
    )
    table = compared(numbers.headings, numbers.rows)
    show(*table, notes=[note], title=f"Digits, learning rate {RATE:g}, {counts}", numbers_from=2)


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
            failures = {}
        else:
            failures = write_reports(folder, out)
        typer.echo(f"The page: {(out or folder / 'report') / 'index.html'}")
    for run, why in failures.items():
        typer.echo(f"ordain: {run}: {why}", err=True)
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
        from ordain.study.files import only_one
        from ordain.study.runs.record_lines import pack as pack_records
        from ordain.study.runs.run_folder import read_header

        for folder in folders:
            read_header(folder)
            with only_one(folder):
                packed = pack_records(folder)
            typer.echo(f"{packed}: {packed.stat().st_size:,} bytes")
