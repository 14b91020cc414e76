"""Random reshuffling: the habit."""

from __future__ import annotations

import numpy as np

from ordain import _rng
from ordain.orders.base import BlindOrder, Indices


class RandomReshuffling(BlindOrder):
    """A new random permutation every epoch.

    >>> order = RandomReshuffling(5)
    >>> sorted(order.sampler)
    [0, 1, 2, 3, 4]
    """

    def _arrange(self, epoch: int) -> Indices:
        return _rng.permutation(self._units, seed=self.seed, stream=epoch) if epoch else np.arange(self._units)
