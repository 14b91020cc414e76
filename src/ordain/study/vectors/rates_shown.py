"""How the study of rates is shown: exponents beside the theorems', and what a theorem's step size reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ordain import theory
from ordain.orders import ORDERS
from ordain.study.vectors.fitting import Slope, slope
from ordain.study.vectors.study import Record, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "n_exponents", "say", "tabulate"]

Floats = NDArray[np.float64]

# (exponent of K, exponent of n) that the paper gives; GraB's for pairs is from the paper that introduced them.
_PAPER: dict[str, dict[str, tuple[str, str]]] = {
    "gap": {"rr": ("-2", "-1"), "grab": ("-2", "-2"), "grab-pair": ("-2", "-2")},
    "gradient": {"rr": ("-2/3", "-1/3"), "grab": ("-2/3", "-2/3"), "grab-pair": ("-2/3", "-2/3")},
}
_WORDS = {"gap": "f - f*", "gradient": "mean |grad f|^2"}
_METRICS = {"gap": "$f - f^*$", "gradient": r"mean of $|\nabla f|^2$"}
_THEOREM = {"gap": "theorem_pl", "gradient": "theorem"}
_NOISY = "noisy"  # the one problem on which the non-convex rates can be seen; PL's can on the others
_SHOWN = {"gap": ("quadratic", "kinked", "sine"), "gradient": ("sine", _NOISY)}


@dataclass(frozen=True)
class _Curve:
    """Errors ``[seeds, points]`` at the step size that is best on average for each point, and its place in the grid."""

    at: list[int]
    values: Floats
    places: list[int]

    @property
    def slope(self) -> Slope | None:
        return slope(self.at, self.values) if len(self.at) > 1 else None


def _of(records: Sequence[Record], config: Any, problem: str, order: str, n: int) -> list[Record]:
    """The records of all seeds, or none if a seed is missing."""
    of = [r for r in records if (r["problem"], r["order"], r["n"]) == (problem, order, n)]
    return of if len(of) == config.seeds else []


def _tuned(records: list[Record], config: Any, metric: str, epochs: int) -> tuple[Floats, int]:
    """``[seeds]`` at the best step of the grid for ``epochs``, and its place."""
    column = records[0]["epochs"].index(epochs)
    values = np.array([[row[column] for row in r[metric][: len(config.grid)]] for r in records])
    best = int(values.mean(axis=0).argmin())
    return values[:, best], best


def _curve(records: Sequence[Record], config: Any, problem: str, order: str, metric: str, axis: str) -> _Curve:
    """Along ``axis`` "K" (at the study's n) or "n" (at its number of epochs)."""
    if axis == "K":
        settings = [(config.n, epochs, epochs) for epochs in config.epochs]
    else:
        settings = [(n, config.at_epochs, n) for n in config.sizes]
    at, values, places = [], [], []
    for n, epochs, shown in settings:
        if of := _of(records, config, problem, order, n):
            found, place = _tuned(of, config, metric, epochs)
            at.append(shown)
            values.append(found)
            places.append(place)
    return _Curve(at, np.array(values).T, places)


def _theorem(records: list[Record], metric: str) -> Floats:
    """``[seeds, epochs]``: what Theorem 3's step size for each K reaches."""
    return np.array([[r[metric][p][k] for k, p in enumerate(r[_THEOREM[metric]])] for r in records])


def draw(config: Any, records: list[Record]) -> dict[str, Figure]:
    """One figure a metric: a column for each problem, K above and n below."""
    from matplotlib.figure import Figure

    from ordain.study.style import LEGEND
    from ordain.study.vectors.problems import LABELS

    figures = {}
    for metric, label in _METRICS.items():
        names = [name for name in config.problems if name in _SHOWN[metric]] or list(config.problems)
        figure = Figure(figsize=(max(3.7 * len(names), 5.4) + 0.8, 7.2), layout="constrained")
        grid = figure.subplots(2, len(names), squeeze=False)
        for column, name in enumerate(names):
            for row, axis in enumerate("Kn"):
                _panel(grid[row, column], config, records, name, metric, axis)
            grid[0, column].set_title(f"{LABELS[name]}\nn = {config.n}, tuned for each K", fontsize=10)
            grid[1, column].set_title(f"K = {config.at_epochs}, tuned for each n", fontsize=10)
        for row in range(2):
            grid[row, 0].set_ylabel(f"{label} (log scale)")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(names) > 2 else 3, **LEGEND)
        figures[f"rates-{metric}"] = figure
    return figures


