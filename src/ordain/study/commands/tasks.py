"""``ordain tasks``: what can be run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

__all__ = ["GRAB_COST", "tasks"]

GRAB_COST = "1.3 to 1.9"  # the range of the table in docs/gradients.md, as the README has it

_TABLE_WIDTH = 130  # where no terminal says otherwise


def tasks() -> None:
    """List the tasks that ``ordain run`` trains."""
    from ordain.study.runs.ablations import ABLATIONS
    from ordain.study.tasks import TASKS
    from ordain.study.vectors import STUDIES

    headings = ("task", "data", "model", "examples", "parameters", "batch", "rates", "epochs", "an epoch")
    table = Table(*headings)
    for column in table.columns[3:]:
        column.justify = "right"
    for task in TASKS.values():
        defaults = task.defaults
        table.add_row(
            task.name,
            task.data,
            task.model,
            f"{task.examples:,}",
            f"{task.parameters:,}",
            str(defaults.batch_size),
            ", ".join(f"{lr:g}" for lr in defaults.rates),
            str(defaults.epochs),
            _time(task.seconds_per_epoch),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    console.print(table)
    console.print(
        "Examples: without the train file of QNLI (qnli: its dev file is split) and without w8a.t (w8a: a tenth of its "
        "train file is the test set). With these files qnli and w8a train on more.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        "An epoch: random reshuffling with evaluation, on one thread of a busy 2.8 GHz Xeon: rough. A step "
        f"of GraB's takes {GRAB_COST} times as long (docs/gradients.md, “What it costs”).",
        highlight=False,
        soft_wrap=True,
    )
    for ablation in ABLATIONS.values():
        console.print(f"{ablation.name} --task TASK: {ablation.title}", highlight=False, soft_wrap=True)
    for study in STUDIES.values():
        console.print(f"{study.name}: {study.title}", highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 100 else f"{seconds / 60:.0f} min"
