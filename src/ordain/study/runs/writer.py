"""Records as they are written: JSON lines, each on disk before the next epoch begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.runs.fields import Fields, read_object

__all__ = ["RecordWriter", "end_of", "lines_of"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a record; a last one that was cut off is left out. None if there is no file."""
    if not path.exists():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [_line(content, f"{path}, line {number}") for number, content in enumerate(whole, 1)]


def _line(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = read_object(content, where)
        kind = Fields(found, where).choice("kind", ("start", "epoch", "end"))
        if kind == "end":
            Fields(found, where).choice("state", ("done", "diverged", "refused"))
    except InputError as error:
        raise InputError(
            f"{where}, which is no line of a record",
            expected="a start, an epoch or an end, as JSON",
            remedy="Delete that file: the same command makes it again.",
        ) from error
    return found


def end_of(path: Path) -> dict[str, Any] | None:
    """The last line of a finished record; None while it is unfinished."""
    lines = lines_of(path)
    return lines[-1] if lines and lines[-1]["kind"] == "end" else None


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
