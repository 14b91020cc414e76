"""Figure 1(b): norms of the prefix sums of random vectors, in four orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ordain import herding
from ordain.study.vectors.fitting import mean_and_error, spread
from ordain.study.vectors.study import Point, Record, Study, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "ToyHerding"]

_LABELS = {"random": "random", "greedy": "greedy", "herding-1": "herding, 1 round", "herding-10": "herding, 10 rounds"}
_POINTS = 400  # of a curve that are kept: each is the largest of its stretch


@dataclass(frozen=True)
class ToyHerding:
    """n vectors drawn evenly from [0, 1]^d, as in the paper's caption."""

    seeds: int = 5
    n: int = 10_000
    d: int = 128


def _sizes(quick: bool, **changes: Any) -> ToyHerding:
    small: dict[str, Any] = {"seeds": 2, "n": 300, "d": 8}
    return ToyHerding(**(small if quick else {}) | changes)


def _points(config: ToyHerding) -> Iterator[Point]:
    return ({"seed": seed, "order": order} for seed in range(config.seeds) for order in _LABELS)


def _measure(config: ToyHerding, point: Point) -> dict[str, Any]:
    rng = np.random.default_rng(point["seed"])
    z, shuffled = rng.random((config.n, config.d)), rng.permutation(config.n)
    orders: dict[str, Callable[[], NDArray[np.int64]]] = {
        "random": lambda: shuffled,
        "greedy": lambda: herding.greedy(z),
        "herding-1": lambda: herding.herd(z, rounds=1),
        "herding-10": lambda: herding.herd(z, rounds=10),
    }
    sigma = orders[point["order"]]()
    norms = herding.prefix_norms(z, sigma)
    starts = np.unique(np.linspace(0, config.n - 1, min(_POINTS, config.n)).astype(np.int64))
    return {
        "l2": float(norms.max()),
        "linf": herding.herding_objective(z, sigma),
        "at": (starts + 1).tolist(),
        "norms": [float(f"{value:.5g}") for value in np.maximum.reduceat(norms, starts)],
    }


def _largest(records: list[Record], order: str, norm: str) -> list[float]:
    return [record[norm] for record in records if record["order"] == order]


def _draw(config: ToyHerding, records: list[Record]) -> dict[str, Figure]:
    from matplotlib.figure import Figure

    from ordain.study.style import LEGEND, finish, style

    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.subplots()
    for position, (order, label) in enumerate(_LABELS.items()):
        of = [record for record in records if record["order"] == order]
        if not of:
            continue
        curves = np.array([record["norms"] for record in of])[:, :-1]  # the last sum is zero
        look, at = style(position), of[0]["at"][:-1]
        axes.plot(at, curves.mean(axis=0), label=label, **look.line(max(1, len(at) // 8)))
        axes.fill_between(at, curves.min(axis=0), curves.max(axis=0), color=look.color, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("vectors in the prefix")
    axes.set_ylabel("l2 norm of the centred prefix sum (log scale)")
    axes.set_title(f"{config.n:,} vectors from $[0,1]^{{{config.d}}}$: {_seeds_said(records)}")
    finish(axes)
    figure.legend(loc="outside right upper", **LEGEND)
    return {"prefix-norms": figure}


def _seeds_said(records: list[Record]) -> str:
    """Of a study that is not finished an order may have a seed more than another."""
    counts = sorted({len(_largest(records, order, "l2")) for order in _LABELS} - {0})
    if counts == [1]:
        return "one seed"
    return f"mean of {' or '.join(str(count) for count in counts)} seeds (band: all)"


def _with(records: list[Record], *orders: str) -> list[Record]:
    """The records of the seeds that have all of ``orders``."""
    had: dict[int, set[str]] = {}
    for record in records:
        had.setdefault(record["seed"], set()).add(record["order"])
    return [record for record in records if had[record["seed"]] >= set(orders)]


def _tabulate(config: ToyHerding, records: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for order, label in _LABELS.items():
        if of := [record for record in records if record["order"] == order]:
            l2, linf = (spread(*mean_and_error(_largest(of, order, norm))) for norm in ("l2", "linf"))
            both = _with(records, "random", order)
            means = [np.mean(_largest(both, name, "l2")) for name in ("random", order)] if both else []
            rows.append((label, l2, f"{means[0] / means[1]:.1f}x" if means else "-", linf))
    return ("order", "largest prefix sum, l2", "smaller than random", "largest, l-inf"), rows


def _say(config: ToyHerding, records: list[Record]) -> list[str]:
    whole = _with(records, *_LABELS)
    if not whole:
        return ["No seed has been measured in all four orders yet."]
    mean = {order: float(np.mean(_largest(whole, order, "l2"))) for order in _LABELS}
    compared = "better" if mean["greedy"] < mean["herding-10"] else "worse"
    return [
        f"Of {config.n:,} vectors from [0,1]^{config.d}, the longest prefix sum (l2) of a random order is "
        f"{mean['random']:.3g}; one round of balancing and reordering leaves {mean['herding-1']:.3g}, ten rounds "
        f"{mean['herding-10']:.3g} ({mean['random'] / mean['herding-10']:.0f} times shorter).",
        f"Greedy, which compares all vectors at each step, reaches {mean['greedy']:.3g} here: on such vectors it is "
        f"{compared} than ten rounds, and its failure needs vectors made for it (see statement1).",
    ]


STUDY: Study[ToyHerding] = Study(
    name="toy-herding",
    title="Figure 1(b): prefix sums of random vectors in four orders",
    sizes=_sizes,
    points=_points,
    measure=_measure,
    draw=_draw,
    tabulate=_tabulate,
    say=_say,
)
