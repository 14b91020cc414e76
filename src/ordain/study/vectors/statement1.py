"""Statement 1: on n/2 copies each of (1, 1) and (4, -2), greedy's prefix sums grow like n."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from ordain import herding
from ordain.study.vectors.vector_study import (
    Estimate,
    Figures,
    Floats,
    Ints,
    Point,
    Record,
    Seeds,
    Table,
    settings,
    slope,
    where,
)

_LABELS = {
    "random": "random",
    "greedy": "greedy of the proof (not centred)",
    "greedy-centred": "greedy, Algorithm 1 (centred)",
    "herding-1": "herding, 1 round",
    "herding-10": "herding, 10 rounds",
}
_EXPECTED = {"random": "1/2 (at most)", "greedy": "1 (at least)", "herding-10": "0 up to logs"}


@settings
class Statement1:
    """Each n is measured with every seed; the vectors start in random order."""

    name: ClassVar = "statement1"
    title: ClassVar = "Statement 1: vectors on which greedy is far worse than random"
    quick: ClassVar = {"seeds": 3, "sizes": (16, 32, 64)}
    seeds: Seeds = 20
    sizes: Annotated[Ints, Field(min_length=2)] = (64, 128, 256, 512, 1024, 2048, 4096)

    def points(self) -> Iterator[Point]:
        return ({"n": n, "seed": seed} for n in self.sizes for seed in range(self.seeds))

    def measure(self, point: Point) -> dict[str, Any]:
        n = point["n"]
        z = np.repeat([[1.0, 1.0], [4.0, -2.0]], n // 2, axis=0)
        z = z[np.random.default_rng([n, point["seed"]]).permutation(n)]
        orders = {
            "random": np.arange(n),
            "greedy": herding.greedy(z, centre=False),
            "greedy-centred": herding.greedy(z),
            "herding-1": herding.herd(z, rounds=1),
            "herding-10": herding.herd(z, rounds=10),
        }
        # The objective centres the vectors; Eq. 2 is in l2.
        return {name: herding.herding_objective(z, order, norm=2) for name, order in orders.items()}

    def _grid(self, records: list[Record], order: str) -> tuple[Floats, Estimate]:
        """The values ``[seeds, sizes]``, and the fitted exponent."""
        values = np.array([[record[order] for record in where(records, n=n)] for n in self.sizes]).T
        return values, slope(self.sizes, values)

    def draw(self, records: list[Record]) -> Figures:
        from matplotlib.ticker import NullFormatter, ScalarFormatter

        from ordain.study.style import LEGEND, finish, grid_figure, plot_seeds

        figure, ((axes,),) = grid_figure(8.6, 4.6)
        for position, (order, label) in enumerate(_LABELS.items()):
            values, fitted = self._grid(records, order)
            text = f"{label}: slope {fitted._replace(error=None):.2f}"
            plot_seeds(axes, self.sizes, values, text, position, alpha=0.12, every=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(list(self.sizes))
        seeds = "one seed" if self.seeds == 1 else f"mean of {self.seeds} seeds (band: all of them)"
        label = "longest centred prefix sum, l2 (log scale)"
        axes.set(xlabel="n: half are (1, 1), half (4, -2)", ylabel=label, title=f"Statement 1: {seeds}")
        finish(axes)
        figure.legend(loc="outside lower center", ncols=2, **LEGEND)
        return {"statement1": figure}

    def tabulate(self, records: list[Record]) -> Table:
        rows: list[tuple[str, ...]] = []
        for order, label in _LABELS.items():
            values, fitted = self._grid(records, order)
            ends = (f"{values[:, 0].mean():.3g}", f"{values[:, -1].mean():.3g}")
            rows.append((label, *ends, f"{fitted:.2f}", _EXPECTED.get(order, "-")))
        ends = f"n = {self.sizes[0]:,}", f"n = {self.sizes[-1]:,}"
        return ("order", *ends, "fitted exponent of n", "Statement 1, Theorem 2"), rows

    def say(self, records: list[Record]) -> list[str]:
        fits = {order: self._grid(records, order)[1] for order in _LABELS}
        return [
            f"For n from {self.sizes[0]:,} to {self.sizes[-1]:,} the longest prefix sum grows like "
            f"n^({fits['greedy']:.2f}) for the greedy algorithm of the proof, n^({fits['random']:.2f}) for random "
            f"orders and n^({fits['herding-10']:.2f}) for ten rounds of herding.",
            "The proof leaves out line 2 of Algorithm 1. With it the two kinds of vector are opposite, greedy "
            f"alternates between them, and its exponent is {fits['greedy-centred']:.2f}: as an example against "
            "Algorithm 1 as printed, these vectors do not work.",
        ]
