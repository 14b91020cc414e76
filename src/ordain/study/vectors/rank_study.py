"""Herding on W ranks: the quality of the order by what the ranks share, and the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain.study.vectors import rank_figures
from ordain.study.vectors.rank_simulation import Sharing, simulate, sketched
from ordain.study.vectors.vector_study import Point, Study

__all__ = ["STUDY", "RankStudy", "vectors"]

_TRAINED, _RATE, _BATCH = 5, 0.1, 32  # epochs of SGD before gradients are taken
_LEVELS = 16  # grey levels of a digit


@dataclass(frozen=True)
class RankStudy:
    """``each`` examples per rank and step, or as many as make ``batch`` examples per step over all ranks."""

    seeds: int = 2
    n: int = 32_768
    d: int = 128
    epochs: int = 10
    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    each: int = 16
    batch: int = 1024
    sketches: tuple[int, ...] = (64, 256, 1024, 4096)
    data: tuple[str, ...] = ("uniform", "digits")


def _points(config: RankStudy) -> Iterator[Point]:
    """Methods that do not depend on the number of ranks are measured once, as one rank with 0 examples per step."""
    common = {"paired": False, "sketch": 0, "world": 1, "each": 0}
    for data in config.data:
        for seed in range(config.seeds):
            for method, settings in _methods(config):
                yield {"data": data, "seed": seed, "method": method} | common | settings


def _methods(config: RankStudy) -> Iterator[tuple[str, dict[str, int]]]:
    yield "rr", {}
    for paired in (False, True):
        for sketch in (0, *config.sketches):
            yield "exact", {"paired": paired, "sketch": sketch}
        for world in config.worlds:
            yield "independent", {"paired": paired, "world": world}
            for each in sorted({config.each, config.batch // world}):
                if each > paired:  # a pair of a rank needs two examples of a step
                    yield "sum", {"paired": paired, "world": world, "each": each}
    for world in config.worlds:
        yield "cd-grab", {"paired": True, "world": world}


def _measure(config: RankStudy, point: Point) -> dict[str, Any]:
    """Both norms of the longest prefix sum, in the first order and after each epoch."""
    from ordain.study.vectors.compiled import measure_orders  # numba is slow to import

    z = vectors(point["data"], config.n, config.d, point["seed"])
    sharing = Sharing(point["method"], paired=point["paired"], world=point["world"], each=max(1, point["each"]))
    seen = sketched(z, point["sketch"], seed=point["seed"]) if point["sketch"] else z
    return measure_orders(z, simulate(seen, sharing, epochs=config.epochs, seed=point["seed"]))


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


STUDY: Study[RankStudy] = Study(
    name="simulate-ranks",
    title="Orders that W ranks find together, by what they tell each other",
    config=RankStudy,
    quick={"n": 128, "d": 4, "epochs": 2, "worlds": (1, 2, 4), "each": 4, "batch": 8, "sketches": (4, 64)},
    points=_points,
    measure=_measure,
    draw=rank_figures.draw,
    tabulate=rank_figures.tabulate,
    say=rank_figures.say,
)
