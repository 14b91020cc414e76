"""The cursor: where in its epoch a loader stands. What comes next is the order's business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from ordain.errors import StepError

if TYPE_CHECKING:
    from ordain.orders.base import Order

_CHUNK = 4096


class OrderSampler(Sampler[int]):
    """Yields the examples of an order; hand it to ``DataLoader(..., sampler=order.sampler)``.

    Each iterator is one pass. A pass begins when its first index is drawn, not when the iterator is
    made: loaders make iterators, and draw ahead, whenever it suits them.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def __len__(self) -> int:
        return self._order.n

    def __iter__(self) -> Iterator[int]:
        order = self._order
        ticket, indices, position = order._begin_pass()
        while position < len(indices):
            for index in indices[position : position + _CHUNK].tolist():
                if order._ticket != ticket:
                    raise StepError(
                        "a draw from an iterator whose epoch is over",
                        expected="one live iterator over an order's sampler at a time",
                        remedy="Evaluate with a loader of its own, or finish this one before starting another.",
                    )
                order._drawn += 1
                yield index
            position += _CHUNK

    def __repr__(self) -> str:
        return f"OrderSampler({self._order!r}; for a map-style dataset of {self._order.n} examples)"
