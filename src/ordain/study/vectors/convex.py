"""A strongly convex problem: f - f* of SGD under several orders, next to scikit-learn's SAG and L-BFGS.

l2-regularised logistic regression in two classes, one example a step, in float64. Every order runs every rate of a
grid, constant and with a cosine decay; tables and figures show each at its best rate, by epochs and by processor time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from time import process_time
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ordain.orders import ORDERS
from ordain.study.vectors.vector_study import (
    Estimate,
    Figures,
    Floats,
    Ints,
    Names,
    Numbers,
    Point,
    Record,
    Seeds,
    Table,
    settings,
    slope,
    where,
)

# Exponents of n in the paper's upper bounds on f - f* under the PL condition, up to logarithms (Table 1, Theorem 3).
# They are for rates far below the best of a run as short as here.
THEOREM = {"rr": -1, "grab": -2}
_THEOREM_EPOCHS = -2  # the exponent of the number of epochs, for both
SOLVERS = {"sag": "SAG (scikit-learn)", "lbfgs": "L-BFGS (scikit-learn)"}
_ALL = 0  # in place of a number of examples: all of them
_ROWS = 64  # to observe at a time
_TIMED = "timed"  # in place of a decay: how long an epoch takes
_REPEATS = 3
_SHORTER = 5  # times as short as the run: from there on, the exponent of its length is fitted
_LEAST = 1e-16  # f - f* is not resolved below


@dataclass(frozen=True)
class Regression:
    """mean_i log(1 + exp(-y_i <x_i, w>)) + strength |w|^2 / 2."""

    x: Floats  # [n, d], rows of norm at most 1
    y: Floats  # [n], +1 and -1
    strength: float

    def value(self, w: Floats) -> float:
        return float(np.logaddexp(0.0, -self.y * (self.x @ w)).mean() + self.strength * (w @ w) / 2)

    def best(self) -> Floats:
        """The minimum, by Newton's method, to the rounding of float64."""
        return self.solved("newton-cholesky", 100)

    def solved(self, solver: str, iterations: int) -> Floats:
        """scikit-learn's weights after so many iterations."""
        from sklearn.linear_model import LogisticRegression

        how = {"solver": solver, "max_iter": iterations, "tol": 1e-14, "fit_intercept": False, "random_state": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has not converged
            found: Floats = LogisticRegression(C=1 / (self.strength * len(self.y)), **how).fit(self.x, self.y).coef_[0]
        return found


@lru_cache(maxsize=4)
def regression(name: str, n: int, strength: float) -> Regression:
    """The first ``n`` rows (0: all) of a fixed shuffle; classes up to half of the largest label are -1."""
    from ordain.study.data import data_dir, load

    part = load(name, data_dir()).train
    x, y = np.asarray(part.x, dtype=np.float64), np.asarray(part.y)
    rows = np.random.default_rng(0).permutation(len(y))[: n or None]
    x = np.column_stack([x.reshape(len(y), -1)[rows], np.ones(len(rows))])  # a constant column is the bias
    x /= np.linalg.norm(x, axis=1).max()
    return Regression(x, np.where(y[rows] > y.max() // 2, 1.0, -1.0), strength)


@lru_cache(maxsize=4)
def minimum(name: str, n: int, strength: float) -> float:
    """f*."""
    problem = regression(name, n, strength)
    return problem.value(problem.best())


@settings
class Convex:
    """``sizes`` are numbers of examples, 0 for all of them; ``grid`` holds rates."""

    name: ClassVar = "convex"
    title: ClassVar = "A strongly convex problem: SGD under several orders, SAG and L-BFGS"
    quick: ClassVar = {"seeds": 2, "problems": ("digits",), "sizes": (200, 400), "epochs": 6, "grid": (1.0, 4.0)}
    seeds: Seeds = 10
    problems: Names = ("digits", "mushrooms")
    sizes: Ints = (500, 1000, _ALL)
    strength: float = 1e-3
    epochs: int = 30
    orders: Names = ("rr", "flipflop", "grab", "grab-pair")
    decays: Names = ("constant", "cosine")
    grid: Numbers = tuple(2.0**k for k in range(-7, 3))

    def points(self) -> Iterator[Point]:
        for problem, n in product(self.problems, self.sizes):
            for order, decay, seed in product(self.orders, self.decays, range(self.seeds)):
                yield {"problem": problem, "n": n, "order": order, "decay": decay, "seed": seed}
            for solver in SOLVERS:
                yield {"problem": problem, "n": n, "order": solver, "decay": "-", "seed": 0}
        for problem, n, order in product(self.problems, self.sizes, (*self.orders, *SOLVERS)):
            yield {"problem": problem, "n": n, "order": order, "decay": _TIMED, "seed": 0}

    def measure(self, point: Point) -> dict[str, Any]:
        """``gap`` is ``[rates, epochs]``: f - f* after each epoch. ``seconds`` is the processor time of an epoch."""
        key = point["problem"], point["n"], self.strength
        problem, lowest = regression(*key), minimum(*key)
        if point["decay"] == _TIMED:
            return {"seconds": self.seconds(problem, point["order"]), "examples": len(problem.y)}
        if point["order"] in SOLVERS:
            runs = [[problem.solved(point["order"], count) for count in range(1, self.epochs + 1)]]  # each is a pass
        else:
            runs = [
                train(problem, point["order"], seed=point["seed"], rate=rate, decay=point["decay"], epochs=self.epochs)
                for rate in self.grid
            ]
        gaps = [[float(f"{max(problem.value(w) - lowest, _LEAST):.4g}") for w in run] for run in runs]
        return {"gap": gaps, "examples": len(problem.y)}

    def seconds(self, problem: Regression, order: str) -> float:
        """Processor time of an epoch: the least of several runs."""
        taken = []
        for _ in range(_REPEATS):
            start = process_time()
            if order in SOLVERS:
                problem.solved(order, self.epochs)
            else:
                train(problem, order, seed=0, rate=self.grid[0], decay="constant", epochs=self.epochs)
            taken.append((process_time() - start) / self.epochs)
        return float(f"{min(taken):.4g}")

    def best(self, records: list[Record]) -> tuple[int, Floats]:
        """The index of the rate with the lowest mean logarithm of the last gap, and its gaps ``[seeds, epochs]``."""
        gaps = np.log([record["gap"] for record in records])  # [seeds, rates, epochs]
        rate = int(np.argmin(np.where(np.isnan(gaps), np.inf, gaps)[:, :, -1].mean(axis=0)))
        return rate, np.exp(gaps[:, rate])

    def _arms(self, records: list[Record], **fields: Any) -> Iterator[tuple[str, list[Record], float]]:
        """Each order with each decay: its label, its records, and the seconds of an epoch."""
        for order, decay in (*product(self.orders, self.decays), *((solver, "-") for solver in SOLVERS)):
            label = f"{ORDERS[order].label}, {decay}" if order in ORDERS else SOLVERS[order]
            (timed,) = where(records, order=order, decay=_TIMED, **fields)
            yield label, where(records, order=order, decay=decay, **fields), timed["seconds"]

    def draw(self, records: list[Record]) -> Figures:
        from ordain.study.style import LEGEND, finish, grid_figure, plot_seeds

        figure, grid = grid_figure(4.2 * len(self.problems), 6.6, rows=2, columns=len(self.problems), sharey=True)
        n = _ALL if _ALL in self.sizes else self.sizes[-1]
        for (by_epoch, by_time), name in zip(grid.T, self.problems, strict=True):
            for position, (label, found, seconds) in enumerate(self._arms(records, problem=name, n=n)):
                _, gaps = self.best(found)
                epochs = range(1, 1 + gaps.shape[1])
                for axes, unit in ((by_epoch, 1), (by_time, seconds)):
                    plot_seeds(axes, [unit * epoch for epoch in epochs], gaps, label, position, alpha=0.1, every=5)
            by_epoch.set(yscale="log", xlabel="epochs", title=name)
            by_time.set(yscale="log", xscale="log", xlabel="seconds of processor time")
            finish(by_epoch)
            finish(by_time)
        for axes in grid[:, 0]:
            axes.set_ylabel("f - f* at the best rate of each")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, **LEGEND)
        return {"convex": figure}

    def tabulate(self, records: list[Record]) -> Table:
        rows: list[tuple[str, ...]] = []
        for name, n in product(self.problems, self.sizes):
            for label, found, seconds in self._arms(records, problem=name, n=n):
                rate, gaps = self.best(found)
                single = len(found[0]["gap"]) == 1
                edge = "*" if not single and rate in (0, len(self.grid) - 1) else ""
                last = np.exp(np.log(gaps[:, -1]).mean())
                rates = "-" if single else f"{self.grid[rate]:g}{edge}"
                taken = f"{1000 * seconds * self.epochs:.3g}"
                rows.append((name, f"{found[0]['examples']:,}", label, rates, taken, f"{last:.2g}"))
        return ("problem", "n", "order", "best rate", "processor time, ms", f"f - f* after {self.epochs} epochs"), rows

    def say(self, records: list[Record]) -> list[str]:
        said = []
        for name in self.problems:
            for what, exponents, how in (
                ("n", self.by_examples, f"{self.epochs} epochs"),
                ("K", self.by_epochs, "the best rate for each number K of epochs"),
            ):
                told = [
                    f"{ORDERS[order].label} {what}^({exponents(records, name, order):.2f}) "
                    f"(bound: {what}^{exponent if what == 'n' else _THEOREM_EPOCHS})"
                    for order, exponent in THEOREM.items()
                    if order in self.orders
                ]
                said.append(f"{name}, constant rate, {how}: f - f* falls like {' and '.join(told)}.")
        return said

    def by_examples(self, records: list[Record], problem: str, order: str) -> Estimate:
        """The exponent of n in the last gap at the best constant rate.

        Best rates come from a coarse grid, so that gaps jump with n: the error has the residuals of the fit in it.
        """
        found = [where(records, problem=problem, n=n, order=order, decay="constant") for n in self.sizes]
        last = np.array([self.best(of)[1][:, -1] for of in found]).T
        fit = slope(sizes := [of[0]["examples"] for of in found], last)
        at, mean = np.log(sizes) - np.log(sizes).mean(), np.log(last).mean(axis=0)
        left = mean - mean.mean() - fit.mean * at
        residual = float(left @ left / (at @ at) / max(1, len(at) - 2)) ** 0.5
        return fit if fit.error is None else Estimate(fit.mean, float(np.hypot(fit.error, residual)))

    def by_epochs(self, records: list[Record], problem: str, order: str) -> Estimate:
        """The exponent of the number of epochs at a constant rate; a run's beginning is a shorter run."""
        found = where(records, problem=problem, n=self.sizes[-1], order=order, decay="constant")
        lengths = np.unique(np.geomspace(self.epochs / _SHORTER, self.epochs, 5).round().astype(int))
        logs = np.log([record["gap"] for record in found])[:, :, lengths - 1]  # [seeds, rates, lengths]
        best = np.where(np.isnan(logs), np.inf, logs).mean(axis=0).argmin(axis=0)
        return slope(lengths.tolist(), np.exp(logs[:, best, range(len(lengths))]))


def train(problem: Regression, order: str, *, seed: int, rate: float, decay: str, epochs: int) -> list[Floats]:
    """SGD on single examples: the weights after each epoch."""
    from ordain.study.vectors.compiled import logistic_epoch  # numba is slow to import

    n, d = problem.x.shape
    policy = ORDERS[order].build(None, n, seed=seed)
    w, gradients = np.zeros(d), np.empty((n, d))
    found: list[Floats] = []
    for epoch in range(epochs):
        sigma: NDArray[np.int64] = np.fromiter(policy.sampler, dtype=np.int64, count=n)
        done = (epoch * n + np.arange(n)) / (epochs * n)
        rates = rate * (0.5 + 0.5 * np.cos(np.pi * done) if decay == "cosine" else np.ones(n))
        logistic_epoch(problem.x, problem.y, problem.strength, sigma, rates, w, gradients)
        if not np.isfinite(gradients).all():
            return found + [np.full(d, np.inf)] * (epochs - epoch)
        for start in range(0, n, _ROWS):  # an order's signs do not depend on the batch size
            policy.observe(torch.from_numpy(gradients[start : start + _ROWS]))
        found.append(w.copy())
    return found
