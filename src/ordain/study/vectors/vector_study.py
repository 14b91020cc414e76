"""What all vector studies share: a folder of records, measured point by point, that can be resumed; and estimates.

Results are shown once every point is measured.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from ordain.errors import InputError
from ordain.study.files import only_one, read_bytes, validated, write_bytes
from ordain.study.progress import Report
from ordain.study.runs.record_lines import records_file, unpack
from ordain.study.runs.run_folder import FORMAT, provenance, read_header, write_header

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Shown = TypeVar("Shown")
Point = dict[str, Any]  # identifies a measurement, with JSON values
Record = dict[str, Any]  # the point, and the measured values
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, rows
Figures: TypeAlias = "dict[str, Figure]"  # by name
Floats = NDArray[np.float64]

# Of settings. The limits are far above what any study has.
settings = dataclass(config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False), frozen=True)
Seeds = Annotated[int, Field(ge=1, le=10_000)]
Ints = Annotated[tuple[int, ...], Field(min_length=1, max_length=1000)]
Numbers = Annotated[tuple[float, ...], Field(min_length=1, max_length=1000)]
Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)]
_MOST_POINTS = 1_000_000
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # raised by values of another kind
_AGAIN = "Remove the folder and run the study again."


def where(records: Iterable[Record], **fields: Any) -> list[Record]:
    """The records with these values."""
    return [record for record in records if all(record[name] == value for name, value in fields.items())]


class Settings(Protocol):
    """The settings of a study (a dataclass of pydantic), the points to measure, and how to present the results."""

    name: ClassVar[str]  # of the command, and ``kind`` in the folder
    title: ClassVar[str]
    quick: ClassVar[dict[str, Any]]  # the settings of a quick run

    @property
    def seeds(self) -> int: ...
    def points(self) -> Iterable[Point]: ...
    def measure(
        self, point: Point
    ) -> Mapping[str, Any]: ...  # JSON values; equal points give equal records, but for times
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
            done = {_key(record, points[0]) for record in _read(folder)}
            if any(_key(point, point) not in done for point in points):
                write_header(folder, head, provenance(command))
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
        config, path = self.saved(folder), folder / "config.json"
        try:
            points = list(islice(config.points(), _MOST_POINTS))
        except _WRONG as error:
            raise InputError(f"{path}: a study that does not exist", expected="its settings", remedy=_AGAIN) from error
        found = {_key(record, points[0]): record for record in _read(folder)}
        records = [found[_key(point, point)] for point in points if _key(point, point) in found]
        if len(records) < len(points):
            raise InputError(
                f"{folder}, where {len(records):,} of {len(points):,} points are measured",
                expected="a finished study",
                remedy=f"Finish it: {shlex.join(['ordain', 'run', config.name, '--out', str(folder)])}, and --quick or "
                "--seeds as before.",
            )
        try:
            return show(config, records)
        except _WRONG as error:
            came = f"{folder / 'records.jsonl'}: values that this study does not write"
            raise InputError(came, expected="what it wrote there", remedy=_AGAIN) from error

    def saved(self, folder: Path) -> Any:
        """The settings of a folder."""
        header, path = read_header(folder), folder / "config.json"
        if header.kind != self.kind.name:
            raise InputError(
                f"{path}, which belongs to another kind of study",
                expected=f"kind {self.kind.name!r}",
                remedy="Choose another folder.",
            )
        return validated(self.kind, json.dumps(header.config).encode(), str(path))

    def _open(self, config: Settings, folder: Path) -> dict[str, Any]:
        """The content of ``config.json`` to continue with; a new folder has no command yet."""
        if not (folder / "config.json").exists():
            return {"format": FORMAT, "kind": self.kind.name, "config": asdict(config)}  # type: ignore[call-overload]
        had = self.saved(folder)
        whole: Any = replace(config, seeds=max(config.seeds, had.seeds))  # type: ignore[type-var]
        changed = [
            of.name for of in fields(had) if of.name != "seeds" and getattr(had, of.name) != getattr(whole, of.name)
        ]
        if changed:
            raise InputError(
                f"{folder}, which holds a run with other {', '.join(changed)}",
                expected="the same configuration, or more seeds",
                remedy="Choose another folder, or remove this one.",
            )
        path = folder / "records.jsonl"
        content = path.read_bytes() if path.exists() else b""
        kept = content[: content.rfind(b"\n") + 1]
        if kept != content:  # a run that was killed while it wrote leaves part of a line
            write_bytes(path, kept)
        head: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return head | {"config": asdict(whole)}


def _key(record: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def _read(folder: Path) -> list[Record]:
    path = records_file(folder)
    records: list[Record] = []
    if not path.exists():
        return records
    try:
        for line in read_bytes(path).decode().split("\n")[:-1]:  # the text after the last line end is unfinished
            record = json.loads(line)
            json.dumps(record, allow_nan=False)  # refuses NaN and infinities
            if not isinstance(record, dict):
                raise ValueError("not an object")
            records.append(record)
    except (ValueError, RecursionError) as error:
        came = f"{path}: line {len(records) + 1} is not a record ({str(error)[:80]!a})"
        raise InputError(came, expected="what the study wrote there", remedy=_AGAIN) from error
    return records


class Estimate(NamedTuple):
    """A mean over seeds and its standard error, None for a single seed.

    >>> f"{Estimate(-0.001, 0.2):.2f}"
    '0.00 ± 0.20'
    """

    mean: float
    error: float | None

    def __format__(self, form: str) -> str:
        shown = f"{self.mean:{form}}"
        shown = shown if float(shown) else shown.removeprefix("-")  # no minus before zero
        return shown if self.error is None else f"{shown} ± {self.error:{form}}"


def estimate(values: ArrayLike) -> Estimate:
    """The mean of ``values [seeds]``."""
    of = np.asarray(values, dtype=np.float64)
    return Estimate(float(of.mean()), float(of.std(ddof=1) / math.sqrt(len(of))) if len(of) > 1 else None)


def slope(x: Sequence[float], y: ArrayLike) -> Estimate:
    """Fit log y ``[seeds, points]`` to log x ``[points]`` by least squares, for each seed.

    >>> f"{slope([1, 2, 4], [[3, 12, 48], [5, 20, 80]]):.2f}"
    '2.00 ± 0.00'
    """
    rows = np.log(np.atleast_2d(np.asarray(y, dtype=np.float64)))
    at = np.log(np.asarray(x, dtype=np.float64))
    at = at - at.mean()
    return estimate(rows @ at / (at @ at))
