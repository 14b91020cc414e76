"""Checkpoints of a job: model, optimizer and order after an epoch, written atomically."""

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
    """The checkpoint cannot be loaded; the job must restart."""


class Checkpoints:
    """The checkpoint of one job.

    Saving n gradients (Greedy, Herding) can take seconds and gigabytes, so after a checkpoint that took t seconds the
    next one is at least 20 t later.

    Args:
        path: the checkpoint file; its folder is created when needed.
        every: minimum number of seconds between checkpoints; 0 saves after every epoch.
    """

    def __init__(self, path: Path, *, every: float) -> None:
        self._path, self._every = path, every
        self._last, self._took = time.monotonic(), 0.0

    def load(self) -> dict[str, Any] | None:
        """Load the checkpoint, or None if there is none."""
        if not self._path.exists():
            return None
        try:
            state = torch.load(self._path, weights_only=True)
        except (OSError, MemoryError):  # a problem of the machine, not of the file
            raise
        except Exception as error:  # torch raises many kinds of errors for damaged files
            raise DamagedCheckpointError from error
        if not isinstance(state, dict) or state.keys() != _KEYS or not _fit(state["epoch"], state["lines"]):
            raise DamagedCheckpointError
        return state

    def save(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Save ``state()`` if enough time has passed; returns whether it did."""
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
        """Delete the checkpoint."""
        self._path.unlink(missing_ok=True)


def _fit(epoch: Any, lines: Any) -> bool:
    """Check the counters: a checkpoint is saved after the start line and epochs 0 to ``epoch``."""
    return isinstance(epoch, int) and isinstance(lines, int) and epoch >= 1 and lines == epoch + 2
