"""Greedy ordering (Algorithm 1), a few steps at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.kernels.compiling import compile_loop

Floats = NDArray[np.float64]


@compile_loop
def greedy_gram(
    gram: Floats, inner: Floats, left: NDArray[np.int64], order: NDArray[np.int64], start: int, stop: int
) -> None:
    """Steps ``start .. stop`` of Alg. 1 from the whole Gram matrix of centred vectors: O(n) each."""
    n = gram.shape[0]
    for i in range(start, stop):
        best = 0
        least = math.inf
        for k in range(n - i):  # |s + z_j|^2 - |s|^2; the first of equals
            j = left[k]
            value = 2.0 * inner[j] + gram[j, j]
            if value < least:
                least = value
                best = k
        chosen = left[best]
        order[i] = chosen
        for k in range(best, n - i - 1):
            left[k] = left[k + 1]
        for k in range(n - i - 1):
            inner[left[k]] += gram[chosen, left[k]]


@compile_loop
def greedy_stream(
    z: NDArray[Any],
    centre: Floats,
    squares: Floats,
    row: Floats,
    inner: Floats,
    left: NDArray[np.int64],
    order: NDArray[np.int64],
    start: int,
    stop: int,
) -> None:
    """The same without the n x n matrix: O(n d) each, for n too large to square."""
    n, d = z.shape
    for i in range(start, stop):
        best = 0
        least = math.inf
        for k in range(n - i):
            j = left[k]
            value = 2.0 * inner[j] + squares[j]
            if value < least:
                least = value
                best = k
        chosen = left[best]
        order[i] = chosen
        for k in range(best, n - i - 1):
            left[k] = left[k + 1]
        for j in range(d):
            row[j] = z[chosen, j] - centre[j]
        for k in range(n - i - 1):
            other = left[k]
            total = 0.0
            for j in range(d):
                total += row[j] * (z[other, j] - centre[j])
            inner[other] += total
