"""Errors a user can mend, as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ordain.errors import OrdainError

__all__ = ["plain_errors"]


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
