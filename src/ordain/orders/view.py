"""Which part of an epoch this process visits; ``ordain.distributed`` registers views for torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ordain.orders.units import Indices


class View:
    """The view of a single process, which visits all ``n`` examples; a rank overrides what is different.

    Attributes:
        n: the number of examples in the epoch.
        examples: the number of examples in the dataset.
        rank: this process.
        ranks: how many there are; 0 where the order is not shared out.
        sent: bytes sent to other ranks for the order.
        identity: what must agree for a saved state to be loaded.
    """

    rank = ranks = sent = 0

    def __init__(self, n: int) -> None:
        self.n = self.examples = n
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

    def coordinator(self, cursor: Any, arrangement: Any, **options: Any) -> Any:
        """A Coordinator (see coordination.py) of the ranks' steps; None: nothing to coordinate.

        Options are ``device``, where gradients live, for a rank that has none; and ``marks``, see :class:`Learner`.
        """
        return None


_views: list[Callable[[int, Any], View]] = [lambda n, distributed: View(n)]


def register_views(build: Callable[[int, Any], View]) -> None:
    """Have ``build(n, distributed)`` say from now on what a process visits."""
    _views.append(build)


def view_of(n: int, distributed: Any) -> View:
    """This process's view of an order of ``n`` examples."""
    return _views[-1](n, distributed)
