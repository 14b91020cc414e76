"""What an order asks of the other ranks of a data-parallel run, and what it does where there are none.

Orders know only these protocols; ``ordain.distributed`` provides them for torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
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
    """Brings together what the ranks observe in a step.

    Attributes:
        takes_indices: whether observations may name their examples.
    """

    takes_indices: bool

    def meeting(self, collect: Collect | None) -> AbstractContextManager[Iterable[Observed]]:
        """The examples of one step, of all ranks.

        Args:
            collect: returns this rank's batches. None: this rank has no more in this epoch, and only takes part while
                others have.
        """

    def loaded(self) -> None:
        """A state was loaded: the next meeting makes sure that all ranks have it."""

    def joinable(self, step: Callable[[], None], device: torch.device) -> Joinable | None:
        """For torch's ``Join``; None where there are no other ranks."""


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


class Alone:
    """The coordinator of a single process: batches are observed as they come."""

    takes_indices = True

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def meeting(self, collect: Collect | None) -> AbstractContextManager[Iterable[Observed]]:
        """See :class:`Coordinator`."""
        batches = collect() if collect is not None else []
        cursor = self._standing.cursor
        if len(batches) > 1 and not cursor.out_of_turn:  # before the first of them changes anything
            cursor.check_drawn(sum(batch if isinstance(batch, int) else batch.examples for batch in batches))
        return nullcontext([self._observed(batch) for batch in batches])

    def _observed(self, batch: Collected | int) -> Observed:
        nothing = np.empty(0, dtype=np.int64)
        if isinstance(batch, int):
            return Observed(batch, None, nothing, np.arange(batch))
        if self._standing.whole_units and batch.examples:
            arrangement = self._standing.arrangement
            slots = arrangement.slots_at(self._standing.cursor.waiting(batch.examples))
            arrangement.check_unit(np.unique(slots), batch.examples)
        return Observed(batch.examples, batch.gradients, np.arange(batch.examples), nothing)

    def loaded(self) -> None:
        """Nothing to make sure of."""

    def joinable(self, step: Callable[[], None], device: torch.device) -> Joinable | None:
        """None."""
        return None
