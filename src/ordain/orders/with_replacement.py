"""Sampling with replacement: what the textbook analysis of SGD assumes."""

from __future__ import annotations

from typing import Any

from ordain import _rng
from ordain.orders.base import BlindOrder, Indices


class WithReplacement(BlindOrder):
    """``n`` independent uniform draws an epoch: the one order that is no permutation, in epoch 0 either."""

    def __init__(self, n: Any, *, seed: int = 0, distributed: Any = "auto") -> None:
        super().__init__(n, seed=seed, distributed=distributed)

    def _arrange(self, epoch: int) -> Indices:
        return _rng.with_replacement(self.n, seed=self.seed, stream=epoch)
