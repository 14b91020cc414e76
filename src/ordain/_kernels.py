"""The compiled sequential loops. Signs depend on all signs before them, so this cannot be vectorised.

Measured on the 10,000 x 128 toy, one thread: 2.5 ms a round here, 0.2 s with a NumPy step per vector
(``make bench`` prints the current ratio). Imported only when a sign is first needed.

``state`` is float64[3] and belongs to one pass: |s|^2, number of failures, and one number of the
balancer's own (the walk's running bound on |z|; kernel halving's sigma^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]

DETERMINISTIC, WALK, HALVING = range(3)
FAILED, UNSURE = 0, 2  # what decide() may answer besides +1 and -1

# Sums may be reassociated (that is what makes them SIMD); NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


def _compile(function: Function) -> Function:
    try:
        return cast("Function", numba.njit(cache=True, fastmath=_FASTMATH)(function))
    except RuntimeError:  # no folder that the cache may be written to
        return cast("Function", numba.njit(fastmath=_FASTMATH)(function))


@_compile
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


@_compile
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


@_compile
def batch_signs(
    kind: int,
    gram: NDArray[Any],
    dots: NDArray[Any],
    paired: bool,
    surplus: float,
    mean_inner: float,
    mean_square: float,
    u: Floats,
    state: Floats,
    param: float,
    weights: NDArray[Any],
) -> bool:
    """Signs of a batch straight from products of its gradients g with each other, with P and with m.

    The common case of ``gram_signs`` without a temporary: z = g - m and s = P - surplus m. ``dots`` is [2, B] of
    <P, g> and <m, g>. If ``paired``, gram and dots [1, B/2] are those of z = g_first - g_second already. Writes
    ``weights`` [B] by row: the sign with which each gradient enters P. False, with only ``state`` touched, where
    something is not finite or |s|_inf must be known: ``gram_signs`` can do those.
    """
    count = gram.shape[0]
    inner = np.empty(count)
    for t in range(count):
        if not math.isfinite(gram[t, t]):
            return False
    for t in range(count):
        if paired:
            inner[t] = dots[0, t]
        else:
            inner[t] = dots[0, t] - mean_inner - surplus * (dots[1, t] - mean_square)
    for t in range(count):
        square = float(gram[t, t]) if paired else gram[t, t] - 2.0 * dots[1, t] + mean_square
        sign = decide(kind, inner[t], square, math.sqrt(max(state[0], 0.0)), False, u[t], state, param)
        if sign == UNSURE:
            return False
        if sign == FAILED:
            state[1] += 1.0
            sign = 1 if inner[t] < 0.0 else -1
        state[0] += 2.0 * sign * inner[t] + square
        if paired:
            weights[2 * t] = sign
            weights[2 * t + 1] = -sign
            for j in range(t + 1, count):
                inner[j] += sign * gram[t, j]
        else:
            weights[t] = sign
            shift = mean_square - dots[1, t]
            for j in range(t + 1, count):
                inner[j] += sign * (gram[t, j] - dots[1, j] + shift)
    return True


@_compile
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
    signs: NDArray[np.int8],
) -> int:
    """Signs of vectors ``start .. stop`` of dense rows, one pass over memory and no Gram matrix.

    Vector t is z[order[t]] - centre, or z[order[2t]] - z[order[2t+1]] if ``paired``. ``s`` [d] is
    brought up to date; ``row`` [d] is room for one vector; ``u`` and ``signs`` begin at ``start``.
    Returns ``stop``, or -1 - t where vector t failed.
    """
    d = z.shape[1]
    for t in range(start, stop):
        first = order[2 * t] if paired else order[t]
        inner = 0.0
        square = 0.0
        if paired:
            second = order[2 * t + 1]
            for j in range(d):
                row[j] = float(z[first, j]) - float(z[second, j])
        else:
            for j in range(d):
                row[j] = z[first, j] - centre[j]
        for j in range(d):
            inner += row[j] * s[j]
            square += row[j] * row[j]
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


@_compile
def rows_dot(a: NDArray[Any], b: NDArray[Any], lo: int, hi: int, symmetric: bool, out: NDArray[Any]) -> None:
    """out[i, j] += <a_i, b_j> over columns lo .. hi; if ``symmetric`` (b is a) only where j >= i, about.

    Four rows by four at a time. At a batch's sizes (64 x 784) this takes a third of the time of a BLAS product of a
    matrix with its own transpose, and a sixth where b has few rows; beyond 128 rows BLAS is as good.
    """
    m = a.shape[0]
    n = b.shape[0]
    width = hi - lo  # counting slices from 0 spares the check for negative indices that would forbid SIMD
    zero = a.dtype.type(0)
    for i in range(0, m, 4):
        start = i if symmetric else 0
        for j in range(start, n, 4):
            if i + 4 <= m and j + 4 <= n:
                s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
                s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
                a0, a1, a2, a3 = a[i, lo:hi], a[i + 1, lo:hi], a[i + 2, lo:hi], a[i + 3, lo:hi]
                b0, b1, b2, b3 = b[j, lo:hi], b[j + 1, lo:hi], b[j + 2, lo:hi], b[j + 3, lo:hi]
                for t in range(width):
                    x0, x1, x2, x3 = a0[t], a1[t], a2[t], a3[t]
                    y0, y1, y2, y3 = b0[t], b1[t], b2[t], b3[t]
                    s00 += x0 * y0
                    s01 += x0 * y1
                    s02 += x0 * y2
                    s03 += x0 * y3
                    s10 += x1 * y0
                    s11 += x1 * y1
                    s12 += x1 * y2
                    s13 += x1 * y3
                    s20 += x2 * y0
                    s21 += x2 * y1
                    s22 += x2 * y2
                    s23 += x2 * y3
                    s30 += x3 * y0
                    s31 += x3 * y1
                    s32 += x3 * y2
                    s33 += x3 * y3
                out[i, j] += s00
                out[i, j + 1] += s01
                out[i, j + 2] += s02
                out[i, j + 3] += s03
                out[i + 1, j] += s10
                out[i + 1, j + 1] += s11
                out[i + 1, j + 2] += s12
                out[i + 1, j + 3] += s13
                out[i + 2, j] += s20
                out[i + 2, j + 1] += s21
                out[i + 2, j + 2] += s22
                out[i + 2, j + 3] += s23
                out[i + 3, j] += s30
                out[i + 3, j + 1] += s31
                out[i + 3, j + 2] += s32
                out[i + 3, j + 3] += s33
            else:
                for p in range(i, min(i + 4, m)):
                    for q in range(j, min(j + 4, n)):
                        s00 = zero
                        a0, b0 = a[p, lo:hi], b[q, lo:hi]
                        for t in range(width):
                            s00 += a0[t] * b0[t]
                        out[p, q] += s00


@_compile
def made_products(
    made: NDArray[Any],
    count: int,
    first: NDArray[Any],
    second: NDArray[Any],
    gram: NDArray[Any],
    dots_first: NDArray[Any],
    dots_second: NDArray[Any],
) -> None:
    """The Gram matrix grows by made made' (where j >= i), and dots by made v for ``count`` of two vectors.

    A block of columns is used for all of it while it is in the cache: memory is read once.
    """
    size, d = made.shape
    for lo in range(0, d, 1024):
        hi = min(lo + 1024, d)
        rows_dot(made, made, lo, hi, True, gram)
        one, two = first[lo:hi], second[lo:hi]
        for i in range(size):
            row = made[i, lo:hi]
            with_one = with_two = made.dtype.type(0)
            if count > 0:
                for t in range(hi - lo):
                    with_one += row[t] * one[t]
                dots_first[i] += with_one
            if count > 1:
                for t in range(hi - lo):
                    with_two += row[t] * two[t]
                dots_second[i] += with_two


@_compile
def gram_total(gram: NDArray[Any]) -> tuple[float, float]:
    """The sum of all entries of a symmetric matrix, from its upper triangle, and the sum of their sizes."""
    total = size = 0.0
    for i in range(gram.shape[0]):
        total += gram[i, i]
        size += abs(gram[i, i])
        for j in range(i + 1, gram.shape[0]):
            total += 2.0 * gram[i, j]
            size += 2.0 * abs(gram[i, j])
    return total, size


@_compile
def outer_gram(a: NDArray[Any], b: NDArray[Any], plus: float, out: NDArray[Any]) -> None:
    """out[i, j] += (<a_i, a_j> + plus) <b_i, b_j> for j >= i: the Gram matrix of the outer products b_i a_i'."""
    size = a.shape[0]
    first = np.zeros((size, size), a.dtype)
    second = np.zeros((size, size), a.dtype)
    rows_dot(a, a, 0, a.shape[1], True, first)
    rows_dot(b, b, 0, b.shape[1], True, second)
    for i in range(size):
        for j in range(i, size):
            out[i, j] += (first[i, j] + plus) * second[i, j]


