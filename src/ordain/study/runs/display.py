"""Progress on stderr: a bar per running job on a terminal, one line per finished job otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from ordain.study.runs.job import Job
from ordain.study.runs.runner import Progress, Report

_TRACE_LINES = 4


@contextmanager
def displaying(epochs: int) -> Iterator[Report]:
    """Context manager giving a ``report`` callback for :func:`ordain.study.runs.runner.run`."""
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        whole = bars.add_task("all jobs", said="")
        rows: dict[Job, TaskID] = {}
        start, finished = time.monotonic(), 0

        def hear(progress: Progress) -> None:
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
            left = _left(time.monotonic() - start, finished, progress)
            bars.update(whole, completed=progress.done, total=progress.total, said=left)
            for line in _lines(progress, left):
                console.print(line, highlight=False, markup=False)

        yield hear


def _lines(progress: Progress, left: str) -> list[str]:
    """The lines to print: one per finished job, with the end of its traceback if it failed."""
    message = progress.message
    if message.kind == "restarted":
        return [f"{message.job}: its checkpoint is damaged and was removed; the job restarts"]
    if message.kind not in ("finished", "failed"):
        return []
    said = message.state if message.kind == "finished" else "FAILED"
    traces = message.trace.splitlines()[-_TRACE_LINES:]
    return [f"{progress.done}/{progress.total} {message.job}: {said}; {left}", *(f"    {trace}" for trace in traces)]


def _left(elapsed: float, finished: int, progress: Progress) -> str:
    """Elapsed time and, after the first job, the estimated time left."""
    said = f"{_clock(elapsed)} elapsed"
    if finished and progress.total > progress.done:
        said += f", about {_clock(elapsed / finished * (progress.total - progress.done))} to go"
    return said


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
