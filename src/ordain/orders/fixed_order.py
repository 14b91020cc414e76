"""A fixed order: the user's own, or one that another order has found."""

from __future__ import annotations

from typing import Any

import numpy as np

from ordain.errors import InputError
from ordain.orders.base import BlindOrder, Indices, Order
from ordain.orders.state import digest


class FixedOrder(BlindOrder):
    """The given permutation, every epoch.

    >>> list(FixedOrder([2, 0, 1]).sampler)
    [2, 0, 1]
    """

    def __init__(self, permutation: Any, *, distributed: Any = "auto") -> None:
        given = np.asarray(permutation)
        n = len(given) if given.ndim == 1 else 0
        if not n or given.dtype.kind not in "iu" or not np.array_equal(np.sort(given), np.arange(n)):
            raise InputError(
                f"an order of shape {given.shape} and dtype {given.dtype}",
                expected="a permutation of range(n): each index exactly once",
                remedy="Pass order.history(epoch), or np.arange(n) for the order of the dataset.",
            )
        self._permutation = given.astype(np.int64)
        self._digest = digest(self._permutation)
        super().__init__(n, distributed=distributed)

    @classmethod
    def from_(cls, order: Order, epoch: int | None = None) -> FixedOrder:
        """Freeze what ``order`` visits in ``epoch`` (its present one by default).

        After a full run of GraB, ``FixedOrder.from_(grab)`` is the paper's *Retrain from GraB*.
        """
        return cls(order.history(order.epoch if epoch is None else epoch))

    def _first_epoch(self) -> Indices:
        return self._permutation

    def _arrange(self, epoch: int) -> Indices:
        return np.arange(self.n)

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"permutation": self._digest}
