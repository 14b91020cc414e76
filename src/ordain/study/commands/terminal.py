"""What commands show: tables, and errors that a user can fix as one line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.table import Table

from ordain.errors import OrdainError

_WIDTH = 130  # where no terminal says otherwise


@contextmanager
def plain_errors() -> Iterator[None]:
    """One line on stderr and exit code 2 for what a user can mend; anything else is a bug and shows itself."""
    try:
        yield
    except OrdainError as error:
        message = str(error)
    except BrokenPipeError:  # who reads the output has seen enough: the command line ends quietly
        raise
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    else:
        return
    typer.echo(f"ordain: {message}", err=True)
    raise typer.Exit(2)


def show(table: Table, *notes: str, numbers_from: int | None = None) -> None:
    """Print a table and lines under it; its columns from ``numbers_from`` on are numbers."""
    for column in table.columns[numbers_from:] if numbers_from is not None else []:
        column.justify = "right"
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def command_line() -> str:
    """The command that is running, as it could be typed again."""
    return shlex.join(["ordain", *sys.argv[1:]])
