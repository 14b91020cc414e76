"""Compiled products of the few rows of a batch, for which BLAS is not built.

Between 20 and 128 rows a Gram matrix and two products take a half to a fifth of the time of BLAS here; beyond that
BLAS is as good. ``python -m benchmarks products`` prints the present ratios.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.kernels.compiling import compile_loop


@compile_loop
def rows_dot(a: NDArray[Any], b: NDArray[Any], lo: int, hi: int, symmetric: bool, out: NDArray[Any]) -> None:
    """out[i, j] += <a_i, b_j> over columns lo .. hi; if ``symmetric`` (b is a) only where j >= i, about.

    Four rows by four at a time: each number loaded is used four times.
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


@compile_loop
def row_products(
    grads: NDArray[Any],
    count: int,
    first: NDArray[Any],
    second: NDArray[Any],
    gram: NDArray[Any],
    dots_first: NDArray[Any],
    dots_second: NDArray[Any],
) -> None:
    """Add grads grads' to gram (where j >= i), and grads v to dots for ``count`` of two vectors.

    A block of columns is used for all of it while it is in the cache: memory is read once.
    """
    size, d = grads.shape
    for lo in range(0, d, 1024):
        hi = min(lo + 1024, d)
        rows_dot(grads, grads, lo, hi, True, gram)
        one, two = first[lo:hi], second[lo:hi]
        for i in range(size):
            row = grads[i, lo:hi]
            with_one = with_two = grads.dtype.type(0)
            if count > 0:
                for t in range(hi - lo):
                    with_one += row[t] * one[t]
                dots_first[i] += with_one
            if count > 1:
                for t in range(hi - lo):
                    with_two += row[t] * two[t]
                dots_second[i] += with_two


@compile_loop
def add_apart(one: NDArray[Any], other: NDArray[Any], scale: float, into: NDArray[Any], also: NDArray[Any]) -> None:
    """Into += scale (one - other) and also += scale (one + other), in one pass over memory."""
    times = one.dtype.type(scale)
    for t in range(len(one)):
        x, y = times * one[t], times * other[t]
        into[t] += x - y
        also[t] += x + y


@compile_loop
def row_dots(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    """out[i] = <a_i, b_i>."""
    for i in range(a.shape[0]):
        x, y = a[i], b[i]
        total = a.dtype.type(0)
        for t in range(a.shape[1]):
            total += x[t] * y[t]
        out[i] = total


@compile_loop
def pair_products(gram: NDArray[Any], dots: NDArray[Any], new_gram: NDArray[Any], new_dots: NDArray[Any]) -> None:
    """From products of g_1, g_2, ... to those of g_1 - g_2, g_3 - g_4, ..., reading and writing where j >= i only."""
    for i in range(new_gram.shape[0]):
        p, q = 2 * i, 2 * i + 1
        new_gram[i, i] = gram[p, p] - 2.0 * gram[p, q] + gram[q, q]
        for j in range(i + 1, new_gram.shape[0]):
            new_gram[i, j] = gram[p, 2 * j] - gram[p, 2 * j + 1] - gram[q, 2 * j] + gram[q, 2 * j + 1]
        for k in range(dots.shape[0]):
            new_dots[k, i] = dots[k, p] - dots[k, q]


@compile_loop
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


@compile_loop
def outer_dot(a: NDArray[Any], b: NDArray[Any], vector: NDArray[Any], biased: bool, out: NDArray[Any]) -> None:
    """out[i] += b_i' (V a_i + c), for V with few rows; ``vector`` is V and, if ``biased``, c behind it, flat."""
    size, d = a.shape
    few = b.shape[1]
    inner = np.zeros((size, few), a.dtype)
    rows_dot(a, vector[: few * d].reshape(few, d), 0, d, False, inner)
    for i in range(size):
        total = a.dtype.type(0)
        for j in range(few):
            total += (inner[i, j] + vector[few * d + j] if biased else inner[i, j]) * b[i, j]
        out[i] += total


@compile_loop
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


@compile_loop
def norm_sums(x: NDArray[Any], b: NDArray[Any], eps: float, weight: NDArray[Any], bias: NDArray[Any]) -> None:
    """Layer norm of x ``[B, T, C]`` with output gradients b: ``[B, C]`` sums over T of b * normalized x, and of b."""
    size, steps, width = x.shape
    for i in range(size):
        w, c = weight[i], bias[i]
        for j in range(width):
            w[j] = 0
            c[j] = 0
        for t in range(steps):
            row, grad = x[i, t], b[i, t]
            total = x.dtype.type(0)
            for j in range(width):
                total += row[j]
            mean = total / width
            square = x.dtype.type(0)
            for j in range(width):
                square += (row[j] - mean) * (row[j] - mean)
            scale = x.dtype.type(1.0 / math.sqrt(square / width + eps))
            for j in range(width):
                w[j] += grad[j] * ((row[j] - mean) * scale)
                c[j] += grad[j]