@_compile
def outer_dot(a: NDArray[Any], b: NDArray[Any], vector: NDArray[Any], biased: bool, out: NDArray[Any]) -> None:
    """out[i] += b_i' (V a_i + c), for V with few rows; ``vector`` is V and, if ``biased``, c behind it, flat."""
    size, d = a.shape
    few = b.shape[1]
    room = np.zeros((size, few), a.dtype)
    rows_dot(a, vector[: few * d].reshape(few, d), 0, d, False, room)
    for i in range(size):
        total = a.dtype.type(0)
        for j in range(few):
            total += (room[i, j] + vector[few * d + j] if biased else room[i, j]) * b[i, j]
        out[i] += total


@_compile
def outer_add(a: NDArray[Any], b: NDArray[Any], weights: NDArray[Any], biased: bool, out: NDArray[Any]) -> None:
    """Out += sum_i w_i b_i a_i' (and, if ``biased``, w_i b_i behind it), flat, for b with few columns."""
    size, d = a.shape
    few = b.shape[1]
    for j in range(few):
        row = out[j * d : (j + 1) * d]
        total = a.dtype.type(0)
        for i in range(0, size - size % 4, 4):
            c0 = weights[i] * b[i, j]
            c1 = weights[i + 1] * b[i + 1, j]
            c2 = weights[i + 2] * b[i + 2, j]
            c3 = weights[i + 3] * b[i + 3, j]
            a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
            for t in range(d):
                row[t] += c0 * a0[t] + c1 * a1[t] + c2 * a2[t] + c3 * a3[t]
            total += c0 + c1 + c2 + c3
        for i in range(size - size % 4, size):
            c0 = weights[i] * b[i, j]
            a0 = a[i]
            for t in range(d):
                row[t] += c0 * a0[t]
            total += c0
        if biased:
            out[few * d + j] += total


@_compile
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


@_compile
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
