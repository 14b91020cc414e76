"""The appendix's figure on balancing: Algorithm 5 beside Algorithm 6, over ten rounds of herding.

The vectors are those of Figure 1, evenly from [0, 1]^d. The paper says neither which c it gave Algorithm 6 nor what
it did on failure. Three ways are measured: Theorem 4's c; a small one, with failed passes started again (as the
paper's text has it); and one so small that every pass would fail, with the probabilities clipped to [0, 1] instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ordain import Deterministic, SelfBalancingWalk, herding
from ordain.balancing import Balancer
from ordain.errors import BalancingFailedError
from ordain.study.vectors.fitting import mean_and_error, spread
from ordain.study.vectors.study import Point, Record, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "Balancing"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_NORMS = {"l2": "l2", "linf": "l-inf"}


@dataclass(frozen=True)
class Balancing:
    """``c`` is about the least with which the walk seldom fails on such vectors; with ``tiny_c`` it always would."""

    seeds: int = 3
    n: int = 10_000
    dims: tuple[int, ...] = (100, 1_000, 10_000)
    rounds: int = 10
    c: float = 10.0
    tiny_c: float = 1.0


def _sizes(quick: bool, **changes: Any) -> Balancing:
    small: dict[str, Any] = {"seeds": 2, "n": 400, "dims": (4, 16), "rounds": 3}
    return Balancing(**(small if quick else {}) | changes)


def _labels(config: Balancing) -> dict[str, str]:
    return {
        "deterministic": "Alg. 5",
        "walk": f"Alg. 6, c = {config.c:g}",
        "walk-theorem": "Alg. 6, Theorem 4's c",
        "walk-tiny": f"Alg. 6, c = {config.tiny_c:g}, clipped",
    }


def _points(config: Balancing) -> Iterator[Point]:
    for d in config.dims:
        for seed in range(config.seeds):
            for balancer in _labels(config):
                yield {"d": d, "seed": seed, "balancer": balancer}


def _measure(config: Balancing, point: Point) -> dict[str, Any]:
    """Both norms of the longest prefix sum, before the first round (a random order) and after each.

    A walk that fails again and again ends its lists early.
    """
    from ordain.study.vectors import loops  # numba takes a while to import

    z = np.random.default_rng([point["d"], point["seed"]]).random((config.n, point["d"]), dtype=np.float32)
    mean = z.mean(axis=0, dtype=np.float64)
    rounds = _clipped if point["balancer"] == "walk-tiny" else _offline
    found = [loops.longest_prefixes(z, mean, sigma) for sigma in rounds(config, point, z, mean)]
    return {"l2": [pair[0] for pair in found], "linf": [pair[1] for pair in found]}


def _offline(config: Balancing, point: Point, z: NDArray[np.float32], mean: Floats) -> Iterator[Indices]:
    """The first order and that of each round, by :func:`ordain.herding.herd`, which starts failed passes again."""
    balancers: dict[str, Balancer] = {
        "deterministic": Deterministic(),
        "walk": SelfBalancingWalk(c=config.c),
        "walk-theorem": SelfBalancingWalk(),
    }
    sigma: Indices = np.arange(config.n)  # independent vectors: this order is a random one
    yield sigma
    for round_ in range(config.rounds):
        seed = point["seed"] * config.rounds + round_
        try:
            sigma = herding.herd(z, rounds=1, order=sigma, balancer=balancers[point["balancer"]], seed=seed)
        except BalancingFailedError:
            return
        yield sigma


def _clipped(config: Balancing, point: Point, z: NDArray[np.float32], mean: Floats) -> Iterator[Indices]:
    """The same with Algorithm 6's probabilities clipped to [0, 1]: it never fails, and any c will do."""
    from ordain.study.vectors import loops  # numba takes a while to import

    sigma: Indices = np.arange(config.n)
    rng = np.random.default_rng([point["d"], point["seed"], 1])
    yield sigma
    for _ in range(config.rounds):
        signs = loops.clipped_walk(z, mean, sigma, rng.random(config.n), config.tiny_c)
        sigma = herding.reorder(signs, sigma)
        yield sigma


