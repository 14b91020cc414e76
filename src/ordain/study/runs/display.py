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
    lines = _Lines(console)
    if not console.is_terminal:
        yield lines.hear
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        whole = bars.add_task("all jobs", said="")
        rows: dict[Job, TaskID] = {}

        def hear(progress: Progress) -> None:
            message = progress.message
            job = message.job
            if message.kind == "begun":
                rows[job] = bars.add_task(str(job), total=epochs, said="")
            elif message.kind == "epoch":
                loss = "not finite" if message.loss is None else f"{message.loss:.4f}"
                bars.update(rows[job], completed=message.epoch, said=f"epoch {message.epoch}, loss {loss}")
            elif message.kind in ("finished", "failed") and job in rows:
                bars.remove_task(rows.pop(job))
            bars.update(whole, completed=progress.done, total=progress.total, said=lines.remaining(progress))
            lines.hear(progress)

        yield hear


class _Lines:
    """Prints one line per finished job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start, self._finished = time.monotonic(), 0

    def hear(self, progress: Progress) -> None:
        message = progress.message
        if message.kind == "restarted":
            said = f"{message.job}: its checkpoint is damaged and was removed; the job restarts"
            self._console.print(said, highlight=False, markup=False)
        if message.kind not in ("finished", "failed"):
            return
        self._finished += 1
        said = message.state if message.kind == "finished" else "FAILED"
        line = f"{progress.done}/{progress.total} {message.job}: {said}; {self.remaining(progress)}"
        self._console.print(line, highlight=False, markup=False)
        for trace in message.trace.splitlines()[-_TRACE_LINES:]:
            self._console.print(f"    {trace}", highlight=False, markup=False)

    def remaining(self, progress: Progress) -> str:
        """Elapsed time and, after the first job, the estimated time left."""
        elapsed = time.monotonic() - self._start
        said = f"{_clock(elapsed)} elapsed"
        if self._finished and progress.total > progress.done:
            said += f", about {_clock(elapsed / self._finished * (progress.total - progress.done))} to go"
        return said


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
