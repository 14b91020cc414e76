"""The DataLoader that draws from a sampler: what it does with the indices, and which loaders are refused.

Draws look the same to a sampler whatever becomes of them. Only the loader knows whether batches are thrown away, dealt
out to other processes, or overtake each other, and only its iterator, found at the first draw, can be asked.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from inspect import currentframe
from itertools import islice
from threading import get_ident
from types import FrameType
from typing import Any

from ordain.errors import ArgumentError, InputError, StateError

_FRAMEWORKS = (
    "With Accelerate, write loader = ordain.integrations.accelerate.prepare(accelerator, order, loader) in place of "
    "accelerator.prepare(loader). With transformers, use ordain.integrations.transformers.OrderedTrainer. With "
    "Lightning, pass ordain.integrations.lightning.OrderCallback to the Trainer. See docs/frameworks.md."
)


class Handed:
    """What a DataLoader has handed out of what it has drawn: workers are sent indices long before.

    Nothing is known (None) once the loader's iterator is gone, nor where another thread draws, at any time.

    Args:
        loader: the loader's iterator.
        shared: whether the indices are one rank's part of an order, all of which its loader must hand out.

    Attributes:
        reads_ahead: whether its batch sampler draws the examples of several batches at once.
    """

    def __init__(self, loader: Any, *, shared: bool) -> None:
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._thread = get_ident()
        workers = hasattr(loader, "_send_idx")
        self._drawing, self._out = ("_send_idx", "_rcvd_idx") if workers else ("_num_yielded", "_num_yielded")
        self._first = getattr(loader, self._drawing)  # not 0 in a StatefulDataLoader that goes on
        self._start = 0
        self._ends: list[int] = []  # how many examples were drawn, by batch, up to its end
        self._most = getattr(getattr(loader, "_index_sampler", None), "batch_size", None) if shared else None
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
        if len(ends) == 1:
            self._check_size()
        ends.append(position)

    def _check_size(self) -> None:
        """Raise if more was drawn for the first batch than a batch has: the rest is not handed out, or not now."""
        if isinstance(self._most, int) and self.batch > self._most:
            raise InputError(
                f"a loader that draws {self.batch} indices for a batch of {self._most}, on one of several ranks",
                expected="each rank's loader to hand out exactly the indices that order.sampler gives it",
                remedy=f"order.sampler already gives each rank its own shard: do not shard it again. {_FRAMEWORKS}",
            )

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


def check_loader(loader: Any, samplers: tuple[type, ...], *, n: int) -> None:
    """Raise, by name, if the loader would not hand out what it draws.

    Args:
        loader: the loader's iterator; None if it is no loader that draws.
        samplers: the types of our own samplers.
        n: how many examples the order is of.
    """
    _refuse_single_indices(loader, samplers)
    for outer in _samplers(loader):
        if not isinstance(outer, samplers):
            _refuse_sharding(outer)
            _refuse_skipping(outer)
    _refuse_dispatching()
    _check_dataset(loader, samplers, n)


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's batch sampler, the sampler inside it, and so on."""
    one = getattr(loader, "_index_sampler", None)
    for _ in range(16):  # not forever, where one contains itself
        if one is None:
            return
        yield one
        inner = getattr(one, "batch_sampler", None)
        one = getattr(one, "sampler", None) if inner is None else inner


def _refuse_sharding(sampler: Any) -> None:
    """Accelerate's BatchSamplerShard, and DistributedSamplers that trainers put around a sampler."""
    ranks = max((_count(sampler, name) for name in ("num_processes", "num_replicas")), default=0)
    if ranks > 1:
        raise InputError(
            f"a {type(sampler).__name__} around order.sampler, which gives each of {ranks} processes only a part of "
            "what order.sampler gives it: the other examples would never be visited, or visited twice",
            expected="each process's loader to hand out exactly the indices that order.sampler gives it",
            remedy="An order created after init_process_group() already gives each process its own shard. "
            f"{_FRAMEWORKS}",
        )


def _refuse_skipping(sampler: Any) -> None:
    """Accelerate's skip_first_batches, unless what it skips are stand-ins for batches that are done."""
    skipped = _count(sampler, "skip_batches")
    if skipped and skipped != _count(getattr(sampler, "batch_sampler", None), "stand_ins"):
        raise StateError(
            f"a {type(sampler).__name__} around order.sampler that draws {skipped} batches and discards them "
            "(Accelerate's skip_first_batches, or a trainer that resumes)",
            expected="a loader that yields every batch it draws",
            remedy="Load the order's state and call order.resume(): the next pass begins where the saved one stopped. "
            "With transformers, ordain.integrations.transformers.OrderedTrainer does so.",
        )


def _refuse_dispatching() -> None:
    """Accelerate's dispatch_batches=True: rank 0 draws for all."""
    for frame in _frames():
        if frame.f_code.co_name not in ("__iter__", "_fetch_batches"):
            continue
        outer = frame.f_locals.get("self")
        if type(outer).__name__ != "DataLoaderDispatcher":
            continue
        ranks = _count(getattr(outer, "state", None), "num_processes")
        if ranks > 1:
            raise InputError(
                f"a DataLoaderDispatcher (Accelerate's dispatch_batches=True), which sends what rank 0 draws to "
                f"{ranks} processes",
                expected="each process's loader to draw from its own order.sampler",
                remedy=f"Leave dispatch_batches=True out. {_FRAMEWORKS}",
            )


def _count(owner: Any, name: str) -> int:
    found = getattr(owner, name, 0)
    return found if isinstance(found, int) else 0


def _refuse_single_indices(loader: Any, samplers: tuple[type, ...]) -> None:
    """A loader that asks for batches of indices gets none from ``batch_sampler=order.sampler``."""
    asked = getattr(loader, "_index_sampler", None)
    if getattr(loader, "_auto_collation", False) and isinstance(asked, samplers):
        raise ArgumentError(
            "batch_sampler=order.sampler",
            expected="a sampler that yields batches of indices; this one yields single indices",
            remedy="Write DataLoader(dataset, batch_size=..., sampler=order.sampler), or "
            "batch_sampler=BatchSampler(order.sampler, batch_size, drop_last=False).",
        )


def out_of_order(loader: Any) -> bool:
    """May the loader's batches overtake each other? Refuse a loader that would throw batches away."""
    skipped = getattr(loader, "_sampler_iter_yielded", 0)
    if skipped and isinstance(getattr(loader, "_sampler_iter", None), islice):
        raise StateError(
            f"a loader that draws {skipped} batches and discards them, as a StatefulDataLoader does to restore its "
            "position if its batch sampler has no state",
            expected="a batch sampler with a state, or a loader without one",
            remedy="Use torchdata.stateful_dataloader.sampler.BatchSampler. Or leave the loader's state out and "
            "call order.resume().",
        )
    return not getattr(loader, "_in_order", True) and getattr(loader, "_num_workers", 0) > 1


def _check_dataset(loader: Any, samplers: tuple[type, ...], n: int) -> None:
    """Raise if the loader's dataset is not of ``n`` examples; what a sampler in between makes of indices is its own."""
    batches: Any = getattr(loader, "_index_sampler", None)
    sampler = batches.sampler if type(batches).__name__ == "BatchSampler" else batches
    dataset: Any = getattr(loader, "_dataset", None)
    if not isinstance(sampler, samplers) or not hasattr(dataset, "__len__"):
        return
    if (length := len(dataset)) != n:
        raise InputError(
            f"an order of n={n} examples in a loader whose dataset has {length}",
            expected="an order of all the dataset's examples",
            remedy=f"Build the order with the dataset, or n={length}; for a part of it, pass the loader a Subset.",
        )


def drawing_loader() -> Any:
    """The loader's iterator that asks for an index just now; None if it is no loader."""
    found = next((frame for frame in _frames() if frame.f_code.co_name == "_next_index"), None)
    return None if found is None else found.f_locals.get("self")


def _frames() -> Iterator[FrameType]:
    """Who called, from the inside out."""
    frame = currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        yield frame
