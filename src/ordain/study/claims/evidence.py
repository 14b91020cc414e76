"""Access to a folder of runs, and the types of claims and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ordain.study.report.views import Entry, View, views
from ordain.study.runs.records import Run, read_run

HOLDS, FAILS, OPEN = "supported", "contradicted", "inconclusive"
GROUPS = TRAINING, ABLATIONS, MECHANICS = "Training", "Ablations", "Mechanics"


@dataclass(frozen=True)
class Evidence:
    """The runs in ``folder`` by name; each is read when first used."""

    folder: Path
    _read: dict[str, tuple[Run | None, dict[str, View]]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether there is such a run."""
        return (self.folder / name / "config.json").is_file()

    def _found(self, name: str) -> tuple[Run | None, dict[str, View]]:
        if name not in self._read:
            run = read_run(self.folder / name) if self.has(name) else None
            self._read[name] = (run, {view.name: view for view in views(run)}) if run and run.arms else (None, {})
        return self._read[name]

    def run(self, name: str) -> Run | None:
        """The records of a training run; None if there are none."""
        return self._found(name)[0]

    def at_rr(self, name: str) -> View | None:
        """All arms at RR's best rate (the paper's protocol)."""
        return self._found(name)[1].get("rr")

    def tuned(self, name: str) -> View | None:
        """Each arm at its own best rate."""
        return next(iter(self._found(name)[1].values()), None)

    def entry(self, name: str, arm: str) -> Entry | None:
        """An arm at RR's best rate; None if it has no finished job there."""
        view = self.at_rr(name)
        return view.shown.get(arm) if view else None

    def figure(self, name: str, file: str) -> str | None:
        """The path of a report's figure, relative to the folder; None if it does not exist."""
        path = f"{name}/report/{file}.png"
        return path if (self.folder / path).is_file() else None


@dataclass(frozen=True)
class Finding:
    """The verdict on a claim, the measurements as sentences, and the path of a figure."""

    verdict: str
    measured: tuple[str, ...]
    figure: str | None = None


NOT_RUN = Finding(OPEN, ("Not run.",))


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and the function that checks it; ``group`` is one of GROUPS."""

    title: str
    paper: str
    find: Callable[[Evidence], Finding]
    group: str


def together(votes: Iterable[bool | None]) -> str:
    """Combine votes: one False contradicts the claim; otherwise all must be True. None is inconclusive.

    >>> together([True, True]), together([True, None]), together([True, False]), together([])
    ('supported', 'inconclusive', 'contradicted', 'inconclusive')
    """
    cast = list(votes)
    if any(vote is False for vote in cast):
        return FAILS
    return HOLDS if cast and all(cast) else OPEN
