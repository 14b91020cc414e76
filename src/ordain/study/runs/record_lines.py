"""Records: JSON lines, each on disk before the next epoch begins; and a run's records packed into one file.

A job's record is ``records/<arm>/lr-<rate>/seed-<seed>.jsonl``: a start line, a line an epoch (epoch 0 is before
training), and an end line. A file without an end is unfinished; a last line that was cut off by a crash is left out.
Anything else that does not fit is an error that names the file and the line. Packed, the lines of all jobs follow
each other in ``records.jsonl.xz``.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from ordain.errors import InputError
from ordain.study.files import write_bytes
from ordain.study.runs.job import ArmName, Job, job_of
from ordain.study.strict_json import STRICT, read_bytes, validated

PACKED, PLAIN = "records.jsonl.xz", "records.jsonl"  # the latter is that of a vector study
DONE, UNFINISHED = "done", "unfinished"
PARTS = ("data", "forward", "backward", "ordering", "optimizer")  # of a training step; evaluation is no part of it
_AGAIN = "Delete that file: the same command makes it again."
Share = Annotated[float, Field(ge=0, le=1)]


class Start(BaseModel):
    """The first line."""

    model_config = STRICT
    kind: Literal["start"] = "start"
    arm: ArmName  # "grab", or with a suffix for an ablation, "grab@64"
    label: str  # what people call it
    order: str  # the name in :data:`ordain.orders.ORDERS`
    lr: PositiveFloat  # the learning rate
    seed: NonNegativeInt  # of the weights and of the order
    group: NonNegativeInt  # examples in a unit of ordering
    threads: NonNegativeInt | None = None  # of torch
    ranks: NonNegativeInt | None = 1  # processes that trained together
    mode: str | None = None  # how the order worked with the other ranks; None if there were none


class Epoch(BaseModel):
    """What was measured after one epoch; None where it was not, or was not finite."""

    model_config = STRICT
    kind: Literal["epoch"] = "epoch"
    epoch: NonNegativeInt  # 0 is before training
    train_loss: float | None = None  # over the whole training set, as are the others over theirs
    valid_loss: float | None = None  # mean over examples (and tokens)
    valid_accuracy: Share | None = None  # in [0, 1]
    test_loss: float | None = None  # as valid_loss
    test_accuracy: Share | None = None  # in [0, 1]
    herding: float | None = None  # the herding objective (Eq. 3) of the epoch's gradients in the epoch's order
    # Correlation of the stale gradients that decided the order with those of the epoch.
    stale_fresh: float | None = None
    seconds: dict[str, NonNegativeFloat]  # of this epoch alone, by part of the step, and evaluation
    # Of this epoch's training, of the process and all its threads; waiting is not in it.
    cpu_seconds: float | None = None
    order_bytes: NonNegativeInt | None = None  # what the order held
    peak_bytes: NonNegativeInt | None = None  # the most memory the process has used
    job_bytes: NonNegativeInt | None = None  # how far that is above what it used when the job began
    # What the order of rank 0 sent to other ranks in a step, mean over the epoch.
    sent_bytes: NonNegativeInt | None = None


class End(BaseModel):
    """The last line: ``why`` the job did not end as it should, and what a refused order would have stored."""

    model_config = STRICT
    kind: Literal["end"] = "end"
    epochs: NonNegativeInt = 0
    state: Literal["done", "diverged", "refused"]
    why: str | None = None
    needed_bytes: NonNegativeInt | None = None


Line = Annotated[Start | Epoch | End, Field(discriminator="kind")]


@dataclass
class Record:
    """What a job has written so far."""

    job: Job
    start: Start | None = None
    epochs: list[Epoch] = field(default_factory=list)
    end: End | None = None

    @property
    def state(self) -> str:
        """Done, diverged, refused or unfinished."""
        return self.end.state if self.end else UNFINISHED

    @property
    def lines(self) -> int:
        """How many there are."""
        return bool(self.start) + len(self.epochs) + bool(self.end)

    def add(self, line: Start | Epoch | End, where: str) -> None:
        """The next line, which must follow what is there."""
        came, expected = f"{line.kind!r} at {where}", "one start line, then epochs, then one end line"
        if isinstance(line, Start):
            inside = Job(line.arm, line.lr, line.seed)
            fits, self.start = self.lines == 0, line
            if inside != self.job:
                raise InputError(
                    f"{inside} at {where}", expected=f"{self.job}, as its path says", remedy="Put it back."
                )
        elif isinstance(line, Epoch):
            fits = self.start is not None and self.end is None
            if fits and line.epoch != len(self.epochs):
                came, expected, fits = f"epoch {line.epoch} at {where}", f"epoch {len(self.epochs)}", False
            self.epochs.append(line)
        else:
            fits, self.end = self.start is not None and self.end is None, line
            if fits and line.state == DONE and (not self.epochs or self.epochs[-1].train_loss is None):
                came, fits = f"the state 'done' at {where}, after no epoch with a loss", False
                expected = "an epoch before it whose train_loss is a number"
        if not fits:
            raise InputError(came, expected=expected, remedy=_AGAIN)


def read_record(path: Path) -> Record:
    """One job's record; an empty one if there is no file."""
    found = Record(job_of(path))
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(_whole(content).splitlines(), 1):
        found.add(_line(line, f"{path}, line {number}"), f"{path}, line {number}")
    return found


