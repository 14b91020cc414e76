"""torch's Sampler around a cursor: what to visit is the order's business, where a loader stands is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ordain._loaders import Handed, check_loader, drawing_loader, out_of_order
from ordain.errors import StateError, StepError

_CHUNK = 4096


class Draws(Protocol):
    """What a sampler needs of a cursor."""

    epoch: int
    ticket: int  # names the live pass
    position: int  # how many indices the live pass has drawn

    @property
    def length(self) -> int:
        """How many indices this process draws in an epoch."""

    @property
    def examples(self) -> int:
        """How many examples the dataset has."""

    @property
    def shared(self) -> bool:
        """Is this one of several processes that share the order?"""

    def begin(self, *, out_of_order: bool, handed: Handed | None) -> tuple[int, NDArray[np.int64], int]:
        """Start a pass, at its first draw: its ticket, the indices it visits, and where among them it starts.

        ``out_of_order``: its batches may arrive in another order than drawn. ``handed``: what the loader, if it is one,
        has handed out.
        """

    def go_on(self, epoch: int, drawn: int) -> None:
        """Continue where a loader's state says; refuse a state that is not this order's."""


class OrderSampler(Sampler[int]):
    """Yields the examples of an order; pass it to ``DataLoader(..., sampler=order.sampler)``.

    Each iterator is one pass. A pass begins when its first index is drawn, not when the iterator is
    created, because loaders create iterators and draw ahead at any time.
    """

    def __init__(self, cursor: Draws, *, order: str) -> None:
        self._cursor, self._order = cursor, order

    def __len__(self) -> int:
        return self._cursor.length

    def __iter__(self) -> Iterator[int]:
        return OrderIterator(self._cursor)

    def __repr__(self) -> str:
        return f"OrderSampler({self._order}; for a map-style dataset of {len(self)} examples)"


class RankSampler(DistributedSampler[Any]):
    """One rank's part of an order, for trainers that look for torch's DistributedSampler.

    The order determines the sequence: ``set_epoch()`` is accepted and does nothing.
    """

    def __init__(self, cursor: Draws, *, order: str, n: int, rank: int, ranks: int) -> None:
        super().__init__(range(n), num_replicas=ranks, rank=rank, shuffle=False)  # type: ignore[arg-type]
        self._cursor, self._order = cursor, order

    def __len__(self) -> int:
        return self._cursor.length

    def __iter__(self) -> Iterator[int]:
        return OrderIterator(self._cursor)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: an order counts its own epochs."""

    def __repr__(self) -> str:
        return f"RankSampler({self._order}; {len(self)} examples on rank {self.rank} of {self.num_replicas})"


class OrderIterator(Iterator[int]):
    """One pass. Its state is the position alone, which is what a StatefulDataLoader asks for at every draw.

    The order's own state is saved and loaded beside the loader's, and first: a position that does not belong to
    it is refused. No generator: one that refers to its iterator would keep both, and the indices, until a collection.
    """

    def __init__(self, cursor: Draws) -> None:
        self._cursor = cursor
        self._epoch: int | None = None  # None until the first draw
        self._drawn = 0
        self._over = False  # saved at the end of its epoch: nothing is left to visit
        self._indices: NDArray[np.int64] | None = None  # None until the first draw in this process
        self._chunk: tuple[int, list[int]] = 0, []  # some of them as ints, from a position on
        self._ticket = -1
        self._handed: Handed | None = None

    def __next__(self) -> int:
        if self._over:
            raise StopIteration
        cursor, position = self._cursor, self._drawn
        if self._indices is None:
            loader = drawing_loader()
            check_loader(loader, (OrderSampler, RankSampler), n=cursor.examples)
            self._handed = Handed(loader, shared=cursor.shared) if hasattr(loader, "_num_yielded") else None
            overtaking = out_of_order(loader)
            self._ticket, self._indices, position = cursor.begin(out_of_order=overtaking, handed=self._handed)
            self._epoch = cursor.epoch
        start, chunk = self._chunk
        if position >= start + len(chunk):
            start, chunk = self._chunk = position, self._indices[position : position + _CHUNK].tolist()
            if not chunk:
                raise StopIteration
        if cursor.ticket != self._ticket:
            raise StepError(
                "a draw from an iterator whose epoch is over",
                expected="only one live iterator over an order's sampler",
                remedy="Evaluate with a loader of its own, or finish this one before starting another.",
            )
        if self._handed is not None:
            self._handed.draw(position + 1)
        self._drawn = cursor.position = position + 1
        return chunk[position - start]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another iterator stood; the order's state must have been loaded, and from the same step."""
        if not isinstance(state, dict) or not {"epoch", "drawn"} <= state.keys():
            raise StateError(
                f"a cursor's state {state!r}",
                expected="{'epoch': ..., 'drawn': ...}",
                remedy="Load what this loader's state_dict() returned.",
            )
        if state["epoch"] is not None:
            self._cursor.go_on(state["epoch"], state["drawn"])
            self._epoch, self._drawn = state["epoch"], state["drawn"]
            self._over = self._drawn == self._cursor.length
