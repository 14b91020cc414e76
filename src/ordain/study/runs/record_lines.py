"""Records, read and written: JSON lines, flushed to disk after every epoch, and packed files of whole runs.

A job's record is ``records/<arm>/lr-<rate>/seed-<seed>.jsonl``: a start line, one line per epoch (epoch 0 is before
training), and an end line. A file without an end line is unfinished; a truncated last line is ignored.
Any other deviation raises InputError with the file and line. In a packed file, ``records.jsonl.xz``, the lines of all
jobs follow each other.
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
from ordain.study.files import STRICT, read_bytes, validated, write_bytes
from ordain.study.runs.job import ArmName, Job, job_of

PACKED, PLAIN = "records.jsonl.xz", "records.jsonl"  # PLAIN: records of a vector study
DONE, UNFINISHED = "done", "unfinished"
PARTS = ("data", "forward", "backward", "ordering", "optimizer")  # of a training step, without evaluation
_AGAIN = "Delete that file and run again: only that job is repeated."
Share = Annotated[float, Field(ge=0, le=1)]


class Start(BaseModel):
    """The first line."""

    model_config = STRICT
    kind: Literal["start"] = "start"
    arm: ArmName  # "grab", or with a suffix for an ablation, "grab@64"
    label: str  # display name
    order: str  # the name in :data:`ordain.orders.ORDERS`
    lr: PositiveFloat  # the learning rate
    seed: NonNegativeInt  # seed of the weights and the order
    group: NonNegativeInt  # examples in a unit of ordering
    threads: NonNegativeInt | None = None  # torch threads
    ranks: NonNegativeInt | None = 1  # processes that trained together
    mode: str | None = None  # distributed mode; None for a single process


class Epoch(BaseModel):
    """Measurements after one epoch; None if not measured or not finite."""

    model_config = STRICT
    kind: Literal["epoch"] = "epoch"
    epoch: NonNegativeInt  # 0 is before training
    train_loss: float | None = None  # over the whole training set
    valid_loss: float | None = None  # mean over examples (and tokens)
    valid_accuracy: Share | None = None  # in [0, 1]
    test_loss: float | None = None  # as valid_loss
    test_accuracy: Share | None = None  # in [0, 1]
    herding: float | None = None  # the herding objective (Eq. 3) of the epoch's gradients in the epoch's order
    # Mean cosine similarity of the gradients with those of the previous epoch.
    stale_fresh: float | None = None
    seconds: dict[str, NonNegativeFloat]  # wall-clock time by part of the step, and evaluation
    # CPU time of training, summed over all threads of the process.
    cpu_seconds: float | None = None
    order_bytes: NonNegativeInt | None = None  # size of the order's state
    peak_bytes: NonNegativeInt | None = None  # peak memory of the process
    job_bytes: NonNegativeInt | None = None  # peak memory minus memory at the start of the job
    # Bytes per step that the order of rank 0 sent to other ranks, mean over the epoch.
    sent_bytes: NonNegativeInt | None = None


class End(BaseModel):
    """The last line; ``why`` and ``needed_bytes`` explain a job that diverged or was refused."""

    model_config = STRICT
    kind: Literal["end"] = "end"
    epochs: NonNegativeInt = 0
    state: Literal["done", "diverged", "refused"]
    why: str | None = None
    needed_bytes: NonNegativeInt | None = None


Line = Annotated[Start | Epoch | End, Field(discriminator="kind")]


@dataclass
class Record:
    """The record of one job so far."""

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
        """Number of lines."""
        return bool(self.start) + len(self.epochs) + bool(self.end)

    def add(self, line: Start | Epoch | End, where: str) -> None:
        """Add the next line and check that it may follow the previous ones."""
        came, expected = f"{line.kind!r} at {where}", "one start line, then epochs, then one end line"
        if isinstance(line, Start):
            inside = Job(line.arm, line.lr, line.seed)
            fits, self.start = self.lines == 0, line
            if inside != self.job:
                raise InputError(
                    f"{inside} at {where}", expected=f"{self.job}, as its path says", remedy="Move the file back."
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
    """Read one job's record; it is empty if there is no file."""
    found = Record(job_of(path))
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(_whole(content).splitlines(), 1):
        found.add(_line(line, f"{path}, line {number}"), f"{path}, line {number}")
    return found


