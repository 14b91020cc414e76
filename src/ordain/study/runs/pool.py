"""Jobs in worker processes: one dies or fails and the others go on; the parent dies and they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from ordain.study.runs.arms import parse
from ordain.study.runs.job import Job
from ordain.study.runs.team import Hear, Message, Team, do
from ordain.study.runs.worker import Setting, Worker, limited_threads
from ordain.study.tasks import Problem

__all__ = ["Message", "do_here", "do_in_processes"]


def do_here(jobs: Sequence[Job], setting: Setting, problem: Problem, hear: Hear) -> None:
    """Jobs in this process; those of several ranks are done by processes of their own, one job after the other."""
    worker = Worker(setting, problem)
    with limited_threads(setting.config.threads):
        for job in jobs:
            if _size(job) == 1:
                do(worker, job, hear)
    together = [job for job in jobs if _size(job) > 1]
    if together:
        do_in_processes(together, setting, 1, hear)


def do_in_processes(jobs: Sequence[Job], setting: Setting, count: int, hear: Hear) -> None:
    """``count`` jobs at a time, each in as many processes as it has ranks; leaves none behind, whatever happens."""
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
                    message = team.hear(connection)
                    if message is not None:
                        hear(message)
            for team in [one for one in teams if one.job is None]:
                _go_on(team, teams, waiting)
    finally:
        for team in teams:
            team.dismiss(now=team.job is not None)


def _go_on(team: Team, teams: list[Team], waiting: deque[Job]) -> None:
    """Another job for a team that has done its own, or its end: each team has one number of ranks."""
    if waiting and team.connections and _size(waiting[0]) == team.size:
        team.give(waiting.popleft())
    else:
        team.dismiss(now=False)
        teams.remove(team)


def _size(job: Job) -> int:
    return parse(job.arm).ranks
