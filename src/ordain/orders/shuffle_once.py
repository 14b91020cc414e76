"""Shuffle once: one random permutation for all epochs."""

from __future__ import annotations

import numpy as np

from ordain.orders.base import BlindOrder, Indices


class ShuffleOnce(BlindOrder):
    """The first epoch's random permutation, again and again."""

    def _arrange(self, epoch: int) -> Indices:
        return np.arange(self._units)
