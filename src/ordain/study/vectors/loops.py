"""The compiled loops of these studies: one number after the other, too slow in Python.

Imported only when a study runs, because numba takes a while to load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from ordain._kernels import compile_loop
from ordain.study.vectors.problems import KINKED, QUADRATIC

__all__ = ["clipped_walk", "epoch", "longest_prefixes", "summed_signs"]

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]


def _compiled(function: Function) -> Function:
    try:
        return cast("Function", numba.njit(cache=True)(function))
    except RuntimeError:  # no folder that the cache may be written to
        return cast("Function", numba.njit(function))


@_compiled
def longest_prefixes(z: NDArray[Any], mean: Floats, sigma: NDArray[np.int64]) -> tuple[float, float]:
    """The longest centred prefix sum of ``z [n, d]`` in the order ``sigma``, in l2 and in l-inf, in one pass."""
    total = np.zeros(z.shape[1])
    l2, linf = 0.0, 0.0
    for t in range(len(sigma)):
        square, largest = 0.0, 0.0
        row = z[sigma[t]]
        for j in range(len(total)):
            value = total[j] + (row[j] - mean[j])
            total[j] = value
            square += value * value
            largest = max(largest, abs(value))
        l2, linf = max(l2, square), max(linf, largest)
    return math.sqrt(l2), linf


@_compiled
def clipped_walk(z: NDArray[Any], mean: Floats, sigma: NDArray[np.int64], u: Floats, c: float) -> NDArray[np.int8]:
    """Algorithm 6's signs for the centred rows of ``z [n, d]`` in the order ``sigma``, clipped where it would fail.

    The rows are scaled by their largest norm; ``u [n]`` are uniform numbers.
    """
    n, d = z.shape
    square = 0.0
    for i in range(n):
        of_row = 0.0
        for j in range(d):
            of_row += (z[i, j] - mean[j]) ** 2
        square = max(square, of_row)
    total, signs = np.zeros(d), np.empty(n, dtype=np.int8)
    for t in range(n):
        row = z[sigma[t]]
        inner = 0.0
        for j in range(d):
            inner += total[j] * (row[j] - mean[j])
        signs[t] = 1 if u[t] < 0.5 - inner / square / (2.0 * c) else -1  # beyond [0, 1] the sign is certain
        for j in range(d):
            total[j] += signs[t] * (row[j] - mean[j])
    return signs


@compile_loop
def summed_signs(
    z: NDArray[Any], sigma: NDArray[np.int64], world: int, each: int, paired: bool, centre: Floats
) -> NDArray[np.int8]:
    """Algorithm 5's sign for each position of ``sigma`` where ranks know each other's choices a step late.

    Position p is rank p mod ``world``'s; a step is ``each`` positions of every rank. A rank balances its own vectors
    (less ``centre``; or the differences of its own consecutive ones) against the sum of all ranks as the step began and
    what it has added to it itself. Then all that was added is added up. An odd one of a rank's step gets 0.
    """
    n, d = len(sigma), z.shape[1]
    shared, own, added, row = np.zeros(d), np.empty(d), np.empty(d), np.empty(d)
    signs = np.zeros(n, dtype=np.int8)
    apart = 2 * world if paired else world
    for start in range(0, n, world * each):
        stop = min(n, start + world * each)
        added[:] = 0.0
        for rank in range(min(world, stop - start)):
            own[:] = shared
            for p in range(start + rank, stop, apart):
                first, second = z[sigma[p]], z[sigma[p]]
                if paired:
                    if p + world >= stop:
                        break
                    second = z[sigma[p + world]]
                inner = 0.0
                for j in range(d):
                    row[j] = float(first[j]) - float(second[j]) if paired else float(first[j]) - centre[j]
                    inner += row[j] * own[j]
                sign = 1 if inner < 0.0 else -1
                signs[p] = sign
                if paired:
                    signs[p + world] = -sign
                for j in range(d):
                    own[j] += sign * row[j]
                    added[j] += sign * row[j]
        for j in range(d):
            shared[j] += added[j]
    return signs


@_compiled
def slope_at(kind: int, low: float, high: float, x: float) -> float:
    """h'(x) of one coordinate with curvatures between ``low`` and ``high``: see ``problems.py``."""
    if kind == QUADRATIC:
        return low * x
    if kind == KINKED:
        return (high if x < 0.0 else low) * x
    return 2.0 * x + 3.0 * math.sin(2.0 * x)


@_compiled
def epoch(
    kind: int, low: Floats, high: Floats, b: Floats, sigma: NDArray[np.int64], alpha: float, w: Floats, out: Floats
) -> None:
    """SGD over f_i(w) = sum_j h_j(w_j) - <b_i, w> in the order ``sigma``: moves ``w [d]``, fills ``out [n, d]``."""
    for t in range(len(sigma)):
        i = sigma[t]
        for j in range(len(w)):
            out[t, j] = slope_at(kind, low[j], high[j], w[j]) - b[i, j]
        for j in range(len(w)):
            w[j] -= alpha * out[t, j]
