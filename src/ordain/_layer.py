"""One linear layer is the whole model: a batch's signs and sums in one compiled pass over its factors.

The gradients are g_i = b_i a_i' (and b_i for the bias). A few rows at a time: their products with P and m, their
Gram matrix, their signs, and P is brought up to date before the next few. That costs O(B d) where the Gram matrix of
the whole batch costs O(B^2) more, and everything stays in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain._kernels import FAILED, batch_signs, compile_loop, decide
from ordain._products import outer_gram, pair_products
from ordain.balancing import WALK

_BLOCK = 4


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
    surplus: float,
    mean_inner: float,
    mean_square: float,
    u: NDArray[np.float64],
    state: NDArray[np.float64],
    param: float,
    weights: NDArray[Any],
) -> tuple[bool, float, float]:
    """Signs of a batch (``weights``, by row), with ``signed`` (P) and ``total`` brought up to date.

    Gradients are scale b_i a_i', flat, the bias's behind them if ``biased``.
    If ``paired``, signs are given to differences of consecutive rows, and ``mean`` and ``total`` are left alone.
    Returns the new surplus and mean_inner; False, with nothing touched, where something is not finite.
    """
    size, d = a.shape
    few = b.shape[1]
    c = b * a.dtype.type(scale)
    for i in range(size):
        square = other = a.dtype.type(0)
        row = a[i]
        for t in range(d):
            square += row[t] * row[t]
        for j in range(few):
            other += c[i, j] * c[i, j]
        if not math.isfinite(8 * (square + 1) * other):  # 8: differences of pairs must be finite too
            return False, surplus, mean_inner

    dots = np.empty((1 if paired else 2, _BLOCK), a.dtype)
    half_gram = np.empty((_BLOCK // 2, _BLOCK // 2), a.dtype)
    half_dots = np.empty((1, _BLOCK // 2), a.dtype)
    block = _BLOCK
    if kind == WALK:  # must be able to ask for |s|_inf before every sign
        block = 2 if paired else 1
    for i in range(0, size, block):
        rows = min(block, size - i)
        _block_dots(a[i : i + rows], c[i : i + rows], signed, mean, biased, dots)
        gram = np.zeros((rows, rows), a.dtype)
        outer_gram(a[i : i + rows], c[i : i + rows], 1.0 if biased else 0.0, gram)
        signs = weights[i : i + rows]
        if paired:
            half = rows // 2
            pair_products(gram, dots, half_gram[:half, :half], half_dots[:, :half])
            known = batch_signs(
                kind, half_gram[:half, :half], half_dots, True, 0.0, 0.0, 0.0, u[i // 2 :], state, param, signs
            )
        else:
            known = batch_signs(kind, gram, dots, False, surplus, mean_inner, mean_square, u[i:], state, param, signs)
        if not known:
            if paired:
                inner, square = float(half_dots[0, 0]), float(half_gram[0, 0])
            else:
                inner = dots[0, 0] - mean_inner - surplus * (dots[1, 0] - mean_square)
                square = gram[0, 0] - 2.0 * dots[1, 0] + mean_square
            sup = _largest(signed, mean, 0.0 if paired else surplus)
            sign = decide(kind, inner, square, sup, True, u[i // 2 if paired else i], state, param)
            if sign == FAILED:
                state[1] += 1.0
                sign = 1 if inner < 0.0 else -1
            state[0] += 2.0 * sign * inner + square
            signs[0] = sign
            if paired:
                signs[1] = -sign
        if not paired:
            for k in range(rows):
                surplus += signs[k]
                mean_inner += signs[k] * dots[1, k]
        _block_add(a[i : i + rows], c[i : i + rows], signs, biased, paired, signed, total)
    return True, surplus, mean_inner


@compile_loop
def _block_dots(
    a: NDArray[Any], c: NDArray[Any], signed: NDArray[Any], mean: NDArray[Any], biased: bool, out: NDArray[Any]
) -> None:
    """out[k, i] = <V_k, c_i a_i'> for up to four rows and V of ``signed`` and, if there is room, ``mean``.

    Two of V's rows at a time: each number of theirs is loaded once for four of a, and of a once for both.
    """
    rows, d = a.shape
    few = c.shape[1]
    both = len(out) > 1
    zero = a.dtype.type(0)
    a0, a1, a2, a3 = a[0], a[min(1, rows - 1)], a[min(2, rows - 1)], a[min(3, rows - 1)]
    out[:] = 0
    for j in range(0, few, 1 if both else 2):
        k = j if both else min(j + 1, few - 1)
        one = signed[j * d : (j + 1) * d]
        two = mean[k * d : (k + 1) * d]
        s0 = s1 = s2 = s3 = r0 = r1 = r2 = r3 = zero
        for t in range(d):
            s0 += one[t] * a0[t]
            s1 += one[t] * a1[t]
            s2 += one[t] * a2[t]
            s3 += one[t] * a3[t]
            r0 += two[t] * a0[t]
            r1 += two[t] * a1[t]
            r2 += two[t] * a2[t]
            r3 += two[t] * a3[t]
        more = signed[few * d + j] if biased else zero
        also = mean[few * d + k] if biased else zero
        for i, (s, r) in enumerate(((s0, r0), (s1, r1), (s2, r2), (s3, r3))):
            if i < rows:
                out[0, i] += c[i, j] * (s + more)
                if both:
                    out[1, i] += c[i, j] * (r + also)
                elif k > j:
                    out[0, i] += c[i, k] * (r + also)


@compile_loop
def _block_add(
    a: NDArray[Any],
    c: NDArray[Any],
    signs: NDArray[Any],
    biased: bool,
    paired: bool,
    signed: NDArray[Any],
    total: NDArray[Any],
) -> None:
    """Signed += sum_i e_i c_i a_i' and, unless ``paired``, total += sum_i c_i a_i'."""
    rows, d = a.shape
    few = c.shape[1]
    zero = a.dtype.type(0)
    k1, k2, k3 = min(1, rows - 1), min(2, rows - 1), min(3, rows - 1)
    a0, a1, a2, a3 = a[0], a[k1], a[k2], a[k3]
    e0, e1, e2, e3 = signs[0], signs[k1], signs[k2], signs[k3]
    for j in range(few):
        c0 = c[0, j]
        c1 = c[1, j] if rows > 1 else zero
        c2 = c[2, j] if rows > 2 else zero
        c3 = c[3, j] if rows > 3 else zero
        f0, f1, f2, f3 = e0 * c0, e1 * c1, e2 * c2, e3 * c3
        into = signed[j * d : (j + 1) * d]
        if paired:
            for t in range(d):
                into[t] += f0 * a0[t] + f1 * a1[t] + f2 * a2[t] + f3 * a3[t]
        else:
            into_total = total[j * d : (j + 1) * d]
            for t in range(d):
                into[t] += f0 * a0[t] + f1 * a1[t] + f2 * a2[t] + f3 * a3[t]
                into_total[t] += c0 * a0[t] + c1 * a1[t] + c2 * a2[t] + c3 * a3[t]
        if biased:
            signed[few * d + j] += f0 + f1 + f2 + f3
            if not paired:
                total[few * d + j] += c0 + c1 + c2 + c3


@compile_loop
def _largest(signed: NDArray[Any], mean: NDArray[Any], surplus: float) -> float:
    """|P - E m|_inf."""
    found = signed.dtype.type(0)
    times = signed.dtype.type(surplus)
    for t in range(len(signed)):
        found = max(found, abs(signed[t] - times * mean[t]))
    return float(found)
