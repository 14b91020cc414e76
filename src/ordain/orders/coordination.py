"""What an order asks of the other ranks of a data-parallel run, and what it does where there are none.

Orders know only these protocols; ``ordain.distributed`` provides them for torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import Joinable

from ordain.gradients import Collected, Gradients
from ordain.orders.arrangement import Arrangement
from ordain.orders.cursor import Cursor, View
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


class RankView(View, Protocol):
    """A rank's share of an order.

    Attributes:
        rank: this process.
        ranks: how many there are.
        sent: bytes sent for the order so far.
        identity: what must agree for a saved state to be loaded.
    """

    rank: int
    ranks: int
    identity: dict[str, Any]

    @property
    def sent(self) -> int:
        """Bytes sent for the order so far."""

    def shard(self, members: Indices) -> Indices:
        """Of the examples in the order of the first epoch, those that this rank's order is about."""

    def agree(self, **facts: Any) -> None:
        """Raise on every rank, with all values named, if ranks were built with different facts."""

    def heard(self) -> AbstractContextManager[None]:
        """What raises in here raises on the other ranks too."""

    def coordinator(self, standing: Standing) -> Coordinator | None:
        """Coordinates the ranks' steps; None where each has an order of its own."""

    def deal_units(self, group: int) -> None:
        """A rank's batches consist of whole units of so many examples."""


class Provider(Protocol):
    """What ``ordain.distributed`` registers."""

    def view(self, n: int, distributed: Any) -> RankView | None:
        """This rank's share of an order of ``n`` examples; None where there is only one process."""

    def other_ranks(self) -> bool:
        """Is this one process of several?"""


class SingleProcess:
    """The provider before another one is registered: there are no ranks."""

    def view(self, n: int, distributed: Any) -> RankView | None:
        """None."""
        return None

    def other_ranks(self) -> bool:
        """No."""
        return False


_providers: list[Provider] = [SingleProcess()]


def register_provider(provider: Provider) -> None:
    """Use this provider from now on."""
    _providers.append(provider)


def provider() -> Provider:
    """The provider that was registered last."""
    return _providers[-1]