def read_records(folder: Path) -> Iterator[Record]:
    """The record of every job of a run, packed or not."""
    if not (folder / PACKED).exists():
        yield from map(read_record, _files(folder))
        return
    found: Record | None = None
    for number, content in enumerate(_unpacked(folder).splitlines(), 1):
        where = f"{folder / PACKED}, line {number}"
        line = _line(content, where)
        if isinstance(line, Start):
            if found:
                yield found
            found = Record(Job(line.arm, line.lr, line.seed))
        if found is None:
            raise InputError(f"{line.kind!r} at {where}", expected="a start line", remedy="Get the file again.")
        found.add(line, where)
    if found:
        yield found


def _line(content: bytes, where: str) -> Start | Epoch | End:
    found: Start | Epoch | End = validated(Line, content, where, remedy=_AGAIN)
    return found


def _whole(content: bytes) -> bytes:
    """Without a last line that is being written, or was cut off by a crash."""
    before, _, last = content.rpartition(b"\n")
    try:
        _line(last, "")
    except InputError:
        return before
    return content


def _files(folder: Path) -> list[Path]:
    records = folder / "records"
    found = sorted(records.glob("*/lr-*/seed-*.jsonl"))
    return [
        path
        for path in found
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(records).parts)
    ]


def pack(folder: Path) -> Path:
    """Replace the records of a run, or of a vector study, by one compressed file; gives back its path."""
    packed, plain = folder / PACKED, folder / PLAIN
    if not packed.exists():
        paths = [plain] if plain.exists() else _files(folder)
        content = b"".join(text + b"\n" for path in paths if (text := _whole(path.read_bytes()).rstrip(b"\n")))
        if not content:
            raise InputError(f"{folder} without records", expected="the folder of a run", remedy="Run it first.")
        write_bytes(packed, lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    plain.unlink(missing_ok=True)  # a packed file is whole: whatever is beside it was left by a pack that was killed
    shutil.rmtree(folder / "records", ignore_errors=True)
    return packed


def unpack(folder: Path) -> None:
    """Undo :func:`pack` where it was done, so that a run can go on."""
    packed = folder / PACKED
    if not packed.exists():
        return
    content = _unpacked(folder)
    if validated(dict[str, Any], content.partition(b"\n")[0], f"{packed}, line 1").get("kind") != "start":
        write_bytes(folder / PLAIN, content)
    else:
        lines = iter(content.splitlines(keepends=True))
        for record in list(read_records(folder)):
            path = record.job.record(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, b"".join(next(lines) for _ in range(record.lines)))
    packed.unlink()


def records_file(folder: Path) -> Path:
    """The records of a vector study, packed or not."""
    return folder / (PACKED if (folder / PACKED).exists() else PLAIN)


def _unpacked(folder: Path) -> bytes:
    try:
        return read_bytes(folder / PACKED)
    except ValueError as error:
        raise InputError(
            f"{folder / PACKED}: {error}", expected="what `ordain pack` wrote", remedy="Get the file again."
        ) from error


class RecordWriter:
    """Appends lines to a record, after cutting it back to the ``keep`` lines that are to stay."""

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_bytes().splitlines(keepends=True)[:keep] if keep else []
        self._file = path.open("r+b" if keep else "wb")
        self._file.truncate(sum(len(line) for line in kept))
        self._file.seek(0, os.SEEK_END)
        self.lines = len(kept)

    def write(self, line: dict[str, Any]) -> None:
        """One line, on disk when this returns."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines += 1

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()
