"""Which rows make up which unit, as weights: a unit's gradient is the mean of its examples'.

Rows are those of a batch, behind a few that earlier batches left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Grouping:
    """Units cut from consecutive rows.

    Attributes:
        weights: ``[units, rows]``.
        slots: ``[units]``, the slot of each complete unit.
        open_slot: the slot of a last, incomplete unit; -1 if there is none.
        open_count: how many examples of it there are so far.
        open_weights: ``[rows]``, the weights of their sum; None if there is none.
    """

    weights: Matrix
    slots: Indices
    open_slot: int = -1
    open_count: int = 0
    open_weights: NDArray[np.float64] | None = None

    @classmethod
    def cut(cls, slots: Indices, counts: Indices, sizes: Indices, *, carried: int) -> Grouping:
        """Cut rows into units.

        Args:
            slots: ``[rows]``, the slot each row belongs to; equal ones are consecutive.
            counts: ``[rows]``, how many examples a row stands for: 1, or more for the sum of an earlier batch's.
            sizes: ``[rows]``, how many examples the row's unit has.
            carried: how many rows in front come from earlier batches and are weighted already; the others weigh 1/size.
        """
        unit = np.cumsum(np.concatenate([[0], slots[1:] != slots[:-1]]))
        scale = np.where(np.arange(len(slots)) < carried, 1.0, 1.0 / sizes)
        weights = np.zeros((unit[-1] + 1, len(slots)))
        weights[unit, np.arange(len(slots))] = scale
        first = np.searchsorted(unit, np.arange(unit[-1] + 1))
        last = int(counts[unit == unit[-1]].sum())
        if last == sizes[-1]:
            return cls(weights, slots[first])
        return cls(weights[:-1], slots[first[:-1]], int(slots[-1]), last, weights[-1])


def differences(count: int) -> Matrix:
    """``[count // 2, count]``: first minus second of consecutive pairs."""
    pairs = np.arange(count // 2)
    weights = np.zeros((count // 2, count))
    weights[pairs, 2 * pairs] = 1.0
    weights[pairs, 2 * pairs + 1] = -1.0
    return weights


class Rows(Protocol):
    """Vectors g_1 .. g_B in R^d, known by their products and sums."""

    size: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, B]`` of <g_i, g_j>, right only where j >= i; and ``[k, d]`` to ``[k, B]`` of <v_k, g_i>."""

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``[k, B]`` to ``[k, d]``: sum_i w_ki g_i, added to ``out`` in place if that is given."""


class Prepended:
    """Rows ``heads`` [h, d] (an unpaired example, an incomplete unit), then the batch's own."""

    def __init__(self, heads: Tensor, batch: Rows) -> None:
        self._heads, self._batch = heads, batch
        self.size = len(heads) + batch.size
        self.dim, self.dtype, self.device = batch.dim, batch.dtype, batch.device

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Rows`."""
        all_vectors = torch.cat([vectors, self._heads])
        gram, dots = self._batch.products(all_vectors)
        dots = torch.cat([all_vectors @ self._heads.T, dots], dim=1)
        above = dots[len(vectors) :]
        return torch.cat([above, torch.cat([above[:, len(self._heads) :].T, gram], dim=1)]), dots[: len(vectors)]

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :class:`Rows`."""
        before, own = torch.split(weights, [len(self._heads), self._batch.size], dim=1)
        return self._batch.weighted_sum(own, out=out).addmm_(before, self._heads)
