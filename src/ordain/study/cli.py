"""The command line: ``ordain COMMAND``."""

from __future__ import annotations

from typing import Annotated

import typer

import ordain
import ordain_cli
from ordain.study.commands.advise_command import advise
from ordain.study.commands.listing_commands import data, tasks
from ordain.study.commands.pretrain_command import pretrain
from ordain.study.commands.report_commands import claims, demo, pack, report
from ordain.study.commands.run_command import run
from ordain.study.commands.vector_commands import herd, simulate_ranks

# Without rich's markup, which would take the [n, d] of a help text for a style.
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ordain {ordain.__version__}")
        raise typer.Exit


@app.callback(help=ordain_cli.ABOUT)
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


for command in (herd, demo, advise, report, claims, pack, pretrain, run, simulate_ranks, tasks):
    app.command()(command)
app.add_typer(data, name="data")