def _values(config: Balancing, records: list[Record], d: int, balancer: str, norm: str) -> NDArray[np.float64]:
    """``[seeds, rounds + 1]`` of the seeds whose rounds all succeeded."""
    of = [record[norm] for record in records if (record["d"], record["balancer"]) == (d, balancer)]
    return np.array([values for values in of if len(values) == config.rounds + 1]).reshape(-1, config.rounds + 1)


def _draw(config: Balancing, records: list[Record]) -> dict[str, Figure]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from ordain.study.style import LEGEND, finish, style

    figure = Figure(figsize=(3.7 * len(config.dims) + 0.4, 6.4), layout="constrained")
    grid = figure.subplots(len(_NORMS), len(config.dims), squeeze=False)
    for row, (norm, norm_label) in enumerate(_NORMS.items()):
        for column, d in enumerate(config.dims):
            axes = grid[row, column]
            start = [record[norm][0] for record in records if record["d"] == d]
            if start:
                axes.axhline(float(np.mean(start)), color="black", linewidth=1.2, label="random order")
            for position, (balancer, label) in enumerate(_labels(config).items(), 1):
                values = _values(config, records, d, balancer, norm)[:, 1:]
                if len(values):
                    look, at = style(position), range(1, config.rounds + 1)
                    axes.plot(at, values.mean(axis=0), label=label, **look.line(1))
                    low, high = values.min(axis=0), values.max(axis=0)
                    axes.fill_between(at, low, high, color=look.color, alpha=0.15, linewidth=0)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if row == 0:
                axes.set_title(f"d = {d:,}, n = {config.n:,}")
            if row == len(_NORMS) - 1:
                axes.set_xlabel("rounds")
            if column == 0:
                axes.set_ylabel(f"longest prefix sum, {norm_label}")
            finish(axes)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, **LEGEND)
    return {"balancing": figure}


def _tabulate(config: Balancing, records: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for d in config.dims:
        for norm, norm_label in _NORMS.items():
            start = {record["seed"]: record[norm][0] for record in records if record["d"] == d}
            before = spread(*mean_and_error(list(start.values()) or [math.nan]))
            for balancer, label in _labels(config).items():
                values = _values(config, records, d, balancer, norm)
                if len(values):
                    first, last = (spread(*mean_and_error(values[:, at])) for at in (1, -1))
                    rows.append((f"{d:,}", norm_label, label, before, first, last))
    return ("d", "norm", "balancing", "random order", "1 round", f"{config.rounds} rounds"), rows


def _say(config: Balancing, records: list[Record]) -> list[str]:
    said = []
    for d in config.dims:
        means = {
            (balancer, norm): _values(config, records, d, balancer, norm).mean(axis=0)
            for balancer in _labels(config)
            for norm in _NORMS
            if len(_values(config, records, d, balancer, norm))
        }
        if ("deterministic", "l2") not in means:
            continue
        for balancer, label in list(_labels(config).items())[1:]:
            if (balancer, "l2") not in means:
                if any((record["d"], record["balancer"]) == (d, balancer) for record in records):
                    said.append(f"d = {d:,}: {label} left its bound in every attempt.")
                continue
            ratio = {norm: means[balancer, norm] / means["deterministic", norm] for norm in _NORMS}
            said.append(
                f"d = {d:,}: {label} leaves {ratio['l2'][1]:.2f} times Alg. 5's longest prefix sum after one round and "
                f"{ratio['l2'][-1]:.2f} times after {config.rounds} (l2; l-inf: {ratio['linf'][1]:.2f} and "
                f"{ratio['linf'][-1]:.2f})."
            )
    return said or ["Too little has been measured to set one way of balancing beside another."]


STUDY: Study[Balancing] = Study(
    name="balancing",
    title="Algorithm 5 beside Algorithm 6 over ten rounds of herding",
    sizes=_sizes,
    points=_points,
    measure=_measure,
    draw=_draw,
    tabulate=_tabulate,
    say=_say,
)
