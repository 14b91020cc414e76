"""Figures of results over several seeds. Imported only to draw, because matplotlib is slow to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ordain.study.style import LEGEND, finish, style

__all__ = ["LEGEND", "finish", "grid_figure", "plot_seeds", "style"]


def grid_figure(width: float, height: float, *, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of ``width`` x ``height`` inches and its axes ``[rows, columns]``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def plot_seeds(
    axes: Axes, at: Sequence[float], values: NDArray[np.float64], label: str, position: int, *, alpha: float, every: int
) -> None:
    """Plot ``values [seeds, points]``: their mean with a marker at each ``every``-th point, and their range."""
    look = style(position)
    axes.plot(at, values.mean(axis=0), label=label, **look.line(every))
    axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=look.color, alpha=alpha, linewidth=0)
