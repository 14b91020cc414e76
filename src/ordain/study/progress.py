"""Progress on stderr: bars on a terminal; otherwise a line per finished job, a few lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining

if TYPE_CHECKING:
    from ordain.study.runs.job import Job
    from ordain.study.runs.runner import Progress as JobProgress
    from ordain.study.runs.runner import Report as JobReport

Report = Callable[[int, int], None]  # (done, total)
_TRACE_LINES = 4


@contextmanager
def reporting(title: str, *, lines: bool = False) -> Iterator[Report]:
    """Context manager giving a callback (done, total); ``lines`` prints every 10 % if there is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
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


@contextmanager
def displaying(epochs: int) -> Iterator[JobReport]:
    """Context manager giving a ``report`` callback for :func:`ordain.study.runs.runner.run`."""
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), Elapsed())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        whole = bars.add_task("all jobs", said="")
        rows: dict[Job, TaskID] = {}
        start, finished = time.monotonic(), 0

        def hear(progress: JobProgress) -> None:
            nonlocal finished
            message, job = progress.message, progress.message.job
            over = message.kind in ("finished", "failed")
            if message.kind == "begun":
                rows[job] = bars.add_task(str(job), total=epochs, said="")
            elif message.kind == "epoch":
                loss = "not finite" if message.loss is None else f"{message.loss:.4f}"
                bars.update(rows[job], completed=message.epoch, said=f"epoch {message.epoch}, loss {loss}")
            elif over and job in rows:
                bars.remove_task(rows.pop(job))
            finished += over
            elapsed, jobs_left = time.monotonic() - start, progress.total - progress.done
            left = f"{_clock(elapsed)} elapsed"
            if finished and jobs_left > 0:
                left += f", about {_clock(elapsed / finished * jobs_left)} to go"
            bars.update(whole, completed=progress.done, total=progress.total, said=left)
            for line in _lines(progress, left):
                console.print(line, highlight=False, markup=False)

        yield hear


def _lines(progress: JobProgress, left: str) -> list[str]:
    """The lines to print: one per finished job, with the end of its traceback if it failed."""
    message = progress.message
    if message.kind == "restarted":
        return [f"{message.job}: its checkpoint is damaged and was removed; the job restarts"]
    if message.kind not in ("finished", "failed"):
        return []
    said = message.state if message.kind == "finished" else "FAILED"
    traces = message.trace.splitlines()[-_TRACE_LINES:]
    return [f"{progress.done}/{progress.total} {message.job}: {said}; {left}", *(f"    {trace}" for trace in traces)]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
