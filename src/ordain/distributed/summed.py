"""Less traffic: each rank balances its own batch against the common sum, and only what it adds to that is sent.

A step sends d numbers for the signed sum, a byte for each unit's sign and a few counts. (The mean's sum is what the
backward has averaged over ranks already; where that has been changed since, it is sent too.) Signs differ from one
process's in that a rank does not see what the others do in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ordain.distributed.ranks import agreed, failed_on
from ordain.gradients.base import Gradients
from ordain.gradients.dense import Dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ordain.distributed.ranks import Ranks
    from ordain.orders.balanced import BalancedOrder

    Indices = NDArray[np.int64]

# What a rank's batch adds to, and so what is added up over ranks.
_TALLIES = ("_surplus", "_mean_inner", "_summed", "_signed", "_set_aside")


class Apart:
    """A batch whose sums go to a place of their own, so that they can be added up over ranks first.

    Args:
        batch: the gradients.
        sums: ``[k, d]``: where sums go that would have been added to a vector of the order's.
        later: leave the second sum, that of the plain gradients, for :meth:`finish`: it may be there already.
    """

    def __init__(self, batch: Gradients, sums: Tensor, *, later: bool = False) -> None:
        self._batch, self.sums = batch, sums
        self.size, self.dim, self.dtype, self.device = batch.size, batch.dim, batch.dtype, batch.device
        self._later = later
        self._left: list[tuple[Gradients, Tensor]] = []  # what finish() has to add up
        self._seen: list[Tensor] = []  # the last products with the order's vectors

    def gram(self) -> Tensor:
        return self._batch.gram()

    def dot(self, vectors: Tensor) -> Tensor:
        return self._batch.dot(vectors)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        gram, dots = self._batch.products(vectors)
        self._seen[:] = [dots]
        return gram, dots

    def paired_products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self._batch.paired_products(vectors)

    def weighted_sum(self, weights: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return self._batch.weighted_sum(weights)
        if self._later:
            self._left.append((self._batch, weights[1:]))
            weights = weights[:1]
        self._batch.weighted_sum(weights, out=self.sums[: len(weights)])
        return out

    def select(self, rows: Tensor) -> Apart:
        chosen = Apart(self._batch.select(rows), self.sums, later=self._later)
        chosen._left, chosen._seen = self._left, self._seen
        return chosen

    def finish(self) -> None:
        """The second sum after all."""
        for batch, weights in self._left:
            batch.weighted_sum(weights, out=self.sums[1:])

    def along(self) -> list[float]:
        """What the gradients' sum is along P and m, and the sizes of what that is added up from."""
        if not self._seen or len(self._seen[0]) < 2:
            return [0.0] * 4
        dots = self._seen[0][:2].double()
        return [*dots.sum(dim=1).tolist(), *dots.abs().sum(dim=1).tolist()]


def learn_apart(
    order: BalancedOrder, ranks: Ranks, batch: Gradients | None, slots: Sequence[Indices], device: torch.device
) -> None:
    """One step: balance ``batch``, this rank's, and take over what all ranks found: all of it or, on failure, nothing.

    Args:
        order: this rank's copy, in the same state as the others'.
        ranks: all of them.
        batch: this rank's gradients; None if it has none.
        slots: for each rank, the slots of its rows.
        device: where the vectors live, for a rank without a batch.
    """
    units = np.unique(np.concatenate(slots))
    kept, places = dict(vars(order)), order._places[units]
    adding = False
    try:
        sums, found = _balanced_apart(order, ranks, batch, slots, device)
        table = order._vectors["table"]
        adding = True
        table[0].add_(sums[0])
        if not order._paired:
            table[2].add_(sums[1])
        for name, value in found.items():
            setattr(order, name, value)
        order._state[0] = _square(order, table)
    except BaseException:
        vars(order).update(kept)
        order._places[units] = places
        if adding:
            order._start_anew()
        raise


