"""Figures, tables and sentences of the simulation of ranks: quality by number of ranks and by bytes sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ordain.study.vectors.estimates import estimate
from ordain.study.vectors.vector_study import Figures, Record, Table, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Label and style by (method, paired), in the order of the legend. There are fewer colours than lines: both kinds of
# ``independent`` share one, and sketches have those of ``exact``.
_LINES = {
    ("rr", False): ("RR", 0),
    ("exact", False): ("exact, mean", 1),
    ("exact", True): ("exact, pair", 2),
    ("sum", False): ("sum, mean", 3),
    ("sum", True): ("sum, pair", 4),
    ("independent", False): ("independent, mean", 5),
    ("independent", True): ("independent, pair", 11),
    ("cd-grab", True): ("CD-GraB", 6),
}
_SKETCH_STYLES = {False: 7, True: 8}
_TITLES = {"uniform": "{n:,} vectors from $[0,1]^{{{d}}}$", "digits": "{n:,} gradients on digits, d = 650"}
_SAME = ("rr", "exact")  # the same order for any number of ranks
_MOST_SHOWN = 64  # ranks in the figure of bytes

# Bytes are counted from the shapes of layers in float32, each contribution once: how often a network passes it on
# (W - 1 times in a ring, back and forth with a server) is the same factor for all methods. The optimizer's own exchange
# of d numbers comes on top.
_FLOAT = 4


@dataclass(frozen=True)
class Layer:
    """One layer, with a weight of ``outputs`` x ``inputs``."""

    inputs: int
    outputs: int
    steps: int = 1  # T, the number of tokens, or of positions of a convolution, in one example
    bias: bool = True
    table: bool = False  # an embedding, of which an example uses ``steps`` rows

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return self.outputs * (self.inputs + self.bias)

    @property
    def exact(self) -> int:
        """The numbers that determine an example's gradient: its factors, or the gradient itself if that is smaller."""
        factors = self.inputs + (1 if self.table else self.outputs)  # of an embedding: the ids and their rows
        return min(self.steps * factors, self.numel)


def _bert(tokens: int, width: int, blocks: int) -> tuple[Layer, ...]:
    """BERT with a head for two classes, on examples of ``tokens`` tokens."""
    norm = Layer(1, width)
    block = (
        *(Layer(width, width, tokens) for _ in range(4)),
        Layer(width, 4 * width, tokens),
        Layer(4 * width, width, tokens),
        norm,
        norm,
    )
    tables = [Layer(width, rows, tokens, bias=False, table=True) for rows in (30_522, 512, 2)]
    return (*tables, norm, *(block * blocks), Layer(width, width), Layer(width, 2))


DIGITS = (Layer(64, 10),)
MODELS: dict[str, tuple[Layer, ...]] = {
    "logistic 784-10": (Layer(784, 10),),
    "MLP 4 x 1024": (*(Layer(1024, 1024) for _ in range(4)), Layer(1024, 10)),
    "LeNet": (Layer(75, 6, 28 * 28), Layer(150, 16, 100), Layer(400, 120), Layer(120, 84), Layer(84, 10)),
    "tiny BERT, T=32": _bert(32, 128, 2),
}


def payload(layers: tuple[Layer, ...], method: str, *, each: int, sketch: int | None = None) -> int:
    """The bytes that a rank with ``each`` examples per step contributes to it.

    - exact: the factors or the gradients of its examples, whichever is smaller, layer by layer.
    - exact with a sketch: ``sketch`` numbers per example.
    - sum: the d numbers that it has added to s, and one byte per example for its sign.
      Centred vectors need another d numbers per epoch for the mean, which are not counted here.
    - cd-grab: the gradients of its examples, d numbers each.
    - independent, rr: nothing.
    """
    d = sum(layer.numel for layer in layers)
    if method == "exact":
        return _FLOAT * each * (sum(layer.exact for layer in layers) if sketch is None else sketch)
    return {"sum": _FLOAT * d + each, "cd-grab": _FLOAT * each * d, "independent": 0, "rr": 0}[method]


def _last(records: list[Record], *, norm: str = "l2", **fields: Any) -> list[float]:
    """The values after the last epoch, by seed."""
    return [record[norm][-1] for record in where(records, **{"sketch": 0} | fields)]


def _last_on(world: int, records: list[Record], *, method: str, each: int, **fields: Any) -> list[float]:
    """Likewise on ``world`` ranks, with ``each`` examples per rank and step where that matters."""
    world, each = 1 if method in _SAME else world, each if method == "sum" else 0
    return _last(records, method=method, world=world, each=each, **fields)


def draw(config: Any, records: list[Record]) -> Figures:
    """Quality by number of ranks, for a fixed batch per rank and in total; and by the bytes that a rank sends."""
    from ordain.study.style import LEGEND, grid_figure

    data = [name for name in config.data if where(records, data=name)]
    figure, grid = grid_figure(4.6 * len(data) + 2.8, 7.8, rows=2, columns=len(data), sharex=True)
    kept = (f"{config.each} examples a rank and step", f"{config.batch:,} examples a step of all ranks")
    for column, name in enumerate(data):
        for row in range(2):
            _draw_by_ranks(grid[row, column], config, records, name, fixed=bool(row))
            title = _TITLES[name].format(n=config.n, d=config.d)
            grid[row, column].set_title(kept[row] if row else f"{title}\n{kept[row]}", fontsize=10)
        grid[1, column].set_xlabel("ranks W")
    for row in range(2):
        grid[row, 0].set_ylabel(f"longest prefix sum, l2, after {config.epochs} epochs")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    figures = {"quality-by-ranks": figure}
    return figures | {"bytes-and-quality": _draw_by_bytes(config, records)} if "digits" in data else figures


