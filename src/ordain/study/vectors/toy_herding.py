"""Figure 1(b): norms of the prefix sums of random vectors, in four orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ordain import herding
from ordain.study.vectors.vector_study import Figures, Point, Record, Seeds, Table, estimate, settings, where

_LABELS = {"random": "random", "greedy": "greedy", "herding-1": "herding, 1 round", "herding-10": "herding, 10 rounds"}
_POINTS = 400  # of a curve in the records: each is the largest value of its interval


@settings
class ToyHerding:
    """n vectors drawn uniformly from [0, 1]^d, as in the paper's caption."""

    name: ClassVar = "toy-herding"
    title: ClassVar = "Figure 1(b): prefix sums of random vectors in four orders"
    quick: ClassVar = {"seeds": 2, "n": 300, "d": 8}
    seeds: Seeds = 5
    n: int = 10_000
    d: int = 128

    def points(self) -> Iterator[Point]:
        return ({"seed": seed, "order": order} for seed in range(self.seeds) for order in _LABELS)

    def measure(self, point: Point) -> dict[str, Any]:
        rng = np.random.default_rng(point["seed"])
        z, shuffled = rng.random((self.n, self.d)), rng.permutation(self.n)
        orders: dict[str, Callable[[], NDArray[np.int64]]] = {
            "random": lambda: shuffled,
            "greedy": lambda: herding.greedy(z),
            "herding-1": lambda: herding.herd(z, rounds=1),
            "herding-10": lambda: herding.herd(z, rounds=10),
        }
        sigma = orders[point["order"]]()
        norms = herding.prefix_norms(z, sigma)
        starts = np.unique(np.linspace(0, self.n - 1, min(_POINTS, self.n)).astype(np.int64))
        return {
            "l2": float(norms.max()),
            "linf": herding.herding_objective(z, sigma),
            "at": (starts + 1).tolist(),
            "norms": [float(f"{value:.5g}") for value in np.maximum.reduceat(norms, starts)],
        }

    def draw(self, records: list[Record]) -> Figures:
        from ordain.study.style import LEGEND, finish, grid_figure, plot_seeds

        figure, ((axes,),) = grid_figure(8.6, 4.6)
        at = records[0]["at"][:-1]  # the last sum is zero
        for position, (order, label) in enumerate(_LABELS.items()):
            curves = np.array([record["norms"] for record in where(records, order=order)])[:, :-1]
            plot_seeds(axes, at, curves, label, position, alpha=0.15, every=max(1, len(at) // 8))
        seeds = "one seed" if self.seeds == 1 else f"mean of {self.seeds} seeds (band: all)"
        title = f"{self.n:,} vectors from $[0,1]^{{{self.d}}}$: {seeds}"
        label = "l2 norm of the centred prefix sum (log scale)"
        axes.set(yscale="log", xlabel="vectors in the prefix", ylabel=label, title=title)
        finish(axes)
        figure.legend(loc="outside right upper", **LEGEND)
        return {"prefix-norms": figure}

    def tabulate(self, records: list[Record]) -> Table:
        rows: list[tuple[str, ...]] = []
        random = estimate(_of(records, "random", "l2")).mean
        for order, label in _LABELS.items():
            l2, linf = (estimate(_of(records, order, norm)) for norm in ("l2", "linf"))
            rows.append((label, f"{l2:.3g}", f"{random / l2.mean:.1f}x", f"{linf:.3g}"))
        return ("order", "largest prefix sum, l2", "smaller than random", "largest, l-inf"), rows

    def say(self, records: list[Record]) -> list[str]:
        mean = {order: estimate(_of(records, order, "l2")).mean for order in _LABELS}
        compared = "better" if mean["greedy"] < mean["herding-10"] else "worse"
        return [
            f"Of {self.n:,} vectors from [0,1]^{self.d}, the longest prefix sum (l2) of a random order is "
            f"{mean['random']:.3g}; one round of balancing and reordering leaves {mean['herding-1']:.3g}, ten rounds "
            f"{mean['herding-10']:.3g} ({mean['random'] / mean['herding-10']:.0f} times shorter).",
            f"Greedy, which compares all vectors at each step, reaches {mean['greedy']:.3g} here: on such vectors it "
            f"is {compared} than ten rounds, and it fails on vectors constructed for that (see statement1).",
        ]


def _of(records: list[Record], order: str, norm: str) -> list[float]:
    return [record[norm] for record in where(records, order=order)]
