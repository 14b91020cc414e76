"""Workers, which hold the problem in memory and run jobs, and the processes that they run in.

If a worker fails, the others continue; if the parent dies, all workers exit.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from ordain.study.runs.arms import RETRAIN, Arm, build_order, parse
from ordain.study.runs.job import Hear, Job, Message
from ordain.study.runs.loop import epoch_of_steps, make_optimizer
from ordain.study.runs.multi_rank import ALONE, Ranks, joined
from ordain.study.runs.train_job import Setting, train
from ordain.study.tasks import LoadedTask

_CONSEQUENCES = ("RanksError", "DistBackendError", "Connection closed", "gloo")  # of another rank's failure
_GRACE = 5.0  # seconds to wait for messages of other ranks after a failure


@dataclass
class Worker:
    """Runs jobs on one problem, which is loaded for the first of them, as one of ``ranks``."""

    setting: Setting
    problem: LoadedTask | None = None
    ranks: Ranks = ALONE
    warm: set[tuple[str, int, str]] = field(default_factory=set)  # kinds of arms whose code is compiled

    def do(self, job: Job, tell: Hear) -> str:
        """Run one job and return its state."""
        if self.problem is None:
            self.problem = self.setting.load()
            gc.freeze()  # the collection before each job then skips imported modules
        self._warm_up(self.problem, parse(job.arm, group=self.setting.config.group))
        return train(self.problem, self.setting, job, tell=tell, ranks=self.ranks)

    def _warm_up(self, problem: LoadedTask, arm: Arm) -> None:
        """Trigger just-in-time compilation, so that it does not count as training time; once for each kind of arm."""
        kind = arm.order, arm.group, arm.mode
        if arm.name == RETRAIN or kind in self.warm:
            return
        config = self.setting.config
        few = min(len(problem.train_x), 2 * config.batch_size + 1)
        problem = replace(problem, train_x=problem.train_x[:few], train_y=problem.train_y[:few])
        config = replace(config, batch_size=config.batch_size // self.ranks.size)
        model = problem.build(0).train()
        parallel = self.ranks.parallel(problem, model, config.batch_size)
        order = build_order(arm, model, few, seed=0, memory_limit=2**40, labels=problem.labels)
        optimizer = make_optimizer(model, config, lr=0.0)
        for _ in range(2):
            epoch_of_steps(problem, config, parallel, optimizer, order, defaultdict(float))
        order.detach()
        self.warm.add(kind)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Limit torch and BLAS (used by herding through NumPy) to ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(limits=count):
            yield
    finally:
        torch.set_num_threads(before)


def do(worker: Worker, job: Job, hear: Hear) -> None:
    """Run one job and report its failure as a message. If ``hear`` itself fails, that message fails as well."""
    hear(Message("begun", job))
    try:
        state = worker.do(job, hear)
    except Exception:
        hear(Message("failed", job, trace=traceback.format_exc()))
    else:
        hear(Message("finished", job, state=state))


class Team:
    """A group of ``size`` processes (one per rank) that run one job at a time; the first failure ends them all."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.size = size
        self.job: Job | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ordain-ranks-")
        self._processes: dict[Connection, BaseProcess] = {}
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            ranks = Ranks(rank, size, Path(self._folder.name) / "store" if size > 1 else None)
            process = context.Process(target=_serve, args=(theirs, setting, ranks), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process

    @property
    def connections(self) -> list[Connection]:
        """Connections to the processes, by rank; none after a failure."""
        return list(self._processes)

    def give(self, job: Job) -> None:
        """Start a job."""
        self.job = job
        self._send(job)

    def hear(self, connection: Connection) -> Message | None:
        """Receive a message from a process; None if nothing runs there. The last one is "finished" or "failed"."""
        if self.job is None or connection not in self._processes:
            return None
        message = self._received(connection, self.job)
        if message.kind == "failed":
            message = self._failed(connection, message)
        if message.kind in ("finished", "failed"):
            self.job = None
        return message

    def dismiss(self) -> None:
        """End the processes and, if there is one, the running job."""
        if self.job is None:
            self._send(None)
        else:
            for process in self._processes.values():
                process.terminate()
        for process in self._processes.values():
            process.join()
        self._processes = {}
        self._folder.cleanup()

    def _send(self, job: Job | None) -> None:
        for connection in self._processes:
            with suppress(OSError):  # the process has exited; hear() will notice
                connection.send(job)

    def _received(self, connection: Connection, job: Job) -> Message:
        try:
            message: Message = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[connection]
            process.join()
            who = f"rank {self.connections.index(connection)}" if self.size > 1 else "the worker"
            return Message("failed", job, trace=f"{who} ended with exit code {process.exitcode}")
        return message

    def _failed(self, connection: Connection, first: Message) -> Message:
        """End all ranks after one has failed, and report all tracebacks, root causes last."""
        found = [(connection, first.trace)]
        left = [other for other in self.connections if other != connection]
        while left and (ready := wait(left, timeout=_GRACE)):
            for one in ready:
                assert isinstance(one, Connection)  # noqa: S101 (what was asked for)
                message = self._received(one, first.job)
                if message.kind in ("finished", "failed"):
                    left.remove(one)
                if message.kind == "failed":
                    found.append((one, message.trace))
        ranks = self.connections
        self.dismiss()
        if self.size == 1:
            return first
        found.sort(key=lambda of: not any(word in of[1] for word in _CONSEQUENCES))
        traces = [f"rank {ranks.index(one)}: {trace.strip()}" for one, trace in found]
        return Message("failed", first.job, trace="\n\n".join(traces))


def _serve(connection: Connection, setting: Setting, ranks: Ranks) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(setting, ranks=ranks)

    def tell(message: Message) -> None:  # rank 0 speaks for all, the others only of failures: they end a job together
        if not ranks.rank or message.kind == "failed":
            connection.send(message)

    with limited_threads(setting.config.threads), joined(ranks):
        while (job := connection.recv()) is not None:
            do(worker, job, tell)


def _end_with_parent() -> None:
    """Exit when the parent dies, so that orphaned workers do not write next to those of the next command."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def do_here(jobs: Sequence[Job], setting: Setting, problem: LoadedTask, hear: Hear) -> None:
    """Run jobs in this process; jobs with several ranks still get their own processes."""
    worker = Worker(setting, problem)
    with limited_threads(setting.config.threads):
        for job in (job for job in jobs if _size(job) == 1):
            do(worker, job, hear)
    do_in_processes([job for job in jobs if _size(job) > 1], setting, 1, hear)


def do_in_processes(jobs: Sequence[Job], setting: Setting, count: int, hear: Hear) -> None:
    """Run ``count`` jobs at a time, each with one process per rank; no process outlives this call."""
    waiting = deque(jobs)
    teams: list[Team] = []
    try:
        while waiting or teams:
            while waiting and len(teams) < count:
                teams.append(Team(setting, _size(waiting[0])))
                teams[-1].give(waiting.popleft())
            ready = wait([connection for team in teams for connection in team.connections])
            for team in teams:
                for connection in (one for one in team.connections if one in ready):
                    if message := team.hear(connection):
                        hear(message)
            for team in [one for one in teams if one.job is None]:
                if waiting and team.connections and _size(waiting[0]) == team.size:
                    team.give(waiting.popleft())
                else:
                    team.dismiss()
                    teams.remove(team)
    finally:
        for team in teams:
            team.dismiss()


def _size(job: Job) -> int:
    return parse(job.arm).ranks
