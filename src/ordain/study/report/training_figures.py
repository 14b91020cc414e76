"""All figures of a training report, in page order."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from ordain.study.report.arm_rows import rows
from ordain.study.report.bars import difference_figure, goal_figure, memory_figure, time_figure
from ordain.study.report.curves import curve_figure, rate_figure, styles
from ordain.study.report.views import ACCURACY, HERDING, STALENESS, TRAIN, VALID, VALID_ACCURACY, View, metrics
from ordain.study.runs.records import Run
from ordain.study.style import Style, png, svg

# Figures shown in Markdown: few enough to keep in a repository. The HTML page shows all figures.
_MAIN = ("difference", "train-loss-epochs", "valid-loss-epochs", "herding", "stale-fresh", "rates")
Named = tuple[str, str, Figure | None]  # file name, alternative text, and the figure (None if there is no data)


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


def training_figures(run: Run, found: list[View]) -> dict[str, list[Drawn]]:
    """Figures by section: one section per view ("own", "rr"), and "costs"."""
    looks = styles(run)
    wanted = ("memory",) if run.config.get("study") == "memory" else _MAIN
    sections = {view.name: _of_view(run, view, looks) for view in found} | {"costs": _of_costs(run, found[0], looks)}
    return {
        section: [
            draw(name, text, figure, main=name.removeprefix(f"{section}-") in wanted)
            for name, text, figure in named
            if figure
        ]
        for section, named in sections.items()
    }


def _of_costs(run: Run, view: View, looks: dict[str, Style]) -> Iterator[Named]:
    table = rows(view)
    for name, metric in (("rates", TRAIN), ("valid-rates", VALID)):
        yield name, f"Final {metric.title} of each order at every learning rate", rate_figure(run, view, looks, metric)
    yield "goal", "Epochs and seconds of training until RR's best training loss", goal_figure(table, looks)
    yield "time", "Seconds per epoch by part of the step", time_figure(view)
    yield "memory", "Memory of the order and of the job", memory_figure(table, looks)


def _of_view(run: Run, view: View, looks: dict[str, Style]) -> Iterator[Named]:
    text = "Final training loss minus RR's, for each order"
    yield f"{view.name}-difference", text, difference_figure(view, TRAIN, looks)
    for metric in (TRAIN, VALID, ACCURACY if ACCURACY in metrics(run) else VALID_ACCURACY):
        for seconds in (False, True):
            what, against = metric.title.capitalize(), "time" if seconds else "epochs"
            title = f"{what.partition(',')[0]} against {against}"
            figure = curve_figure(view, looks, metric, title=title, seconds=seconds)
            yield f"{view.name}-{metric.name}-{against}", f"{what} against {against}", figure
    herding = curve_figure(view, looks, HERDING, title="Herding objective per epoch")
    yield f"{view.name}-herding", "Herding objective against epochs", herding
    staleness = curve_figure(view, looks, STALENESS, title="Staleness of gradients")
    yield f"{view.name}-stale-fresh", "Cosine similarity of gradients in consecutive epochs", staleness
