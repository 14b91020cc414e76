"""Steps that all ranks take together; every rank ends each step in the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ordain.distributed.exchange import Exchange, Meeting, fingerprint
from ordain.distributed.ranks import Ranks, disagreed
from ordain.errors import RanksError
from ordain.gradients import Collected
from ordain.orders.arrangement import Arrangement
from ordain.orders.coordination import Collect, Observed
from ordain.orders.cursor import Cursor
from ordain.orders.units import Indices


class RankCoordinator:
    """Gathers what the ranks observe.

    Args:
        ranks: all of them.
        cursor: where the epoch stands.
        arrangement: this epoch's order.
        positions: the positions of an epoch that this rank visits.
        each: how many consecutive ones are dealt to a rank at once.
        group: the process group that the user has given, if any.
        device: where gradients live, for a rank that has none.
        marks: numbers by which two states of the same epoch are told apart.
    """

    def __init__(
        self,
        ranks: Ranks,
        cursor: Cursor,
        arrangement: Arrangement,
        *,
        positions: Indices,
        each: int,
        group: object,
        device: torch.device,
        marks: Callable[[], Indices],
    ) -> None:
        self._ranks, self._cursor, self._arrangement, self._group = ranks, cursor, arrangement, group
        self._mine, self._each, self._device, self._marks = positions, each, device, marks
        self._exchange = Exchange(ranks)
        self._digest: tuple[Indices | None, int] = None, 0
        self._loaded = False  # has a state been loaded that the others may not have?
        self._broken = False  # was a step interrupted here, while the others went on?

    def loaded(self) -> None:
        self._loaded = True

    def joinable(self, step: Callable[[], None]) -> Joinable:
        return JoinAdapter(step, self._device, self._group)

    @contextmanager
    def meeting(self, collect: Collect | None) -> Iterator[Iterable[Observed]]:
        if self._broken:
            raise RanksError(
                "a step after one that was interrupted on this rank",
                expected="ranks that have completed the same exchanges",
                remedy="Create a new order on every rank, and load the last saved state.",
            )
        calls = self._ranks.calls
        try:
            yield self._observed(collect)
        except BaseException as error:
            # What this rank would say next, the others would take for something else.
            self._broken = self._ranks.calls > calls and not getattr(error, "agreed", False)
            raise

    def _observed(self, collect: Collect | None) -> Iterator[Observed]:
        checked = None if collect is None else lambda: self._checked(collect())
        for meeting in self._exchange.meet(checked, self._stands()):
            self._loaded = False
            yield self._dealt(meeting)

    def _checked(self, batches: Sequence[Collected | int]) -> Sequence[Collected | int]:
        """Before any rank hears of them: drawn by this rank, and whole units."""
        cursor, arrangement = self._cursor, self._arrangement
        sizes = [batch if isinstance(batch, int) else batch.examples for batch in batches]
        start = cursor.view.own(cursor.taken)
        cursor.check_drawn(sum(sizes), cursor.view.own(cursor.drawn) - start)
        cursor.compare_with_loader(sum(sizes), skipped=all(isinstance(batch, int) for batch in batches))
        for size, done in zip(sizes, accumulate(sizes, initial=start), strict=False):
            positions = self._mine[done : done + size] % cursor.view.n
            if size and arrangement.whole_units:
                arrangement.check_unit(np.unique(arrangement.slots_at(positions)), size)
        return batches

    def _stands(self) -> tuple[int, int, int]:
        """The epoch, the examples done and a digest of the order: the same on every rank."""
        cursor, order = self._cursor, self._arrangement.order
        if self._digest[0] is not order:  # hashed once an epoch
            self._digest = order, fingerprint(order.tobytes())
        if not self._loaded:
            return cursor.epoch, cursor.taken, self._digest[1]
        told = np.concatenate([order, self._arrangement.places.astype(np.int64), self._marks()])
        return cursor.epoch, cursor.taken, fingerprint(told.tobytes())

    def _dealt(self, meeting: Meeting) -> Observed:
        """Which example of the epoch each row of each rank is."""
        done, n = self._cursor.taken, self._cursor.view.n
        positions = [self._positions(rank, size, done) for rank, size in enumerate(meeting.sizes)]
        kept = [np.flatnonzero(one < n) for one in positions]  # not those of a repeated example
        every = np.sort(np.concatenate([one[rows] for one, rows in zip(positions, kept, strict=True)]))
        if not np.array_equal(every, np.arange(done, done + len(every))):
            raise disagreed(
                f"batches of {meeting.sizes} examples on the ranks",
                expected="the same number on every rank, except for the epoch's last batch",
                remedy="Give every rank's loader the same batch_size, and drop_last to all of them or to none.",
            )
        passed = [one[rows] for one, rows, skip in zip(positions, kept, meeting.skipped, strict=True) if skip]
        most = 1 if self._arrangement.whole_units else None  # one row is the whole unit
        kept = [rows[:0] if skip else rows[:most] for rows, skip in zip(kept, meeting.skipped, strict=True)]
        learned = [one[rows] for one, rows in zip(positions, kept, strict=True)]
        rows = np.sort(np.concatenate(learned)) - done
        places = np.argsort(np.argsort(np.concatenate(learned)))
        cuts = np.cumsum([len(one) for one in learned])[:-1]
        batch = None
        if len(rows):
            batch = meeting.batch(
                [torch.from_numpy(one) for one in kept],
                [torch.from_numpy(one) for one in np.split(places, cuts)],
                device=self._device,
            )
        return Observed(len(every), batch, rows, np.concatenate([*passed, np.empty(0, dtype=np.int64)]) - done)

    def _positions(self, rank: int, size: int, done: int) -> Indices:
        """The positions in the epoch of a rank's next ``size`` examples, after ``done`` of all."""
        ranks, each = self._ranks.size, self._each
        whole, rest = divmod(done, ranks * each)
        before = whole * each + min(max(rest - rank * each, 0), each)
        local = np.arange(before, before + size)
        positions: Indices = (local // each * ranks + rank) * each + local % each
        return positions


class JoinAdapter(Joinable, JoinHook):
    """For torch's ``Join``: takes part in the other ranks' steps once this one has come to the end of its epoch."""

    def __init__(self, step: Callable[[], None], device: torch.device, group: object) -> None:
        super().__init__()
        self._step, self._device, self._group = step, device, group

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Called by ``Join``."""
        return self

    def main_hook(self) -> None:
        self._step()

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts."""
        return self._device

    @property
    def join_process_group(self) -> object:
        """The model's group, where ``Join`` counts; not our own."""
        return self._group or torch.distributed.group.WORLD