def _panel(axes: Axes, config: Any, records: list[Record], name: str, metric: str, axis: str) -> None:
    from matplotlib.ticker import (
        FixedLocator,
        FormatStrFormatter,
        LogLocator,
        NullFormatter,
        NullLocator,
        ScalarFormatter,
    )

    from ordain.study.style import finish, style

    for position, order in enumerate(config.orders):
        curve = _curve(records, config, name, order, metric, axis)
        if curve.at:
            look, mean = style(position), curve.values.mean(axis=0)
            axes.plot(curve.at, mean, label=ORDERS[order].label, **look.line(1))
            low, high = curve.values.min(axis=0), curve.values.max(axis=0)
            axes.fill_between(curve.at, low, high, color=look.color, alpha=0.1, linewidth=0)
    if axis == "K" and "grab" in config.orders and (of := _of(records, config, name, "grab", config.n)):
        kept = [k for k, epochs in enumerate(of[0]["epochs"]) if epochs in config.epochs]
        reached = _theorem(of, metric).mean(axis=0)[kept]
        axes.plot(config.epochs, reached, ":", color="0.45", linewidth=1.6, label="GraB, Theorem 3's step")
    curve = _curve(records, config, name, "grab", metric, axis)
    if curve.at:
        power = float(Fraction(_PAPER[metric]["grab"][axis == "n"]))
        guide = curve.values.mean(axis=0)[0] * (np.array(curve.at) / curve.at[0]) ** power
        axes.plot(curve.at, guide / 2, color="0.7", linewidth=1, label="Theorem 3's slope")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(config.epochs if axis == "K" else config.sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    low_end, high_end = axes.get_ylim()
    if high_end < 100 * low_end:  # too few powers of ten to read a value from
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("epochs K" if axis == "K" else "examples n")
    finish(axes)


def tabulate(config: Any, records: list[Record]) -> Table:
    """Exponents by problem and order, with the paper's in brackets, and the theorem's step beside the tuned one."""
    headings = (
        "problem",
        "order",
        "f - f*: K exponent",
        "f - f*: n exponent",
        "mean |grad|^2: K exponent",
        "mean |grad|^2: n exponent",
        "f - f* at Theorem 3's step / tuned",
    )
    rows = []
    for name in config.problems:
        for order in config.orders:
            of = _of(records, config, name, order, config.n)
            if not of:
                continue
            cells = [
                _cell(_curve(records, config, name, order, metric, axis).slope, metric, order, axis)
                for metric in _METRICS
                for axis in "Kn"
            ]
            last = config.epochs[-1]
            reached = _theorem(of, "gap")[:, of[0]["epochs"].index(last)].mean()
            cells.append(f"{reached / _tuned(of, config, 'gap', last)[0].mean():.3g}")
            rows.append((name, ORDERS[order].label, *cells))
    return headings, rows


def _cell(fitted: Slope | None, metric: str, order: str, axis: str) -> str:
    paper = _PAPER[metric].get(order)
    return f"{fitted or '-'}" + (f" ({paper[axis == 'n']})" if paper else "")


def n_exponents(config: Any, records: list[Record]) -> dict[str, dict[str, Slope | None]]:
    """By problem and order: with what power of n the error falls, in the quantity that the paper's rate is of."""
    return {
        name: {
            order: _curve(records, config, name, order, "gradient" if name == _NOISY else "gap", "n").slope
            for order in config.orders
        }
        for name in config.problems
    }


def say(config: Any, records: list[Record]) -> list[str]:
    """What the exponents and the theorem's step size say."""
    said = []
    last = config.epochs[-1]
    for name in config.problems:
        found = {}
        for order in ("rr", "grab"):
            if order in config.orders and (of := _of(records, config, name, order, config.n)):
                found[order] = of
        if len(found) < 2:
            continue
        metric = "gradient" if name == _NOISY else "gap"
        said.append(_exponents_said(config, records, name, metric, found, last))
        said.append(_theorem_said(config, name, metric, found["grab"], last))
    if not said:
        return ["No problem has been measured with every seed for both GraB and RR yet."]
    said.insert(0, "In brackets: the exponents of the paper (upper bounds, up to logarithms).")
    edges = sorted({name for name in config.problems if _at_edge(records, config, name)})
    if edges:
        said.append(f"At some points the best step size is the first or last of the grid ({', '.join(edges)}).")
    return said


def _exponents_said(
    config: Any, records: list[Record], name: str, metric: str, found: dict[str, list[Record]], last: int
) -> str:
    words = []
    for order, label in (("grab", "GraB"), ("rr", "RR")):
        fits = {axis: _curve(records, config, name, order, metric, axis).slope for axis in "Kn"}
        fitted = {axis: fit for axis, fit in fits.items() if fit}  # none where only one point has all seeds
        paper = ", ".join(_PAPER[metric][order]["Kn".index(axis)] for axis in fitted)
        if fitted:
            words.append(f"{' '.join(f'{axis}^({fit})' for axis, fit in fitted.items())} for {label} ({paper})")
    falls = f"{_WORDS[metric]} falls like {' and '.join(words)}; " if words else ""
    error = {order: _tuned(of, config, metric, last)[0].mean() for order, of in found.items()}
    return (
        f"{name}: tuned, {falls}after {last} epochs of {config.n} examples GraB's {_WORDS[metric]} "
        f"is {error['grab'] / error['rr']:.3g} times RR's."
    )


def _theorem_said(config: Any, name: str, metric: str, of: list[Record], last: int) -> str:
    column = of[0]["epochs"].index(last)
    reached = float(_theorem(of, metric)[:, column].mean())
    tuned, place = _tuned(of, config, metric, last)
    ratio = of[0]["steps"][place] / of[0]["steps"][of[0][_THEOREM[metric]][column]]
    proved = theory.grab_proved_pl if metric == "gap" else theory.grab_proved
    bounds = [proved(theory.Constants(**r["constants"]), n=config.n, epochs=last, balancing=r["balancing"]) for r in of]
    left = reached / float(np.mean([r["constants"]["F"] for r in of]))
    kept = f", {left:.2g} of f(w_1) - f*" if metric == "gap" else ""
    return (
        f"{name}: Theorem 3's step size for {last} epochs is {ratio:.3g} times smaller than the tuned one, and GraB's "
        f"{_WORDS[metric]} is then {reached / tuned.mean():.3g} times as large{kept}. The proof's bound is "
        f"{float(np.mean(bounds)) / reached:.3g} times what is reached."
    )


def _at_edge(records: list[Record], config: Any, name: str) -> bool:
    places = [
        place
        for order in config.orders
        for metric in _METRICS
        for axis in "Kn"
        for place in _curve(records, config, name, order, metric, axis).places
    ]
    return bool({0, len(config.grid) - 1} & set(places))
