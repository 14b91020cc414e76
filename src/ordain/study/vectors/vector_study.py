"""The common part of all vector studies: a folder of records, measured point by point, that can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from ordain.errors import InputError
from ordain.study import strict_json
from ordain.study.files import only_one, write_bytes
from ordain.study.machine import provenance
from ordain.study.progress import Report
from ordain.study.runs.record_lines import records_file, unpack
from ordain.study.runs.run_folder import FORMAT, read_header

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shown = TypeVar("Shown")
Point = dict[str, Any]  # identifies a measurement, with JSON values
Record = dict[str, Any]  # the point, and the measured values
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, rows
Figures: TypeAlias = "dict[str, Figure]"  # by name

_MOST_SEEDS, _MOST_POINTS = 10_000, 1_000_000  # far more than any study has
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # raised by values of another kind


def where(records: Iterable[Record], **fields: Any) -> list[Record]:
    """The records with these values."""
    return [record for record in records if all(record[name] == value for name, value in fields.items())]


class Settings(Protocol):
    """The settings of a study (a frozen dataclass), with the points to measure and how to present the results."""

    name: ClassVar[str]  # of the command, and ``kind`` in the folder
    title: ClassVar[str]
    quick: ClassVar[dict[str, Any]]  # the settings of a quick run

    @property
    def seeds(self) -> int: ...
    def points(self) -> Iterable[Point]: ...
    def measure(self, point: Point) -> Mapping[str, Any]: ...  # JSON values; equal points give equal records
    def draw(self, records: list[Record]) -> Figures: ...
    def tabulate(self, records: list[Record]) -> Table: ...
    def say(self, records: list[Record]) -> list[str]: ...  # the findings, in sentences


@dataclass(frozen=True)
class Study:
    """The folders of one kind of study: measured, resumed and read."""

    kind: Any  # a class of Settings

    def configure(self, *, seeds: int | None = None, quick: bool = False) -> Any:
        """The settings to run; ``seeds`` is the number of measurements of each point."""
        if seeds is not None and seeds < 1:
            raise InputError(f"seeds={seeds}", expected="at least 1", remedy="Leave it out for the default.")
        return self.kind(**(self.kind.quick if quick else {}) | ({} if seeds is None else {"seeds": seeds}))

    def run(self, config: Settings, folder: Path, report: Report, *, command: str = "") -> None:
        """Measure the points that ``folder`` does not have yet. Can be interrupted at any time and run again."""
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder):
            unpack(folder)
            head, points = self._open(config, folder), list(config.points())
            done = {_key(record, points[0]) for record in _read(folder)} if points else set()
            if any(_key(point, point) not in done for point in points):
                made = provenance(command)
                # The fields of the first command stay; every command and its environment is listed after them.
                head = made | head | {"commands": [*head.get("commands", []), made]}
                write_bytes(folder / "config.json", json.dumps(head, indent=1, allow_nan=False).encode())
            with (folder / "records.jsonl").open("a", encoding="utf-8") as file:
                for count, point in enumerate(points, 1):
                    if _key(point, point) not in done:
                        record = {**point, **config.measure(point)}
                        file.write(json.dumps(record, allow_nan=False) + "\n")
                        file.flush()
                        os.fsync(file.fileno())
                    report(count, len(points))

    def figures(self, folder: Path) -> Figures:
        """The figures of a folder, by name."""
        return self.shown(self.kind.draw, folder)

    def table(self, folder: Path) -> Table:
        """Headings and rows of a folder."""
        found: Table = self.shown(self.kind.tabulate, folder)
        return found

    def sentences(self, folder: Path) -> list[str]:
        """The findings of a folder."""
        return self.shown(self.kind.say, folder)

    def shown(self, show: Callable[[Any, list[Record]], Shown], folder: Path) -> Shown:
        """Call ``show`` with a folder's configuration and records; an error names the file with malformed records."""
        config = self.saved(folder)
        try:
            points = list(islice(config.points(), _MOST_POINTS))
        except _WRONG as error:
            raise _damaged(folder / "config.json", "a configuration that this study does not have") from error
        found = {_key(record, points[0]): record for record in _read(folder)}
        records = [found[_key(point, point)] for point in points if _key(point, point) in found]
        if not records:
            raise InputError(f"{folder} without records", expected="measured points", remedy="Run the study first.")
        try:
            return show(config, records)
        except _WRONG as error:
            raise _damaged(folder / "records.jsonl", "records with values that this study does not write") from error

    def saved(self, folder: Path) -> Any:
        """The settings of a folder."""
        return self.kind(**{name: _tuples(value) for name, value in self._head(folder)["config"].items()})

    def _open(self, config: Settings, folder: Path) -> dict[str, Any]:
        """The content of ``config.json`` to continue with; a new folder has no command yet."""
        wanted = _plain(config)
        if not (folder / "config.json").exists():
            return {"format": FORMAT, "kind": self.kind.name, "config": wanted}
        head = self._head(folder)
        had = head["config"]
        changed = sorted(name for name in wanted if name != "seeds" and had.get(name) != wanted[name])
        if changed:
            raise InputError(
                f"{folder}, which holds a run with other {', '.join(changed)}",
                expected="the same configuration, or more seeds",
                remedy="Choose another folder, or remove this one.",
            )
        path = folder / "records.jsonl"
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a run that was killed while it wrote leaves part of a line
            write_bytes(path, whole)
        return head | {"config": wanted | {"seeds": max(wanted["seeds"], had["seeds"])}}

    def _head(self, folder: Path) -> dict[str, Any]:
        header, path = read_header(folder), folder / "config.json"
        if header.kind != self.kind.name:
            raise InputError(
                f"{path}, which belongs to another kind of study",
                expected=f"kind {self.kind.name!r}",
                remedy="Choose another folder.",
            )
        config = header.config
        if not strict_json.alike(config, _plain(self.kind())) or not 1 <= config["seeds"] <= _MOST_SEEDS:
            raise _damaged(path, "a configuration that this study does not have")
        head: dict[str, Any] = json.loads(path.read_bytes())
        return head


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _key(record: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def _read(folder: Path) -> list[Record]:
    path = records_file(folder)
    records: list[Record] = []
    if not path.exists():
        return records
    try:
        for line in (
            strict_json.read_bytes(path).decode().split("\n")[:-1]
        ):  # the text after the last line end is unfinished
            record = strict_json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
            records.append(record)
    except ValueError as error:
        raise _damaged(path, f"line {len(records) + 1} is not a record ({str(error)[:80]!a})") from error
    return records


def _damaged(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: {what}", expected="what the study wrote there", remedy="Remove the folder and run the study again."
    )
