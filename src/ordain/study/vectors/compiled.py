"""The compiled loops of these studies. Imported only when a study runs, because numba is slow to import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]


def _compiled(**options: Any) -> Callable[[Function], Function]:
    def compile_function(function: Function) -> Function:
        try:
            return cast("Function", numba.njit(cache=True, **options)(function))
        except RuntimeError:  # no folder that the cache may be written to
            return cast("Function", numba.njit(**options)(function))

    return compile_function


def measure_orders(z: NDArray[Any], orders: Iterable[NDArray[np.int64]]) -> dict[str, list[float]]:
    """The longest centred prefix sum of ``z [n, d]`` in each order, in l2 and in l-inf."""
    mean = z.mean(axis=0, dtype=np.float64)
    found = [longest_prefixes(z, mean, sigma) for sigma in orders]
    return {"l2": [pair[0] for pair in found], "linf": [pair[1] for pair in found]}


@_compiled()
def longest_prefixes(z: NDArray[Any], mean: Floats, sigma: NDArray[np.int64]) -> tuple[float, float]:
    """Both norms of the longest centred prefix sum in the order ``sigma``, in one pass."""
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


@_compiled()
def clipped_walk(z: NDArray[Any], mean: Floats, sigma: NDArray[np.int64], u: Floats, c: float) -> NDArray[np.int8]:
    """Algorithm 6's signs for the centred rows of ``z [n, d]`` in the order ``sigma``, clipped where it would fail.

    The rows are scaled by their largest norm; ``u [n]`` are uniform numbers.
    """
    square = 0.0
    for i in range(len(z)):
        square = max(square, np.square(z[i] - mean).sum())
    total, signs = np.zeros(len(mean)), np.empty(len(z), dtype=np.int8)
    for t in range(len(z)):
        row = z[sigma[t]] - mean
        signs[t] = 1 if u[t] < 0.5 - (total * row).sum() / square / (2.0 * c) else -1  # beyond [0, 1] it is certain
        total += signs[t] * row
    return signs


# Sums may be reassociated, which is what vectorises them; NaN and infinity keep their meaning.
@_compiled(fastmath={"reassoc", "contract", "nsz"})
def signs_by_steps(
    z: NDArray[Any], sigma: NDArray[np.int64], world: int, each: int, paired: bool, centre: Floats
) -> NDArray[np.int8]:
    """Algorithm 5's sign for each position of ``sigma``, where ranks learn of each other's signs after a step.

    Position p belongs to rank p mod ``world``; a step is ``each`` positions of every rank. A rank balances its own
    vectors (minus ``centre``, or the differences of its consecutive vectors) against the sum of all ranks at the start
    of the step plus its own additions. Then the additions of all ranks are summed. The odd last vector of a rank's step
    gets 0. One rank and one step (``world=1, each=n``) is Algorithm 5 itself.
    """
    n, step = len(sigma), world * each
    shared, own, added, row = np.zeros_like(centre), np.zeros_like(centre), np.zeros_like(centre), np.zeros_like(centre)
    signs = np.zeros(n, dtype=np.int8)
    for start in range(0, n, step):
        stop = min(n, start + step)
        added[:] = 0.0
        for rank in range(min(world, stop - start)):
            own[:] = shared
            for p in range(start + rank, stop - world * paired, world + world * paired):
                row[:] = z[sigma[p]]
                if paired:
                    row -= z[sigma[p + world]]
                else:
                    row -= centre
                sign = 1 if np.dot(row, own) < 0.0 else -1
                signs[p] = sign
                if paired:
                    signs[p + world] = -sign
                own += sign * row
                added += sign * row
        shared += added
    return signs


@_compiled()
def sgd_epoch(
    sine: bool, low: Floats, high: Floats, b: Floats, sigma: NDArray[np.int64], alpha: float, w: Floats, out: Floats
) -> None:
    """SGD over f_i(w) = h(w) - <b_i, w> in the order ``sigma``: updates ``w [d]`` and fills ``out [n, d]``."""
    for t in range(len(sigma)):
        mean = 2.0 * w + 3.0 * np.sin(2.0 * w) if sine else np.where(w < 0.0, high, low) * w  # Objective.gradient
        out[t] = mean - b[sigma[t]]
        w -= alpha * out[t]


@_compiled()
def logistic_epoch(
    x: Floats, y: Floats, strength: float, sigma: NDArray[np.int64], rates: Floats, w: Floats, out: Floats
) -> None:
    """SGD over log(1 + exp(-y_i <x_i, w>)) + strength |w|^2 / 2 in the order ``sigma``: updates ``w`` and ``out``."""
    for t in range(len(sigma)):
        row, sign = x[sigma[t]], y[sigma[t]]
        out[t] = strength * w - sign / (1.0 + math.exp(sign * np.dot(row, w))) * row
        w -= rates[t] * out[t]
