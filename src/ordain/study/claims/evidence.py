"""A folder of runs, each read when it is asked for; a claim, and what was found about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ordain.study.report.views import Entry, View, views
from ordain.study.runs.records import Run, read_run

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"


@dataclass(frozen=True)
class Evidence:
    """The runs in ``folder``, by the names of their folders."""

    folder: Path
    _views: dict[str, tuple[Run, list[View]] | None] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Is there such a run?"""
        return (self.folder / name / "config.json").is_file()

    def _read(self, name: str) -> tuple[Run, list[View]] | None:
        if name not in self._views:
            run = read_run(self.folder / name) if self.has(name) else None
            self._views[name] = (run, views(run)) if run and run.arms else None
        return self._views[name]

    def run(self, name: str) -> Run | None:
        """A training run's records; None where there are none."""
        found = self._read(name)
        return found[0] if found else None

    def at_rr(self, name: str) -> View | None:
        """All arms at RR's best rate, the paper's protocol."""
        found = self._read(name)
        return next((view for view in found[1] if view.name == "rr"), None) if found else None

    def tuned(self, name: str) -> View | None:
        """Each arm at its own best rate; RR's where that is the best of all."""
        found = self._read(name)
        return found[1][0] if found else None

    def entry(self, name: str, arm: str) -> Entry | None:
        """An arm at RR's best rate, if it has a finished job there."""
        view = self.at_rr(name)
        return view.shown.get(arm) if view else None

    def figure(self, name: str, file: str) -> str | None:
        """A figure of a report that is there, as a path in the folder."""
        path = f"{name}/report/{file}.png"
        return path if (self.folder / path).is_file() else None


@dataclass(frozen=True)
class Finding:
    """The verdict, what was measured in sentences, and a figure's file in the folder of runs."""

    verdict: str
    measured: tuple[str, ...]
    figure: str | None = None


NOT_RUN = Finding(OPEN, ("Not run.",))


@dataclass(frozen=True)
class Claim:
    """What the paper says, and how to find out."""

    title: str
    paper: str
    find: Callable[[Evidence], Finding]


def together(votes: Iterable[bool | None]) -> str:
    """One vote against is enough; without one, all must be for it. None is a vote that could be luck.

    >>> together([True, True]), together([True, None]), together([True, False]), together([])
    ('holds', 'cannot tell', 'does not hold', 'cannot tell')
    """
    cast = list(votes)
    if any(vote is False for vote in cast):
        return FAILS
    return HOLDS if cast and all(cast) else OPEN
