"""The same numbers for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.runs.job import Job

_SCALARS = ("train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy", "herding", "stale_fresh")


def check_installed() -> None:
    """Refuse ``--tensorboard`` where there is none."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--tensorboard without TensorBoard",
            expected="the package tensorboard",
            remedy="Install it: pip install tensorboard.",
        ) from error


class Board:
    """Scalars of one job under ``tensorboard/``; those from epoch ``first`` on are hidden, to be written again."""

    def __init__(self, out: Path, job: Job, *, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(job.board(out)), purge_step=first)

    def add(self, line: dict[str, Any]) -> None:
        """The numbers of an epoch's line."""
        for name in _SCALARS:
            if line[name] is not None:
                self._writer.add_scalar(name, line[name], line["epoch"])

    def close(self) -> None:
        """Nothing more will be written."""
        self._writer.close()
