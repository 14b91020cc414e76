"""What an order asks of the other ranks of a data-parallel run; ``ordain.distributed`` provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.algorithms.join import Joinable

from ordain.gradients import Collected, Gradients
from ordain.orders.units import Indices

Collect = Callable[[], Sequence[Collected | int]]  # a number stands for so many examples that are passed over


@dataclass(frozen=True)
class Observed:
    """Part of a step: what is known of the next examples of the epoch.

    Attributes:
        count: how many examples of the epoch it is about.
        gradients: of those that have any; None: of none.
        rows: which of the ``count`` examples each row of the gradients belongs to.
        passed: which of them are passed over.
    """

    count: int
    gradients: Gradients | None
    rows: Indices
    passed: Indices


class Coordinator(Protocol):
    """Brings together what the ranks observe in a step."""

    def meeting(self, collect: Collect | None) -> AbstractContextManager[Iterable[Observed]]:
        """The examples of one step, of all ranks.

        Args:
            collect: returns this rank's batches. None: this rank has no more in this epoch, and only takes part while
                others have.
        """

    def loaded(self) -> None:
        """A state was loaded: the next meeting makes sure that all ranks have it."""

    def joinable(self, step: Callable[[], None]) -> Joinable:
        """For torch's ``Join``: ``step`` is called while other ranks have batches."""
