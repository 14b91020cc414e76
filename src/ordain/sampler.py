"""The cursor: where in its epoch a loader stands. What comes next is the order's business."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ordain.errors import StateError, StepError

if TYPE_CHECKING:
    from ordain.distributed.share import Share
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
        return OrderIterator(self._order)

    def __repr__(self) -> str:
        return f"OrderSampler({self._order!r}; for a map-style dataset of {self._order.n} examples)"


class RankSampler(DistributedSampler[Any]):
    """One rank's view of an order. Trainers that know torch's DistributedSampler leave it as it is.

    The order decides what comes when: ``set_epoch()`` is accepted and does nothing.
    """

    def __init__(self, order: Order, share: Share) -> None:
        ranks = share.ranks
        super().__init__(range(order.n), num_replicas=ranks.size, rank=ranks.rank, shuffle=False)  # type: ignore[arg-type]
        self._order, self._share = order, share

    def __len__(self) -> int:
        return len(self._share.positions)

    def __iter__(self) -> Iterator[int]:
        return OrderIterator(self._order)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: an order counts its own epochs."""

    def __repr__(self) -> str:
        return f"RankSampler({self._order!r}; {len(self)} examples on rank {self.rank} of {self.num_replicas})"


class OrderIterator(Iterator[int]):
    """One pass. Its state is the cursor alone, which is what a StatefulDataLoader asks for at every draw.

    The order's own state is saved and loaded beside the loader's, and first: a cursor that does not belong to
    it is refused.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: int | None = None  # None until the first draw
        self._drawn = 0
        self._over = False  # saved at the end of its epoch: there is nothing to go on with
        self._indices = self._draw()

    def __next__(self) -> int:
        return next(self._indices)

    def _draw(self) -> Iterator[int]:
        if self._over:
            return
        order = self._order
        loader = _who_draws()
        lost = getattr(loader, "_sampler_iter_yielded", 0)
        if lost and isinstance(getattr(loader, "_sampler_iter", None), islice):
            raise StateError(
                f"a loader that begins by drawing {lost} batches and throwing them away, which is how a "
                "StatefulDataLoader goes back to its state where its batch sampler has none",
                expected="a batch sampler with a state, or a loader without one",
                remedy="Use torchdata.stateful_dataloader.sampler.BatchSampler. Or leave the loader's state out and "
                "call order.resume().",
            )
        ticket, indices, position = order._begin_pass()
        order._overtaking = not getattr(loader, "_in_order", True) and getattr(loader, "_num_workers", 0) > 1
        self._epoch = order.epoch
        shared = order._share is not None
        while position < len(indices):
            for index in indices[position : position + _CHUNK].tolist():
                if order._ticket != ticket:
                    raise StepError(
                        "a draw from an iterator whose epoch is over",
                        expected="one live iterator over an order's sampler at a time",
                        remedy="Evaluate with a loader of its own, or finish this one before starting another.",
                    )
                position += 1
                self._drawn = position
                if shared:
                    order._draw_to(position)
                else:
                    order._drawn = position
                yield index

    def state_dict(self) -> dict[str, Any]:
        """The epoch (None before the first draw) and how many of its examples have been drawn."""
        return {"epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another iterator stood; the order's state must have been loaded, and from the same step."""
        if not isinstance(state, dict) or not {"epoch", "drawn"} <= state.keys():
            raise StateError(
                f"a cursor's state {state!r}",
                expected="{'epoch': ..., 'drawn': ...}",
                remedy="Load what this loader's state_dict() gave.",
            )
        if state["epoch"] is not None:
            self._order._go_on(state["epoch"], state["drawn"])
            self._epoch, self._drawn = state["epoch"], state["drawn"]
            self._over = self._drawn == len(self._order.sampler)  # type: ignore[arg-type]


def _who_draws() -> Any:
    """The loader's iterator that asks for an index just now; None if it is no loader.

    Draws look the same to a sampler whatever becomes of them: only who draws knows whether batches are thrown away, or
    overtake each other.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_next_index":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")
