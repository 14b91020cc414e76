"""The figure of ``ordain herd --plot``: norms of prefix sums (as Figure 1(b) of the paper)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ordain.study.style import LEGEND, finish, grid_figure, style

_POINTS = 600  # maximum number of points per curve, each the maximum of its interval


def prefix_figure(curves: Mapping[str, NDArray[np.float64]], *, title: str) -> Figure:
    """One curve per label, from the norms of all prefixes ``[n]``; the last sum is zero and is not drawn."""
    figure, ((axes,),) = grid_figure(8, 4.6)
    drawn = {label: norms[:-1] if len(norms) > 1 else norms for label, norms in curves.items()}
    for position, (label, kept) in enumerate(drawn.items()):
        starts = np.unique(np.linspace(0, len(kept) - 1, min(_POINTS, len(kept))).astype(np.int64))
        look = style(position).line(max(1, len(starts) // 8))
        axes.plot(starts + 1, np.maximum.reduceat(kept, starts), label=label, **look)
    if all(kept.min() > 0 for kept in drawn.values()):
        axes.set_yscale("log")
    axes.set(xlabel="vectors in the prefix", ylabel="l2 norm of the centred prefix sum", title=title)
    finish(axes)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure
