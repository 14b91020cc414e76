"""One rank's share of an order: what it visits, and how its own count of draws and the common one go together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ordain.distributed.deal import Positions, Tail, covered, dealt, own, visited
from ordain.distributed.ranks import ProcessRanks, Ranks, agree
from ordain.errors import InputError

Mode = Literal["exact", "sum", "independent"]
_MODES = ("exact", "sum", "independent")
_TAILS = ("repeat", "drop", "uneven")


@dataclass(frozen=True)
class Distributed:
    """How an order works with the other ranks.

    Args:
        mode: ``"exact"`` gives every example the sign that one process would; ``"sum"`` sends less: each rank
            balances its own batch, and only signed sums are added up; ``"independent"``: each rank orders its own
            shard and hears nothing of the others.
        tail: when n does not go round: ``"repeat"`` a few examples, ``"drop"`` them for this epoch, or ``"uneven"``,
            one example less for some ranks, for torch's ``Join`` (see ``order.joinable``).
        timeout: seconds after which a rank that does not answer counts as lost.
        group: the process group, whose own timeout then counts; by default all ranks.
        ranks: what to send through instead of a process group.
    """

    mode: Mode = "exact"
    tail: Tail = "repeat"
    timeout: float = 600.0
    group: Any = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("mode", self.mode, _MODES), ("tail", self.tail, _TAILS)):
            if value not in allowed:
                raise InputError(
                    f"{name}={value!r}",
                    expected=" or ".join(repr(one) for one in allowed),
                    remedy="See docs/distributed.md.",
                )
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise InputError(f"timeout={self.timeout!r}", expected="seconds > 0", remedy="600 is ten minutes.")


class Share:
    """A rank's part in an order of ``n`` examples, dealt in blocks of ``each``."""

    def __init__(self, n: int, *, ranks: Ranks, options: Distributed, each: int = 1) -> None:
        self.n, self.ranks, self.options, self.each = n, ranks, options, each

    @cached_property
    def positions(self) -> Positions:
        """The positions of an epoch that this rank visits, in order."""
        if self.alone:
            return np.arange(self.n)
        return dealt(self.n, ranks=self.ranks.size, rank=self.ranks.rank, each=self.each, tail=self.options.tail)

    @property
    def alone(self) -> bool:
        """Does this rank have an order of its own?"""
        return self.options.mode == "independent"

    def indices(self, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        """What this rank visits of an epoch."""
        return visited(epoch, self.positions)

    def covered(self, drawn: int) -> int:
        """How many of the epoch's examples are drawn when every rank has drawn so many."""
        if self.alone:
            return drawn
        if self.options.tail == "uneven" and drawn >= len(self.positions):
            return self.n  # this rank may have one less than the others
        return covered(self.n, drawn, ranks=self.ranks.size, each=self.each)

    def own(self, done: int) -> int:
        """How many of this rank's examples are among the epoch's first ``done``."""
        return len(self.positions) if done >= self.n else own(self.positions, done)

    def shard(self, first: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the first epoch, what a rank with an order of its own has for good."""
        positions = dealt(len(first), ranks=self.ranks.size, rank=self.ranks.rank, tail=self.options.tail)
        return visited(first, positions)


def share_of(n: int, distributed: Any) -> Share | None:
    """This rank's share, or None where there is only one process.

    Args:
        n: the number of examples.
        distributed: ``"auto"`` (a share wherever torch.distributed is initialised), False, a mode, or
            a :class:`Distributed`.
    """
    if distributed is False:
        return None
    if distributed == "auto":
        if not (dist.is_available() and dist.is_initialized()):
            return None
        distributed = Distributed()
    if isinstance(distributed, str):
        distributed = Distributed(mode=distributed)  # type: ignore[arg-type]
    if not isinstance(distributed, Distributed):
        raise InputError(
            f"distributed={distributed!r}",
            expected="'auto', False, 'exact', 'sum', 'independent' or a Distributed(...)",
            remedy="Leave it out: inside torch.distributed the order is shared out, elsewhere it is not.",
        )
    ranks = distributed.ranks
    if ranks is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                f"distributed={distributed.mode!r} without a process group",
                expected="torch.distributed to be initialised",
                remedy="Start with torchrun and call torch.distributed.init_process_group() first.",
            )
        ranks = ProcessRanks(distributed.group, timeout=distributed.timeout)
    if n < ranks.size and distributed.tail == "drop":
        raise InputError(
            f"n={n} examples for {ranks.size} ranks with tail='drop'",
            expected="at least one example for each rank",
            remedy="Leave tail= out: then some examples are visited twice.",
        )
    return Share(n, ranks=ranks, options=distributed)


def other_ranks() -> bool:
    """Is this one process of several?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_agreement(share: Share | None, **facts: Any) -> None:
    """Raise, on every rank, if ranks were built with different facts."""
    if share is not None and share.ranks.size > 1:
        agree(share.ranks, facts)
