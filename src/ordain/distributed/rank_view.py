"""One rank's share of an order: what it visits, and how its own count of draws relates to the common one.

The order is dealt out like cards: position p of the epoch belongs to rank p mod W, so that ranks that draw batches of B
examples each draw, together, the next W B positions. Or it is blocks of ``each`` positions that are dealt.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ordain.distributed.coordinator import RankCoordinator
from ordain.distributed.ranks import ProcessRanks, Ranks, agree, heard
from ordain.errors import InputError, StepError
from ordain.orders.arrangement import Arrangement
from ordain.orders.cursor import Cursor
from ordain.orders.view import View

Mode = Literal["exact", "independent"]
Tail = Literal["repeat", "drop", "uneven"]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Distributed:
    """How an order works with the other ranks.

    Args:
        mode: ``"exact"`` gives every example the sign that a single process would; with ``"independent"`` each rank
            orders its own shard, without communication.
        tail: when n is not divisible by the number of ranks: ``"repeat"`` a few examples, ``"drop"`` them for this
            epoch, or ``"uneven"``, one example fewer for some ranks, for torch's ``Join`` (see ``order.joinable``).
        timeout: seconds after which a rank that does not answer is considered lost.
        group: the process group, whose own timeout then applies; all ranks by default.
        ranks: a replacement for the process group, for tests.
    """

    mode: Mode = "exact"
    tail: Tail = "repeat"
    timeout: float = 600.0
    group: Any = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (("mode", self.mode, Mode), ("tail", self.tail, Tail)):
            if value not in get_args(kind):
                expected = " or ".join(map(repr, get_args(kind)))
                raise InputError(f"{name}={value!r}", expected=expected, remedy="See docs/distributed.md.")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise InputError(f"timeout={self.timeout!r}", expected="seconds > 0", remedy="600 is ten minutes.")


def dealt(n: int, *, ranks: int, rank: int, each: int = 1, tail: Tail = "repeat") -> Positions:
    """``[m]``: the positions that a rank visits, in order; those from ``n`` on stand for the first ones, once more.

    ``"repeat"``: all ranks visit as many blocks, and some of them the first ones again, as torch's DistributedSampler
    does. ``"drop"``: the last blocks that do not go round are visited by nobody in this epoch. ``"uneven"``: some
    ranks visit one block less, which is for torch's ``Join``.

    >>> dealt(5, ranks=2, rank=1).tolist(), dealt(5, ranks=2, rank=1, tail="uneven").tolist()
    ([1, 3, 5], [1, 3])
    """
    blocks = -(-n // each)
    rounds, rest = divmod(blocks, ranks)
    if rest and (tail == "repeat" or (tail == "uneven" and rank < rest)):
        rounds += 1
    starts = (np.arange(rounds) * ranks + rank) * each
    positions: Positions = (starts[:, None] + np.arange(each)).ravel()
    # Where the last block is short, nothing stands at its missing positions, and the repeated blocks come behind it.
    missing = blocks * each - n
    kept = (positions < n) | (positions >= n + missing)
    return np.where(positions < n, positions, positions - missing)[kept]


class RankShare(View):
    """A rank's share in an order of ``n`` examples.

    Attributes:
        positions: the positions of an epoch that this rank visits, in order.
    """

    positions: Positions

    def __init__(self, n: int, *, ranks: Ranks, options: Distributed) -> None:
        super().__init__(n)
        self._ranks, self._options = ranks, options
        self.rank, self.ranks = ranks.rank, ranks.size
        self._independent = options.mode == "independent"
        if self._independent:
            self.identity = {"rank": self.rank, "ranks": self.ranks}
        self._deal(1)

    def _deal(self, each: int) -> None:
        self._each = each
        self.positions = dealt(self.n, ranks=self.ranks, rank=self.rank, each=each, tail=self._options.tail)

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def sent(self) -> int:  # type: ignore[override]
        return self._ranks.sent

    def deal_units(self, group: int) -> None:
        if not self._independent:
            self._deal(group)

    def indices(self, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.take(epoch, self.positions % len(epoch))

    def covered(self, drawn: int) -> int:
        if self._independent:
            return drawn
        if self._options.tail == "uneven" and drawn >= self.length:
            return self.n  # this rank may have one less than the others
        return min(self.n, -(-drawn // self._each) * self._each * self.ranks)

    def own(self, done: int) -> int:
        return self.length if done >= self.n else int(np.searchsorted(self.positions, done))

    def shard(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._independent:
            return members
        positions = dealt(len(members), ranks=self.ranks, rank=self.rank, tail=self._options.tail)
        self.n, self.positions = len(positions), np.arange(len(positions))
        return np.take(members, positions % len(members))

    def agree(self, **facts: Any) -> None:
        if self.ranks > 1:
            agree(self._ranks, facts | {"mode": self._options.mode, "tail": self._options.tail})

    def heard(self) -> AbstractContextManager[None]:
        return heard(self._ranks)

    def coordinator(self, cursor: Cursor, arrangement: Arrangement, **options: Any) -> RankCoordinator | None:
        if self._independent:
            return None
        mine = {"positions": self.positions, "each": self._each, "group": self._options.group}
        return RankCoordinator(self._ranks, cursor, arrangement, **mine, **options)


class Unshared(View):
    """The view of an order built before torch.distributed was initialised, without ``distributed=False``."""

    def check_draw(self) -> None:
        if other_ranks():
            raise StepError(
                "a draw from an order created before init_process_group(): every rank would visit all examples",
                expected="an order created after init_process_group()",
                remedy="Create the order after init_process_group(), or pass distributed=False if each rank should "
                "visit all examples.",
            )


def view_for(n: int, distributed: Any) -> View:
    """Which part of an order of ``n`` examples this process visits; ``distributed`` as in :class:`~ordain.Order`."""
    if distributed is False:
        return View(n)
    if distributed == "auto":
        if not _initialized():
            return Unshared(n)
        distributed = Distributed()
    if isinstance(distributed, str):
        distributed = Distributed(mode=distributed)  # type: ignore[arg-type]
    if not isinstance(distributed, Distributed):
        raise InputError(
            f"distributed={distributed!r}",
            expected="'auto', False, 'exact', 'independent' or a Distributed(...)",
            remedy="Leave it out: inside torch.distributed the order is sharded, elsewhere it is not.",
        )
    ranks = distributed.ranks
    if ranks is None:
        if not _initialized():
            raise InputError(
                f"distributed={distributed.mode!r} without a process group",
                expected="torch.distributed to be initialised",
                remedy="Start with torchrun and call torch.distributed.init_process_group() first.",
            )
        ranks = ProcessRanks(distributed.group, timeout=distributed.timeout)
    if n < ranks.size and distributed.tail != "repeat":
        raise InputError(
            f"n={n} examples for {ranks.size} ranks with tail={distributed.tail!r}",
            expected="at least one example for each rank",
            remedy="Leave tail= out: then some examples are visited twice.",
        )
    return RankShare(n, ranks=ranks, options=distributed)


def other_ranks() -> bool:
    """Is this one process of several?"""
    return _initialized() and dist.get_world_size() > 1


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
