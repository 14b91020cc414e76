"""Writing of a job's record, and of the same numbers for TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ordain.errors import InputError

_SCALARS = ("train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy", "herding", "stale_fresh")


def check_installed() -> None:
    """Raise InputError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--tensorboard without TensorBoard",
            expected="the package tensorboard",
            remedy="Install it: pip install tensorboard.",
        ) from error


class RecordWriter:
    """Appends lines to a record, after truncating it to its first ``keep`` lines.

    With ``board``, a folder, the numbers of each epoch go to TensorBoard as well, replacing those of lines not kept.
    """

    def __init__(self, path: Path, *, keep: int = 0, board: Path | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_bytes().splitlines(keepends=True)[:keep] if keep else []
        self._file = path.open("r+b" if keep else "wb")
        self._file.truncate(sum(len(line) for line in kept))
        self._file.seek(0, os.SEEK_END)
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
