"""Units: groups of examples that stay together and are ordered as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from ordain import _rng
from ordain.errors import InputError

Indices = NDArray[np.int64]


class Units:
    """Units of ``group`` examples, cut from the first epoch; the last unit may be smaller.

    Attributes:
        members: ``[n]``, the examples in the order of the first epoch; unit u is the u-th ``group`` of them.
        group: examples in a unit.
        n: the number of examples.
        count: the number of units.
    """

    def __init__(self, members: Indices, *, group: int) -> None:
        self.members, self.group = members, group
        self.n = len(members)
        self.count = -(-self.n // group)
        self.missing = self.count * group - self.n  # how many examples the last unit lacks

    def expand(self, units: Indices) -> Indices:
        """The examples of these units, in turn."""
        if self.group == 1:
            return np.take(self.members, units)
        places = (units[:, None] * self.group + np.arange(self.group)).ravel()
        return np.take(self.members, places[places < self.n])

    def sizes(self, units: Indices) -> Indices:
        """How many examples each of these units has."""
        return np.where(units == self.count - 1, self.group - self.missing, self.group)


def runs(n: int, group: int, *, seed: int) -> Indices:
    """``[n]``: runs of ``group`` neighbouring examples in a random order; a last, shorter one at the end.

    >>> runs(7, 3, seed=2).tolist()
    [3, 4, 5, 0, 1, 2, 6]
    """
    whole = n // group
    first = _rng.permutation(whole, seed=seed)[:, None] * group + np.arange(group)
    return np.concatenate([first.ravel(), np.arange(whole * group, n)])


def check_n(n: Any) -> int:
    """``n`` as a positive int; a dataset is asked for its length."""
    if isinstance(n, IterableDataset):
        raise InputError(
            f"an IterableDataset ({type(n).__name__})",
            expected="a map-style dataset with a length, whose examples can be visited in any order",
            remedy="Load it into a list or a map-style Dataset, or order the shards that it reads: see docs/orders.md.",
        )
    if isinstance(n, DataLoader):
        raise InputError(
            "a DataLoader, whose length counts batches",
            expected="the number of examples, or the dataset",
            remedy="Pass loader.dataset, or its length.",
        )
    if hasattr(n, "__len__") and not isinstance(n, (str, bytes, torch.Tensor, np.ndarray)):
        n = len(n)
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise InputError(f"n={n!r}", expected="the number of examples, at least 1", remedy="Pass len(dataset).")
    return int(n)


def check_group(group: Any) -> int:
    """``group`` as a positive int."""
    if isinstance(group, bool) or not isinstance(group, (int, np.integer)) or group < 1:
        raise InputError(f"group={group!r}", expected="an integer >= 1", remedy="group=1 orders single examples.")
    return int(group)