def _draw_by_ranks(axes: Axes, config: Any, records: list[Record], data: str, *, fixed: bool) -> None:
    from ordain.study.style import finish, style

    for (method, paired), (label, position) in _LINES.items():
        means = {}
        for world in config.worlds:
            each = config.batch // world if fixed else config.each
            if found := _last_on(world, records, data=data, method=method, paired=paired, each=each):
                means[world] = np.mean(found)
        if means:
            look = style(position).line(2 if method in _SAME else 1)
            axes.plot(list(means), list(means.values()), label=label, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(config.worlds[::2], [f"{world}" for world in config.worlds[::2]])
    finish(axes)


def _draw_by_bytes(config: Any, records: list[Record]) -> Figure:
    """For the model on digits, whose gradients these are."""
    from ordain.study.style import LEGEND, finish, grid_figure, style

    world = max((w for w in config.worlds if w <= _MOST_SHOWN), default=config.worlds[0])
    figure, ((axes,),) = grid_figure(8.8, 4.8)
    for (method, paired), (label, position) in _LINES.items():
        found = _last_on(world, records, data="digits", method=method, paired=paired, each=config.each)
        look, sent = style(position), payload(DIGITS, method, each=config.each)
        if found and sent:
            axes.plot([sent], [np.mean(found)], label=label, **look.line(1) | {"linestyle": "none", "markersize": 8})
        elif found:  # zero has no place on a log scale
            axes.axhline(float(np.mean(found)), label=f"{label} (no bytes)", color=look.color, linestyle=look.linestyle)
    for paired, position in _SKETCH_STYLES.items():
        found_by = {k: _last(records, data="digits", method="exact", paired=paired, sketch=k) for k in config.sketches}
        means = {k: np.mean(found) for k, found in found_by.items() if found}
        if means:
            sizes = [payload(DIGITS, "exact", each=config.each, sketch=k) for k in means]
            label = f"sketches, {'pair' if paired else 'mean'}:\nk = {', '.join(map(str, means))}"
            axes.plot(sizes, list(means.values()), label=label, **style(position).line(1))
    axes.set(xscale="log", yscale="log", ylabel=f"longest prefix sum, l2, after {config.epochs} epochs")
    axes.set_xlabel(f"bytes that a rank sends, {config.each} examples a rank and step")
    axes.set_title(f"Gradients on digits (d = 650), {world} ranks", fontsize=10)
    finish(axes)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def tabulate(config: Any, records: list[Record]) -> Table:
    """A row for each method and number of ranks: both norms on all data, and the bytes for the model on digits."""
    rows: list[tuple[str, ...]] = []
    names = ("method", "paired", "sketch", "world", "each")
    for values in dict.fromkeys(tuple(record[name] for name in names) for record in records):
        way = dict(zip(names, values, strict=True))
        method, sketch, each = way["method"], way["sketch"], way["each"] or config.each
        found = [_last(records, data=data, norm=norm, **way) for data in config.data for norm in ("l2", "linf")]
        rows.append(
            (
                _LINES[method, way["paired"]][0] + (f", sketch {sketch}" if sketch else ""),
                "any" if method in _SAME else str(way["world"]),
                str(each),
                *(f"{estimate(one):.3g}" if one else "-" for one in found),
                f"{payload(DIGITS, method, each=each, sketch=sketch or None):,}",
            )
        )
    norms = tuple(f"{data}, {norm}" for data in config.data for norm in ("l2", "l-inf"))
    return ("way", "ranks", "examples a rank", *norms, "bytes a rank, digits"), rows


def traffic_table(config: Any) -> Table:
    """The bytes that a rank contributes to a step, for models of different shapes."""
    ways: list[tuple[str, str, int | None]] = [("exact", "exact", None), ("sum", "sum", None)]
    ways += [(f"sketch {k}", "exact", k) for k in config.sketches]
    ways += [("CD-GraB", "cd-grab", None)]
    rows = []
    for name, layers in MODELS.items():
        sent = [payload(layers, method, each=config.each, sketch=sketch) for _, method, sketch in ways]
        rows.append((name, f"{sum(layer.numel for layer in layers):,}", *(f"{one:,}" for one in sent)))
    return ("model", "d", *(label for label, _, _ in ways)), rows


def say(config: Any, records: list[Record]) -> list[str]:
    """Each method on the most ranks, compared with one process and with random orders."""
    return list(_said(config, records)) or ["Too few results to compare ranks with one process."]


def _said(config: Any, records: list[Record]) -> Iterator[str]:
    world = config.worlds[-1]
    for data in config.data:
        random = _last(records, data=data, method="rr")
        for (method, paired), (label, _) in _LINES.items():
            found = _last_on(world, records, data=data, method=method, paired=paired, each=config.each)
            exact = _last(records, data=data, method="exact", paired=paired)
            if method not in _SAME and found and exact and random:
                mean, one = float(np.mean(found)), float(np.mean(exact))
                yield (
                    f"{data}: {label} on {world:,} ranks leaves a longest prefix sum (l2) of {mean:.3g}, "
                    f"{mean / one:.2f} times that of one process ({one:.3g}); random orders have "
                    f"{float(np.mean(random)):.3g}."
                )
