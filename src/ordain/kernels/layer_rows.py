"""The per-example gradients of a small linear layer, written out and checked in one compiled pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.kernels.signs import compile_loop


def _layer_rows(
    a: NDArray[Any], b: NDArray[Any], biased: bool, scale: float, largest: float, out: NDArray[Any]
) -> bool:
    """Write scale b_i a_i', flat, followed by scale b_i if ``biased``, to row i of ``out``.

    Returns whether all numbers are finite and at most ``largest``. They are torch's products, to the last bit.
    """
    size, d = a.shape
    times, most = a.dtype.type(scale), a.dtype.type(min(largest, float(np.finfo(a.dtype).max)))
    fine = True
    for i in range(size):
        for j in range(b.shape[1]):
            row, c = out[i, j * d : (j + 1) * d], b[i, j]
            for t in range(d):
                row[t] = c * a[i, t] * times
                fine &= abs(row[t]) <= most  # as NaN is not
            if biased:
                out[i, b.shape[1] * d + j] = c * times
                fine &= abs(c * times) <= most
    return fine


layer_rows = compile_loop(_layer_rows, exact=True)
