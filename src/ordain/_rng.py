"""Randomness as a pure function of (seed, stream, position): nothing to save, nothing global.

Philox is counter-based, so the number drawn for the t-th vector of an epoch is the same whatever
the batch size, and a resumed run needs no generator state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.errors import InputError

_PERMUTATION, _UNIFORM, _REPLACEMENT, _HASH = range(4)
_SEED_LIMIT = 2**64
_STREAM_LIMIT = 2**56


def check_seed(seed: Any) -> int:
    """Return ``seed`` as an int in [0, 2**64), or raise."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < _SEED_LIMIT:
        raise InputError(f"seed={seed!r}", expected="an integer in [0, 2**64)", remedy="Pass seed=0, for example.")
    return int(seed)


def _philox(seed: int, purpose: int, stream: int) -> np.random.Philox:
    if not 0 <= stream < _STREAM_LIMIT:
        raise InputError(f"stream {stream}", expected="a number in [0, 2**56)", remedy="Use fewer epochs.")
    return np.random.Philox(key=np.array([seed, (purpose << 56) | stream], dtype=np.uint64))


def permutation(n: int, *, seed: int, stream: int = 0) -> NDArray[np.int64]:
    """A uniformly random permutation of ``range(n)``; stream 0 is every order's first epoch."""
    return np.random.Generator(_philox(seed, _PERMUTATION, stream)).permutation(n)


def with_replacement(n: int, *, seed: int, stream: int) -> NDArray[np.int64]:
    """``n`` independent uniform draws from ``range(n)``."""
    return np.random.Generator(_philox(seed, _REPLACEMENT, stream)).integers(0, n, size=n)


def uniforms(count: int, *, seed: int, stream: int, start: int = 0) -> NDArray[np.float64]:
    """Numbers ``start .. start + count`` of a stream of uniforms in [0, 1).

    >>> whole = uniforms(5, seed=1, stream=2)
    >>> bool((whole[3:] == uniforms(2, seed=1, stream=2, start=3)).all())
    True
    """
    # One Philox block gives four numbers; one block a position keeps positions addressable.
    bits = _philox(seed, _UNIFORM, stream).advance(start)
    return np.random.Generator(bits).random((count, 4))[:, 0]


def hashes(count: int, *, seed: int, stream: int) -> NDArray[np.uint64]:
    """Random 64-bit words for ``range(count)``: a table of hashes that anybody with the seed can make again."""
    return _philox(seed, _HASH, stream).random_raw(count)
