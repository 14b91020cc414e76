"""Who visits what: the global order dealt out to ranks like cards, and what is done with an uneven rest.

Position p of the epoch belongs to rank p mod W, so that ranks that draw batches of B examples each draw, together,
the next W B positions. With ``each`` > 1 it is blocks of so many positions that are dealt.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Tail = Literal["repeat", "drop", "uneven"]
Positions = NDArray[np.int64]


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
