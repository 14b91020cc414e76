"""Gradients as they come in: of the same length every time, and scaled or sketched where the order asks for it."""

from __future__ import annotations

import math
from typing import Any

from torch.amp import GradScaler

from ordain.balancing.state import broken, described
from ordain.errors import GradientError, InputError, StateError
from ordain.gradients import Gradients, Sketch
from ordain.gradients.memory import shrinking
from ordain.orders.preconditioning import Preconditioner
from ordain.orders.saved_state import State


class Intake:
    """Checks, scales and sketches.

    Args:
        given: the length of the gradients that come, if it is known already; None: that of the first ones.
        sketch: what is applied to those that are longer than a sketch; None: nothing.
        precondition: what scales them first; None: nothing.
        from_model: whether they come from a model, which does not change their length.

    Attributes:
        given: as above, once it is known.
        passive: whether it has nothing to do with what comes from the model and is of that length.
    """

    def __init__(
        self,
        given: int | None,
        sketch: Sketch | None,
        precondition: Preconditioner | None = None,
        *,
        from_model: bool = False,
    ) -> None:
        self.sketch, self._precondition = sketch, precondition
        self.given = self._coming = given
        self._fixed, self._from_model = given is not None, from_model
        self.passive = False
        if given is not None:
            self.confirm()

    @property
    def dim(self) -> int | None:
        """The length of what is ordered by."""
        return self.given if self.given is None or self.sketch is None else min(self.given, self.sketch.k)

    def take(self, batch: Gradients) -> Gradients:
        """The batch as it is exchanged with other ranks: in factors, or sketched."""
        if self.given is not None and batch.dim != self.given:
            raise GradientError(
                f"gradients of length {batch.dim}",
                expected=f"length {self.given}, as before",
                remedy="Pass the same parameters, in the same order, every time.",
            )
        self._coming = batch.dim
        sketch = self.sketch
        return batch if sketch is None or not self._sketched else shrinking(lambda: sketch(self._scaled(batch)))

    def learned(self, batch: Gradients) -> Gradients:
        """The same as it is learned from: scaled, unless it is a sketch, which is of scaled gradients."""
        return batch if self._sketched else self._scaled(batch)

    @property
    def _sketched(self) -> bool:
        return self.sketch is not None and self._coming is not None and self._coming > self.sketch.k

    def _scaled(self, batch: Gradients) -> Gradients:
        return batch if self._precondition is None else self._precondition(batch)

    def begin_pass(self, *, touched: bool) -> None:
        """A pass begins: that of a new epoch, unless some of it was observed."""
        if self._precondition is not None and not (touched and self._precondition.begun):
            self._precondition.begin_epoch()

    def confirm(self) -> None:
        """The last batch was learned from: those that follow must be of its length."""
        self.given = self._coming
        self.passive = self._from_model and self._precondition is None and not self._sketched

    def save(self, *, vectors: bool) -> State:
        """The lengths, and what they are scaled by."""
        scaled = {} if self._precondition is None else self._precondition.save(vectors=vectors)
        return self._lengths() | scaled

    def _lengths(self) -> State:
        return {"dim": self.dim} if self.sketch is None else {"dim": self.dim, "given_dim": self.given}

    def check(self, state: State) -> None:
        """Raise if the lengths are not these."""
        for name, length in self._lengths().items():
            saved = state[name]
            if saved is not None and (type(saved) is not int or saved < 1):
                raise broken(name, described(saved), "the length of a gradient")
            if length is not None and saved not in (None, length):
                raise StateError(
                    f"a state for gradients of length {described(saved)}",
                    expected=f"length {self.given}",
                    remedy="Load it into the model it was saved with.",
                )
        if self._precondition is not None:
            self._precondition.check(state, state["dim" if self.sketch is None else "given_dim"])

    def load(self, state: State) -> None:
        """Go back to a state that has passed :meth:`check`."""
        if not self._fixed:
            self.given = self._coming = state["dim" if self.sketch is None else "given_dim"]
        if self._precondition is not None:
            self._precondition.load(state)


def number_of(loss_scale: Any) -> float:
    """A loss scale as a number, which a gradient scaler has too; raise unless gradients can be divided by it."""
    scale = loss_scale.get_scale() if isinstance(loss_scale, GradScaler) else loss_scale
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not 0 < scale < math.inf:
        raise InputError(
            f"loss_scale={loss_scale!r}",
            expected="a finite number > 0, or a torch.amp.GradScaler",
            remedy="Pass what the loss was multiplied by before backward(), as a float, or the scaler before update().",
        )
    return float(scale)
