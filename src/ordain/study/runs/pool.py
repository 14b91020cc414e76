"""Jobs in worker processes: one dies or fails and the others go on; the parent dies and they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from ordain.study.runs.job import Job
from ordain.study.runs.worker import Setting, Worker, limited_threads, load_problem
from ordain.study.tasks import Problem

__all__ = ["Message", "do_here", "do_in_processes"]


@dataclass(frozen=True)
class Message:
    """What is heard of a job.

    Attributes:
        kind: what happened.
        job: to which.
        epoch: for ``"epoch"`` and ``"checkpoint"``.
        loss: on the training set, for ``"epoch"``; None if it is not finite.
        state: for ``"finished"``.
        trace: for ``"failed"``.
    """

    kind: Literal["begun", "restarted", "epoch", "checkpoint", "finished", "failed"]
    job: Job
    epoch: int = 0
    loss: float | None = None
    state: str = ""
    trace: str = ""


Hear = Callable[[Message], None]


def _do(worker: Worker, job: Job, hear: Hear) -> None:
    """One job; an exception in it is a message, one in ``hear`` is not."""

    def tell(kind: Any, epoch: int, loss: float | None) -> None:
        try:
            hear(Message(kind, job, epoch, loss))
        except Exception as error:
            raise _NotHeardError from error

    hear(Message("begun", job))
    try:
        state = worker.do(job, tell)
    except _NotHeardError as error:
        raise (error.__cause__ or error) from None
    except Exception:
        hear(Message("failed", job, trace=traceback.format_exc()))
    else:
        hear(Message("finished", job, state=state))


class _NotHeardError(Exception):
    """Whoever listens is gone, or has had enough."""


def do_here(jobs: Sequence[Job], setting: Setting, problem: Problem, hear: Hear) -> None:
    """Jobs in this process."""
    worker = Worker(setting, problem)
    with limited_threads(setting.config.threads):
        for job in jobs:
            _do(worker, job, hear)


def do_in_processes(jobs: Sequence[Job], setting: Setting, count: int, hear: Hear) -> None:
    """Jobs in ``count`` processes; leaves none behind, whatever happens."""
    waiting = deque(jobs)
    running: dict[Connection, tuple[BaseProcess, Job]] = {}
    processes: list[BaseProcess] = []
    context = multiprocessing.get_context("spawn")
    try:
        while waiting or running:
            while waiting and len(running) < count:
                ours, theirs = context.Pipe()
                begun = context.Process(target=_serve, args=(theirs, setting), daemon=True)
                begun.start()
                theirs.close()
                processes.append(begun)
                running[ours] = begun, waiting.popleft()
                ours.send(running[ours][1])
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)  # noqa: S101 (what was asked for)
                process, job = running[connection]
                try:
                    message: Message = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    del running[connection]
                    hear(Message("failed", job, trace=f"the worker ended with exit code {process.exitcode}"))
                    continue
                hear(message)
                if message.kind in ("finished", "failed"):
                    del running[connection]
                    if waiting:
                        running[connection] = process, waiting.popleft()
                        connection.send(running[connection][1])
                    else:
                        connection.send(None)
    finally:
        for process in processes:
            if running:
                process.terminate()
            process.join()


def _serve(connection: Connection, setting: Setting) -> None:
    """A worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker: Worker | None = None
    with limited_threads(setting.config.threads):
        while (job := connection.recv()) is not None:
            if worker is None:
                worker = _made(setting, job, connection)
                if worker is None:
                    return
            _do(worker, job, connection.send)


def _made(setting: Setting, job: Job, connection: Connection) -> Worker | None:
    try:
        return Worker(setting, load_problem(setting))
    except Exception:
        connection.send(Message("failed", job, trace=traceback.format_exc()))
        return None


def _end_with_parent() -> None:
    """A parent that was killed cannot stop its workers, which would go on writing beside those of the next command."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
