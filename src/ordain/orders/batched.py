"""How much is learned from at once: batches as they come, several together, or a few examples after another.

Signs are the same whatever the batches are; how long they take to find is not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from ordain.gradients import ExactSource, Gradients
from ordain.gradients.context import undisturbed
from ordain.gradients.factored import Factored
from ordain.gradients.few import Piece, pieces
from ordain.gradients.memory import shrinking
from ordain.orders.base import Indices
from ordain.orders.gathered import Gathered
from ordain.orders.learned import LearnedOrder
from ordain.orders.placed import WAITING


class BatchedOrder(LearnedOrder):
    """Gathers batches, or cuts them up, where that is less work.

    Args:
        model: as in :class:`~ordain.orders.learned.LearnedOrder`.
        n: as there.
        paired: are differences of consecutive units learned from?
        **options: as there.
    """

    _changing: bool  # is a batch being added to the sums?
    _signed: int  # vectors given a sign in this epoch
    _slot_first: int  # the unit that waits for its partner, or -1

    def __init__(self, model: nn.Module | None, n: Any, *, paired: bool, **options: Any) -> None:
        super().__init__(model, n, **options)
        self._paired = paired
        self._gathered = Gathered()

    @abstractmethod
    def _learn(self, batch: Gradients, slots: Indices, *, cut: bool) -> None:
        """Sign what the batch completes; ``cut`` says that its rows are examples, several to a unit."""

    @abstractmethod
    def _start_anew(self) -> None:
        """Some of a batch is in the sums and nobody knows how much: balance from zero."""

    def resume(self, done: int | None = None) -> int:
        if isinstance(done, int) and done < self._taken:
            self._settle()  # examples that wait will come once more
        return super().resume(done)

    def _take(self, batch: Gradients, slots: Indices) -> None:
        if self._together is None and self.group == 1 and isinstance(batch, Factored) and self._gathered.takes(batch):
            if not self._gathered.fits(batch):
                self._settle()  # first: what fails before the batch is added may be tried again with it
            self._gathered.add(batch, slots)
            self._places[slots] = WAITING
            if self._taken + 2 * len(slots) > self.n:  # the last whole batch of the epoch
                self._settle()
            return
        self._settle()
        self._learn_or_mend(batch, slots, cut=self.group > 1)

    def _take_units(self, batch: Gradients, slots: Indices) -> None:
        self._settle()
        self._learn_or_mend(batch, slots, cut=False)

    def _settle(self) -> None:
        """Learn from what was gathered. If that fails, those units keep the middle."""
        if self._gathered.rows:
            batch, slots = self._gathered.batch()
            try:
                with undisturbed():
                    shrinking(lambda: self._learn_or_mend(batch, slots, cut=False))
            finally:
                self._gathered.clear()

    def _learn_or_mend(self, batch: Gradients, slots: Indices, *, cut: bool) -> None:
        parts = None if cut or self._slot_first >= 0 else pieces(batch, paired=self._paired)
        if parts is None:
            self._learn_part(lambda: batch, slots, cut=cut)
        else:
            self._learn_pieces(parts, slots)

    def _learn_pieces(self, parts: Iterable[Piece], slots: Indices) -> None:
        """One piece of a batch after another: each starts again by itself where memory runs out."""
        if isinstance(self._source, ExactSource):
            self._source.forget_sums()
        before, done = self._signed, False
        try:
            for rows, take in parts:
                shrinking(partial(self._learn_part, take, slots[rows], cut=False))
                done = True
        except BaseException:
            if done or self._signed > before:
                self._start_anew()  # the batch may come again, and must not count twice
            raise

    def _learn_part(self, take: Callable[[], Gradients], slots: Indices, *, cut: bool) -> None:
        try:
            self._learn(take(), slots, cut=cut)
        except BaseException:
            if self._changing:
                self._start_anew()
            raise
