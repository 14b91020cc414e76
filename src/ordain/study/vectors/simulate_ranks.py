"""Herding on W ranks: how good an order is left by what the ranks tell each other, and how much that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.study.vectors import ranks_shown
from ordain.study.vectors.ranks import Way, orders, sketched
from ordain.study.vectors.study import Point, Study

__all__ = ["STUDY", "Ranks", "vectors"]

_TRAINED, _RATE, _BATCH = 5, 0.1, 32  # epochs of SGD before gradients are taken
_LEVELS = 16  # grey levels of a digit


@dataclass(frozen=True)
class Ranks:
    """``each`` examples a rank and step; or as many as make ``batch`` examples a step of all ranks."""

    seeds: int = 2
    n: int = 32_768
    d: int = 128
    epochs: int = 10
    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    each: int = 16
    batch: int = 1024
    sketches: tuple[int, ...] = (64, 256, 1024, 4096)
    data: tuple[str, ...] = ("uniform", "digits")


def _sizes(quick: bool, **changes: Any) -> Ranks:
    small: dict[str, Any] = {
        "n": 128,
        "d": 4,
        "epochs": 2,
        "worlds": (1, 2, 4),
        "each": 4,
        "batch": 8,
        "sketches": (4, 64),
    }
    return Ranks(**(small if quick else {}) | changes)


def _points(config: Ranks) -> Iterator[Point]:
    """What does not depend on the number of ranks is measured for one of them only, as 0 examples a step."""
    for data in config.data:
        for seed in range(config.seeds):
            for method, paired, sketch, world, each in _ways(config):
                yield {
                    "data": data,
                    "seed": seed,
                    "method": method,
                    "paired": paired,
                    "sketch": sketch,
                    "world": world,
                    "each": each,
                }


def _ways(config: Ranks) -> Iterator[tuple[str, bool, int, int, int]]:
    yield "rr", False, 0, 1, 0
    for paired in (False, True):
        for sketch in (0, *config.sketches):
            yield "exact", paired, sketch, 1, 0
        for world in config.worlds:
            yield "independent", paired, 0, world, 0
            for each in sorted({config.each, config.batch // world}):
                if each > paired:  # a rank's pair takes two of a step
                    yield "sum", paired, 0, world, each
    for world in config.worlds:
        yield "cd-grab", True, 0, world, 0


def _measure(config: Ranks, point: Point) -> dict[str, Any]:
    """Both norms of the longest prefix sum, in the first order and after each epoch."""
    from ordain.study.vectors import loops  # numba takes a while to import

    z = vectors(point["data"], config.n, config.d, point["seed"])
    mean = z.mean(axis=0, dtype=np.float64)
    way = Way(point["method"], paired=point["paired"], world=point["world"], each=max(1, point["each"]))
    seen = sketched(z, point["sketch"], seed=point["seed"]) if point["sketch"] else z
    found = [
        loops.longest_prefixes(z, mean, sigma) for sigma in orders(seen, way, epochs=config.epochs, seed=point["seed"])
    ]
    return {"l2": [pair[0] for pair in found], "linf": [pair[1] for pair in found]}


@lru_cache(maxsize=1)
def vectors(data: str, n: int, d: int, seed: int) -> NDArray[np.float32]:
    """``[n, d]`` evenly from [0, 1]^d (the paper's toy); or ``[n, 650]``, gradients of a logistic regression.

    Those are at weights that five epochs of SGD have led to. There are 1,294 digits to train on: n of them are drawn
    with replacement, and each pixel is changed by up to half a grey level, so that no two are alike.
    """
    rng = np.random.default_rng([n, d, seed])
    return rng.random((n, d), dtype=np.float32) if data == "uniform" else _gradients(n, rng, seed)


def _gradients(n: int, rng: np.random.Generator, seed: int) -> NDArray[np.float32]:
    import torch

    from ordain.study.runs.probe import per_example_gradients
    from ordain.study.tasks import TASKS

    problem = TASKS["digits"].load(Path())  # they come with scikit-learn: no folder is read
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


STUDY: Study[Ranks] = Study(
    name="simulate-ranks",
    title="Orders that W ranks find together, by what they tell each other",
    sizes=_sizes,
    points=_points,
    measure=_measure,
    draw=ranks_shown.draw,
    tabulate=ranks_shown.tabulate,
    say=ranks_shown.say,
)
