"""Figures, tables and sentences of the study of convergence rates: exponents next to those of the theorems."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ordain import theory
from ordain.orders import ORDERS
from ordain.study.vectors.estimates import Estimate, slope
from ordain.study.vectors.vector_study import Figures, Record, Table, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
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


class _Curve(NamedTuple):
    """Errors ``[seeds, points]`` at the step size that is best on average for each point, and its index in the grid."""

    at: list[int]
    values: Floats
    places: list[int]

    @property
    def slope(self) -> Estimate | None:
        return slope(self.at, self.values) if len(self.at) > 1 else None


def _of(records: Sequence[Record], config: Any, problem: str, order: str, n: int) -> list[Record]:
    """The records of all seeds, or none if a seed is missing."""
    of = where(records, problem=problem, order=order, n=n)
    return of if len(of) == config.seeds else []


def _tuned(records: list[Record], config: Any, metric: str, epochs: int) -> tuple[Floats, int]:
    """``[seeds]`` at the best step of the grid for ``epochs``, and its index."""
    column = records[0]["epochs"].index(epochs)
    values = np.array([[row[column] for row in r[metric][: len(config.grid)]] for r in records])
    best = int(values.mean(axis=0).argmin())
    return values[:, best], best


def _curve(records: Sequence[Record], config: Any, problem: str, order: str, metric: str, axis: str) -> _Curve:
    """Along ``axis`` "K" (at the study's n) or "n" (at its number of epochs)."""
    found = {}
    for at in config.epochs if axis == "K" else config.sizes:
        n, epochs = (config.n, at) if axis == "K" else (at, config.at_epochs)
        if of := _of(records, config, problem, order, n):
            found[at] = _tuned(of, config, metric, epochs)
    values = np.array([values for values, _ in found.values()]).T
    return _Curve(list(found), values, [place for _, place in found.values()])


def _at_theorem(records: list[Record], metric: str) -> Floats:
    """``[seeds, epochs]``: the error with Theorem 3's step size for each K."""
    return np.array([[r[metric][p][k] for k, p in enumerate(r[_THEOREM[metric]])] for r in records])


def draw(config: Any, records: list[Record]) -> Figures:
    """One figure per metric: a column for each problem, with K above and n below."""
    from ordain.study.style import LEGEND, grid_figure

    figures = {}
    for metric, label in _METRICS.items():
        names = [name for name in config.problems if name in _SHOWN[metric]] or list(config.problems)
        figure, grid = grid_figure(max(3.7 * len(names), 5.4) + 0.8, 7.2, rows=2, columns=len(names))
        for column, name in enumerate(names):
            for axis, row in _AXES.items():
                _draw_panel(grid[row, column], config, records, name, metric, axis)
            grid[0, column].set_title(f"{LABELS[name]}\nn = {config.n}, tuned for each K", fontsize=10)
            grid[1, column].set_title(f"K = {config.at_epochs}, tuned for each n", fontsize=10)
        for row in range(2):
            grid[row, 0].set_ylabel(f"{label} (log scale)")
        columns = 4 if len(names) > 2 else 3
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, **LEGEND)
        figures[f"rates-{metric}"] = figure
    return figures


def _draw_panel(axes: Axes, config: Any, records: list[Record], name: str, metric: str, axis: str) -> None:
    from matplotlib import ticker

    from ordain.study.style import finish, plot_seeds

    for position, order in enumerate(config.orders):
        curve = _curve(records, config, name, order, metric, axis)
        if curve.at:
            plot_seeds(axes, curve.at, curve.values, ORDERS[order].label, position, alpha=0.1, every=1)
    if axis == "K" and "grab" in config.orders and (of := _of(records, config, name, "grab", config.n)):
        kept = [k for k, epochs in enumerate(of[0]["epochs"]) if epochs in config.epochs]
        reached = _at_theorem(of, metric).mean(axis=0)[kept]
        axes.plot(config.epochs, reached, ":", color="0.45", linewidth=1.6, label="GraB, Theorem 3's step")
    curve = _curve(records, config, name, "grab", metric, axis)
    if curve.at:
        power = float(Fraction(_PAPER[metric]["grab"][_AXES[axis]]))
        guide = curve.values.mean(axis=0)[0] * (np.array(curve.at) / curve.at[0]) ** power
        axes.plot(curve.at, guide / 2, color="0.7", linewidth=1, label="Theorem 3's slope")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(ticker.FixedLocator(config.epochs if axis == "K" else config.sizes))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
    low, high = axes.get_ylim()
    if high < 100 * low:  # too few powers of ten to read a value from
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("epochs K" if axis == "K" else "examples n")
    finish(axes)


