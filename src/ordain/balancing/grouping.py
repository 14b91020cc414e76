"""Which rows of a batch make up which unit, as weights: a unit's gradient is the mean of its examples'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
