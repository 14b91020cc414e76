"""Terminal output shared by the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.table import Table

from ordain.errors import OrdainError

_WIDTH = 130  # columns, if the output is not a terminal
_COMPARED = (  # of the columns of a report
    "order",
    "rate",
    "verdict",
    "final train loss",
    "test acc. %",
    "epochs to RR's best",
    "time / RR",
    "order's state",
    "p",
)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can fix as one line and exit with code 2; other exceptions propagate."""
    try:
        yield
    except OrdainError as error:
        message = str(error)
    except BrokenPipeError:  # the reader of a pipe has closed it: exit quietly
        raise
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    else:
        return
    typer.echo(f"ordain: {message}", err=True)
    raise typer.Exit(2)


def compared(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> Table:
    """The columns of a report's table that fit a terminal."""
    places = [place for place, heading in enumerate(headings) if heading in _COMPARED]
    return filled(
        [headings[place] for place in places], [[row[place] for place in places] for row in rows], title=title
    )


def filled(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """A table with these rows."""
    table = Table(*headings, title=title or None)
    for row in rows:
        table.add_row(*row)
    return table


def show(table: Table, *notes: str, numbers_from: int | None = None) -> None:
    """Print a table, with columns right-aligned from ``numbers_from`` on, and notes below it."""
    for column in table.columns[numbers_from:] if numbers_from is not None else []:
        column.justify = "right"
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
