"""Which part of an epoch this process visits, and what it asks of the other ranks of a data-parallel run.

Orders know only what is here; ``ordain.distributed`` registers views for torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.algorithms.join import Joinable

from ordain.gradients import Collected, Gradients
from ordain.orders.units import Indices

if TYPE_CHECKING:
    from ordain.orders.arrangement import Arrangement
    from ordain.orders.cursor import Cursor

Collect = Callable[[], Sequence[Collected | int]]  # a number stands for so many examples that are passed over


class View:
    """The view of a single process, which visits all ``n`` examples; a rank overrides what is different.

    Attributes:
        n: the number of examples in the epoch.
        rank: this process.
        ranks: how many there are; 0 where the order is not shared out.
        sent: bytes sent to other ranks for the order.
        identity: what must agree for a saved state to be loaded.
    """

    rank = ranks = sent = 0

    def __init__(self, n: int) -> None:
        self.n = n
        self.identity: dict[str, Any] = {}

    @property
    def length(self) -> int:
        """How many indices this process draws in an epoch."""
        return self.n

    def check_draw(self) -> None:
        """Called before the first draw of a pass; may refuse it."""

    def indices(self, epoch: Indices) -> Indices:
        """The indices that this process draws, from those of the whole epoch."""
        return epoch

    def covered(self, drawn: int) -> int:
        """How many of the epoch's examples are drawn when every process has drawn so many."""
        return drawn

    def own(self, done: int) -> int:
        """How many of this process's draws are among the epoch's first ``done`` examples."""
        return done

    def shard(self, members: Indices) -> Indices:
        """Of the examples in the order of the first epoch, those that this process's order is about."""
        return members

    def deal_units(self, group: int) -> None:
        """A rank's batches consist of whole units of so many examples."""

    def agree(self, **facts: Any) -> None:
        """Raise on every rank, with all values named, if ranks were built with different facts."""

    def heard(self) -> AbstractContextManager[None]:
        """What raises in here raises on the other ranks too."""
        return nullcontext()

    def coordinator(self, standing: Standing) -> Coordinator | None:
        """Coordinates the ranks' steps; None where there is nothing to coordinate."""
        return None


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


@dataclass(frozen=True)
class Standing:
    """The parts of an order that ranks must agree on.

    Attributes:
        cursor: where the epoch stands.
        arrangement: this epoch's order.
        whole_units: whether a row of gradients stands for a whole unit.
        device: where gradients live, for a rank that has none.
        marks: numbers by which two states of the same epoch are told apart.
    """

    cursor: Cursor
    arrangement: Arrangement
    whole_units: bool
    device: torch.device
    marks: Callable[[], Indices]


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

    def joinable(self, step: Callable[[], None], device: torch.device) -> Joinable:
        """For torch's ``Join``: ``step`` is called while other ranks have batches."""


def _whole(n: int, distributed: Any) -> View:
    return View(n)


_views: list[Callable[[int, Any], View]] = [_whole]


def register_views(build: Callable[[int, Any], View]) -> None:
    """Have ``build(n, distributed)`` say from now on what a process visits."""
    _views.append(build)


def view_of(n: int, distributed: Any) -> View:
    """This process's view of an order of ``n`` examples."""
    return _views[-1](n, distributed)
