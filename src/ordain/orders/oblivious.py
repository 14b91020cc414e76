"""Orders that do not use gradients: each epoch depends on the seed alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ordain import _rng
from ordain.errors import InputError
from ordain.orders.order import Order
from ordain.orders.saved_state import digest
from ordain.orders.units import Indices

__all__ = ["FixedOrder", "FlipFlop", "RandomReshuffling", "ShuffleOnce", "WithReplacement"]


class RandomReshuffling(Order):
    """A new random permutation every epoch: the usual choice.

    >>> order = RandomReshuffling(5)
    >>> sorted(order.sampler)
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self, n: Any, *, group: int = 1, contiguous: bool = False, seed: int = 0, distributed: Any = "auto"
    ) -> None:
        arrange = partial(_reshuffled, seed)
        super().__init__(n, group=group, contiguous=contiguous, seed=seed, distributed=distributed, arrange=arrange)


class ShuffleOnce(Order):
    """One random permutation, the first epoch's, in every epoch."""

    def __init__(
        self, n: Any, *, group: int = 1, contiguous: bool = False, seed: int = 0, distributed: Any = "auto"
    ) -> None:
        super().__init__(n, group=group, contiguous=contiguous, seed=seed, distributed=distributed, arrange=_unchanged)


class FlipFlop(Order):
    """A new random permutation in epochs 0, 2, 4, ...; its reverse in epochs 1, 3, 5, ...

    From Rajput, Lee and Papailiopoulos.
    """

    def __init__(
        self, n: Any, *, group: int = 1, contiguous: bool = False, seed: int = 0, distributed: Any = "auto"
    ) -> None:
        def arrange(epoch: int, units: int) -> Indices:
            forward = _reshuffled(seed, epoch - epoch % 2, units)
            return forward[::-1] if epoch % 2 else forward

        super().__init__(n, group=group, contiguous=contiguous, seed=seed, distributed=distributed, arrange=arrange)


class WithReplacement(Order):
    """``n`` independent uniform draws per epoch, as the textbook analysis of SGD assumes.

    The only order that is not a permutation, including in epoch 0.
    """

    def __init__(self, n: Any, *, seed: int = 0, distributed: Any = "auto") -> None:
        def arrange(epoch: int, units: int) -> Indices:
            return _rng.with_replacement(units, seed=seed, stream=epoch)

        super().__init__(n, seed=seed, distributed=distributed, arrange=arrange)


class FixedOrder(Order):
    """The given permutation in every epoch.

    >>> list(FixedOrder([2, 0, 1]).sampler)
    [2, 0, 1]
    """

    def __init__(self, permutation: Any, *, distributed: Any = "auto") -> None:
        given = np.asarray(permutation)
        n = len(given) if given.ndim == 1 else 0
        if not n or given.dtype.kind not in "iu" or not np.array_equal(np.sort(given), np.arange(n)):
            raise InputError(
                f"an order of shape {given.shape} and dtype {given.dtype}",
                expected="a permutation of range(n): each index exactly once",
                remedy="Pass order.history(epoch), or np.arange(n) for the order of the dataset.",
            )
        members = given.astype(np.int64)
        identity = {"permutation": digest(members)}
        super().__init__(n, distributed=distributed, arrange=_unchanged, members=members, identity=identity)

    @classmethod
    def from_(cls, order: Order, epoch: int | None = None) -> FixedOrder:
        """Fix the order in which ``order`` visits ``epoch`` (the current one by default).

        After a full run of GraB, ``FixedOrder.from_(grab)`` is the paper's *Retrain from GraB*.
        """
        return cls(order.history(order.epoch if epoch is None else epoch))


def _unchanged(epoch: int, units: int) -> Indices:
    return np.arange(units)


def _reshuffled(seed: int, epoch: int, units: int) -> Indices:
    return _rng.permutation(units, seed=seed, stream=epoch) if epoch else np.arange(units)
