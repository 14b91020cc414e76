"""Every figure of a training run, by name, in the order of the page."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from matplotlib.figure import Figure

from ordain.study.report.bars import difference_figure, goal_figure, memory_figure, time_figure
from ordain.study.report.curves import curve_figure, rate_figure, styles
from ordain.study.report.rows import rows
from ordain.study.report.views import ACCURACY, TRAIN, VALID, VALID_ACCURACY, View, metrics
from ordain.study.runs.records import Run
from ordain.study.style import png, svg

__all__ = ["Drawn", "draw", "training_figures"]


@dataclass(frozen=True)
class Drawn:
    """A figure as files' bytes; ``text`` is what a page says where it cannot be seen, ``inches`` its width."""

    name: str
    text: str
    png: bytes
    svg: bytes
    inches: float


def draw(name: str, text: str, figure: Figure) -> Drawn:
    """Render it twice."""
    with warnings.catch_warnings():  # a letter that the font does not have is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        pixels = png(figure, dpi=130)
        figure.set_layout_engine("none")  # it is laid out; doing so again would take longer than drawing
        return Drawn(name, text, pixels, svg(figure), figure.get_figwidth())


def training_figures(run: Run, found: list[View]) -> dict[str, list[Drawn]]:
    """By section: one for each view ("own", "rr"), and "costs"."""
    sections = {view.name: _curves(run, view) for view in found}
    looks, table = styles(run), rows(found[0])
    costs = {
        "rates": ("Final training loss of each order at every learning rate", rate_figure(run, found[0], looks)),
        "valid-rates": (
            "Final validation loss of each order at every learning rate",
            rate_figure(run, found[0], looks, VALID),
        ),
        "goal": ("Epochs and seconds of training until RR's best training loss", goal_figure(table, looks)),
        "time": ("Seconds of an epoch by part of the step", time_figure(found[0])),
        "memory": ("Memory of the order and of the process", memory_figure(table, looks)),
    }
    sections["costs"] = [draw(name, text, figure) for name, (text, figure) in costs.items() if figure]
    return sections


def _curves(run: Run, view: View) -> list[Drawn]:
    looks = styles(run)
    accuracy = ACCURACY if ACCURACY in metrics(run) else VALID_ACCURACY
    drawn = []
    difference = difference_figure(view, TRAIN, looks)
    if difference:
        drawn.append(draw(f"{view.name}-difference", "Final training loss minus RR's, for each order", difference))
    for metric in (TRAIN, VALID, accuracy):
        for seconds in (False, True):
            what, log = metric.title.capitalize(), metric.lower_is_better
            against = "time" if seconds else "epochs"
            figure = curve_figure(
                view,
                looks,
                title=f"{what.partition(',')[0]} against {against}",
                ylabel=metric.title,
                get=metric.get,
                scale=metric.scale,
                seconds=seconds,
                log=log,
            )
            if figure:
                drawn.append(draw(f"{view.name}-{metric.name}-{against}", f"{what} against {against}", figure))
    herding = curve_figure(
        view, looks, title="Herding objective of an epoch", ylabel="largest prefix sum (Eq. 3)", get=lambda e: e.herding
    )
    if herding:
        drawn.append(draw(f"{view.name}-herding", "Herding objective against epochs", herding))
    stale = curve_figure(
        view,
        looks,
        title="How stale are the gradients?",
        ylabel="correlation of stale and fresh",
        get=lambda e: e.stale_fresh,
        log=False,
    )
    if stale:
        drawn.append(draw(f"{view.name}-stale-fresh", "Correlation of stale and fresh gradients", stale))
    return drawn
