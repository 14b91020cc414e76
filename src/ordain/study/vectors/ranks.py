"""W ranks that order one data set together, in one process: what each way of sharing does to the order.

Position p of an epoch's order is rank p mod W's, so that a step of b examples a rank is W b consecutive positions.
Vectors stay as they are from epoch to epoch, as gradients nearly do; means are those of the epoch before, and 0 in the
first (Algorithm 4). Signs are Algorithm 5's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain import herding
from ordain.balancing import Deterministic
from ordain.errors import InputError

__all__ = ["METHODS", "Way", "orders", "sketched"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Signs = NDArray[np.int8]

METHODS = {
    "rr": "a new random order each epoch",
    "exact": "every rank knows the gradients of all: as one process",
    "sum": "each rank balances its own against the sum as the step began; then the sums are added",
    "independent": "each rank orders a fixed shard of its own and tells nobody",
    "cd-grab": "fixed shards; a server balances all pairs of a step, rank after rank",
}


@dataclass(frozen=True)
class Way:
    """How ranks share.

    Attributes:
        method: one of :data:`METHODS`.
        paired: balance differences of consecutive vectors, not centred vectors. CD-GraB always does.
        world: W, how many ranks there are.
        each: b, the examples of a rank and step; it matters to ``sum`` only.
    """

    method: str
    paired: bool = False
    world: int = 1
    each: int = 1

    def check(self, n: int) -> None:
        """Ranks must have equally many of ``n`` vectors, and CD-GraB's whole pairs."""
        if self.method not in METHODS:
            raise InputError(f"a method {self.method!r}", expected=f"one of {', '.join(METHODS)}", remedy="Take one.")
        share = 2 * self.world if self.method == "cd-grab" else self.world
        if self.world < 1 or self.each < 1 or n % share:
            raise InputError(
                f"{n:,} vectors on {self.world} ranks, {self.each} a step",
                expected=f"at least one of each, and a multiple of {share}",
                remedy="Take powers of two.",
            )


def orders(z: NDArray[Any], way: Way, *, epochs: int, seed: int) -> Iterator[Indices]:
    """The first order of ``z [n, d]``, which is random and the same in every way, and that after each epoch."""
    way.check(len(z))
    rng = np.random.default_rng(seed)
    sigma: Indices = rng.permutation(len(z))
    yield sigma
    for epoch in range(epochs):
        sigma = rng.permutation(len(z)) if way.method == "rr" else _next(z, sigma, way, stale=epoch > 0)
        yield sigma


def _next(z: NDArray[Any], sigma: Indices, way: Way, *, stale: bool) -> Indices:
    """The order after one epoch in the order ``sigma``; ``stale``: there is a mean from the epoch before."""
    if way.method == "exact":
        return herding.rearranged(_places(z, sigma, way.paired, _mean(z, sigma, stale)), sigma)
    if way.method == "sum":
        from ordain.study.vectors import loops  # numba takes a while to import

        signs = loops.summed_signs(z, sigma, way.world, way.each, way.paired, _mean(z, sigma, stale))
        return herding.rearranged(signs, sigma)
    new = np.empty_like(sigma)
    together: Signs | None = None
    if way.method == "cd-grab":
        # [pair, first or second, rank]: the server takes the first pair of every rank, then the second, ...
        turns = sigma.reshape(-1, 2, way.world).transpose(0, 2, 1)
        places = _places(z, turns.ravel(), True, np.zeros(z.shape[1]))
        together = places.reshape(turns.shape).transpose(0, 2, 1).ravel()
    for rank in range(way.world):
        own = sigma[rank :: way.world]
        places = _places(z, own, way.paired, _mean(z, own, stale)) if together is None else together[rank :: way.world]
        new[rank :: way.world] = herding.rearranged(places, own)
    return new


def _mean(z: NDArray[Any], rows: Indices, stale: bool) -> Floats:
    if not stale:
        return np.zeros(z.shape[1])
    mean: Floats = z[rows].mean(axis=0, dtype=np.float64) if len(rows) < len(z) else z.mean(axis=0, dtype=np.float64)
    return mean


def _places(z: NDArray[Any], visits: Indices, paired: bool, centre: Floats) -> Signs:
    """The sign of each visited vector, by one process; an odd one gets 0."""
    from ordain import _kernels  # numba takes a while to import

    d, count = z.shape[1], len(visits) // 2 if paired else len(visits)
    signs = np.zeros(count, dtype=np.int8)
    state, s, row = np.zeros(3), np.zeros(d), np.empty(d)
    kind = Deterministic.kind
    _kernels.stream_signs(kind, z, visits, 0, count, paired, centre, s, row, np.zeros(count), state, 0.0, signs)
    if not paired:
        return signs
    places = np.zeros(len(visits), dtype=np.int8)
    places[0 : 2 * count : 2], places[1 : 2 * count : 2] = signs, -signs
    return places


def sketched(z: NDArray[Any], k: int, *, seed: int) -> NDArray[Any]:
    """Sketches ``[n, k]`` of the rows of ``z``, without the places that no coordinate goes to."""
    import torch

    from ordain.gradients import sketch

    (block,) = sketch(torch.from_numpy(z), k, seed=seed).blocks()
    small: NDArray[Any] = block.numpy()
    return np.ascontiguousarray(small[:, small.any(axis=0)])
