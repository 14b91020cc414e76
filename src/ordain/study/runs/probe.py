"""Per-example gradients at fixed weights, used to measure the herding objective (Eq. 3) and gradient staleness."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.gradients import ExactSource
from ordain.study.tasks import LoadedTask as Problem

_MOST_BYTES = 256 * 2**20
_ROWS = 128


def check_size(n: int, d: int) -> None:
    """Raise InputError if n gradients are too large: two copies are held, and computing them costs an extra epoch."""
    if 4 * n * d > _MOST_BYTES:
        raise InputError(
            f"--herding with {n:,} gradients of {d:,} numbers: {4 * n * d / 2**30:.2f} GiB",
            expected=f"at most {_MOST_BYTES / 2**30:.2f} GiB",
            remedy=f"Train on fewer examples: --limit {max(1, _MOST_BYTES // (4 * d)):,}.".replace(",", ""),
        )


def per_example_gradients(problem: Problem, model: nn.Module) -> Tensor:
    """The gradient of each training example, ``[n, d]``; ``model`` is not modified."""
    watched = copy.deepcopy(model)  # hooks of the order are on the original model
    watched.zero_grad()
    source = ExactSource(watched)
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
