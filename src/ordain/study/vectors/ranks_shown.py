"""How the simulation of ranks is shown: the longest prefix sum by number of ranks, and beside what is sent for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ordain.study.vectors.fitting import mean_and_error, spread
from ordain.study.vectors.study import Record, Table
from ordain.study.vectors.traffic import DIGITS, MODELS, payload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "say", "tabulate", "traffic_table"]

# (method, paired) in the order of the legend.
_LINES = {
    ("rr", False): "RR",
    ("exact", False): "exact, mean",
    ("exact", True): "exact, pair",
    ("sum", False): "sum, mean",
    ("sum", True): "sum, pair",
    ("independent", False): "independent, mean",
    ("independent", True): "independent, pair",
    ("cd-grab", True): "CD-GraB",
}
# Their styles: there are fewer colours than lines, so both of ``independent`` share one, and sketches exact's.
_STYLES = dict(zip(_LINES, (0, 1, 2, 3, 4, 5, 11, 6), strict=True))
_SKETCH_STYLES = {False: 7, True: 8}
_TITLES = {"uniform": "{n:,} vectors from $[0,1]^{{{d}}}$", "digits": "{n:,} gradients on digits, d = 650"}
_ALIKE = ("rr", "exact")  # the same for any number of ranks
_MOST_SHOWN = 64  # ranks, of the figure of bytes


def _last(
    records: Sequence[Record],
    data: str,
    method: str,
    paired: bool,
    *,
    world: int = 1,
    each: int = 0,
    sketch: int = 0,
    norm: str = "l2",
) -> list[float]:
    """After the last epoch, by seed."""
    wanted = (data, method, paired, world, each, sketch)
    names = ("data", "method", "paired", "world", "each", "sketch")
    return [record[norm][-1] for record in records if tuple(record[name] for name in names) == wanted]


def _each(method: str, each: int) -> int:
    return each if method == "sum" else 0


def draw(config: Any, records: list[Record]) -> dict[str, Figure]:
    """By number of ranks, with either batch kept; and beside the bytes that a rank sends."""
    from matplotlib.figure import Figure

    from ordain.study.style import LEGEND

    data = [name for name in config.data if any(record["data"] == name for record in records)]
    ranks = Figure(figsize=(4.6 * len(data) + 2.8, 7.8), layout="constrained")
    grid = ranks.subplots(2, len(data), squeeze=False, sharex=True)
    for column, name in enumerate(data):
        title = _TITLES[name].format(n=config.n, d=config.d)
        for row, fixed in enumerate((False, True)):
            axes = grid[row, column]
            _by_ranks(axes, config, records, name, fixed=fixed)
            kept = (
                f"{config.batch:,} examples a step of all ranks" if fixed else f"{config.each} examples a rank and step"
            )
            axes.set_title(f"{title}\n{kept}" if not row else kept, fontsize=10)
        grid[1, column].set_xlabel("ranks W")
    for row in range(2):
        grid[row, 0].set_ylabel(f"longest prefix sum, l2, after {config.epochs} epochs")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    ranks.legend(handles, labels, loc="outside lower center", ncols=4, **LEGEND)
    return {"quality-by-ranks": ranks} | ({"bytes-and-quality": _bytes(config, records)} if "digits" in data else {})


def _by_ranks(axes: Axes, config: Any, records: list[Record], data: str, *, fixed: bool) -> None:
    from ordain.study.style import finish, style

    for (method, paired), label in _LINES.items():
        at, values = [], []
        for world in config.worlds:
            each = _each(method, config.batch // world if fixed else config.each)
            if found := _last(records, data, method, paired, world=1 if method in _ALIKE else world, each=each):
                at.append(world)
                values.append(np.mean(found))
        if at:
            axes.plot(at, values, label=label, **style(_STYLES[method, paired]).line(2 if method in _ALIKE else 1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(config.worlds[::2], [f"{world}" for world in config.worlds[::2]])
    finish(axes)


def _bytes(config: Any, records: list[Record]) -> Figure:
    """Of the digits' own model, whose gradients they are."""
    from matplotlib.figure import Figure

    from ordain.study.style import LEGEND, finish, style

    world = max((w for w in config.worlds if w <= _MOST_SHOWN), default=config.worlds[0])
    figure = Figure(figsize=(8.8, 4.8), layout="constrained")
    axes = figure.subplots()
    for (method, paired), label in _LINES.items():
        found = _last(
            records,
            "digits",
            method,
            paired,
            world=1 if method in _ALIKE else world,
            each=_each(method, config.each),
        )
        if not found:
            continue
        look, sent = style(_STYLES[method, paired]), payload(DIGITS, method, each=config.each)
        if sent:
            axes.plot([sent], [np.mean(found)], label=label, **look.line(1) | {"linestyle": "none", "markersize": 8})
        else:  # nothing at all has no place on a log scale
            axes.axhline(float(np.mean(found)), label=f"{label} (no bytes)", color=look.color, linestyle=look.linestyle)
    for paired, position in _SKETCH_STYLES.items():
        lengths = [k for k in config.sketches if _last(records, "digits", "exact", paired, sketch=k)]
        if not lengths:
            continue
        sent_each = [payload(DIGITS, "exact", each=config.each, sketch=k) for k in lengths]
        values = [np.mean(_last(records, "digits", "exact", paired, sketch=k)) for k in lengths]
        kind = "pair" if paired else "mean"
        axes.plot(
            sent_each, values, label=f"sketches, {kind}:\nk = {', '.join(map(str, lengths))}", **style(position).line(1)
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"bytes that a rank sends, {config.each} examples a rank and step")
    axes.set_ylabel(f"longest prefix sum, l2, after {config.epochs} epochs")
    axes.set_title(f"Gradients on digits (d = 650), {world} ranks", fontsize=10)
    finish(axes)
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def tabulate(config: Any, records: list[Record]) -> Table:
    """A row for each way and number of ranks: both norms on each data, and the bytes for the digits' model."""
    rows: list[tuple[str, ...]] = []
    ways = list(dict.fromkeys(tuple(r[name] for name in _WAY) for r in records))
    for method, paired, sketch, world, each in ways:
        label = _LINES[method, paired] + (f", sketch {sketch}" if sketch else "")
        cells = []
        for data in config.data:
            for norm in ("l2", "linf"):
                found = _last(records, data, method, paired, world=world, each=each, sketch=sketch, norm=norm)
                cells.append(spread(*mean_and_error(found)) if found else "-")
        sent = payload(DIGITS, method, each=each or config.each, sketch=sketch or None)
        rows.append((label, "any" if method in _ALIKE else str(world), str(each or config.each), *cells, f"{sent:,}"))
    norms = tuple(f"{data}, {norm}" for data in config.data for norm in ("l2", "l-inf"))
    return ("way", "ranks", "examples a rank", *norms, "bytes a rank, digits"), rows


