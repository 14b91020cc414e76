"""Terminal output shared by the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ordain.errors import OrdainError

_INTERRUPTED = 130  # the exit code
_WIDTH = 130  # columns, if the output is not a terminal
_COMPARED = (  # of the columns of a report
    "order",
    "rate",
    "verdict",
    "final train loss",
    "p",
    "test acc. %",
    "epochs to RR's best",
    "time / RR",
    "order's state",
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
    except (FileExistsError, NotADirectoryError) as error:
        message = f"got {error.filename}, which is a file; expected a folder. Choose another name."
    except FileNotFoundError as error:
        message = f"got {error.filename}, which does not exist; expected an existing path. Check the name."
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    else:
        return
    typer.echo(f"ordain: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """On Ctrl-C, exit and print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"ordain: stopped; results so far are in {folder}. Run the same command to resume.", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def compared(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[Sequence[str], ...]:
    """The columns of a report's table that fit a terminal: its headings, then its rows."""
    places = [place for place, heading in enumerate(headings) if heading in _COMPARED]
    return tuple([line[place] for place in places] for line in (headings, *rows))


def show(
    headings: Sequence[str],
    *rows: Sequence[str],
    notes: Sequence[str] = (),
    title: str | None = None,
    numbers_from: int | None = None,
) -> None:
    """Print a table, with columns right-aligned from ``numbers_from`` on, and notes below it."""
    table = Table(*headings, title=title)
    for column in table.columns[numbers_from:] if numbers_from is not None else []:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
