"""Figures of prefix sum norms (Figure 1(b) of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ordain.study.style import LEGEND, finish, style

Curve = tuple[Sequence[int], Sequence[float]]  # number of vectors, norm of their sum
_POINTS = 600  # maximum number of points per curve


def prefix_figure(norms: Mapping[str, NDArray[np.float64]], *, title: str) -> Figure:
    """One curve per label, from the norms of all prefixes ``[n]``."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    draw_prefixes(axes, {label: thin(of) for label, of in norms.items()})
    axes.set_title(title)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def draw_prefixes(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Draw the curves, on a log scale if all norms are positive."""
    for position, (label, (at, norms)) in enumerate(curves.items()):
        axes.plot(at, norms, label=label, **style(position).line(max(1, len(at) // 8)))
    if all(min(norms) > 0 for _, norms in curves.values()):
        axes.set_yscale("log")
    axes.set_xlabel("vectors in the prefix")
    axes.set_ylabel("l2 norm of the centred prefix sum")
    finish(axes)


def thin(norms: NDArray[np.float64]) -> Curve:
    """Reduce a curve to ``_POINTS`` points, each the maximum of its interval; the last sum (zero) is omitted."""
    kept = norms[:-1] if len(norms) > 1 else norms
    starts = np.unique(np.linspace(0, len(kept) - 1, min(_POINTS, len(kept))).astype(np.int64))
    return (starts + 1).tolist(), np.maximum.reduceat(kept, starts).tolist()
