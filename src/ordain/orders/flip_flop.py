"""FlipFlop (Rajput, Lee and Papailiopoulos): every second epoch runs the one before it backwards."""

from __future__ import annotations

from ordain.orders.base import Indices
from ordain.orders.random_reshuffling import RandomReshuffling


class FlipFlop(RandomReshuffling):
    """A new random permutation in epochs 0, 2, 4, ...; its reverse in epochs 1, 3, 5, ..."""

    def _arrange(self, epoch: int) -> Indices:
        forward = super()._arrange(epoch - epoch % 2)
        return forward[::-1] if epoch % 2 else forward
