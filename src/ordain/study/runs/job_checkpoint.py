"""Where a job goes on: model, optimizer and order after an epoch, in one file that is whole or not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ordain.study.files import replacing

_SHARE = 20
_KEYS = {"epoch", "lines", "model", "optimizer", "schedule", "order"}


class DamagedCheckpointError(Exception):
    """A checkpoint that cannot be gone on with: its job is begun anew."""


class Checkpoints:
    """The checkpoint of one job.

    Greedy and Herding save n gradients, which may take seconds and gigabytes: a checkpoint that took t seconds is not
    followed by another within 20 t.

    Args:
        path: where; its folder is made when first needed.
        every: seconds from one checkpoint to the next, at least; 0 saves after every epoch.
    """

    def __init__(self, path: Path, *, every: float) -> None:
        self._path, self._every = path, every
        self._last, self._took = time.monotonic(), 0.0

    def load(self) -> dict[str, Any] | None:
        """What was saved, or None."""
        if not self._path.exists():
            return None
        try:
            state = torch.load(self._path, weights_only=True)
        except (OSError, MemoryError):  # of the machine, not of the file
            raise
        except Exception as error:  # garbage makes torch raise nearly anything
            raise DamagedCheckpointError from error
        if not isinstance(state, dict) or state.keys() != _KEYS or not _fit(state["epoch"], state["lines"]):
            raise DamagedCheckpointError
        return state

    def save(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Save what ``state`` gives if it is time to; says whether it did."""
        start = time.monotonic()
        if self._every and start - self._last < max(self._every, _SHARE * self._took):
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            torch.save(state(), file)
        self._last = time.monotonic()
        self._took = self._last - start
        return True

    def remove(self) -> None:
        """The job has ended."""
        self._path.unlink(missing_ok=True)


def _fit(epoch: Any, lines: Any) -> bool:
    """A record has its start and epochs 0 to ``epoch`` when a checkpoint is saved."""
    return isinstance(epoch, int) and isinstance(lines, int) and epoch >= 1 and lines == epoch + 2
