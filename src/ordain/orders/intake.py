"""Gradients as they come in: of the same length every time, and sketched if the order is one of sketches."""

from __future__ import annotations

import math
from typing import Any

from ordain.balancing.state import broken, described
from ordain.errors import GradientError, InputError, StateError
from ordain.gradients import Gradients, Sketch
from ordain.gradients.memory import shrinking
from ordain.orders.saved_state import State


class Intake:
    """Checks and sketches.

    Args:
        given: the length of the gradients that come, if a model is watched; None: that of the first ones.
        sketch: what is applied to those that are longer than a sketch; None: nothing.

    Attributes:
        passive: whether it has nothing to do with what comes from the model.
    """

    def __init__(self, given: int | None, sketch: Sketch | None) -> None:
        self.sketch = sketch
        self._given = self._coming = given
        self._fixed = given is not None
        self.passive = self._fixed and sketch is None

    @property
    def dim(self) -> int | None:
        """The length of what is ordered by."""
        return self._given if self._given is None or self.sketch is None else min(self._given, self.sketch.k)

    def take(self, batch: Gradients) -> Gradients:
        """The batch as it is learned from."""
        if self._given is not None and batch.dim != self._given:
            raise GradientError(
                f"gradients of length {batch.dim}",
                expected=f"length {self._given}, as before",
                remedy="Pass the same parameters, in the same order, every time.",
            )
        self._coming = batch.dim
        sketch = self.sketch
        return batch if sketch is None or batch.dim <= sketch.k else shrinking(lambda: sketch(batch))

    def confirm(self) -> None:
        """The last batch was learned from: those that follow must be of its length."""
        self._given = self._coming

    def save(self) -> State:
        """The lengths."""
        return {"dim": self.dim} if self.sketch is None else {"dim": self.dim, "given_dim": self._given}

    def check(self, state: State) -> None:
        """Raise if the lengths are not these."""
        for name, length in self.save().items():
            saved = state[name]
            if saved is not None and (type(saved) is not int or saved < 1):
                raise broken(name, described(saved), "the length of a gradient")
            if length is not None and saved not in (None, length):
                raise StateError(
                    f"a state for gradients of length {described(saved)}",
                    expected=f"length {self._given}",
                    remedy="Load it into the model it was saved with.",
                )

    def load(self, state: State) -> None:
        """Go back to a state that has passed :meth:`check`."""
        if not self._fixed:
            self._given = self._coming = state["dim" if self.sketch is None else "given_dim"]


def check_loss_scale(loss_scale: Any) -> None:
    """Raise unless gradients can be divided by it."""
    number = isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool)
    if not number or not 0 < loss_scale < math.inf:
        raise InputError(
            f"loss_scale={loss_scale!r}",
            expected="a finite number > 0",
            remedy="Pass what the loss was multiplied by before backward(), as a float.",
        )
