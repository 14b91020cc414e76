"""The command line: ``ordain COMMAND``."""

from __future__ import annotations

from typing import Annotated

import typer

import ordain
from ordain.study.commands.claims import claims
from ordain.study.commands.data import data
from ordain.study.commands.demo import demo
from ordain.study.commands.herd import herd
from ordain.study.commands.report import report
from ordain.study.commands.run import run
from ordain.study.commands.simulate_ranks import simulate_ranks
from ordain.study.commands.tasks import tasks

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ordain {ordain.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Better orders in which to visit training data than random reshuffling."""


app.command()(herd)
app.command()(demo)
app.command()(report)
app.command()(claims)
app.command()(run)
app.command()(simulate_ranks)
app.command()(tasks)
app.add_typer(data, name="data")
