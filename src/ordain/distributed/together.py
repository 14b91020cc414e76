"""Steps that all ranks take at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from ordain.distributed.exchange import Exchange, Local, Meeting, fingerprint
from ordain.distributed.ranks import agreed
from ordain.distributed.share import Share
from ordain.distributed.summed import learn_apart
from ordain.errors import RanksError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ordain.orders.balanced import BalancedOrder
    from ordain.orders.learned import LearnedOrder

    Indices = NDArray[np.int64]


class Together:
    """What the ranks of a learned order do together; every rank ends each step in the same state.

    Args:
        order: this rank's copy.
        share: its part in it.
    """

    def __init__(self, order: LearnedOrder, share: Share) -> None:
        self._order, self._share = order, share
        self._exchange = Exchange(share.ranks)
        self._digest: tuple[Indices | None, int] = None, 0
        self._loaded = False  # has a state been loaded that the others may not have?
        self._broken = False  # has a step broken off here, while the others went on?

    def loaded(self) -> None:
        """A state was loaded: at the next step the ranks make sure that all have it."""
        self._loaded = True

    def step(self, collect: Callable[[], Sequence[Local]] | None) -> None:
        """Learn from every rank's batches; ``collect`` gives this rank's, and is None if it has come to its end."""
        exact = self._share.options.mode == "exact"
        checked = None if collect is None else lambda: self._checked(collect())
        if self._broken:
            raise RanksError(
                "a step after one that broke off on this rank",
                expected="ranks that have all heard the same",
                remedy="Make the order anew on every rank, and load the last saved state.",
            )
        calls = self._share.ranks.calls
        try:
            for meeting in self._exchange.meet(checked, self._stands(), send=exact):
                self._loaded = False
                rows = _Rows.dealt(meeting, self._order, self._share)
                (self._learn_all if exact else self._learn_mine)(meeting, rows)
        except BaseException as error:
            # What this rank would say next, the others would take for something else.
            self._broken = self._share.ranks.calls > calls and not getattr(error, "agreed", False)
            raise

    def _checked(self, batches: Sequence[Local]) -> Sequence[Local]:
        """Before anybody hears of them: drawn by this rank, and of the right length."""
        order, share = self._order, self._share
        order._check_in_turn()
        order._check_drawn(sum(one.size for one in batches), share.own(order._drawn) - share.own(order._taken))
        for one in batches:
            if order._whole_units and one.size:
                start = share.own(order._taken)
                positions = share.positions[start : start + one.size] % share.n
                order._check_unit(np.unique(order._slots_at(positions)), one.size)
        return batches

    def _stands(self) -> tuple[int, int, int]:
        order = self._order
        if self._digest[0] is not order._arrangement:  # hashed once an epoch
            self._digest = order._arrangement, fingerprint(order._arrangement.tobytes())
        if not self._loaded:
            return order._epoch, order._taken, self._digest[1]
        return order._epoch, order._taken, fingerprint(np.concatenate([order._arrangement, *order._marks()]).tobytes())

    def _learn_all(self, meeting: Meeting, rows: _Rows) -> None:
        order = self._order
        order._pass_over(rows.passed)
        if len(rows.slots):
            batch = meeting.gathered(rows.kept, rows.places, device=_device(order, meeting))
            (order._take_units if order._whole_units else order._take)(batch, rows.slots)
            order._dim = batch.dim
        self._count(rows)

    def _count(self, rows: _Rows) -> None:
        self._order._taken += rows.count
        self._order._touched = self._order._touched or rows.count > 0

    def _learn_mine(self, meeting: Meeting, rows: _Rows) -> None:
        order, rank = cast("BalancedOrder", self._order), self._share.ranks.rank
        order._pass_over(rows.passed)
        batch = meeting.mine.batch
        if batch is not None and len(rows.kept[rank]) < batch.size:
            batch = batch.select(rows.kept[rank].to(batch.device))
        if len(rows.slots):
            slots, like = [_slots(order, one) for one in rows.positions], meeting.like(_device(order, meeting))
            learn_apart(order, self._share.ranks, batch, slots, like)
            order._dim = like.shape[1]
        self._count(rows)


@dataclass(frozen=True)
class _Rows:
    """Which example of the epoch each rank's each row is.

    Attributes:
        count: how many examples of the epoch this step is about.
        kept: for each rank, which of its rows have a gradient that counts: not those of a repeated example.
        places: for each rank, which row of the whole batch each of those is.
        positions: for each rank, where in the epoch each of those stands.
        slots: ``[B]``, the slot of each row of the whole batch.
        passed: the slots that are passed over.
    """

    count: int
    kept: list[Tensor]
    places: list[Tensor]
    positions: list[Indices]
    slots: Indices
    passed: Indices

    @classmethod
    def dealt(cls, meeting: Meeting, order: LearnedOrder, share: Share) -> _Rows:
        ranks, each, done = share.ranks.size, share.each, order._taken
        whole, rest = divmod(done, ranks * each)
        positions = []
        for rank, size in enumerate(meeting.sizes):
            before = (
                whole * each + min(max(rest - rank * each, 0), each) if each > 1 else (done - rank + ranks - 1) // ranks
            )
            local = np.arange(before, before + size)
            positions.append((local // each * ranks + rank) * each + local % each)
        kept = [np.flatnonzero(one < share.n) for one in positions]
        every = np.sort(np.concatenate([one[rows] for one, rows in zip(positions, kept, strict=True)]))
        if not np.array_equal(every, np.arange(done, done + len(every))):
            raise agreed(
                RanksError(
                    f"batches of {meeting.sizes} examples on the ranks",
                    expected="the same number on every rank, but for the epoch's last batch",
                    remedy="Give every rank's loader the same batch_size, and drop_last to all of them or to none.",
                )
            )
        passed = [one[rows] for one, rows, skip in zip(positions, kept, meeting.skipped, strict=True) if skip]
        kept = [rows[:0] if skip else rows for rows, skip in zip(kept, meeting.skipped, strict=True)]
        if order._whole_units:
            kept = [rows[:1] for rows in kept]  # one row is the whole unit
        learned = [one[rows] for one, rows in zip(positions, kept, strict=True)]
        places = np.argsort(np.argsort(np.concatenate(learned)))
        cuts = np.cumsum([len(one) for one in learned])[:-1]
        return cls(
            len(every),
            [torch.from_numpy(rows) for rows in kept],
            [torch.from_numpy(one) for one in np.split(places, cuts)],
            learned,
            _slots(order, np.sort(np.concatenate(learned))),
            _slots(order, np.concatenate([*passed, np.empty(0, dtype=np.int64)])),
        )


def _slots(order: LearnedOrder, positions: Indices) -> Indices:
    if order.group == 1:
        return positions
    slots = order._slots_at(positions)
    return np.unique(slots) if order._whole_units else slots


def _device(order: LearnedOrder, meeting: Meeting) -> torch.device:
    return meeting.mine.batch.device if meeting.mine.batch is not None else order._like().device


class Company(Joinable):
    """For torch's ``Join``: keeps the other ranks company once this one has come to the end of its epoch."""

    def __init__(self, step: Callable[[], None], device: torch.device, group: object) -> None:
        super().__init__()
        self._step, self._device, self._group = step, device, group

    def join_hook(self, **kwargs: object) -> JoinHook:
        return _Hook(self._step)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> object:
        return self._group or torch.distributed.group.WORLD  # the model's, where Join counts; not our own


class _Hook(JoinHook):
    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def main_hook(self) -> None:
        self._step()
