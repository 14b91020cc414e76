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
    out: Annotated[Path, typer.Option(help="Output folder; created if needed.")] = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per order.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 20,
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
        "An illustration: all orders use the same learning rate, not their best. p: paired t-test of the final train "
        f"loss against RR's; a verdict requires p < 0.01 and five seeds. The page: {out / 'index.html'}",
        numbers_from=2,
    )
