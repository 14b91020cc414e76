"""Which place each unit gets in the next epoch, and which example each gradient belongs to."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ordain.errors import InputError, OrdainWarning, StepError
from ordain.orders.base import Indices, Order
from ordain.orders.state import State, array, broken, check_count, check_permutation

# Places of a unit besides +1 (front) and -1 (back); all three keep it in the middle.
UNSEEN, ASIDE, WAITING = 0, 2, 3
_PLACES = (1, -1, UNSEEN, ASIDE, WAITING)
_IN_ORDER = np.empty(0, dtype=np.int64)  # epoch 0's units are range(units), which need not be kept


class PlacedOrder(Order):
    """An order that is arranged anew, unit by unit, from epoch to epoch.

    A *slot* is a unit's number in this epoch's arrangement; ``_places`` says where the unit in each slot goes next.
    """

    def __init__(self, n: Any, *, group: int, seed: int, distributed: Any, whole_units: bool) -> None:
        super().__init__(n, group=group, seed=seed, distributed=distributed)
        self._arrangement = np.arange(self._units)
        self._origin = 0  # the first epoch that history() knows
        self._origin_arrangement: Indices = _IN_ORDER
        self._short: tuple[Indices | None, int] = None, 0  # an arrangement, and the slot of the short unit in it
        self._whole_units = whole_units  # is a unit's gradient given as one row?
        self._places = np.zeros(self._units, dtype=np.int8)  # by slot: the unit's place in this epoch
        self._out_of_turn = False  # has observe() been given indices in this epoch?
        self._set_aside = 0
        self._warned: set[str] = set()

    @property
    def set_aside(self) -> int:
        """How many examples' gradients were not finite and so took no part, over all epochs."""
        return self._set_aside

    def _is_over(self) -> bool:
        if not self._touched and self._drawn == self.n:
            self._warn_once(
                "no step",
                f"{type(self).__name__}: a whole pass was drawn and nothing observed, so the order stays as it is. "
                "Call order.step() after each loss.backward(). (Harmless if that pass was an evaluation.)",
            )
        return self._touched

    def _advance(self) -> None:
        super()._advance()
        self._places[:] = UNSEEN
        self._out_of_turn = False

    def _known_progress(self) -> int | None:
        if not self._out_of_turn:
            return super()._known_progress()
        seen = self._places != UNSEEN
        return int(seen.sum()) if seen[: seen.sum()].all() else None

    def _pass_over(self, slots: Indices) -> None:
        self._places[slots] = ASIDE

    def _put_aside(self, slots: NDArray[np.int64], count: int) -> None:
        """These units' gradients are not finite: they keep a place in the middle of the next epoch."""
        self._places[slots] = ASIDE
        self._set_aside += count
        self._warn_once(
            "set aside",
            f"{count} example(s) with a gradient that is not finite were set aside for epoch {self._epoch}: they "
            "are visited as before but have no say in the next order. order.set_aside counts them; check the "
            "loss and the learning rate if it grows.",
        )

    def _slots(self, count: int, indices: Any) -> Indices:
        """The slot of each row: the next drawn ones, or those of the examples named."""
        if indices is None:
            return self._next_slots(count)
        given = np.asarray(indices)
        if given.shape != (count,) or given.dtype.kind not in "iu":
            raise InputError(
                f"indices of shape {given.shape} and dtype {given.dtype}",
                expected=f"one integer for each of the {count} gradients",
                remedy="Pass the dataset index of each row.",
            )
        if self.group > 1:
            raise InputError(
                f"indices with group={self.group}",
                expected="units to come in the order drawn",
                remedy="Leave indices out and observe batches in the order in which they are drawn.",
            )
        if len(given) and (given.min() < 0 or given.max() >= self.n or len(np.unique(given)) < len(given)):
            raise InputError(
                "an index out of range or named twice",
                expected=f"different indices in range({self.n})",
                remedy="Pass the dataset index of each row.",
            )
        slots = np.take(self._slot_of(), given)
        late = slots >= self._drawn
        if late.any() or (self._places[slots] != UNSEEN).any():
            raise StepError(
                f"example {int(given[late | (self._places[slots] != UNSEEN)][0])}",
                expected="examples that were drawn in this epoch and not yet observed",
                remedy="Draw from order.sampler and observe each example once an epoch.",
            )
        return slots

    def _check_in_turn(self) -> None:
        if self._overtaking:
            raise StepError(
                "examples to be taken in the order drawn, from a loader with in_order=False",
                expected="batches that arrive in the order in which they were drawn",
                remedy="Leave in_order=False out, or have the dataset give each example's index and call "
                "observe(grads, indices=...).",
            )

    def _next_slots(self, count: int) -> Indices:
        self._check_in_turn()
        if self._out_of_turn:
            waiting = np.flatnonzero(self._places[: self._drawn] == UNSEEN)
            if count > len(waiting):
                self._check_drawn(self._drawn + count)
            return waiting[:count]
        self._check_drawn(count)
        positions = np.arange(self._taken, self._taken + count)
        return positions if self.group == 1 else self._slots_at(positions)

    def _settled(self, arrangement: Indices) -> Indices:
        """A micro-batch is a unit, and a loader makes its short batch last: so the short unit stays last."""
        if not self._whole_units or self.n % self.group == 0:
            return arrangement
        last = self._units - 1
        return np.append(arrangement[arrangement != last], last)

    def _sizes(self, slots: Indices) -> Indices:
        """How many examples the unit in each slot has; the last unit may be smaller."""
        return np.where(
            self._arrangement[slots] == self._units - 1, self.n - (self._units - 1) * self.group, self.group
        )

    def _slots_at(self, positions: Indices) -> Indices:
        """The slot of each position of this epoch: all are ``group`` long but the last unit's, wherever that is."""
        missing = self._units * self.group - self.n
        if not missing:
            return positions // self.group
        if self._short[0] is not self._arrangement:  # looked for once an epoch, not once a batch
            self._short = self._arrangement, int(np.flatnonzero(self._arrangement == self._units - 1)[0])
        behind = positions >= (self._short[1] + 1) * self.group - missing
        slots: Indices = (positions + missing * behind) // self.group
        return slots

    def _slot_of(self) -> Indices:
        slot_of = np.empty(self.n, dtype=np.int64)
        slot_of[self._expand(self._arrangement)] = np.arange(self.n)
        return slot_of

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, OrdainWarning, stacklevel=4)

    # --- saving -----------------------------------------------------------------------------------

    def state_dict(self, *, vectors: bool = True, history: bool = True) -> State:
        # An arrangement is replaced and never changed, so that states may share it.
        origin, first = (self._origin, self._origin_arrangement) if history else (self._epoch, self._arrangement)
        return super().state_dict(vectors=vectors, history=history) | {
            "arrangement": torch.from_numpy(self._arrangement),
            "places": torch.from_numpy(self._places.copy()),
            "out_of_turn": self._out_of_turn,
            "set_aside": self._set_aside,
            "origin": origin,
            "origin_arrangement": torch.from_numpy(first if origin else _IN_ORDER),
        }

    def _check_state(self, state: State) -> None:
        super()._check_state(state)
        check_permutation(state, "arrangement", self._units)
        check_count(state, "origin", state["epoch"])
        if state["origin"] or len(state["origin_arrangement"]):
            check_permutation(state, "origin_arrangement", self._units)
        check_count(state, "set_aside")
        if len(state["places"]) != self._units or not np.isin(state["places"].cpu().numpy(), _PLACES).all():
            raise broken("places", f"{len(state['places'])} numbers", f"{self._units} places of units")

    def _load(self, state: State) -> None:
        super()._load(state)
        self._arrangement = array(state["arrangement"])
        self._places = array(state["places"])
        self._out_of_turn, self._set_aside = state["out_of_turn"], state["set_aside"]
        self._origin = state["origin"]
        self._origin_arrangement = array(state["origin_arrangement"]) if self._origin else _IN_ORDER

    def _check_epoch(self, epoch: int) -> None:
        """A learned order is known up to the epoch being visited."""
        if not self._origin <= epoch <= self._epoch:
            raise InputError(
                f"epoch {epoch}",
                expected=f"an epoch from {self._origin} to {self._epoch}, the one being visited",
                remedy="Later orders are not known yet; earlier ones were left out by state_dict(history=False).",
            )