_WAY = ("method", "paired", "sketch", "world", "each")


def traffic_table(config: Any) -> Table:
    """Bytes that a rank contributes to a step, for models of different shapes."""
    ways: list[tuple[str, str, int | None]] = [("exact", "exact", None), ("sum", "sum", None)]
    ways += [(f"sketch {k}", "exact", k) for k in config.sketches]
    ways += [("CD-GraB", "cd-grab", None)]
    rows = []
    for name, layers in MODELS.items():
        sent = [payload(layers, method, each=config.each, sketch=sketch) for _, method, sketch in ways]
        rows.append((name, f"{sum(layer.numel for layer in layers):,}", *(f"{one:,}" for one in sent)))
    return ("model", "d", *(label for label, _, _ in ways)), rows


def say(config: Any, records: list[Record]) -> list[str]:
    """Each way at the most ranks beside one process, and beside random orders."""
    said = []
    world = config.worlds[-1]
    for data in config.data:
        random = _last(records, data, "rr", False)
        for (method, paired), label in _LINES.items():
            each = _each(method, config.each)
            found = _last(records, data, method, paired, world=world, each=each)
            exact = _last(records, data, "exact", paired)
            if method in _ALIKE or not (found and exact and random):
                continue
            mean, one = float(np.mean(found)), float(np.mean(exact))
            said.append(
                f"{data}: {label} on {world:,} ranks leaves a longest prefix sum (l2) of {mean:.3g}, {mean / one:.2f} "
                f"times that of one process ({one:.3g}); random orders have {float(np.mean(random)):.3g}."
            )
    return said or ["Too little has been measured to set ranks beside one process."]
