"""A folder of runs, each read when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ordain.study.report.views import Entry, View, views
from ordain.study.runs.records import Run, read_run

__all__ = ["Evidence"]


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

    def figure(self, name: str, *files: str) -> str | None:
        """The first of a report's figures that is there, as a path in the folder."""
        return next((path for file in files if (self.folder / (path := f"{name}/report/{file}.png")).is_file()), None)
