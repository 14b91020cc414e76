"""``ordain demo``: every order on digits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ordain.study.commands.terminal import plain_errors, show

_SHOWN = (
    "order",
    "verdict",
    "final train loss",
    "test acc. %",
    "epochs to RR's best",
    "time / RR",
    "order's state",
    "p",
)


def demo(
    out: Annotated[Path, typer.Option(help="The folder to write; made if need be.")] = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each order runs with.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs each run trains for.")] = 20,
) -> None:
    """Train on scikit-learn's digits with every order, and write a page with the results."""
    with plain_errors():
        from ordain.study.demo import RATE, demo_config, write_demo  # these import scikit-learn and matplotlib
        from ordain.study.report.number_text import counted
        from ordain.study.runs.display import displaying

        command = shlex.join(["ordain", "demo", "--out", str(out), "--seeds", str(seeds), "--epochs", str(epochs)])
        with displaying(epochs) as report:
            content = write_demo(out, demo_config(seeds=seeds, epochs=epochs), report=report, command=command)
    (numbers,) = content.tables
    places = [place for place, heading in enumerate(numbers.headings) if heading in _SHOWN]
    counts = f"{counted(epochs, 'epoch')}, {counted(seeds, 'seed')}"
    table = Table(*(numbers.headings[place] for place in places), title=f"Digits, learning rate {RATE:g}, {counts}")
    for row in numbers.rows:
        table.add_row(*(row[place] for place in places))
    show(
        table,
        "All orders at one rate, an illustration: no claim about the best of each. p: paired t test of the final train "
        f"loss against RR's; a verdict asks for p < 0.01 and five seeds. The page: {out / 'index.html'}",
        numbers_from=2,
    )
