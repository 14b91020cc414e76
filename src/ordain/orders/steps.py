"""Learning from a step: which examples it brought gradients of, what the learner decides, and where they go next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ordain._context import undisturbed
from ordain.errors import InputError
from ordain.gradients import Collected, Gradients
from ordain.orders.arrangement import Arrangement
from ordain.orders.coordination import Collect, Coordinator
from ordain.orders.cursor import Cursor
from ordain.orders.intake import Intake
from ordain.orders.learner import Learner
from ordain.orders.units import Indices


class Steps:
    """What an order does with the gradients of a step.

    Args:
        cursor: says which examples come next.
        arrangement: where they are in this epoch, and the places that they get in the next.
        learner: decides those places.
        intake: scales and sketches gradients before they are learned from.
        ranks: brings together what other ranks observe; None where there are none.
    """

    def __init__(
        self, cursor: Cursor, arrangement: Arrangement, learner: Learner, intake: Intake, ranks: Coordinator | None
    ) -> None:
        self._cursor, self._arrangement, self._learner = cursor, arrangement, learner
        self._intake, self._ranks = intake, ranks
        self._group = arrangement.units.group

    def learn(self, collect: Collect, indices: Any = None) -> None:
        """Learn from the batches that ``collect()`` returns, of the next examples drawn or of those named."""
        with undisturbed():
            if self._ranks is not None:
                if indices is not None:
                    raise InputError(
                        "indices= with an order that is coordinated over ranks",
                        expected="each rank to observe its examples in the order in which it drew them",
                        remedy="Leave indices= out.",
                    )
                self._learn_together(self._ranks, collect)
                return
            batches = collect()
            # The slots of all batches are known before the first changes anything.
            for batch, slots in zip(batches, self._slots_of(batches, indices), strict=True):
                if isinstance(batch, int):
                    self._pass_over(slots)
                elif len(slots):
                    self._place(slots, batch.gradients)
                self._cursor.take(len(slots), named=indices is not None)

    def accompany(self) -> None:
        """Take part in the step of other ranks, where this one has no more batches."""
        if self._ranks is not None:
            with undisturbed():
                self._learn_together(self._ranks, None)

    def _learn_together(self, ranks: Coordinator, collect: Collect | None) -> None:
        with ranks.meeting(collect) as batches:
            for observed in batches:
                slots = self._slots(observed.count, None)
                self._pass_over(slots[observed.passed])
                if observed.gradients is not None:
                    self._place(slots[observed.rows], observed.gradients)
                self._cursor.take(observed.count)

    def _place(self, slots: Indices, batch: Gradients) -> None:
        """Learn from gradients of the examples in these slots, and note the places of their units."""
        arrangement, cursor = self._arrangement, self._cursor
        if whole := arrangement.whole_units:
            slots = np.unique(slots)
        if self._group > 1:  # without the rest of units that were set aside
            batch, slots = arrangement.live(batch, slots)
            if not len(slots):
                return
        try:
            batch = batch if self._intake.passive else self._intake.learned(batch)
            decision = self._learner.learn(batch, slots, whole_units=whole, epoch=cursor.epoch)
        except BaseException:
            arrangement.set_aside(self._learner.abandoned())
            raise
        arrangement.places[decision.slots] = decision.places
        if decision.not_finite:
            arrangement.note_not_finite(decision.not_finite, cursor.epoch)
        if not self._intake.passive:
            self._intake.confirm()

    def _pass_over(self, slots: Indices) -> None:
        """Examples in these slots will not be observed."""
        if len(slots):
            self._arrangement.set_aside(slots)
            self._learner.skip(slots)

    def _slots_of(self, batches: Sequence[Collected | int], indices: Any) -> list[Indices]:
        """The slots of each batch, in turn or as they are named."""
        sizes = [batch if isinstance(batch, int) else batch.examples for batch in batches]
        slots = self._slots(sum(sizes), indices)
        if indices is None:
            self._cursor.compare_with_loader(len(slots), skipped=all(isinstance(batch, int) for batch in batches))
        parts = [slots[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if self._arrangement.whole_units:
            for batch, part in zip(batches, parts, strict=True):
                if len(part) and not isinstance(batch, int):
                    self._arrangement.check_unit(np.unique(part), len(part))
        return parts

    def _slots(self, count: int, indices: Any) -> Indices:
        """The slots of the next ``count`` drawn examples, or of those named."""
        cursor, arrangement = self._cursor, self._arrangement
        if indices is not None:
            return arrangement.slots_of(indices, count=count, drawn=cursor.drawn)
        if cursor.out_of_turn:
            unseen = arrangement.unseen(cursor.drawn)
            cursor.check_drawn(count, len(unseen))
            return unseen[:count]
        cursor.check_drawn(count)
        positions = np.arange(cursor.taken, cursor.taken + count)
        return positions if self._group == 1 else arrangement.slots_at(positions)


class Clock:
    """Adds up the time of ``step()`` in an epoch, next to that of the whole epoch."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new epoch begins."""
        self._own = 0.0
        self._first: float | None = None  # the end of the first step, in which code may be compiled
        self._last = 0.0

    def stepped(self, start: float, end: float) -> None:
        """A step took from ``start`` to ``end``, in seconds."""
        if self._first is None:
            self._first = end
        else:
            self._own += end - start
        self._last = end

    def cost(self, rounds: float) -> float | None:
        """The order's time, with ``rounds`` seconds at the end, over that of everything else; None before two steps.

        >>> clock = Clock()
        >>> clock.stepped(0.0, 1.0)
        >>> clock.stepped(9.0, 11.0)
        >>> clock.cost(2.0)
        0.5
        """
        rest = 0.0 if self._first is None else self._last - self._first - self._own
        return (self._own + rounds) / rest if rest > 0 else None
