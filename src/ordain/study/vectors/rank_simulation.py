"""W ranks that order one data set together, simulated in one process.

Position p of an epoch's order belongs to rank p mod W, so a step of b examples per rank is W b consecutive positions.
The vectors are the same in every epoch, as gradients nearly are; means are those of the epoch before, and 0 in the
first (Algorithm 4). Signs are those of Algorithm 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.errors import InputError

__all__ = ["METHODS", "Sharing", "simulate", "sketched"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

METHODS = {
    "rr": "a new random order each epoch",
    "exact": "every rank knows the gradients of all ranks, as in one process",
    "sum": "each rank balances its examples against the sum at the start of the step; then the sums are added",
    "independent": "each rank orders a fixed shard, without communication",
    "cd-grab": "fixed shards; a server balances the pairs of a step, one rank after another",
}


@dataclass(frozen=True)
class Sharing:
    """What the ranks share."""

    method: str  # one of METHODS
    paired: bool = False  # balance differences of consecutive vectors instead of centred vectors; CD-GraB always does
    world: int = 1  # W, the number of ranks
    each: int = 1  # b, the examples of a rank in a step; used by "sum" only

    def check(self, n: int) -> None:
        """Every rank needs the same number of the ``n`` vectors, and CD-GraB whole pairs."""
        if self.method not in METHODS:
            raise InputError(f"a method {self.method!r}", expected=f"one of {', '.join(METHODS)}", remedy="Use one.")
        share = 2 * self.world if self.method == "cd-grab" else self.world
        if self.world < 1 or self.each < 1 or n % share:
            raise InputError(
                f"{n:,} vectors on {self.world} ranks, {self.each} a step",
                expected=f"at least one of each, and a multiple of {share}",
                remedy="Use powers of two.",
            )


def simulate(z: NDArray[Any], sharing: Sharing, *, epochs: int, seed: int) -> Iterator[Indices]:
    """The first order of ``z [n, d]``, which is random and depends only on the seed, and the order after each epoch."""
    sharing.check(len(z))
    rng = np.random.default_rng(seed)
    sigma: Indices = rng.permutation(len(z))
    yield sigma
    for epoch in range(epochs):
        sigma = rng.permutation(len(z)) if sharing.method == "rr" else _next(z, sigma, sharing, first=epoch == 0)
        yield sigma


def _next(z: NDArray[Any], sigma: Indices, sharing: Sharing, *, first: bool) -> Indices:
    """The order after an epoch in the order ``sigma``; ``first``: there is no mean from an epoch before."""
    from ordain.study.vectors.compiled import signs_by_steps  # numba is slow to import

    paired, world = sharing.paired, sharing.world

    def alone(visits: Indices) -> NDArray[np.int8]:
        """The signs that one process finds for these vectors."""
        return signs_by_steps(z, visits, 1, len(visits), paired, _mean(z, visits, first))

    if sharing.method == "exact":
        return _reorder(alone(sigma), sigma)
    if sharing.method == "sum":
        return _reorder(signs_by_steps(z, sigma, world, sharing.each, paired, _mean(z, sigma, first)), sigma)
    if sharing.method == "independent":
        signs = np.stack([alone(sigma[rank::world]) for rank in range(world)], axis=1).ravel()
    else:
        # [pair, first or second, rank]: the server takes the first pair of every rank, then the second, ...
        turns = sigma.reshape(-1, 2, world).transpose(0, 2, 1)
        signs = alone(turns.ravel()).reshape(turns.shape).transpose(0, 2, 1).ravel()
    new = np.empty_like(sigma)
    for rank in range(world):  # an example never leaves its rank
        new[rank::world] = _reorder(signs[rank::world], sigma[rank::world])
    return new


def _reorder(signs: NDArray[np.int8], sigma: Indices) -> Indices:
    """+1 to the front, -1 reversed to the back, and 0 in between."""
    return np.concatenate([sigma[signs > 0], sigma[signs == 0], sigma[signs < 0][::-1]])


def _mean(z: NDArray[Any], rows: Indices, first: bool) -> Floats:
    if first:
        return np.zeros(z.shape[1])
    mean: Floats = (z[rows] if len(rows) < len(z) else z).mean(axis=0, dtype=np.float64)
    return mean


def sketched(z: NDArray[Any], k: int, *, seed: int) -> NDArray[Any]:
    """Sketches ``[n, k]`` of the rows of ``z``, without the columns that are zero for all of them."""
    import torch

    from ordain.gradients import sketch

    (block,) = sketch(torch.from_numpy(z), k, seed=seed).blocks()
    small: NDArray[Any] = block.numpy()
    return np.ascontiguousarray(small[:, small.any(axis=0)])
