"""Algorithm 5 next to Algorithm 6 over ten rounds of herding (a figure in the paper's appendix).

The vectors are those of Figure 1, uniform in [0, 1]^d. The paper states neither its c for Algorithm 6 nor how it treats
a failure. Three variants are measured: the c of Theorem 4; a small c, where a failed pass is repeated (as the paper's
text has it); and a c so small that every pass would fail, with the probabilities clipped to [0, 1] instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ordain import Deterministic, SelfBalancingWalk, herding
from ordain.balancing import Balancer
from ordain.errors import BalancingFailedError
from ordain.study.vectors.vector_study import Figures, Ints, Point, Record, Seeds, Table, estimate, settings, where

_NORMS = {"l2": "l2", "linf": "l-inf"}


@settings
class BalancingRules:
    """``c`` is about the smallest with which the walk seldom fails on such vectors; with ``tiny_c`` it always would."""

    name: ClassVar = "balancing"
    title: ClassVar = "Algorithm 5 and Algorithm 6 over ten rounds of herding"
    quick: ClassVar = {"seeds": 2, "n": 400, "dims": (4, 16), "rounds": 3}
    seeds: Seeds = 3
    n: int = 10_000
    dims: Ints = (100, 1_000, 10_000)
    rounds: int = 10
    c: float = 10.0
    tiny_c: float = 1.0

    def _labels(self) -> dict[str, str]:
        return {
            "deterministic": "Alg. 5",
            "walk": f"Alg. 6, c = {self.c:g}",
            "walk-theorem": "Alg. 6, Theorem 4's c",
            "walk-tiny": f"Alg. 6, c = {self.tiny_c:g}, clipped",
        }

    def points(self) -> Iterator[Point]:
        combinations = product(self.dims, range(self.seeds), self._labels())
        return ({"d": d, "seed": seed, "balancer": balancer} for d, seed, balancer in combinations)

    def measure(self, point: Point) -> dict[str, Any]:
        """Both norms of the longest prefix sum, before the first round (a random order) and after each."""
        from ordain.study.vectors.compiled import measure_orders  # numba is slow to import

        z = np.random.default_rng([point["d"], point["seed"]]).random((self.n, point["d"]), dtype=np.float32)
        return measure_orders(z, self._orders(point, z))

    def _orders(self, point: Point, z: NDArray[np.float32]) -> Iterator[NDArray[np.int64]]:
        """The first order and that after each round. Ends early if the walk fails too often for ``herd``."""
        from ordain.study.vectors.compiled import clipped_walk  # numba is slow to import

        name, mean = point["balancer"], z.mean(axis=0, dtype=np.float64)
        walks: dict[str, Balancer] = {"walk": SelfBalancingWalk(c=self.c), "walk-theorem": SelfBalancingWalk()}
        rng = np.random.default_rng([point["d"], point["seed"], 1])
        sigma: NDArray[np.int64] = np.arange(self.n)  # the vectors are independent, so this order is a random one
        yield sigma
        for round_ in range(self.rounds):
            if name == "walk-tiny":  # never fails: probabilities are clipped to [0, 1], so any c will do
                sigma = herding.reorder(clipped_walk(z, mean, sigma, rng.random(self.n), self.tiny_c), sigma)
            else:
                seed = point["seed"] * self.rounds + round_
                try:
                    sigma = herding.herd(z, rounds=1, order=sigma, balancer=walks.get(name, Deterministic()), seed=seed)
                except BalancingFailedError:
                    return
            yield sigma

    def _values(self, records: list[Record], d: int, balancer: str, norm: str) -> NDArray[np.float64]:
        """``[seeds, rounds + 1]`` of the seeds whose rounds all succeeded."""
        of = [record[norm] for record in where(records, d=d, balancer=balancer)]
        return np.array([values for values in of if len(values) == self.rounds + 1]).reshape(-1, self.rounds + 1)

    def draw(self, records: list[Record]) -> Figures:
        from matplotlib.ticker import MaxNLocator

        from ordain.study.style import LEGEND, finish, grid_figure, plot_seeds

        columns, at = len(self.dims), range(1, self.rounds + 1)
        figure, grid = grid_figure(3.7 * columns + 0.4, 6.4, rows=len(_NORMS), columns=columns)
        for (row, (norm, norm_label)), (column, d) in product(enumerate(_NORMS.items()), enumerate(self.dims)):
            axes = grid[row, column]
            start = float(np.mean([record[norm][0] for record in where(records, d=d)]))
            axes.axhline(start, color="black", linewidth=1.2, label="random order")
            for position, (balancer, label) in enumerate(self._labels().items(), 1):
                values = self._values(records, d, balancer, norm)[:, 1:]
                if len(values):
                    plot_seeds(axes, at, values, label, position, alpha=0.15, every=1)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(f"d = {d:,}, n = {self.n:,}" if row == 0 else "")
            axes.set_xlabel("rounds" if row == len(_NORMS) - 1 else "")
            axes.set_ylabel(f"longest prefix sum, {norm_label}" if column == 0 else "")
            finish(axes)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, **LEGEND)
        return {"balancing": figure}

    def tabulate(self, records: list[Record]) -> Table:
        rows: list[tuple[str, ...]] = []
        for d, (norm, norm_label) in product(self.dims, _NORMS.items()):
            start = {record["seed"]: record[norm][0] for record in where(records, d=d)}
            before = f"{estimate(list(start.values())):.3g}"
            for balancer, label in self._labels().items():
                values = self._values(records, d, balancer, norm)
                if len(values):
                    first, last = (f"{estimate(values[:, at]):.3g}" for at in (1, -1))
                    rows.append((f"{d:,}", norm_label, label, before, first, last))
        return ("d", "norm", "balancing", "random order", "1 round", f"{self.rounds} rounds"), rows

    def say(self, records: list[Record]) -> list[str]:
        said = []
        (first, _), *others = self._labels().items()
        for d, (balancer, label) in product(self.dims, others):
            ours, theirs = ({norm: self._values(records, d, of, norm) for norm in _NORMS} for of in (first, balancer))
            if not len(theirs["l2"]):
                said.append(f"d = {d:,}: {label} left its bound in every attempt.")
                continue
            ratio = {norm: theirs[norm].mean(axis=0) / ours[norm].mean(axis=0) for norm in _NORMS}
            said.append(
                f"d = {d:,}: {label} leaves {ratio['l2'][1]:.2f} times Alg. 5's longest prefix sum after one round "
                f"and {ratio['l2'][-1]:.2f} times after {self.rounds} (l2; l-inf: {ratio['linf'][1]:.2f} and "
                f"{ratio['linf'][-1]:.2f})."
            )
        return said