def read_records(folder: Path) -> Iterator[Record]:
    """Read the records of all jobs of a run, packed or not."""
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
            raise InputError(f"{line.kind!r} at {where}", expected="a start line", remedy="Restore the file.")
        found.add(line, where)
    if found:
        yield found


def _line(content: bytes, where: str) -> Start | Epoch | End:
    found: Start | Epoch | End = validated(Line, content, where, remedy=_AGAIN)
    return found


def _whole(content: bytes) -> bytes:
    """Drop a truncated last line."""
    before, _, last = content.rpartition(b"\n")
    try:
        _line(last, "")
    except InputError:
        return before
    return content


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "records").glob("[!.]*/lr-*/seed-*.jsonl") if path.is_file())


def pack(folder: Path) -> Path:
    """Replace the records of a run or vector study by one compressed file, and return its path."""
    packed, plain = folder / PACKED, folder / PLAIN
    if not packed.exists():
        paths = [plain] if plain.exists() else _files(folder)
        content = b"".join(text + b"\n" for path in paths if (text := _whole(path.read_bytes()).rstrip(b"\n")))
        if not content:
            raise InputError(f"{folder} without records", expected="the folder of a run", remedy="Run it first.")
        write_bytes(packed, lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    plain.unlink(missing_ok=True)  # left by an interrupted pack: the packed file is complete
    shutil.rmtree(folder / "records", ignore_errors=True)
    return packed


def unpack(folder: Path) -> None:
    """Undo :func:`pack`, so that the run can be resumed."""
    packed = folder / PACKED
    if not packed.exists():
        return
    content = _unpacked(folder)
    if validated(dict[str, Any], content.partition(b"\n")[0], f"{packed}, line 1").get("kind") != "start":
        write_bytes(folder / PLAIN, content)
    else:
        lines = iter(content.splitlines(keepends=True))
        for record in list(read_records(folder)):
            write_bytes(record.job.record(folder), b"".join(next(lines) for _ in range(record.lines)))
    packed.unlink()


def records_file(folder: Path) -> Path:
    """Path of a vector study's records, packed or not."""
    return folder / (PACKED if (folder / PACKED).exists() else PLAIN)


def _unpacked(folder: Path) -> bytes:
    try:
        return read_bytes(folder / PACKED)
    except ValueError as error:
        came = f"{folder / PACKED}: not a complete xz file ({error})"
        raise InputError(came, expected="what `ordain pack` wrote", remedy="Restore the file.") from error


_SCALARS = ("train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy", "herding", "stale_fresh")


def check_installed() -> None:
    """Raise InputError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        came, remedy = "--tensorboard without TensorBoard", "Install it: pip install tensorboard."
        raise InputError(came, expected="the package tensorboard", remedy=remedy) from error


class RecordWriter:
    """Appends lines to a record, after truncating it to its first ``keep`` lines.

    With ``board``, a folder, the numbers of each epoch go to TensorBoard as well, replacing those of lines not kept.
    """

    def __init__(self, path: Path, *, keep: int = 0, board: Path | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_bytes().splitlines(keepends=True)[:keep] if keep else []
        self._file = path.open("ab")
        self._file.truncate(sum(len(line) for line in kept))
        self.lines = len(kept)
        self._board: Any = None
        if board:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(board), purge_step=max(0, keep - 1))  # the first line is no epoch

    def write(self, line: dict[str, Any]) -> None:
        """Write one line and flush it to disk."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines += 1
        for name in _SCALARS if self._board else ():
            if line.get(name) is not None:
                self._board.add_scalar(name, line[name], line["epoch"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board:
            self._board.close()
