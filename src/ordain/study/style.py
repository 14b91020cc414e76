"""Style of figures (colours for colour-blind readers, and markers for print without colour), and rendering."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

# Okabe and Ito's palette without yellow, which is too pale on white; black is reserved for the baseline.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "sv^D<>PXph*d"
_PALETTE, _APART = 256, 12  # number of colours in a PNG, and their minimum distance in a channel (of 255)
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 3.4}  # long enough to show the dashes


@dataclass(frozen=True)
class Style:
    """The style of one order, the same in every figure."""

    color: str
    linestyle: Any
    marker: str
    linewidth: float = 1.6
    position: int = 0

    def line(self, every: int) -> dict[str, Any]:
        """Options for ``Axes.plot``, with a marker at every ``every``-th point.

        Markers are offset between orders, so that overlapping lines can be distinguished.
        """
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "marker": self.marker,
            "linewidth": self.linewidth,
            "markersize": 4.5,
            "markevery": (self.position % every, every),
        }


def style(position: int) -> Style:
    """The style of the line at ``position``; 0 is the baseline."""
    if position == 0:
        return Style("black", "-", "o", 2.2)
    place = position - 1
    return Style(
        COLOURS[place % len(COLOURS)],
        DASHES[position % len(DASHES)],
        MARKERS[place % len(MARKERS)],
        position=position,
    )


def finish(axes: Axes) -> None:
    """Add a light grid and remove the top and right spines."""
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)


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


def png(figure: Figure, *, dpi: int = 150) -> bytes:
    """Render as PNG with a palette, which is a third of the size without visible difference."""
    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    with Image.open(buffer) as image:
        few = image.convert("RGB").quantize(palette=_palette(image.convert("RGB")), dither=Image.Dither.NONE)
    few.save(small, format="png", optimize=True)
    return small.getvalue()


def _palette(image: Image.Image) -> Image.Image:
    """The most frequent colours that are clearly different from each other.

    Pillow's own choice can give rare markers the colour of a frequent line.
    """
    codes, counts = np.unique(np.asarray(image).reshape(-1, 3) @ np.array([1 << 16, 1 << 8, 1]), return_counts=True)
    colours = codes[np.argsort(-counts, kind="stable"), None] >> np.array([16, 8, 0]) & 255
    chosen = np.empty((0, 3), dtype=np.int64)
    for colour in colours:
        if len(chosen) == _PALETTE:
            break
        if not (np.abs(chosen - colour).max(axis=1) < _APART).any():
            chosen = np.vstack([chosen, colour])
    palette = Image.new("P", (1, 1))
    palette.putpalette(chosen.ravel().tolist())
    return palette


def svg(figure: Figure) -> bytes:
    """Render as SVG, reproducibly, with text as paths, so that no font is needed."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "ordain", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Drawn:
    """A rendered figure; ``text`` is its alternative text, ``inches`` its width.

    Only ``main`` figures are shown in the Markdown report.
    """

    name: str
    text: str
    png: bytes
    svg: bytes
    inches: float
    main: bool = True


def draw(name: str, text: str, figure: Figure, *, main: bool = True) -> Drawn:
    """Render a figure as PNG and SVG."""
    with warnings.catch_warnings():  # missing glyphs are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        pixels = png(figure, dpi=130)
        figure.set_layout_engine("none")  # the layout is done; repeating it is slow
        return Drawn(name, text, pixels, svg(figure), figure.get_figwidth(), main)
