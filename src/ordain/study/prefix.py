"""Norms of prefix sums, one curve an order: Figure 1(b) of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ordain.study.style import LEGEND, finish, style

Curve = tuple[Sequence[int], Sequence[float]]  # how many vectors, the norm of their sum
_POINTS = 600  # of a curve: as many as a figure can show


def prefix_figure(norms: Mapping[str, NDArray[np.float64]], *, title: str) -> Figure:
    """A curve for each label, from the norms of all its prefixes ``[n]``."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    draw_prefixes(axes, {label: thin(of) for label, of in norms.items()})
    axes.set_title(title)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def draw_prefixes(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Curves on a log scale, unless one of them touches zero."""
    for position, (label, (at, norms)) in enumerate(curves.items()):
        axes.plot(at, norms, label=label, **style(position).line(max(1, len(at) // 8)))
    if all(min(norms) > 0 for _, norms in curves.values()):
        axes.set_yscale("log")
    axes.set_xlabel("vectors in the prefix")
    axes.set_ylabel("l2 norm of the centred prefix sum")
    finish(axes)


def thin(norms: NDArray[np.float64]) -> Curve:
    """At most ``_POINTS`` points, each the largest of its stretch; the last sum is left out, being zero."""
    kept = norms[:-1] if len(norms) > 1 else norms
    starts = np.unique(np.linspace(0, len(kept) - 1, min(_POINTS, len(kept))).astype(np.int64))
    return (starts + 1).tolist(), np.maximum.reduceat(kept, starts).tolist()
