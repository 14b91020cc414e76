"""Progress on stderr: a bar on a terminal, otherwise a few lines or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]  # (done, total)


@contextmanager
def reporting(title: str, *, lines: bool = False) -> Iterator[Report]:
    """Context manager giving a callback (done, total); ``lines`` prints every 10 % if there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tenths = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title)

        def report(done: int, total: int) -> None:
            nonlocal tenths
            bar.update(task, completed=done, total=total)
            if lines and not console.is_terminal and 10 * done // total > tenths:
                tenths = 10 * done // total
                console.print(f"{title}: {10 * tenths} %", highlight=False)

        yield report
