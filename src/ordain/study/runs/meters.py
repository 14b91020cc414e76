"""What is measured of a job besides its loss: seconds by part, bytes of the order, the process's peak."""

from __future__ import annotations

import gc
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ordain import Order
from ordain.study.runs.arms import STORING, Arm, stored_bytes
from ordain.study.tasks import Problem

__all__ = ["Score", "Seconds", "evaluate", "order_bytes", "peak_bytes", "reset_peak"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Seconds:
    """Where an epoch's time went. Ordering is ``order.step()`` and the epoch's first draw, which adopts its order."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    ordering: float = 0.0
    optimizer: float = 0.0
    evaluation: float = 0.0

    def to_json(self) -> dict[str, float]:
        """To the microsecond."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Score:
    """The mean loss, and the share of right predictions in [0, 1]."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(problem: Problem, model: nn.Module, x: Tensor, y: Tensor) -> Score:
    """Over all rows, a chunk at a time."""
    model.eval()
    loss, hits, total = 0.0, 0, 0
    for start in range(0, len(x), problem.chunk):
        rows = slice(start, start + problem.chunk)
        output = problem.forward(model, x[rows])
        loss += float(problem.loss(output, y[rows])) * len(output)
        found, of = problem.correct(output, y[rows])
        hits, total = hits + found, total + of
    model.train()
    return Score(loss / len(x), hits / total)


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


def reset_peak() -> None:
    """Forget the peak of earlier jobs of this process, where the system can (Linux)."""
    gc.collect()  # an order and its sampler know each other: the last job's n gradients may still be there
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """The largest resident size of this process (Python, torch, data and all) since :func:`reset_peak`.

    Where the system cannot reset it, since the process began.
    """
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
