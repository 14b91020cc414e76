"""This epoch's permutation of the units, the place that each gets in the next, and how past epochs are replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ordain.balancing.state import broken
from ordain.balancing.step import ASIDE, UNSEEN, WAITING
from ordain.errors import InputError, OrdainWarning, StepError
from ordain.gradients import Gradients
from ordain.orders.saved_state import State, array, check_count, check_permutation
from ordain.orders.sign_log import Log, Settle
from ordain.orders.units import Indices, Units

_PLACES = (1, -1, UNSEEN, ASIDE, WAITING)
_IN_ORDER = np.empty(0, dtype=np.int64)  # the units of epoch 0 are range(count), which need not be kept


class Arrangement:
    """The order of a learned epoch.

    A *slot* is a unit's number in this epoch's order; its *place* says where the unit in that slot goes next.

    Args:
        units: what is ordered.
        log: builds the log of past epochs.
        learns: in which epochs the order is learned from.
        whole_units: gradients are of whole units. One that is smaller than the others is kept last, where a loader has
            its short batch.

    Attributes:
        units: as above.
        whole_units: as above.
        order: ``[count]``, the unit in each slot. Replaced and never changed: states share it.
        places: ``[count]`` int8, by slot: +1, -1, or a place in the middle.
        not_finite: how many examples had a gradient that is not finite, over all epochs.
    """

    def __init__(
        self, units: Units, *, log: Callable[[int, Settle], Log], learns: Callable[[int], bool], whole_units: bool
    ) -> None:
        self.units, self.whole_units = units, whole_units
        self.order: Indices = np.arange(units.count)
        self.places = np.zeros(units.count, dtype=np.int8)
        self.not_finite = 0
        self._learns = learns
        self._log = log(units.count, self.settle)
        self._origin = 0  # the first epoch that is known
        self._first: Indices = _IN_ORDER
        self._short: tuple[Indices | None, int] = None, 0  # an order, and the slot of the short unit in it
        self._warned: set[str] = set()

    def settle(self, order: Indices) -> Indices:
        """Move the short unit to the end, if that is where it stays."""
        if not self.whole_units or not self.units.missing:
            return order
        last = self.units.count - 1
        return np.append(order[order != last], last)

    # --- which example is which -------------------------------------------------------------------

    def indices(self) -> Indices:
        """``[n]``: the examples of this epoch, in order."""
        return self.units.expand(self.order)

    def sizes(self, slots: Indices) -> Indices:
        """How many examples the unit in each slot has."""
        return self.units.sizes(self.order[slots])

    def slots_at(self, positions: Indices) -> Indices:
        """The slot of each position of this epoch."""
        group, missing = self.units.group, self.units.missing
        if not missing:  # so it is with single examples
            return positions // group
        if self._short[0] is not self.order:  # found once an epoch, not once a batch
            self._short = self.order, int(np.flatnonzero(self.order == self.units.count - 1)[0])
        behind = positions >= (self._short[1] + 1) * group - missing
        return np.asarray((positions + missing * behind) // group)

    def slots_of(self, given: Any, *, count: int, drawn: int) -> Indices:
        """The slots of examples that are named by their index: ``count`` of them, among the first ``drawn``."""
        named = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
        if named.shape != (count,) or named.dtype.kind not in "iu":
            raise InputError(
                f"indices of shape {named.shape} and dtype {named.dtype}",
                expected=f"one integer for each of the {count} gradients",
                remedy="Pass the dataset index of each row, of all backward passes since the last step().",
            )
        if self.units.group > 1:
            raise InputError(
                f"indices with group={self.units.group}",
                expected="units in the order in which they were drawn",
                remedy="Leave indices out and observe batches in the order in which they are drawn.",
            )
        n = self.units.n
        if len(named) and (named.min() < 0 or named.max() >= n or len(np.unique(named)) < len(named)):
            raise InputError(
                "an index that is out of range or repeated",
                expected=f"distinct indices in range({n})",
                remedy="Pass the dataset index of each row.",
            )
        slot_of = np.empty(n, dtype=np.int64)
        slot_of[self.indices()] = np.arange(n)
        slots: Indices = np.take(slot_of, named)
        wrong = (slots >= drawn) | (self.places[slots] != UNSEEN)
        if wrong.any():
            raise StepError(
                f"example {int(named[wrong][0])}",
                expected="examples that were drawn in this epoch and not yet observed",
                remedy="Draw from order.sampler and observe each example once an epoch.",
            )
        return slots

    def unseen(self, drawn: int) -> Indices:
        """The slots of drawn examples that were not observed, where observations name their examples."""
        return np.flatnonzero(self.places[:drawn] == UNSEEN)

    def observed(self) -> int | None:
        """How many examples were observed, if they are the first of the epoch; None if they are not."""
        seen = self.places != UNSEEN
        return int(seen.sum()) if seen[: seen.sum()].all() else None

    def check_unit(self, slots: Indices, examples: int) -> None:
        """Raise unless these are one whole unit."""
        if len(slots) != 1 or examples != self.sizes(slots)[0]:
            raise StepError(
                f"a micro-batch of {examples} examples",
                expected=f"units of group={self.units.group} examples, one per backward",
                remedy="Set batch_size and group to the same number.",
            )

    # --- what is decided --------------------------------------------------------------------------

    def note_not_finite(self, count: int, epoch: int) -> None:
        """Count examples whose gradient is not finite, and warn of the first."""
        self.not_finite += count
        self.warn_once(
            "not finite",
            f"{count} example(s) with a gradient that is not finite were set aside for epoch {epoch}: they are visited "
            "as before but do not influence the next order. order.set_aside counts them; check the loss and the "
            "learning rate if it grows.",
        )

    def set_aside(self, slots: Any) -> None:
        """These units get no sign and go in the middle."""
        self.places[slots] = ASIDE

    def live(self, batch: Gradients, slots: Indices) -> tuple[Gradients, Indices]:
        """The rows of units that were not set aside."""
        rows = np.flatnonzero(self.places[slots] != ASIDE)
        if len(rows) == len(slots):
            return batch, slots
        return batch.select(torch.from_numpy(rows).to(batch.device)), slots[rows]

    def advance(self, chosen: Indices | None) -> None:
        """The epoch was learned from: adopt the order that the places, or ``chosen``, give."""
        self.order = self._log.following(self.order, self.places, chosen)
        self.clear()

    def clear(self) -> None:
        """Nothing is decided."""
        self.places[:] = UNSEEN

    def history(self, epoch: int, present: int) -> Indices:
        """``[n]``: the examples in the order in which ``epoch`` visited them; ``present`` is the present epoch."""
        if not self._origin <= epoch <= present:
            raise InputError(
                f"epoch {epoch}",
                expected=f"an epoch from {self._origin} to {present}, the current one",
                remedy="Later orders are not known yet; earlier ones were left out by state_dict(history=False).",
            )
        if epoch == present:
            return self.indices()
        first = self._first if self._origin else np.arange(self.units.count)
        return self.units.expand(self._log.replay(first, self._learned(self._origin, epoch), self.order))

    def _learned(self, start: int, stop: int) -> int:
        return sum(self._learns(epoch) for epoch in range(start, stop))

    def warn_once(self, topic: str, message: str) -> None:
        """Warn of something that would otherwise be said again and again."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, OrdainWarning, stacklevel=5)

    # --- saving -----------------------------------------------------------------------------------

    def save(self, *, epoch: int, history: bool) -> State:
        """Tensors and numbers; ``history``: with what past epochs are replayed from."""
        origin, first = (self._origin, self._first) if history else (epoch, self.order)
        rows = self._log.rows if history else self._log.rows[:0]
        return {
            "arrangement": torch.from_numpy(self.order),
            "places": torch.from_numpy(self.places.copy()),
            "set_aside": self.not_finite,
            "origin": origin,
            "origin_arrangement": torch.from_numpy(first if origin else _IN_ORDER),
            self._log.field: torch.from_numpy(rows),
        }

    def check(self, state: State) -> None:
        """Raise if no arrangement can have saved this."""
        count = self.units.count
        check_permutation(state, "arrangement", count)
        check_count(state, "origin", state["epoch"])
        if state["origin"] or len(state["origin_arrangement"]):
            check_permutation(state, "origin_arrangement", count)
        check_count(state, "set_aside")
        if len(state["places"]) != count or not np.isin(state["places"].cpu().numpy(), _PLACES).all():
            raise broken("places", f"{len(state['places'])} numbers", f"{count} places of units")
        learned, field = self._learned(state["origin"], state["epoch"]), self._log.field
        if len(state[field]) != learned:
            raise broken(field, f"of {len(state[field])} epochs", str(learned))
        if field == "past":
            check_permutation(state, field, count)

    def load(self, state: State) -> None:
        """Go back to a state that has passed :meth:`check`."""
        self.order = array(state["arrangement"])
        self.places = array(state["places"])
        self.not_finite = state["set_aside"]
        self._origin = state["origin"]
        self._first = array(state["origin_arrangement"]) if self._origin else _IN_ORDER
        self._log.rows = array(state[self._log.field])
