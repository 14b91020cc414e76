"""Herding on W ranks, simulated in one process: the quality of the order by what the ranks share.

Position p of an epoch's order belongs to rank p mod W, so a step of b examples per rank is W b consecutive positions.
The vectors are the same in every epoch, as gradients nearly are; means are those of the epoch before, and 0 in the
first (Algorithm 4). Signs are those of Algorithm 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ordain.errors import InputError
from ordain.herding import rearranged
from ordain.study.vectors import rank_figures
from ordain.study.vectors.vector_study import Point

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_TRAINED, _RATE, _BATCH = 5, 0.1, 32  # epochs of SGD before gradients are taken
_LEVELS = 16  # grey levels of a digit

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
        visits = np.ascontiguousarray(visits)  # or the loop is compiled once more, for rows with gaps
        return signs_by_steps(z, visits, 1, len(visits), paired, _mean(z, visits, first))

    if sharing.method == "exact":
        return rearranged(alone(sigma), sigma)
    if sharing.method == "sum":
        return rearranged(signs_by_steps(z, sigma, world, sharing.each, paired, _mean(z, sigma, first)), sigma)
    if sharing.method == "independent":
        signs = np.stack([alone(sigma[rank::world]) for rank in range(world)], axis=1).ravel()
    else:
        # [pair, first or second, rank]: the server takes the first pair of every rank, then the second, ...
        turns = sigma.reshape(-1, 2, world).transpose(0, 2, 1)
        signs = alone(turns.ravel()).reshape(turns.shape).transpose(0, 2, 1).ravel()
    new = np.empty_like(sigma)
    for rank in range(world):  # an example never leaves its rank
        new[rank::world] = rearranged(signs[rank::world], sigma[rank::world])
    return new


def _mean(z: NDArray[Any], rows: Indices, first: bool) -> Floats:
    if first:
        return np.zeros(z.shape[1])
    mean: Floats = (z[rows] if len(rows) < len(z) else z).mean(axis=0, dtype=np.float64)
    return mean


def sketched(z: NDArray[Any], k: int, *, seed: int) -> NDArray[Any]:
    """Sketches ``[n, k]`` of the rows of ``z``, without the columns that are zero for all of them."""
    import torch

    from ordain.gradients import sketch

    block = sketch(torch.from_numpy(z), k, seed=seed).rows()
    small: NDArray[Any] = block.numpy()
    return np.ascontiguousarray(small[:, small.any(axis=0)])


@dataclass(frozen=True)
class RankSimulation:
    """``each`` examples per rank and step, or as many as make ``batch`` examples per step over all ranks."""

    name: ClassVar = "simulate-ranks"
    title: ClassVar = "Orders that W ranks find together, by what they tell each other"
    quick: ClassVar = {"n": 128, "d": 4, "epochs": 2, "worlds": (1, 2, 4), "each": 4, "batch": 8, "sketches": (4, 64)}
    seeds: int = 2
    n: int = 32_768
    d: int = 128
    epochs: int = 10
    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    each: int = 16
    batch: int = 1024
    sketches: tuple[int, ...] = (64, 256, 1024, 4096)
    data: tuple[str, ...] = ("uniform", "digits")

    draw = rank_figures.draw
    tabulate = rank_figures.tabulate
    say = rank_figures.say

    def points(self) -> Iterator[Point]:
        """Methods that do not depend on the number of ranks are measured once, as one rank with 0 examples per step."""
        common = {"paired": False, "sketch": 0, "world": 1, "each": 0}
        for data, seed, (method, settings) in product(self.data, range(self.seeds), self._methods()):
            yield {"data": data, "seed": seed, "method": method} | common | settings

    def _methods(self) -> Iterator[tuple[str, dict[str, int]]]:
        yield "rr", {}
        for paired in (False, True):
            for sketch in (0, *self.sketches):
                yield "exact", {"paired": paired, "sketch": sketch}
            for world in self.worlds:
                yield "independent", {"paired": paired, "world": world}
                for each in sorted({self.each, self.batch // world}):
                    if each > paired:  # a pair of a rank needs two examples of a step
                        yield "sum", {"paired": paired, "world": world, "each": each}
        for world in self.worlds:
            yield "cd-grab", {"paired": True, "world": world}

    def measure(self, point: Point) -> dict[str, Any]:
        """Both norms of the longest prefix sum, in the first order and after each epoch."""
        from ordain.study.vectors.compiled import measure_orders  # numba is slow to import

        z = vectors(point["data"], self.n, self.d, point["seed"])
        sharing = Sharing(point["method"], paired=point["paired"], world=point["world"], each=max(1, point["each"]))
        seen = sketched(z, point["sketch"], seed=point["seed"]) if point["sketch"] else z
        return measure_orders(z, simulate(seen, sharing, epochs=self.epochs, seed=point["seed"]))


@lru_cache(maxsize=1)
def vectors(data: str, n: int, d: int, seed: int) -> NDArray[np.float32]:
    """``[n, d]`` uniform in [0, 1]^d (the paper's toy), or ``[n, 650]``, gradients of a logistic regression on digits.

    The gradients are taken after five epochs of SGD. There are 1,294 training digits: n are drawn with replacement, and
    each pixel is changed by up to half a grey level, so that no two are equal.
    """
    rng = np.random.default_rng([n, d, seed])
    return rng.random((n, d), dtype=np.float32) if data == "uniform" else _gradients(n, rng, seed)


def _gradients(n: int, rng: np.random.Generator, seed: int) -> NDArray[np.float32]:
    import torch

    from ordain.study.runs.probe import per_example_gradients
    from ordain.study.tasks import TASKS

    problem = TASKS["digits"].load(Path())  # part of scikit-learn: no folder is read
    model = problem.build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for _ in range(_TRAINED):
        for rows in torch.split(torch.from_numpy(rng.permutation(len(problem.train_x))), _BATCH):
            optimizer.zero_grad()
            problem.loss(model(problem.train_x[rows]), problem.train_y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    chosen = torch.from_numpy(rng.integers(0, len(problem.train_x), n))
    dither = (rng.random((n, problem.train_x.shape[1]), dtype=np.float32) - np.float32(0.5)) / np.float32(_LEVELS)
    drawn = problem.train_x[chosen] + torch.from_numpy(dither)
    many = replace(problem, train_x=drawn, train_y=problem.train_y[chosen])
    found: NDArray[np.float32] = per_example_gradients(many, model).numpy()
    return found
