"""Convergence by epochs and examples: fitted exponents next to those of Theorem 3 and of RR.

Each order runs every step size of a grid, to be tuned for each K and n, and the step sizes of Theorem 3. One run
measures all K: its weights after K epochs are those of a run of K epochs.

The problems are small and their constants known exactly: f_i(w) = h(w) - <b_i, w>, where the b_i sum to zero. h is a
sum over coordinates with its minimum 0 at w = 0, and equals the mean loss f. An example's gradient differs from the
mean gradient by b_i at every w, so Assumption 3 holds on all of R^d, which is true of few problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ordain import theory
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
from ordain.theory import Constants

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "quadratic": "quadratic, strongly convex",
    "kinked": "kinked, strongly convex",
    "sine": "PL, not convex",
    "noisy": "PL, not convex, noisy",
}
_NOISY = "noisy"  # the one problem that shows the non-convex rates; the others show those under PL
_AXES = {"K": 0, "n": 1}

# The exponents of K and of n in the paper; those of GraB with pairs are from the paper on CD-GraB.
_PAPER: dict[str, dict[str, tuple[str, str]]] = {
    "gap": {"rr": ("-2", "-1"), "grab": ("-2", "-2"), "grab-pair": ("-2", "-2")},
    "gradient": {"rr": ("-2/3", "-1/3"), "grab": ("-2/3", "-2/3"), "grab-pair": ("-2/3", "-2/3")},
}
_METRICS = {"gap": "$f - f^*$", "gradient": r"mean of $|\nabla f|^2$"}
_WORDS = {"gap": "f - f*", "gradient": "mean |grad f|^2"}
_THEOREM = {"gap": "theorem_pl", "gradient": "theorem"}  # the field of a record with Theorem 3's step sizes
_SHOWN = {"gap": ("quadratic", "kinked", "sine"), "gradient": ("sine", _NOISY)}


SINE_MU = 0.1755  # of x^2 + 3 sin(x)^2: min of h'^2/2h, at x = 2.2017 (tests); the literature has 1/32


@dataclass(frozen=True)
class Objective:
    """``low`` and ``high`` are curvatures ``[d]``.

    - quadratic: h_j = low_j x^2 / 2, which is kinked with ``low = high``.
    - kinked: h_j = high_j x^2 / 2 for x < 0, low_j x^2 / 2 for x >= 0. A random walk around the kink feels a
      force on average, unlike at the minimum of a smooth function with small steps: RR's rate is tight here.
    - sine: h_j = x^2 + 3 sin(x)^2, with curvatures from -4 to 8, started where they are negative.
    """

    sine: bool
    low: Floats
    high: Floats
    b: Floats
    start: Floats

    @cached_property
    def constants(self) -> Constants:
        """Exact: Hessians are diagonal, so |H|_inf is the largest curvature and |H v|_2 is largest at v = 1."""
        return Constants(
            L=float(self.high.max()),
            L_2inf=float(np.linalg.norm(self.high)),
            L_inf=float(self.high.max()),
            varsigma=float(np.linalg.norm(self.b, axis=1).max()),
            F=self.gap(self.start),
            mu=SINE_MU if self.sine else float(self.low.min()),
        )

    def gap(self, w: Floats) -> float:
        """f(w) - f*, which is h(w)."""
        if self.sine:
            return float((w**2 + 3 * np.sin(w) ** 2).sum())
        return float((self._curvature(w) * w**2).sum() / 2)

    def gradient(self, w: Floats) -> Floats:
        """Grad f(w)."""
        return 2 * w + 3 * np.sin(2 * w) if self.sine else self._curvature(w) * w

    def _curvature(self, w: Floats) -> Floats:
        return np.where(w < 0, self.high, self.low)


def objective(name: str, *, n: int, d: int, seed: int) -> Objective:
    """One of :data:`LABELS` with n random examples."""
    b = np.random.default_rng([n, d, seed]).normal(size=(n, d))
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    b -= b.mean(axis=0)
    one, q = np.ones(d), np.linspace(0.25, 1.0, d)
    if name in ("quadratic", "kinked"):
        low, high = (q, q) if name == "quadratic" else (0.25 * one, one)
        return Objective(False, low, high, b, one / np.sqrt(d))
    # "noisy": varsigma^2 far above F L, so that small mean gradients take small steps, as the non-convex rates assume.
    return Objective(True, -4 * one, 8 * one, (1000 if name == "noisy" else 4) * b, 1.5 * one)


class _Curve(NamedTuple):
    """Errors ``[seeds, points]`` at the step size that is best on average for each point, and its index in the grid."""

    at: Sequence[int]
    values: Floats
    places: list[int]

    @property
    def slope(self) -> Estimate:
        return slope(self.at, self.values)


@settings
class ConvergenceRates:
    """``grid`` holds alpha n L; ``epochs`` are measured at ``n``, and ``sizes`` at ``at_epochs``."""

    name: ClassVar = "rates"
    title: ClassVar = "Convergence rates on problems with known constants"
    quick: ClassVar = {
        "seeds": 2,
        "problems": ("quadratic", "noisy"),
        "orders": ("rr", "grab"),
        "n": 16,
        "epochs": (4, 8),
        "sizes": (8, 16),
        "at_epochs": 8,
        "grid": (0.25, 0.5, 1.0),
    }
    seeds: Seeds = 5
    d: int = 8
    problems: Names = tuple(LABELS)
    orders: Names = ("rr", "so", "flipflop", "grab", "grab-pair")
    n: int = 256
    epochs: Ints = (8, 16, 32, 64, 128)
    sizes: Ints = (32, 64, 128, 256, 512)
    at_epochs: int = 32
    grid: Numbers = tuple(2.0 ** (2 * k / 3) for k in range(-8, 6))

    def points(self) -> Iterator[Point]:
        sizes = sorted({self.n, *self.sizes})
        for name, n, seed, order in product(self.problems, sizes, range(self.seeds), self.orders):
            yield {"problem": name, "n": n, "seed": seed, "order": order}

    def measure(self, point: Point) -> dict[str, Any]:
        """``gap`` and ``gradient`` are ``[steps, epochs]``: f - f*, and the mean of |grad f(w_k)|^2 over the epochs.

        ``theorem`` and ``theorem_pl`` give the step size of Theorem 3 for each K as an index into ``steps``.
        """
        n = point["n"]
        problem = objective(point["problem"], n=n, d=self.d, seed=point["seed"])
        epochs = list(self.epochs) if n == self.n else []
        epochs = sorted({*epochs, self.at_epochs}) if n in self.sizes else epochs
        c, bound = problem.constants, theory.walk_bound(n, self.d)
        steps = [gamma / (n * c.L) for gamma in self.grid]
        places = {}
        for name, step in (("theorem", theory.grab_step), ("theorem_pl", theory.grab_step_pl)):
            wanted = [step(c, n=n, epochs=count, balancing=bound) for count in epochs]
            steps += [alpha for alpha in dict.fromkeys(wanted) if alpha not in steps]
            places[name] = [steps.index(alpha) for alpha in wanted]
        runs = [train(problem, point["order"], seed=point["seed"], alpha=alpha, epochs=epochs) for alpha in steps]
        gaps, means = ([[float(f"{value:.6g}") for value in of] for of in found] for found in zip(*runs, strict=True))
        return {
            "epochs": epochs,
            "steps": steps,
            **places,
            "gap": gaps,
            "gradient": means,
            "constants": asdict(c),
            "balancing": bound,
        }

    def _tuned(self, records: list[Record], metric: str, epochs: int) -> tuple[Floats, int]:
        """``[seeds]`` at the step of the grid that is best on average for ``epochs``, and its index."""
        column = records[0]["epochs"].index(epochs)
        values = np.array([[row[column] for row in r[metric][: len(self.grid)]] for r in records])
        best = int(values.mean(axis=0).argmin())
        return values[:, best], best

    def _curve(self, records: list[Record], problem: str, order: str, metric: str, axis: str) -> _Curve:
        """Along ``axis`` "K" (at the study's n) or "n" (at its number of epochs)."""
        at = self.epochs if axis == "K" else self.sizes
        points = [(self.n, one) if axis == "K" else (one, self.at_epochs) for one in at]
        of = (where(records, problem=problem, order=order, n=n) for n, _ in points)
        found = [self._tuned(one, metric, epochs) for one, (_, epochs) in zip(of, points, strict=True)]
        return _Curve(at, np.array([values for values, _ in found]).T, [place for _, place in found])

    def draw(self, records: list[Record]) -> Figures:
        """One figure per metric: a column for each problem, with K above and n below."""
        from ordain.study.style import LEGEND, grid_figure

        figures = {}
        for metric, label in _METRICS.items():
            names = [name for name in self.problems if name in _SHOWN[metric]] or list(self.problems)
            figure, grid = grid_figure(max(3.7 * len(names), 5.4) + 0.8, 7.2, rows=2, columns=len(names))
            for column, name in enumerate(names):
                for axis, row in _AXES.items():
                    self._draw_panel(grid[row, column], records, name, metric, axis)
                grid[0, column].set_title(f"{LABELS[name]}\nn = {self.n}, tuned for each K", fontsize=10)
                grid[1, column].set_title(f"K = {self.at_epochs}, tuned for each n", fontsize=10)
            for row in range(2):
                grid[row, 0].set_ylabel(f"{label} (log scale)")
            columns = 4 if len(names) > 2 else 3
            figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, **LEGEND)
            figures[f"rates-{metric}"] = figure
        return figures

    def _draw_panel(self, axes: Axes, records: list[Record], name: str, metric: str, axis: str) -> None:
        from matplotlib import ticker

        from ordain.study.style import finish, plot_seeds

        curves = {order: self._curve(records, name, order, metric, axis) for order in self.orders}
        for position, (order, curve) in enumerate(curves.items()):
            plot_seeds(axes, curve.at, curve.values, ORDERS[order].label, position, alpha=0.1, every=1)
        if "grab" in curves:
            at, reached = curves["grab"].at, curves["grab"].values.mean(axis=0)
            if axis == "K":
                of = where(records, problem=name, order="grab", n=self.n)
                kept = [k for k, epochs in enumerate(of[0]["epochs"]) if epochs in self.epochs]
                proved = _at_theorem(of, metric).mean(axis=0)[kept]
                axes.plot(at, proved, ":", color="0.45", linewidth=1.6, label="GraB, Theorem 3's step")
            guide = reached[0] * (np.array(at) / at[0]) ** float(Fraction(_PAPER[metric]["grab"][_AXES[axis]]))
            axes.plot(at, guide / 2, color="0.7", linewidth=1, label="Theorem 3's slope")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(ticker.FixedLocator(self.epochs if axis == "K" else self.sizes))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        low, high = axes.get_ylim()
        if high < 100 * low:  # too few powers of ten to read a value from
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel("epochs K" if axis == "K" else "examples n")
        finish(axes)

    def tabulate(self, records: list[Record]) -> Table:
        """Exponents by problem and order, with the paper's in brackets; the theorem's step next to the tuned one."""
        rows, last = [], self.epochs[-1]
        for name, order in product(self.problems, self.orders):
            of, cells = where(records, problem=name, order=order, n=self.n), []
            for metric, (axis, place) in product(_METRICS, _AXES.items()):
                paper = f" ({_PAPER[metric][order][place]})" if order in _PAPER[metric] else ""
                cells.append(f"{self._curve(records, name, order, metric, axis).slope:.2f}{paper}")
            reached = _at_theorem(of, "gap")[:, of[0]["epochs"].index(last)].mean()
            cells.append(f"{reached / self._tuned(of, 'gap', last)[0].mean():.3g}")
            rows.append((name, ORDERS[order].label, *cells))
        words = {"gap": "f - f*", "gradient": "mean |grad|^2"}
        exponents = (f"{words[metric]}: {axis} exponent" for metric, axis in product(_METRICS, _AXES))
        return ("problem", "order", *exponents, "f - f* at Theorem 3's step / tuned"), rows

    def n_exponents(self, records: list[Record]) -> dict[str, dict[str, Estimate]]:
        """By problem and order: the power of n with which the error falls."""
        return {
            name: {order: self._curve(records, name, order, _metric_of(name), "n").slope for order in self.orders}
            for name in self.problems
        }

    def say(self, records: list[Record]) -> list[str]:
        """The findings on exponents and on the theorem's step size."""
        said = ["In brackets: the exponents of the paper (upper bounds, up to logarithms)."]
        for name in self.problems:
            found = {order: where(records, problem=name, order=order, n=self.n) for order in ("rr", "grab")}
            said += [self._say_exponents(records, name, found), self._say_theorem(name, found["grab"])]
        curves = product(self.problems, self.orders, _METRICS, _AXES)
        ends = {0, len(self.grid) - 1}
        if edges := {name for name, *rest in curves if ends & set(self._curve(records, name, *rest).places)}:
            named = ", ".join(sorted(edges))
            said.append(f"At some points the best step size is the first or last of the grid ({named}).")
        return said

    def _say_exponents(self, records: list[Record], name: str, found: dict[str, list[Record]]) -> str:
        metric, last = _metric_of(name), self.epochs[-1]
        words, parts = _WORDS[metric], []
        for order, label in (("grab", "GraB"), ("rr", "RR")):
            fits = (f"{axis}^({self._curve(records, name, order, metric, axis).slope:.2f})" for axis in _AXES)
            parts.append(f"{' '.join(fits)} for {label} ({', '.join(_PAPER[metric][order])})")
        error = {order: self._tuned(of, metric, last)[0].mean() for order, of in found.items()}
        return (
            f"{name}: tuned, {words} falls like {' and '.join(parts)}; after {last} epochs of {self.n} examples GraB's "
            f"{words} is {error['grab'] / error['rr']:.3g} times RR's."
        )

    def _say_theorem(self, name: str, of: list[Record]) -> str:
        metric, last = _metric_of(name), self.epochs[-1]
        words, column = _WORDS[metric], of[0]["epochs"].index(last)
        reached = float(_at_theorem(of, metric)[:, column].mean())
        tuned, place = self._tuned(of, metric, last)
        ratio = of[0]["steps"][place] / of[0]["steps"][of[0][_THEOREM[metric]][column]]
        proved = theory.grab_proved_pl if metric == "gap" else theory.grab_proved
        bounds = [proved(Constants(**r["constants"]), n=self.n, epochs=last, balancing=r["balancing"]) for r in of]
        left = reached / float(np.mean([r["constants"]["F"] for r in of]))
        kept = f", {left:.2g} of f(w_1) - f*" if metric == "gap" else ""
        return (
            f"{name}: Theorem 3's step size for {last} epochs is {ratio:.3g} times smaller than the tuned one, and "
            f"GraB's {words} is then {reached / tuned.mean():.3g} times as large{kept}. The proof's bound is "
            f"{float(np.mean(bounds)) / reached:.3g} times what is reached."
        )


