"""Per-example gradients at one set of weights: what an order is judged by (Eq. 3), and how stale the last ones are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ordain.errors import InputError
from ordain.gradients import ExactSource
from ordain.study.tasks import Problem

_MOST_BYTES = 256 * 2**20
_ROWS = 128


def check_size(n: int, d: int) -> None:
    """Refuse what would not be quick: two copies of n gradients are held, and an epoch more is computed each time."""
    if 4 * n * d > _MOST_BYTES:
        raise InputError(
            f"--herding with {n:,} gradients of {d:,} numbers: {4 * n * d / 2**30:.2f} GiB",
            expected=f"at most {_MOST_BYTES / 2**30:.2f} GiB",
            remedy=f"Train on fewer examples: --limit {max(1, _MOST_BYTES // (4 * d)):,}.".replace(",", ""),
        )


def per_example_gradients(problem: Problem, model: nn.Module) -> Tensor:
    """``[n, d]``: each training example's gradient at the weights of ``model``, which is left alone."""
    watched = copy.deepcopy(model)  # the order watches the original: passes of it would count as training
    watched.zero_grad()
    source = ExactSource(watched)
    found = []
    for start in range(0, len(problem.train_x), _ROWS):
        rows = slice(start, start + _ROWS)
        problem.loss(problem.forward(watched, problem.train_x[rows]), problem.train_y[rows]).backward()  # type: ignore[no-untyped-call]
        found += [batch.weighted_sum(torch.eye(batch.size, dtype=batch.dtype)) for batch in source.collect()]
        watched.zero_grad()
    source.detach()
    return torch.cat(found)


def stale_fresh(stale: Tensor, fresh: Tensor) -> float | None:
    """The mean over examples of the cosine between two of its gradients; examples with a zero one are left out."""
    norms = stale.norm(dim=1) * fresh.norm(dim=1)
    kept = norms > 0
    if not kept.any():
        return None
    return float(((stale * fresh).sum(dim=1)[kept] / norms[kept]).mean())
