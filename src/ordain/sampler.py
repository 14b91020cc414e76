"""torch's Sampler around a cursor: what to visit is the order's business, where a loader stands is here."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ordain.errors import ArgumentError, InputError, StateError, StepError

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

    def begin(self, *, out_of_order: bool, handed: Handed | None) -> tuple[int, NDArray[np.int64], int]:
        """Start a pass, at its first draw: its ticket, the indices it visits, and where among them it starts.

        ``out_of_order``: its batches may arrive in another order than drawn. ``handed``: what the loader, if it is one,
        has handed out.
        """

    def go_on(self, epoch: int, drawn: int) -> None:
        """Continue where a loader's state says; refuse a state that is not this order's."""


class Handed:
    """What a DataLoader has handed out of what it has drawn: workers are sent indices long before.

    Nothing is known (None) once the loader's iterator is gone, nor where another thread draws, at any time.

    Attributes:
        reads_ahead: whether its batch sampler draws the examples of several batches at once.
    """

    def __init__(self, loader: Any) -> None:
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._thread = get_ident()
        workers = hasattr(loader, "_send_idx")
        self._drawing, self._out = ("_send_idx", "_rcvd_idx") if workers else ("_num_yielded", "_num_yielded")
        self._first = getattr(loader, self._drawing)  # not 0 in a StatefulDataLoader that goes on
        self._start = 0
        self._ends: list[int] = []  # how many examples were drawn, by batch, up to its end
        self.reads_ahead = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loader": _gone}  # a copy has no loader

    @property
    def batch(self) -> int:
        """How many examples the first batch has."""
        return self._ends[0] - self._start if self._ends else 0

    def draw(self, position: int) -> None:
        """``position`` examples have been drawn."""
        loader, ends = self._loader(), self._ends
        number = getattr(loader, self._drawing, -1) - self._first
        if 0 <= number < len(ends):
            ends[-1] = position
            return
        if loader is None or get_ident() != self._thread:
            self._thread = -1
        if not ends:
            self._start = position - 1
        self.reads_ahead |= number > len(ends)
        ends.append(position)

    def after(self, done: int) -> tuple[int, int, int] | None:
        """How many batches and examples were handed out behind the first ``done`` examples; and drawn behind those."""
        loader = self._loader()
        if loader is None or self.reads_ahead or get_ident() != self._thread:
            return None
        batches, ends = getattr(loader, self._out) - self._first, self._ends
        self.reads_ahead = batches > len(ends)
        if self.reads_ahead or not batches:
            return None
        begun = bisect_left(ends, done, 0, batches - 1)  # the batch that the last of them is in
        return batches - 1 - begun, ends[batches - 1] - done, ends[-1] - ends[batches - 1]


def _gone() -> None:
    """What a reference to a loader's iterator that is no more gives."""


class OrderSampler(Sampler[int]):
    """Yields the examples of an order; pass it to ``DataLoader(..., sampler=order.sampler)``.

    Each iterator is one pass. A pass begins when its first index is drawn, not when the iterator is
    made: loaders make iterators, and draw ahead, whenever it suits them.
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

    The order decides what comes when: ``set_epoch()`` is accepted and does nothing.
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
            loader = _drawing_loader()
            _refuse_single_indices(loader)
            out_of_order = _out_of_order(loader)
            _check_dataset(loader, cursor.examples)
            self._handed = Handed(loader) if hasattr(loader, "_num_yielded") else None
            self._ticket, self._indices, position = cursor.begin(out_of_order=out_of_order, handed=self._handed)
            self._epoch = cursor.epoch
        start, chunk = self._chunk
        if position >= start + len(chunk):
            start, chunk = self._chunk = position, self._indices[position : position + _CHUNK].tolist()
            if not chunk:
                raise StopIteration
        if cursor.ticket != self._ticket:
            raise StepError(
                "a draw from an iterator whose epoch is over",
                expected="one live iterator over an order's sampler at a time",
                remedy="Evaluate with a loader of its own, or finish this one before starting another.",
            )
        self._drawn = cursor.position = position + 1
        if self._handed is not None:
            self._handed.draw(position + 1)
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


def _refuse_single_indices(loader: Any) -> None:
    """A loader that asks for batches of indices gets none from ``batch_sampler=order.sampler``."""
    asked = getattr(loader, "_index_sampler", None)
    if getattr(loader, "_auto_collation", False) and isinstance(asked, (OrderSampler, RankSampler)):
        raise ArgumentError(
            "batch_sampler=order.sampler",
            expected="batches of indices, where this gives single ones",
            remedy="Write DataLoader(dataset, batch_size=..., sampler=order.sampler), or "
            "batch_sampler=BatchSampler(order.sampler, batch_size, drop_last=False).",
        )


def _out_of_order(loader: Any) -> bool:
    """May the loader's batches overtake each other? Refuse a loader that would throw batches away."""
    skipped = getattr(loader, "_sampler_iter_yielded", 0)
    if skipped and isinstance(getattr(loader, "_sampler_iter", None), islice):
        raise StateError(
            f"a loader that begins by drawing {skipped} batches and throwing them away, which is how a "
            "StatefulDataLoader goes back to its state where its batch sampler has none",
            expected="a batch sampler with a state, or a loader without one",
            remedy="Use torchdata.stateful_dataloader.sampler.BatchSampler. Or leave the loader's state out and "
            "call order.resume().",
        )
    return not getattr(loader, "_in_order", True) and getattr(loader, "_num_workers", 0) > 1


def _check_dataset(loader: Any, n: int) -> None:
    """Raise if the loader's dataset is not of ``n`` examples; what a sampler in between makes of indices is its own."""
    batches: Any = getattr(loader, "_index_sampler", None)
    sampler = batches.sampler if type(batches).__name__ == "BatchSampler" else batches
    dataset: Any = getattr(loader, "_dataset", None)
    if not isinstance(sampler, (OrderSampler, RankSampler)) or not hasattr(dataset, "__len__"):
        return
    if (length := len(dataset)) != n:
        raise InputError(
            f"an order of n={n} examples in a loader whose dataset has {length}",
            expected="an order of all the dataset's examples",
            remedy=f"Build the order with the dataset, or n={length}; for a part of it, pass the loader a Subset.",
        )


def _drawing_loader() -> Any:
    """The loader's iterator that asks for an index just now; None if it is no loader.

    Draws look the same to a sampler whatever becomes of them: only who draws knows whether batches are thrown away, or
    overtake each other.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_next_index":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")
