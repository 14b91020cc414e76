"""One linear layer is the whole model (logistic regression): signs and sums in one compiled pass over its factors.

The gradients are g_i = b_i a_i' (and b_i for the bias). For each row: its products with P and m, its sign, and P is
brought up to date before the next row. That is O(B d) work in the cache and needs no Gram matrix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.kernels import CANCELLED
from ordain.kernels.signs import FAILED, UNSURE, announce, compile_loop, decide


@compile_loop
def layer_signs(
    kind: int,
    a: NDArray[Any],
    b: NDArray[Any],
    scale: float,
    biased: bool,
    paired: bool,
    signed: NDArray[Any],
    mean: NDArray[Any],
    total: NDArray[Any],
    sums: NDArray[np.float64],
    u: NDArray[np.float64],
    state: NDArray[np.float64],
    param: float,
    signs: NDArray[np.int8],
) -> bool:
    """Signs of a batch, with ``signed`` (P) and ``total`` brought up to date.

    Gradients are scale b_i a_i', flat, followed by the bias's if ``biased``. ``sums`` is float64[3]: the sum of the
    signs E and <P, m>, both brought up to date, and |m|^2. If ``paired``, signs are given to differences of
    consecutive rows, and ``mean`` and ``total`` are left alone. Returns False, with nothing touched, where a gradient
    is not finite or g - m, of the first row, has lost digits (see ``CANCELLED``).
    """
    size, d = a.shape
    out = b.shape[1]
    c = b * a.dtype.type(scale)
    plus = 1.0 if biased else 0.0
    squares, limit = np.empty(size), float(np.finfo(a.dtype).max)
    lost = CANCELLED * float(np.finfo(a.dtype).eps)
    for i in range(size):
        squares[i] = (_dot(a[i], a[i]) + plus) * _dot(c[i], c[i])
        if not 8.0 * squares[i] <= limit:  # 8: differences of pairs must be finite too
            return False
    for t in range(size // 2 if paired else size):
        i = 2 * t if paired else t
        inner = along = 0.0
        if paired:  # c_1 a_1' - c_2 a_2' = apart a_1' + c_2 change'
            change, apart = a[i] - a[i + 1], c[i] - c[i + 1]
        for j in range(out):
            row = signed[j * d : (j + 1) * d]
            bias = signed[out * d + j] if biased else a.dtype.type(0)
            if paired:
                first, second = _two_dots(row, row, a[i], change)
                inner += apart[j] * (first + bias) + c[i + 1, j] * second
            else:
                first, second = _two_dots(row, mean[j * d : (j + 1) * d], a[i], a[i])
                inner += c[i, j] * (first + bias)
                along += c[i, j] * (second + mean[out * d + j] if biased else second)
        if paired:
            square = _dot(apart, apart) * (_dot(a[i], a[i]) + plus) + _dot(c[i + 1], c[i + 1]) * _dot(change, change)
            square += 2.0 * _dot(apart, c[i + 1]) * _dot(a[i], change)
        else:  # <s, z> and |z|^2 for s = P - E m and z = g - m
            inner = inner - sums[1] - sums[0] * (along - sums[2])
            square = squares[i] - 2.0 * along + sums[2]
            if t == 0 and square < lost * (squares[i] + sums[2]):  # before anything is touched
                return False
        sign = decide(kind, inner, square, math.sqrt(max(state[0], 0.0)), False, u[t], state, param)
        if sign == UNSURE:
            sup = _largest(signed, mean, 0.0 if paired else sums[0])
            sign = decide(kind, inner, square, sup, True, u[t], state, param)
        if sign == FAILED:
            state[1] += 1.0
            sign = 1 if inner < 0.0 else -1
        state[0] += 2.0 * sign * inner + square
        signs[t] = sign
        if not paired:
            sums[0] += sign
            sums[1] += sign * along
        for j in range(out):
            into = signed[j * d : (j + 1) * d]
            if paired:
                _add_pair(into, sign * apart[j], a[i], sign * c[i + 1, j], change)
            else:
                _add_both(into, sign * c[i, j], total[j * d : (j + 1) * d], c[i, j], a[i])
            if biased:
                signed[out * d + j] += sign * (apart[j] if paired else c[i, j])
                if not paired:
                    total[out * d + j] += c[i, j]
    return True


@compile_loop
def _dot(x: NDArray[Any], y: NDArray[Any]) -> float:
    found = x.dtype.type(0)
    for t in range(len(x)):
        found += x[t] * y[t]
    return float(found)


@compile_loop
def _two_dots(v: NDArray[Any], w: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> tuple[float, float]:
    """<v, x> and <w, y>, in one pass."""
    first = second = v.dtype.type(0)
    for t in range(len(v)):
        first += v[t] * x[t]
        second += w[t] * y[t]
    return first, second


@compile_loop
def _add_pair(into: NDArray[Any], e: float, x: NDArray[Any], f: float, y: NDArray[Any]) -> None:
    """Add e x + f y."""
    e, f = into.dtype.type(e), into.dtype.type(f)
    for t in range(len(into)):
        into[t] += e * x[t] + f * y[t]


@compile_loop
def _add_both(one: NDArray[Any], e: float, other: NDArray[Any], f: float, x: NDArray[Any]) -> None:
    """Add e x to one and f x to the other, in one pass."""
    e, f = one.dtype.type(e), one.dtype.type(f)
    for t in range(len(one)):
        one[t] += e * x[t]
        other[t] += f * x[t]


@compile_loop
def _largest(signed: NDArray[Any], mean: NDArray[Any], surplus: float) -> float:
    """|P - E m|_inf."""
    found = signed.dtype.type(0)
    times = signed.dtype.type(surplus)
    for t in range(len(signed)):
        found = max(found, abs(signed[t] - times * mean[t]))
    return float(found)


announce(layer_signs)  # this module is imported when the loop is needed
