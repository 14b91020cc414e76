"""``ordain tasks`` and ``ordain data``: list tasks and data sets, and download data."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ordain.study.commands.terminal import plain_errors, show
from ordain.study.data import DATASETS, Dataset, data_dir, fetch, find
from ordain.study.progress import reporting

GRAB_COST = "1.5 to 2.5"  # the range in the table of docs/gradients.md, also in the README

data = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List the data sets of the study and download them."
)

_Folder = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with the data sets.  [default: $ORDAIN_DATA, or a cache]")
]


def tasks() -> None:
    """List the tasks that ordain run trains."""
    from ordain.study.runs.config import ABLATIONS
    from ordain.study.tasks import TASKS
    from ordain.study.vectors import STUDIES

    table = [("task", "data", "model", "examples", "parameters", "batch", "rates", "epochs", "an epoch")]
    for task in TASKS.values():
        defaults, seconds = task.defaults, task.seconds_per_epoch
        rates = ", ".join(f"{lr:g}" for lr in defaults.rates)
        took = f"{seconds:g} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        sizes = f"{task.examples:,}", f"{task.parameters:,}", str(defaults.batch_size)
        table.append((task.name, task.data, task.model, *sizes, rates, str(defaults.epochs), took))
    notes = [
        "Examples: without the train file of QNLI (its dev file is split) and without w8a.t (a tenth of the train "
        "file is the test set instead). With these files, qnli and w8a have more training examples.",
        "An epoch: rough time with random reshuffling, including evaluation, on one thread of a 2.8 GHz Xeon. A step "
        f"with GraB takes {GRAB_COST} times as long (see docs/gradients.md).",
        *(f"{ablation.name} --task TASK: {ablation.title}" for ablation in ABLATIONS.values()),
        *(f"{name}: {study.kind.title}" for name, study in STUDIES.items()),
    ]
    show(*table, notes=notes, numbers_from=3)


@data.command("list")
def list_(folder: _Folder = None) -> None:
    """List every data set with its availability, location, size and licence."""
    with plain_errors():
        root = data_dir(folder)
        table = [("name", "what", "there", "where", "rows", "licence")]
        for entry in DATASETS.values():
            there, where = _found(entry, root)
            rows = " / ".join(f"{count:,}" for count in entry.counts.values())
            table.append((entry.name, entry.title, there, escape(where), rows or "-", entry.licence))
    note = "rows: train / valid / test, as published. To download one: ordain data fetch NAME"
    show(*table, notes=[note], title=f"Data in {escape(str(root))}")


@data.command("fetch")
def fetch_(name: Annotated[str, typer.Argument(help="One of `ordain data list`.")], folder: _Folder = None) -> None:
    """Download a data set from its publisher, verify its checksums and counts, and print its location."""
    with plain_errors():
        where = fetch(name, data_dir(folder), reporting=partial(reporting, lines=True))
        typer.echo(f"{name} is in {where}")


def _found(entry: Dataset, root: Path) -> tuple[str, str]:
    """Availability and location; files are searched for, not read."""
    if not entry.files:
        return ("yes" if find_spec("sklearn") else "no"), "scikit-learn"
    where, paths = find(entry, root)
    if not paths:
        return "no", "-"
    needed = {file.key for file in entry.files if file.required}
    missing = [file.names[0] for file in entry.files if file.key not in paths]
    there = "yes" if not missing else f"{'yes' if needed <= paths.keys() else 'no'}, without {', '.join(missing)}"
    return there, where.relative_to(root).as_posix()
