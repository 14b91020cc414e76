"""Compiled loops over the entries of a table of which each example touches a few rows.

There are a few hundred of them, and torch's operations on so few take longer to begin than to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.kernels.compiling import compile_loop
from ordain.kernels.products import rows_dot

Ints = NDArray[np.int64]


@compile_loop
def join_entries(
    keys: Ints, order: Ints, size: int, b: NDArray[Any], examples: Ints, ids: Ints, joined: NDArray[Any]
) -> int:
    """Entries with the same key (id * size + example) added up, sorted by key. Returns how many there are."""
    count = 0
    for n in order:
        key = keys[n]
        source = b[n]
        if count == 0 or examples[count - 1] + ids[count - 1] * size != key:
            examples[count], ids[count] = key % size, key // size
            target = joined[count]
            for t in range(len(source)):
                target[t] = source[t]
            count += 1
        else:
            target = joined[count - 1]
            for t in range(len(source)):
                target[t] += source[t]
    return count


@compile_loop
def entry_gram(examples: Ints, ids: Ints, b: NDArray[Any], size: int, gram: NDArray[Any]) -> None:
    """The Gram matrix grows where j >= i, from joined entries sorted by id and example: only those of one id meet."""
    inner = np.empty((size, size), b.dtype)
    lo = 0
    while lo < len(ids):
        hi = lo + 1
        while hi < len(ids) and ids[hi] == ids[lo]:
            hi += 1
        rows, count = b[lo:hi], hi - lo
        for i in range(count):
            for j in range(count):
                inner[i, j] = 0
        rows_dot(rows, rows, 0, b.shape[1], True, inner)
        for i in range(count):
            for j in range(i, count):
                gram[examples[lo + i], examples[lo + j]] += inner[i, j]
        lo = hi


@compile_loop
def entry_dots(examples: Ints, ids: Ints, b: NDArray[Any], vector: NDArray[Any], dots: NDArray[Any]) -> None:
    """dots[i] += <V, G_i>, for V ``[rows, cols]``."""
    for n in range(len(ids)):
        row, entry = vector[ids[n]], b[n]
        total = b.dtype.type(0)
        for t in range(len(entry)):
            total += row[t] * entry[t]
        dots[examples[n]] += total


@compile_loop
def entry_add(examples: Ints, ids: Ints, b: NDArray[Any], weights: NDArray[Any], out: NDArray[Any]) -> None:
    """Out += sum_i w_i G_i, for ``[rows, cols]``."""
    for n in range(len(ids)):
        row, entry, weight = out[ids[n]], b[n], weights[examples[n]]
        for t in range(len(entry)):
            row[t] += weight * entry[t]
