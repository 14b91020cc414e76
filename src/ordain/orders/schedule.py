"""The epochs in which an order learns. In the others it does not change, and a step costs nothing extra."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ordain.errors import InputError

__all__ = ["Always", "Every", "Schedule", "Until"]


@runtime_checkable
class Schedule(Protocol):
    """A function of the epoch that returns whether the order learns in it.

    It must depend on the epoch alone, so that a resumed run learns in the same epochs. An object may also have a method
    ``ends(epoch)``, which returns True if no epoch from this one on learns. Memory is then released.
    """

    def __call__(self, epoch: int, /) -> bool:
        """Whether to learn in this epoch, to find the order of the next one."""


@dataclass(frozen=True)
class Always:
    """Learn in every epoch, as the paper does."""

    def __call__(self, epoch: int) -> bool:
        return True


@dataclass(frozen=True)
class Until:
    """Learn in the first ``epochs`` epochs, then keep the order. ``Until(1)`` is the paper's *1-step GraB*.

    >>> [epoch for epoch in range(4) if Until(2)(epoch)]
    [0, 1]
    """

    epochs: int

    def __post_init__(self) -> None:
        check_epochs(self.epochs, repr(self))

    def __call__(self, epoch: int) -> bool:
        return epoch < self.epochs

    def ends(self, epoch: int) -> bool:
        return epoch >= self.epochs


@dataclass(frozen=True)
class Every:
    """Learn in the first ``after`` epochs, then in every ``k``-th epoch.

    >>> [epoch for epoch in range(9) if Every(3)(epoch)], [epoch for epoch in range(9) if Every(3, after=2)(epoch)]
    ([0, 3, 6], [0, 1, 4, 7])
    """

    k: int
    _: KW_ONLY
    after: int = 1

    def __post_init__(self) -> None:
        check_epochs(self.k, repr(self))
        check_epochs(self.after, repr(self))

    def __call__(self, epoch: int) -> bool:
        return epoch < self.after or (epoch - self.after + 1) % self.k == 0


def check_epochs(epochs: Any, came: str) -> None:
    """Raise unless this is a number of epochs."""
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError(came, expected="a number of epochs >= 1", remedy="Until(1) learns in the first epoch only.")


class Learning:
    """A schedule as an order asks it: None is :class:`Always`, and every answer is checked.

    Attributes:
        name: of the schedule, in saved states. The same in every process: no address is part of it.
    """

    def __init__(self, learn: Any) -> None:
        self._learn: Schedule = Always() if learn is None else learn
        if isinstance(self._learn, type) or not callable(self._learn):
            raise InputError(
                f"learn={learn!r}",
                expected="Always(), Until(k), Every(k) or a function of the epoch",
                remedy="Write learn=Every(5) or learn=lambda epoch: epoch % 5 == 0, for example.",
            )
        self.name = re.sub(" at 0x[0-9a-fA-F]+", "", getattr(learn, "__qualname__", repr(self._learn)))
        self.in_epoch(0)

    def in_epoch(self, epoch: int) -> bool:
        """Does the order learn in this epoch?"""
        answer = self._learn(epoch)
        if not isinstance(answer, (bool, np.bool_)):
            raise InputError(
                f"learn={self.name}, which returned {answer!r} for epoch {epoch}",
                expected="True or False",
                remedy="Pass a function that takes the epoch and says whether to learn in it.",
            )
        return bool(answer) and not self.ended(epoch)

    def ended(self, epoch: int) -> bool:
        """Does no epoch from this one on learn?"""
        ends = getattr(self._learn, "ends", None)
        return ends is not None and bool(ends(epoch))
