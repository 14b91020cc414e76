"""Bytes: those an order holds, the process's peak, and how much of that is one job's."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ordain import Order
from ordain.study.runs.arms import STORING, Arm, stored_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """The memory of one job of several that a process does; ``start`` is the process's size when the job began.

    ``start`` is None where the system cannot forget the peak of earlier jobs (anywhere but Linux).
    """

    start: int | None

    @classmethod
    def begin(cls) -> Memory:
        """Give back what earlier jobs have left, and forget their peak.

        Without that a job could grow into what an earlier one has freed, and would seem to need nothing.
        """
        gc.collect()  # an order and its sampler know each other: the last job's n gradients may still be there
        _trim()
        try:
            _CLEAR.write_text("5")
        except OSError:
            return cls(None)
        return cls(_status_bytes("VmHWM"))

    def peak_bytes(self) -> int:
        """The largest resident size of this process (Python, torch, data and all) since :meth:`begin`.

        Where the system cannot reset it, since the process began.
        """
        found = _status_bytes("VmHWM")
        if found is not None:
            return found
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def job_bytes(self) -> int | None:
        """How far that is above the size at :meth:`begin`: model, order, batches, evaluation; not the data."""
        return None if self.start is None else max(0, self.peak_bytes() - self.start)


def _trim() -> None:
    """Ask the C library to give freed memory back to the system, where it can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no CDLL(None)
        return


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def order_bytes(order: Order, arm: Arm, n: int, d: int) -> int:
    """Tensors and lists of numbers in the order's ``state_dict()``.

    Of Greedy and Herding it is the n gradients alone, by their number: copying gigabytes to count them would show in
    the peak.
    """
    return stored_bytes(arm, n, d) if arm.order in STORING else _bytes(order.state_dict())


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_bytes(part) for part in state.values())
    return 8 * len(state) if isinstance(state, list) else 0
