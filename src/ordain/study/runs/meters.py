"""What is measured of a job at the end of an epoch: its losses, and where the seconds went."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ordain.study.tasks import Problem

__all__ = ["Score", "Seconds", "evaluate"]


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
