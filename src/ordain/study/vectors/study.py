"""What the studies of plain vectors share: a folder of records that can be gone on with, point by point."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ordain.errors import InputError
from ordain.study import strict_json
from ordain.study.files import write_bytes
from ordain.study.lock import only_one
from ordain.study.machine import provenance
from ordain.study.progress import Report
from ordain.study.runs.record_lines import records_file, unpack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Point", "Record", "Study", "Table"]

Config = TypeVar("Config")
Shown = TypeVar("Shown")
Point = dict[str, Any]  # what is measured: JSON values that name it
Record = dict[str, Any]  # the point, and what was measured
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, rows

FORMAT = 1
_MOST_SEEDS, _MOST_POINTS = 10_000, 1_000_000  # no folder of ours has more
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what values of another kind lead to


@dataclass(frozen=True)
class Study(Generic[Config]):
    """One study: what it measures, and how that is shown.

    Attributes:
        name: of the command and of the folder's ``kind``.
        title: one line.
        sizes: the default configuration, and a quick one, by whether it should be quick. Has a field ``seeds``.
        points: what a configuration measures, in order.
        measure: one point, as JSON values without times: equal points give equal records.
        draw: figures by name.
        tabulate: headings and rows.
        say: what was found, in sentences.
    """

    name: str
    title: str
    sizes: Callable[..., Config]  # (quick: bool, **changes) -> Config
    points: Callable[[Config], Iterable[Point]]
    measure: Callable[[Config, Point], Mapping[str, Any]]
    draw: Callable[[Config, list[Record]], dict[str, Figure]]
    tabulate: Callable[[Config, list[Record]], Table]
    say: Callable[[Config, list[Record]], list[str]]

    def configure(self, *, seeds: int | None = None, quick: bool = False) -> Config:
        """The configuration to run; ``seeds`` changes how often each point is measured."""
        if seeds is not None and seeds < 1:
            raise InputError(f"seeds={seeds}", expected="at least 1", remedy="Leave it out for the default.")
        return self.sizes(quick) if seeds is None else self.sizes(quick, seeds=seeds)

    def run(self, config: Config, folder: Path, report: Report, *, command: str | None = None) -> None:
        """Measure what ``folder`` does not have yet; stopped at any moment, it goes on from the next point."""
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder):
            unpack(folder)
            self._run(config, folder, report, command)

    def _run(self, config: Config, folder: Path, report: Report, command: str | None) -> None:
        head = self._open(config, folder)
        points = list(self.points(config))
        done = {_key(record, points[0]) for record in _read(folder)} if points else set()
        if any(_key(point, point) not in done for point in points):
            made = provenance(command)
            # The fields of the first command stay; every command, with what it ran on, is listed after them.
            head = made | head | {"commands": [*head.get("commands", []), made]}
            write_bytes(folder / "config.json", json.dumps(head, indent=1, allow_nan=False).encode())
        with (folder / "records.jsonl").open("a", encoding="utf-8") as file:
            for count, point in enumerate(points, 1):
                if _key(point, point) not in done:
                    record = {**point, **self.measure(config, point)}
                    file.write(json.dumps(record, allow_nan=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                report(count, len(points))

    def figures(self, folder: Path) -> dict[str, Figure]:
        """The figures of a folder, by name."""
        return self.shown(self.draw, folder)

    def table(self, folder: Path) -> Table:
        """Headings and rows of a folder."""
        return self.shown(self.tabulate, folder)

    def sentences(self, folder: Path) -> list[str]:
        """What a folder's records say."""
        return self.shown(self.say, folder)

    def shown(self, show: Callable[[Config, list[Record]], Shown], folder: Path) -> Shown:
        """What ``show`` makes of a folder's records; those of another kind are an error that names the file."""
        config, records = self._load(folder)
        try:
            return show(config, records)
        except _WRONG as error:
            raise _damaged(folder / "records.jsonl", "records with values that this study does not write") from error

    def _open(self, config: Config, folder: Path) -> dict[str, Any]:
        """The head to go on with; that of a new folder says nothing of a command yet."""
        wanted = _plain(config)
        if (folder / "config.json").exists():
            head = self._head(folder)
            had = head["config"]
            if had | {"seeds": 0} != wanted | {"seeds": 0}:
                changed = sorted(name for name in wanted if had.get(name) != wanted[name])
                raise InputError(
                    f"{folder}, which holds a run with other {', '.join(changed)}",
                    expected="the same configuration, or more seeds",
                    remedy="Choose another folder, or remove this one.",
                )
            if not isinstance(head.get("commands", []), list):
                raise _damaged(folder / "config.json", "commands that are no list")
            _drop_unfinished(folder / "records.jsonl")
            return head | {"config": wanted | {"seeds": max(wanted["seeds"], had["seeds"])}}
        return {"format": FORMAT, "kind": self.name, "config": wanted}

    def _head(self, folder: Path) -> dict[str, Any]:
        path = folder / "config.json"
        try:
            head = strict_json.loads(strict_json.read_text(path))
        except (FileNotFoundError, ValueError) as error:
            raise InputError(
                f"{path}, which cannot be read", expected="a folder of this study", remedy="Run the study first."
            ) from error
        if not isinstance(head, dict) or (head.get("format"), head.get("kind")) != (FORMAT, self.name):
            raise InputError(
                f"{path}, which belongs to something else",
                expected=f"kind {self.name!r} and format {FORMAT}",
                remedy="Choose another folder.",
            )
        config: Any = head.get("config")
        if not strict_json.alike(config, _plain(self.sizes(False))) or not 1 <= config["seeds"] <= _MOST_SEEDS:
            raise _damaged(path, "a configuration that this study does not have")
        return head

    def _load(self, folder: Path) -> tuple[Config, list[Record]]:
        config = self.sizes(False, **{name: _tuples(value) for name, value in self._head(folder)["config"].items()})
        try:
            points = list(islice(self.points(config), _MOST_POINTS))
        except _WRONG as error:
            raise _damaged(folder / "config.json", "a configuration that this study does not have") from error
        found = {_key(record, points[0]): record for record in _read(folder)}
        records = [found[_key(point, point)] for point in points if _key(point, point) in found]
        if not records:
            raise InputError(f"{folder} without records", expected="measured points", remedy="Run the study first.")
        return config, records


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _key(record: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def _read(folder: Path) -> list[Record]:
    path = records_file(folder)
    if not path.exists():
        return []
    try:
        lines = strict_json.read_text(path).split("\n")[:-1]  # what follows the last line end is unfinished
    except ValueError as error:
        raise _damaged(path, f"lines that are no records ({str(error)[:80]!a})") from error
    return [_record(line, path, number) for number, line in enumerate(lines, 1)]


def _record(line: str, path: Path, number: int) -> Record:
    try:
        record = strict_json.loads(line)
    except ValueError as error:
        raise _damaged(path, f"line {number} is no record ({str(error)[:80]!a})") from error
    if not isinstance(record, dict):
        raise _damaged(path, f"line {number} is no record")
    return record


def _damaged(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: {what}", expected="what the study wrote there", remedy="Remove the folder and run the study again."
    )


def _drop_unfinished(path: Path) -> None:
    """A run that was killed while it wrote leaves part of a line."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            write_bytes(path, whole)