def _balanced_apart(
    order: BalancedOrder, ranks: Ranks, batch: Gradients | None, slots: Sequence[Indices], device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """What is to be added to P and to the mean's sum, and the order's new numbers; the places are there already."""
    dim = batch.dim if batch is not None else order._dim or 0
    if "table" not in order._vectors:
        order._allocate(
            batch if batch is not None else Dense([torch.zeros(0, dim, dtype=order._like().dtype, device=device)])
        )
    table = order._vectors["table"]
    before = [float(getattr(order, name)) for name in _TALLIES]
    failures, own_before = float(order._state[1]), float(order._state[2])
    share = 2 if order._paired else 1
    counts = [len(np.unique(one)) // share for one in slots]
    order._signed += sum(counts[: ranks.rank])  # coins of its own
    started = order._signed
    sums = torch.zeros(len(table) // 2 + 1, dim, dtype=table.dtype, device=table.device)
    # Where the backward has averaged the ranks' gradients, their sum is in p.grad on every rank.
    later = not order._paired and order._averaged and len({len(one) for one in slots}) == 1
    apart = None if batch is None else Apart(batch, sums, later=later)
    error: Exception | None = None
    mine = slots[ranks.rank]
    try:
        if apart is not None and len(mine):
            order._learn(apart, mine, cut=order.group > 1)
            order._let_go()
    except Exception as raised:  # the others must hear of it, or wait for ever
        error = raised
        sums.zero_()
    told = [float(error is not None), float(order._state[1]) - failures, float(order._state[2])]
    told += [float(getattr(order, name)) - old for name, old in zip(_TALLIES, before, strict=True)]
    told[3 + _TALLIES.index("_signed")] = float(order._signed - started)
    told += apart.along() if apart is not None else [0.0] * 4
    every, places = _told(ranks, told, order._places, slots)
    failed = np.flatnonzero(every[:, 0])
    if error is not None:
        raise agreed(error)
    if len(failed):
        raise agreed(failed_on(f"rank {failed[0]}"))
    there = later and _gradient(order, ranks, every[:, -4:].sum(axis=0), sums[1], table)
    if later and not there and apart is not None:
        sums[1].zero_()
        apart.finish()
    ranks.add(sums[:1] if there else sums)
    for one, found in zip(slots, places, strict=True):
        order._places[np.unique(one)] = found
    numbers: dict[str, Any] = {
        name: type(getattr(order, name))(old + added)
        for name, old, added in zip(_TALLIES, before, every[:, 3:-4].sum(axis=0), strict=True)
    }
    numbers["_state"] = np.array([0.0, failures + every[:, 1].sum(), max(own_before, every[:, 2].max())])
    return sums, numbers


def _gradient(order: BalancedOrder, ranks: Ranks, along: NDArray[np.float64], out: Tensor, table: Tensor) -> bool:
    """``out`` = the sum of all ranks' gradients, from what the backward has left, if it is that on every rank.

    Clipped, accumulated or otherwise changed, it is not: its products with P and m then differ from the examples'.
    """
    found = order._averaged_sum(out, ranks.size)
    if found:
        eps = torch.finfo(table.dtype).eps
        products = (table[:2] @ out).double().cpu().numpy()
        sizes = (table[:2].norm(dim=1) * out.norm()).double().cpu().numpy()
        rounding = 16 * eps * sizes + 128 * eps * along[2:]
        # A change of one in a hundred must show in one of them: else there is nothing to tell by.
        found = bool((np.abs(products - along[:2]) <= rounding).all() and (np.abs(along[:2]) > 100 * rounding).any())
    return bool(ranks.gather(torch.tensor(found)).all())


def _told(
    ranks: Ranks, told: list[float], places: NDArray[np.int8], slots: Sequence[Indices]
) -> tuple[NDArray[np.float64], list[NDArray[np.int8]]]:
    """Every rank's numbers ``[W, k]`` and the places of its units, in one message."""
    units = [np.unique(one) for one in slots]
    numbers = np.array(told)
    data = np.zeros(numbers.nbytes + max(len(one) for one in units), dtype=np.uint8)
    data[: numbers.nbytes] = numbers.view(np.uint8)
    mine = places[units[ranks.rank]].view(np.uint8)
    data[numbers.nbytes : numbers.nbytes + len(mine)] = mine
    every = ranks.gather(torch.from_numpy(data)).numpy()
    found = [
        row[numbers.nbytes : numbers.nbytes + len(one)].view(np.int8) for row, one in zip(every, units, strict=True)
    ]
    return np.ascontiguousarray(every[:, : numbers.nbytes]).view(np.float64), found


def _square(order: BalancedOrder, table: Tensor) -> float:
    """|s|^2, for s = P - E m."""
    if order._paired:
        return float(table[0] @ table[0])
    s = table[0] - order._surplus * table[1]
    return float(s @ s)
