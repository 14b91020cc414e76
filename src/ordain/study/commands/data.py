"""``ordain data``: the data sets of the study, and getting them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ordain.study.commands.plain import plain_errors
from ordain.study.data import DATASETS, Dataset, data_dir, fetch, find
from ordain.study.progress import reporting

__all__ = ["data"]

_TABLE_WIDTH = 130  # where no terminal says otherwise

data = typer.Typer(no_args_is_help=True, help="The data sets of the study: see what is there, and get the rest.")

_Folder = Annotated[
    Path | None, typer.Option("--data-dir", help="The folder of all data sets.  [default: $ORDAIN_DATA, or a cache]")
]


@data.command("list")
def list_(folder: _Folder = None) -> None:
    """Every data set: what it is, whether it is there and where, its size and its licence."""
    with plain_errors():
        root = data_dir(folder)
        table = Table("name", "what", "there", "where", "rows", "licence", title=f"Data in {escape(str(root))}")
        for entry in DATASETS.values():
            there, where = _found(entry, root)
            rows = " / ".join(f"{count:,}" for count in entry.counts.values())
            table.add_row(entry.name, entry.title, there, escape(where), rows or "-", entry.licence)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    console.print(table)
    console.print("rows: train / valid / test, as published. Get one with: ordain data fetch NAME", highlight=False)


@data.command("fetch")
def fetch_(name: Annotated[str, typer.Argument(help="One of `ordain data list`.")], folder: _Folder = None) -> None:
    """Download a data set from its publisher, compare it with its checksums and counts, and say where it is."""
    with plain_errors():
        where = fetch(name, data_dir(folder), reporting=partial(reporting, lines=True))
        typer.echo(f"{name} is in {where}")


def _found(entry: Dataset, root: Path) -> tuple[str, str]:
    """Whether it is there, and where; files are looked for, not read."""
    if not entry.files:
        return ("yes" if find_spec("sklearn") else "no"), "scikit-learn"
    where, paths = find(entry, root)
    if not paths:
        return "no", "-"
    needed = {file.key for file in entry.files if file.required}
    missing = [file.names[0] for file in entry.files if file.key not in paths]
    there = "yes" if not missing else f"{'yes' if needed <= paths.keys() else 'no'}, without {', '.join(missing)}"
    return there, where.relative_to(root).as_posix()
