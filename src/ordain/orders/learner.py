"""What an order that looks at gradients asks of whatever learns from them."""

from __future__ import annotations

from typing import Any, Protocol

from ordain.balancing.step import Decision
from ordain.gradients import Gradients
from ordain.orders.arrangement import Arrangement
from ordain.orders.saved_state import State
from ordain.orders.sign_log import Log, Settle
from ordain.orders.units import Indices


class Learner(Protocol):
    """Learns from gradients what the next epoch's order is."""

    def log(self, units: int, settle: Settle) -> Log:
        """How past epochs are remembered: a :class:`SignLog` where places decide, else an :class:`OrderLog`."""

    def begin(self, arrangement: Arrangement, *, seed: int, dim: int | None) -> None:
        """Called once, before anything else; ``dim`` is the length of the gradients, if known."""

    def learn(self, batch: Gradients, slots: Indices, *, whole_units: bool, epoch: int) -> Decision:
        """Learn from gradients of examples (or, with ``whole_units``, of units) in these slots."""

    def abandoned(self) -> list[int]:
        """The slots of units that get no sign because :meth:`learn` was interrupted, since the last call."""

    def skip(self, slots: Indices) -> None:
        """Examples in these slots will not be observed."""

    def choose(self) -> Indices | None:
        """The epoch is over: the order of the next, as units; None where the places decide."""

    def next_epoch(self) -> None:
        """The next order has been adopted."""

    def release(self) -> None:
        """Nothing will be learned any more: free memory."""

    def identity(self) -> dict[str, Any]:
        """What must agree for a saved state to be loaded."""

    def save(self, *, vectors: bool) -> State:
        """Tensors, numbers and strings; ``vectors``: with what is as long as a gradient."""

    def check(self, state: State) -> None:
        """Raise StateError if no learner of this kind can have saved this."""

    def load(self, state: State) -> list[int]:
        """Go back to a state that has passed :meth:`check`; returns what :meth:`abandoned` returns."""

    def marks(self) -> Indices:
        """Numbers by which two states of the same epoch are told apart."""
