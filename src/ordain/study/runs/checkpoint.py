"""Where a job goes on: model, optimizer and order after an epoch, in one file that is whole or not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ordain.study.files import replacing

__all__ = ["Checkpoints"]

_SHARE = 20


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
        state: dict[str, Any] = torch.load(self._path, weights_only=True)
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
