"""Measurements of a job: memory, and per-example gradients at fixed weights.

The gradients give the herding objective (Eq. 3) and the staleness of gradients.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ordain import Order
from ordain.errors import InputError
from ordain.gradients import ExactSource
from ordain.study.runs.arms import STORING, Arm, stored_bytes
from ordain.study.tasks import LoadedTask

_MOST_BYTES = 256 * 2**20
_ROWS = 128
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def check_size(n: int, d: int) -> None:
    """Raise InputError if n gradients are too large: two copies are held, and computing them costs an extra epoch."""
    if 4 * n * d > _MOST_BYTES:
        raise InputError(
            f"--herding with {n:,} gradients of {d:,} numbers: {4 * n * d / 2**30:.2f} GiB",
            expected=f"at most {_MOST_BYTES / 2**30:.2f} GiB",
            remedy=f"Train on fewer examples: --limit {max(1, _MOST_BYTES // (4 * d)):,}.".replace(",", ""),
        )


def per_example_gradients(problem: LoadedTask, model: nn.Module, *, params: Any = None) -> Tensor:
    """The gradient of each training example by ``params`` (default: all), ``[n, d]``; ``model`` is not modified."""
    watched = copy.deepcopy(model)  # hooks of the order are on the original model
    watched.zero_grad()
    source = ExactSource(watched, params=params)
    found = []
    for start in range(0, len(problem.train_x), _ROWS):
        rows = slice(start, start + _ROWS)
        problem.loss(problem.forward(watched, problem.train_x[rows]), problem.train_y[rows]).backward()  # type: ignore[no-untyped-call]
        found += [batch.rows() for batch, _ in source.collect()]
        watched.zero_grad()
    source.detach()
    return torch.cat(found)


def stale_fresh(stale: Tensor, fresh: Tensor) -> float | None:
    """Mean cosine similarity between each example's old and new gradient; zero gradients are skipped."""
    norms = stale.norm(dim=1) * fresh.norm(dim=1)
    kept = norms > 0
    if not kept.any():
        return None
    return float(((stale * fresh).sum(dim=1)[kept] / norms[kept]).mean())


@dataclass(frozen=True)
class Memory:
    """Memory use of one job; ``start`` is the resident size of the process when the job began.

    ``start`` is None if the system cannot reset the peak (anything but Linux).
    """

    start: int | None

    @classmethod
    def begin(cls) -> Memory:
        """Release memory of earlier jobs and reset the peak.

        Otherwise a job could reuse memory freed by an earlier one and appear to need none.
        """
        gc.collect()  # reference cycles may keep the last job's gradients alive
        with suppress(AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system (glibc)
        try:
            _CLEAR.write_text("5")
        except OSError:
            return cls(None)
        return cls(_peak())

    def peak_bytes(self) -> int:
        """The peak resident size of this process (including Python, torch and data) since :meth:`begin`.

        If the system cannot reset the peak, since the process started.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return _peak() or (peak if sys.platform == "darwin" else peak * 1024)

    def job_bytes(self) -> int | None:
        """The peak minus the size at :meth:`begin`: model, order, batches and evaluation, but not the data."""
        return None if self.start is None else max(0, self.peak_bytes() - self.start)


def _peak() -> int | None:
    """The peak resident size since it was last reset; None if the system is not Linux."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def order_bytes(order: Order, arm: Arm, n: int, d: int) -> int:
    """Size of the order's ``state_dict()`` in bytes.

    For Greedy and Herding this is the size of the n stored gradients: copying them to measure them would change
    the peak.
    """
    return stored_bytes(arm, n, d) if arm.order in STORING else _bytes(order.state_dict())


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_bytes(part) for part in state.values())
    return 8 * len(state) if isinstance(state, list) else 0
