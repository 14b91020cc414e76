"""Memory use: of the order, of the process, and of one job."""

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
        _trim()
        try:
            _CLEAR.write_text("5")
        except OSError:
            return cls(None)
        return cls(_status_bytes("VmHWM"))

    def peak_bytes(self) -> int:
        """The peak resident size of this process (including Python, torch and data) since :meth:`begin`.

        If the system cannot reset the peak, since the process started.
        """
        found = _status_bytes("VmHWM")
        if found is not None:
            return found
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def job_bytes(self) -> int | None:
        """The peak minus the size at :meth:`begin`: model, order, batches and evaluation, but not the data."""
        return None if self.start is None else max(0, self.peak_bytes() - self.start)


def _trim() -> None:
    """Return freed memory to the system (glibc only)."""
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
