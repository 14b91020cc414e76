"""In which epochs an order learns. In the others it is visited as it is, and a step costs nothing extra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ordain.errors import InputError

__all__ = ["Always", "Schedule", "Until"]


@runtime_checkable
class Schedule(Protocol):
    """Write your own with these two methods, and a ``repr`` that names its settings: it is saved with the order.

    Both must depend on the epoch alone, so that a resumed run learns in the same epochs.
    """

    def learns(self, epoch: int) -> bool:
        """Are gradients looked at in this epoch, to find the order of the next?"""

    def ends(self, epoch: int) -> bool:
        """Does no epoch from this one on learn? Memory is then released."""


@dataclass(frozen=True)
class Always:
    """Learn in every epoch."""

    def learns(self, epoch: int) -> bool:
        return True

    def ends(self, epoch: int) -> bool:
        return False


@dataclass(frozen=True)
class Until:
    """Learn in the first ``epochs`` epochs, then keep the order. ``Until(1)`` is the paper's *1-step GraB*.

    >>> [Until(2).learns(epoch) for epoch in range(4)]
    [True, True, False, False]
    """

    epochs: int

    def __post_init__(self) -> None:
        check_epochs(self.epochs, f"Until({self.epochs!r})")

    def learns(self, epoch: int) -> bool:
        return epoch < self.epochs

    def ends(self, epoch: int) -> bool:
        return epoch >= self.epochs


def check_epochs(epochs: Any, came: str) -> None:
    """Raise unless this is a number of epochs."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError(came, expected="a number of epochs >= 1", remedy="1 learns in the first epoch only.")


def check_schedule(schedule: Any) -> Schedule:
    """None is :class:`Always`; anything else must have a schedule's methods."""
    if schedule is None:
        return Always()
    if isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule={schedule!r}",
            expected="a Schedule: an object with learns(epoch) and ends(epoch)",
            remedy="Write schedule=Until(1), for example.",
        )
    return schedule
