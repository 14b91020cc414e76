"""Signs, one vector after the other: each depends on all signs before it, so this cannot be vectorised.

``make bench`` prints how many times faster this is than a NumPy step per vector.

``state`` is float64[3] and belongs to one pass: |s|^2, number of failures, and one number of the
balancer's own (the walk's running bound on |z|; kernel halving's sigma^2).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Sup = Callable[[NDArray[np.int8]], float] | None  # |s|_inf after these signs

RULES = DETERMINISTIC, WALK, HALVING = 0, 1, 2  # the rules that decide() knows
FAILED, UNSURE = 0, 2  # what decide() may answer besides +1 and -1
# Sums may be reassociated (that is what lets them use SIMD); NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


def compile_loop(function: Function, *, exact: bool = False) -> Function:
    """Compile at the first call, and keep the result on disk where that is possible.

    ``exact``: without reassociation, every number is what NumPy would compute.
    """
    fastmath = set() if exact else _FASTMATH
    try:
        return cast("Function", numba.njit(cache=True, fastmath=fastmath)(function))
    except RuntimeError:  # no folder that the cache may be written to
        return cast("Function", numba.njit(fastmath=fastmath)(function))


def announce(loop: Any) -> None:
    """Log one line before a compilation that takes seconds, unless an earlier process left its result on disk."""
    stats = getattr(loop, "stats", None)  # None: Numba is switched off
    if stats is not None and not (stats.cache_path and any(Path(stats.cache_path).glob(f"*.{loop.__name__}-*.nbi"))):
        how = (
            "once (the result is cached on disk)" if stats.cache_path else "in every process (no cache can be written)"
        )
        logging.getLogger("ordain").warning("compiling %s: this takes about 5 seconds", how)


@compile_loop
def decide(
    kind: int, inner: float, square: float, sup: float, exact: bool, u: float, state: Floats, param: float
) -> int:
    """The sign for one vector z from <s,z>, |z|^2, (a bound on) |s|_inf and a uniform number."""
    if kind == DETERMINISTIC:  # Alg. 5: |s+z| < |s-z| if and only if <s,z> < 0; a tie gives -1
        return 1 if inner < 0.0 else -1
    if kind == WALK:  # Alg. 6 on z/R and s/R, with R the largest norm so far
        bound = max(state[2], math.sqrt(max(square, 0.0)))
        scaled = inner / (bound * bound) if bound > 0.0 else 0.0
        if abs(scaled) > param:
            return FAILED
        if sup > param * bound:
            return FAILED if exact else UNSURE
        state[2] = bound
        return 1 if u < 0.5 - scaled / (2.0 * param) else -1
    # Kernel halving: the threshold a adapts to the vectors; sigma^2 bounds the walk's variance.
    norm = math.sqrt(max(square, 0.0))
    variance = state[2]
    threshold = max(norm * math.sqrt(variance * param), square)
    if threshold <= 0.0:
        return 1 if u < 0.5 else -1
    growth = 1.0 + (square - 2.0 * threshold) * variance / (threshold * threshold)
    state[2] = variance + square * max(growth, 0.0)
    return 1 if u < 0.5 * (1.0 - inner / threshold) else -1


@compile_loop
def gram_signs(
    kind: int,
    dots: Floats,
    gram: Floats,
    start: int,
    sup: float,
    u: Floats,
    state: Floats,
    param: float,
    fallback: bool,
    signs: NDArray[np.int8],
) -> int:
    """Signs of a batch from dots = <s,z_t> (brought up to date in place) and gram = <z_i,z_j>.

    Returns the number of signs found; less than the batch where |s|_inf (``sup`` for the vector at
    ``start``, else bounded by |s|_2) must be known to go on; -1 - t where vector t failed.
    """
    size = len(dots)
    for t in range(start, size):
        exact = t == start and sup >= 0.0
        bound = sup if exact else math.sqrt(max(state[0], 0.0))
        square = gram[t, t]
        sign = decide(kind, dots[t], square, bound, exact, u[t], state, param)
        if sign == UNSURE:
            return t
        if sign == FAILED:
            state[1] += 1.0
            if not fallback:
                return -1 - t
            sign = 1 if dots[t] < 0.0 else -1
        state[0] += 2.0 * sign * dots[t] + square
        signs[t] = sign
        for j in range(t + 1, size):
            dots[j] += sign * gram[t, j]
    return size


def batch_signs(
    kind: int, dots: Floats, gram: Floats, u: Floats | None, state: Floats, param: float, fallback: bool, sup: Sup
) -> tuple[NDArray[np.int8], int]:
    """:func:`gram_signs` of the whole batch, with |s|_inf asked of ``sup`` where it must be known.

    Returns the signs and, if they are not all found, a number below 0: -1 - t where vector t failed.
    """
    size = len(dots)
    dots, gram = np.array(dots, dtype=np.float64), np.ascontiguousarray(gram, dtype=np.float64)
    u = np.zeros(size) if u is None else u
    signs = np.zeros(size, dtype=np.int8)
    done, bound = 0, -1.0
    while 0 <= done < size:
        done = gram_signs(kind, dots, gram, done, bound, u, state, param, fallback, signs)
        if 0 <= done < size:
            bound = sup(signs[:done]) if sup else math.inf
    return signs, done


@compile_loop
def stream_signs(
    kind: int,
    z: NDArray[Any],
    order: NDArray[np.int64],
    start: int,
    stop: int,
    paired: bool,
    centre: Floats,
    s: Floats,
    row: Floats,
    u: Floats,
    state: Floats,
    param: float,
    prefix: Floats,
    largest: Floats,
    signs: NDArray[np.int8],
) -> int:
    """Signs of vectors ``start .. stop`` of dense rows, one pass over memory and no Gram matrix.

    Vector t is z[order[t]] - centre, or z[order[2t]] - z[order[2t+1]] if ``paired``. ``s`` [d] and ``prefix`` [d], the
    sum of the vectors, are brought up to date, and so is ``largest`` [1], the largest |prefix|^2; ``row`` [d] is a
    scratch buffer for one vector; ``u`` and ``signs`` begin at ``start``.
    Returns ``stop``, or -1 - t where vector t failed.
    """
    d = z.shape[1]
    sign = 0
    row[:] = 0.0
    for t in range(start, stop):
        first = order[2 * t] if paired else order[t]
        inner = 0.0
        square = 0.0
        # The vector before goes into s on the way: so s is read once for each vector.
        if paired:
            second = order[2 * t + 1]
            for j in range(d):
                s[j] += sign * row[j]
                row[j] = float(z[first, j]) - float(z[second, j])
                inner += row[j] * s[j]
                square += row[j] * row[j]
        else:
            total = 0.0
            for j in range(d):
                s[j] += sign * row[j]
                row[j] = z[first, j] - centre[j]
                prefix[j] += row[j]
                inner += row[j] * s[j]
                square += row[j] * row[j]
                total += prefix[j] * prefix[j]
            largest[0] = max(largest[0], total)
        sign = decide(kind, inner, square, math.sqrt(max(state[0], 0.0)), False, u[t - start], state, param)
        if sign == UNSURE:
            sup = 0.0
            for j in range(d):
                sup = max(sup, abs(s[j]))
            sign = decide(kind, inner, square, sup, True, u[t - start], state, param)
        if sign == FAILED:
            state[1] += 1.0
            return -1 - t
        state[0] += 2.0 * sign * inner + square
        signs[t - start] = sign
    for j in range(d):
        s[j] += sign * row[j]
    return stop
