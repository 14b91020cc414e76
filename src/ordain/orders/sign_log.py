"""What past epochs decided, from which ``history(epoch)`` is replayed.

Rows are replaced and never changed, so that saved states can share them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ordain import herding
from ordain.balancing.deciding import Signs
from ordain.balancing.grouping import Indices

Settle = Callable[[Indices], Indices]  # what is done to each new order: see Arrangement.settle


class SignLog:
    """The places of units, at two bits each: a thousand epochs of a million examples in 250 MB.

    Attributes:
        field: its name in a saved state.
        rows: ``[epochs, ...]``, one for each epoch that was learned from.
    """

    field = "log"

    def __init__(self, units: int, settle: Settle) -> None:
        self._units, self._settle = units, settle
        self.rows: NDArray[np.uint8] = np.empty((0, 2 * (-(-units // 8))), dtype=np.uint8)

    def following(self, order: Indices, places: Signs, chosen: Indices | None) -> Indices:
        """Append an epoch; returns the order of the next."""
        signs = np.where(np.abs(places) == 1, places, 0)
        self.rows = np.append(self.rows, pack(signs)[None], axis=0)
        return self._settle(herding.rearranged(signs, order))  # Alg. 3

    def replay(self, first: Indices, epochs: int, last: Indices) -> Indices:
        """The order after the first ``epochs`` rows, from the order ``first`` before and ``last`` after all of them."""
        for row in self.rows[:epochs]:
            first = self._settle(herding.rearranged(unpack(row, self._units), first))
        return first


class OrderLog:
    """Whole orders, for learners that do not order by signs; otherwise like :class:`SignLog`."""

    field = "past"

    def __init__(self, units: int, settle: Settle) -> None:
        self._settle = settle
        self.rows: NDArray[np.int64] = np.empty((0, units), dtype=np.int64)

    def following(self, order: Indices, places: Signs, chosen: Indices | None) -> Indices:
        self.rows = np.append(self.rows, order[None], axis=0)
        return order if chosen is None else self._settle(chosen)

    def replay(self, first: Indices, epochs: int, last: Indices) -> Indices:
        return self.rows[epochs] if epochs < len(self.rows) else last


Log = SignLog | OrderLog


def pack(signs: Signs) -> NDArray[np.uint8]:
    """Signs in {-1, 0, +1} at two bits each."""
    return np.concatenate([np.packbits(signs > 0), np.packbits(signs < 0)])


def unpack(packed: NDArray[np.uint8], count: int) -> Signs:
    """The ``count`` signs that were packed."""
    front, back = (np.unpackbits(half, count=count).astype(np.int8) for half in np.split(packed, 2))
    return front - back
