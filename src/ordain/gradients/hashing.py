"""A random linear map of one parameter's gradients to k numbers: a count sketch, hashed by row and by column.

Entry (r, c) of a gradient ``[rows, cols]`` is added, with the sign s(r) s'(c), to place (h(r) + h'(c)) mod k. Hashing
rows and columns apart takes rows + cols numbers instead of rows x cols, and turns the sketch of an outer product into
the circular convolution of two small sketches (Pham and Pagh's tensor sketch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ordain import _rng
from ordain.gradients.memory import chunk_numbers

# Nanoseconds on one core of a Xeon at 2.8 GHz: they choose between two ways to the same numbers.
_TRANSFORM, _MULTIPLY, _SCATTER, _MAKE = 0.6, 2.0, 5.0, 0.1
_APART = 16  # places that a row has at least where rows are kept apart
_KEPT = 2**16  # hashes of longer flat gradients are drawn each time: they take more memory than a gradient


@dataclass(frozen=True)
class Hashes:
    """Where each row and each column goes: places ``[rows]`` and ``[cols]`` in [0, k), and signs +1 and -1.

    Entry (r, c) goes to the sum of their places, mod k. A few rows are kept apart: row r has ``width`` places alone,
    which brings less noise, and takes one product for an outer product. ``width`` is 0 for more rows. ``start`` is the
    number of the first row.
    """

    k: int
    width: int
    start: int
    row_places: Tensor
    row_signs: Tensor
    col_places: Tensor
    col_signs: Tensor

    def of_rows(self, lo: int, hi: int) -> Hashes:
        """The hashes of rows lo .. hi alone."""
        if (lo, hi) == (0, len(self.row_places)):
            return self
        rows, signs = self.row_places[lo:hi], self.row_signs[lo:hi]
        return replace(self, start=self.start + lo, row_places=rows, row_signs=signs)

    def add_materialized(self, grads: Tensor, out: Tensor) -> None:
        """Add the sketches of materialised gradients ``[B, rows, cols]`` to ``out`` ``[B, k]``."""
        size, rows, cols = grads.shape
        if rows * cols <= _KEPT:
            places, signs = self._entries
            out.scatter_add_(1, places.flatten().expand(size, -1), (grads.to(out.dtype) * signs).flatten(1))
            return
        step = max(1, chunk_numbers() // max(1, size * rows))  # of a flat gradient there is one row, however long
        for lo in range(0, cols, step):
            part = grads[:, :, lo : lo + step].to(out.dtype)
            signs = self.row_signs[:, None] * self.col_signs[lo : lo + step]
            places = (self.row_places[:, None] + self.col_places[lo : lo + step]) % self.k
            out.scatter_add_(1, places.flatten().expand(size, -1), (part * signs).flatten(1))

    def convolves(self, steps: int) -> bool:
        """Whether convolving the sketches of T outer products is cheaper than materialising their sum."""
        if self.width:
            return True
        numel = len(self.row_places) * len(self.col_places)
        convolved = steps * self.k * (_TRANSFORM * math.log2(max(2, self.k)) + _MULTIPLY)
        return convolved < numel * (_SCATTER + _MAKE * steps)

    def add_outer(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add the sketches of sum_t b_it a_it', for a ``[B, T, cols]`` and b ``[B, T, rows]``, to ``out``."""
        size, steps = a.shape[:2]
        if self.width:
            narrow = a.to(out.dtype).flatten(0, 1) @ self._columns
            signed, narrow = (b.to(out.dtype) * self.row_signs).mT, narrow.view(size, steps, self.width)
            wide = signed * narrow if steps == 1 else signed @ narrow
            first = self.start * self.width
            out[:, first : first + wide.shape[1] * self.width] += wide.flatten(1)
            return
        long = max(1, min(steps, chunk_numbers() // (4 * self.k)))
        few = max(1, chunk_numbers() // (4 * self.k * long))
        for lo in range(0, size, few):
            total: Tensor | None = None
            for first in range(0, steps, long):
                here = slice(lo, lo + few), slice(first, first + long)
                product = self._spectrum(a[here], self.col_places, self.col_signs, out)
                product *= self._spectrum(b[here], self.row_places, self.row_signs, out)
                added = product.sum(dim=1)
                total = added if total is None else total.add_(added)
            if total is not None:
                out[lo : lo + few] += torch.fft.irfft(total, n=self.k)

    @cached_property
    def _columns(self) -> Tensor:
        """``[cols, width]``: the sign of each column in its place."""
        table = self.col_signs.new_zeros(len(self.col_places), self.width)
        return table.scatter_(1, self.col_places[:, None], self.col_signs[:, None])

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor]:
        """``[rows, cols]`` of places, and of signs."""
        return (self.row_places[:, None] + self.col_places) % self.k, self.row_signs[:, None] * self.col_signs

    def _spectrum(self, part: Tensor, places: Tensor, signs: Tensor, like: Tensor) -> Tensor:
        """``[few, T, m]`` to the Fourier transform ``[few, T, k // 2 + 1]`` of their sketches."""
        small = like.new_zeros(*part.shape[:2], self.k)
        small.scatter_add_(2, places.expand(*part.shape[:2], -1), part.to(like.dtype) * signs)
        spectrum: Tensor = torch.fft.rfft(small)
        return spectrum

    def add_entries(self, examples: Tensor, ids: Tensor, b: Tensor, out: Tensor) -> None:
        """Add the sketches of tables with b ``[N, cols]`` in rows ids ``[N]`` of examples ``[N]`` to ``out``."""
        flat = out.view(-1)
        step = max(1, chunk_numbers() // b.shape[1])
        for lo in range(0, len(ids), step):
            of = ids[lo : lo + step]
            signs = self.row_signs[of, None] * self.col_signs
            places = (self.row_places[of, None] + self.col_places) % self.k + examples[lo : lo + step, None] * self.k
            flat.index_add_(0, places.flatten(), (b[lo : lo + step].to(out.dtype) * signs).flatten())


class HashFamily:
    """The hashes of all parameters, drawn when first needed: rows + cols numbers for each.

    Args:
        k: how many numbers a sketch has.
        seed: everything random follows from it.
    """

    def __init__(self, k: int, *, seed: int) -> None:
        self.k, self._seed = k, seed
        self._drawn: dict[tuple[Any, ...], Hashes] = {}

    def hashes(self, offset: int, rows: int, cols: int, like: Tensor) -> Hashes:
        """The hashes of the parameter ``[rows, cols]`` at ``offset``, with signs of dtype and device as ``like``.

        They are the same whenever and wherever drawn.
        """
        key = offset, rows, cols, like.dtype, like.device
        if key in self._drawn:
            return self._drawn[key]
        words = _rng.hashes(rows + cols, seed=self._seed, stream=offset)
        width = self.k // rows if 1 < rows <= self.k // _APART else 0
        found = (words >> np.uint64(1)).astype(np.int64) % (width or self.k)
        found[:rows] = np.arange(rows) * width if width else found[:rows]
        places = torch.from_numpy(found).to(like.device)
        signs = torch.from_numpy(1.0 - 2.0 * (words & np.uint64(1))).to(like.device, like.dtype)
        drawn = Hashes(self.k, width, 0, places[:rows], signs[:rows], places[rows:], signs[rows:])
        if rows > 1 or cols <= _KEPT:
            self._drawn[key] = drawn
        return drawn
