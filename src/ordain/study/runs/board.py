"""TensorBoard logging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.runs.job import Job

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


class Board:
    """Writes one job's scalars to ``tensorboard/``; values from epoch ``first`` on replace older ones."""

    def __init__(self, out: Path, job: Job, *, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(job.board(out)), purge_step=first)

    def add(self, line: dict[str, Any]) -> None:
        """Log the numbers of one epoch."""
        for name in _SCALARS:
            if line[name] is not None:
                self._writer.add_scalar(name, line[name], line["epoch"])

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