def _metric_of(problem: str) -> str:
    """The quantity that the paper's rate for this problem is of."""
    return "gradient" if problem == _NOISY else "gap"


def _at_theorem(records: list[Record], metric: str) -> Floats:
    """``[seeds, epochs]``: the error with Theorem 3's step size for each K."""
    return np.array([[r[metric][p][k] for k, p in enumerate(r[_THEOREM[metric]])] for r in records])


def train(
    problem: Objective, order: str, *, seed: int, alpha: float, epochs: list[int]
) -> tuple[list[float], list[float]]:
    """SGD: after each of ``epochs``, f - f* and the mean over the epochs so far of |grad f(w_k)|^2."""
    from ordain.study.vectors.compiled import sgd_epoch  # numba is slow to import

    n, d = problem.b.shape
    policy = ORDERS[order].build(None, n, seed=seed)
    w, gradients = problem.start.copy(), np.empty((n, d))
    gaps, means, total = [], [], 0.0
    for done in range(1, max(epochs) + 1):
        total += float(np.square(problem.gradient(w)).sum())
        sigma: NDArray[np.int64] = np.fromiter(policy.sampler, dtype=np.int64, count=n)
        sgd_epoch(problem.sine, problem.low, problem.high, problem.b, sigma, alpha, w, gradients)
        policy.observe(torch.from_numpy(gradients))  # an order's signs do not depend on the batch size
        if done in epochs:
            gaps.append(problem.gap(w))
            means.append(total / done)
    return gaps, means