def tabulate(config: Any, records: list[Record]) -> Table:
    """Exponents by problem and order, with the paper's in brackets, and the theorem's step next to the tuned one."""
    rows = []
    for name, order in product(config.problems, config.orders):
        if of := _of(records, config, name, order, config.n):
            cells = []
            for metric, (axis, place) in product(_METRICS, _AXES.items()):
                fitted = _curve(records, config, name, order, metric, axis).slope
                paper = f" ({_PAPER[metric][order][place]})" if order in _PAPER[metric] else ""
                cells.append(f"{fitted:.2f}{paper}" if fitted else f"-{paper}")
            last = config.epochs[-1]
            reached = _at_theorem(of, "gap")[:, of[0]["epochs"].index(last)].mean()
            cells.append(f"{reached / _tuned(of, config, 'gap', last)[0].mean():.3g}")
            rows.append((name, ORDERS[order].label, *cells))
    words = {"gap": "f - f*", "gradient": "mean |grad|^2"}
    exponents = (f"{words[metric]}: {axis} exponent" for metric, axis in product(_METRICS, _AXES))
    return ("problem", "order", *exponents, "f - f* at Theorem 3's step / tuned"), rows


def _metric_of(problem: str) -> str:
    """The quantity that the paper's rate for this problem is of."""
    return "gradient" if problem == _NOISY else "gap"


def n_exponents(config: Any, records: list[Record]) -> dict[str, dict[str, Estimate | None]]:
    """By problem and order: the power of n with which the error falls."""
    return {
        name: {order: _curve(records, config, name, order, _metric_of(name), "n").slope for order in config.orders}
        for name in config.problems
    }


def say(config: Any, records: list[Record]) -> list[str]:
    """The findings on exponents and on the theorem's step size."""
    said = []
    for name in config.problems:
        found = {order: _of(records, config, name, order, config.n) for order in ("rr", "grab")}
        if all(found.values()):
            said.append(_say_exponents(config, records, name, found))
            said.append(_say_theorem(config, name, found["grab"]))
    if not said:
        return ["No problem has been measured with every seed for both GraB and RR yet."]
    said.insert(0, "In brackets: the exponents of the paper (upper bounds, up to logarithms).")
    curves = product(config.problems, config.orders, _METRICS, _AXES)
    ends = {0, len(config.grid) - 1}
    if edges := {name for name, *rest in curves if ends & set(_curve(records, config, name, *rest).places)}:
        said.append(f"At some points the best step size is the first or last of the grid ({', '.join(sorted(edges))}).")
    return said


def _say_exponents(config: Any, records: list[Record], name: str, found: dict[str, list[Record]]) -> str:
    metric, last = _metric_of(name), config.epochs[-1]
    words, parts = _WORDS[metric], []
    for order, label in (("grab", "GraB"), ("rr", "RR")):
        fits = {axis: _curve(records, config, name, order, metric, axis).slope for axis in _AXES}
        fitted = {axis: fit for axis, fit in fits.items() if fit}  # none where only one point has all seeds
        if fitted:
            paper = ", ".join(_PAPER[metric][order][_AXES[axis]] for axis in fitted)
            parts.append(f"{' '.join(f'{axis}^({fit:.2f})' for axis, fit in fitted.items())} for {label} ({paper})")
    falls = f"{words} falls like {' and '.join(parts)}; " if parts else ""
    error = {order: _tuned(of, config, metric, last)[0].mean() for order, of in found.items()}
    return (
        f"{name}: tuned, {falls}after {last} epochs of {config.n} examples GraB's {words} "
        f"is {error['grab'] / error['rr']:.3g} times RR's."
    )


def _say_theorem(config: Any, name: str, of: list[Record]) -> str:
    metric, last = _metric_of(name), config.epochs[-1]
    words, column = _WORDS[metric], of[0]["epochs"].index(last)
    reached = float(_at_theorem(of, metric)[:, column].mean())
    tuned, place = _tuned(of, config, metric, last)
    ratio = of[0]["steps"][place] / of[0]["steps"][of[0][_THEOREM[metric]][column]]
    proved = theory.grab_proved_pl if metric == "gap" else theory.grab_proved
    bounds = [proved(theory.Constants(**r["constants"]), n=config.n, epochs=last, balancing=r["balancing"]) for r in of]
    left = reached / float(np.mean([r["constants"]["F"] for r in of]))
    kept = f", {left:.2g} of f(w_1) - f*" if metric == "gap" else ""
    return (
        f"{name}: Theorem 3's step size for {last} epochs is {ratio:.3g} times smaller than the tuned one, and GraB's "
        f"{words} is then {reached / tuned.mean():.3g} times as large{kept}. The proof's bound is "
        f"{float(np.mean(bounds)) / reached:.3g} times what is reached."
    )
