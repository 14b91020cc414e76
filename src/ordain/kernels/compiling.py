"""How the loops are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reassociated (that is what lets them use SIMD); NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


def compile_loop(function: Function) -> Function:
    """Compile at the first call, and keep the result on disk where that is possible."""
    try:
        return cast("Function", numba.njit(cache=True, fastmath=_FASTMATH)(function))
    except RuntimeError:  # no folder that the cache may be written to
        return cast("Function", numba.njit(fastmath=_FASTMATH)(function))
