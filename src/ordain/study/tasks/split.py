"""Fixed splits: which examples are held out does not depend on any seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ordain.errors import InputError

__all__ = ["Parts", "few", "split"]

_SPLIT_SEED = 0
_HELD_OUT = 10  # a tenth


@dataclass(frozen=True)
class Parts:
    """Rows of a data set's training file: those to train on, to validate with, to test with."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


def split(n: int, *, valid: bool, test: bool, limit: int | None = None) -> Parts:
    """Shuffle ``n`` rows, always alike, and hold out a tenth for each set that the data lacks.

    ``limit`` keeps at most that many rows of each part, the first of the same shuffle.

    >>> parts = split(20, valid=True, test=False, limit=5)
    >>> len(parts.train), len(parts.valid), len(parts.test)
    (5, 2, 0)
    """
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(n)
    tenth = max(1, n // _HELD_OUT)
    rest = n - tenth * (valid + test)
    if rest < 1:
        raise InputError(f"{n} training examples", expected="enough to hold some out", remedy="Use more data.")
    train = shuffled[:rest]
    if limit is not None:
        if not 1 <= limit <= rest:
            raise InputError(
                f"--limit {limit}",
                expected=f"1 to {rest:,}, the number of training examples",
                remedy="Leave it out for all of them.",
            )
        train = train[:limit]
    held = shuffled[rest:]
    return Parts(train, held[: tenth * valid][:limit], held[tenth * valid :][:limit])


def few(n: int, limit: int | None) -> NDArray[np.int64]:
    """At most ``limit`` of ``n`` rows, always the same and from all over the set; all of them, in order, otherwise."""
    if limit is None or limit >= n:
        return np.arange(n)
    return np.random.default_rng(_SPLIT_SEED).permutation(n)[:limit]
