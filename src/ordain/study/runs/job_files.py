"""Files of a job besides its record: checkpoint, order of the last epoch, and the digest of its seed's weights."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ordain import Order, RandomReshuffling
from ordain.errors import InputError, StateError
from ordain.study.files import replacing, validated, write_bytes
from ordain.study.runs.job import Job

_SHARE = 20
_KEYS = {"epoch", "lines", "model", "optimizer", "schedule", "decay", "average", "order"}


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
        if not isinstance(state, dict) or state.keys() != _KEYS:
            raise DamagedCheckpointError
        epoch, lines = state["epoch"], state["lines"]  # saved after the start line and epochs 0 to epoch
        if not isinstance(epoch, int) or epoch < 1 or not isinstance(lines, int) or lines != epoch + 2:
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


def check_seed(out: Path, seed: int, model: nn.Module, order: Order | None) -> None:
    """Check that all arms of a seed share the initial weights and the first epoch; otherwise raise StateError."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    path = out / "seeds" / f"seed-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {"weights": digest.hexdigest()}
    if path.exists():
        if validated(dict[str, Any], path.read_bytes(), str(path)) != mine:
            raise StateError(
                f"other initial weights for seed {seed} than those of the arms that ran before",
                expected="the same weights, according to the digest in seeds/",
                remedy="Use the versions listed in config.json, or a new folder.",
            )
    else:
        write_bytes(path, json.dumps(mine).encode())
    if order is None:
        return
    first = RandomReshuffling(order.n, seed=seed, distributed=False).history(0)
    if not np.array_equal(order.history(0), first):
        raise StateError(
            f"{order!r}, whose first epoch is different",
            expected="the first epoch shared by all orders of a seed",
            remedy="This is a bug in that order; please report it.",
        )


def keep_order(order: Order, path: Path) -> None:
    """Save the order of the last epoch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.save(file, order.history(order.epoch).astype(np.int32))


def kept_order(job: Job, out: Path) -> NDArray[Any]:
    """Load the order that :func:`keep_order` saved for ``job``."""
    path = job.order(out)
    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path}, which is not a complete .npy file",
            expected="the order of GraB's last epoch",
            remedy=f"Delete it and {job.record(out)}; running the same command creates both again.",
        ) from error
    return found
