"""The figures of the demo and of herded vectors, as PNG bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ordain.study.demo import ARMS, BASELINE, Run
from ordain.study.style import LEGEND, Style, finish, png, style

__all__ = ["accuracy_figure", "loss_figure", "prefix_figure", "summary_figure"]

Curves = Mapping[str, NDArray[np.float64]]

_POINTS = 600  # of a prefix curve: as many as a figure can show
_README = ("rr", "so", "herding", "grab", "grab-pair")  # few enough for a small picture


_STYLES = {name: style(position) for position, name in enumerate(ARMS)}


def loss_figure(runs: Mapping[str, Sequence[Run]]) -> bytes:
    """Train loss against epochs (mean and standard deviation over seeds), and where each seed ended."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, of in runs.items():
        _draw_band(left, ARMS[name], np.array([run.train_loss for run in of]), _STYLES[name])
    _finish_loss(left)
    left.set_title("Train loss: mean and standard deviation over seeds")

    for place, (name, of) in enumerate(runs.items()):
        look, final = _STYLES[name], [run.train_loss[-1] for run in of]
        right.plot(final, [place] * len(final), look.marker, color=look.color, alpha=0.6, markersize=6)
        right.plot([np.mean(final)] * 2, [place - 0.35, place + 0.35], color=look.color, linewidth=2.5)
    right.set_yticks(range(len(runs)), [ARMS[name] for name in runs])
    right.invert_yaxis()
    right.xaxis.set_major_locator(MaxNLocator(5))
    right.set_xlabel("train loss after the last epoch (cross-entropy, nats)")
    right.set_title("Each seed (mark) and their mean (bar)")
    finish(right)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    return png(figure)


def accuracy_figure(runs: Mapping[str, Sequence[Run]]) -> bytes:
    """Test accuracy against epochs."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    accuracies = {name: 100 * np.array([run.test_accuracy for run in of]) for name, of in runs.items()}
    for name, accuracy in accuracies.items():
        _draw_band(axes, ARMS[name], accuracy, _STYLES[name], band=name == BASELINE)
    last = np.concatenate([accuracy[:, 1:].mean(axis=0) for accuracy in accuracies.values()])
    axes.set_ylim(bottom=float(last.min()) - 0.5)
    axes.set_title("Test accuracy: mean over seeds (band: RR's standard deviation)")
    axes.set_ylabel("test accuracy, %")
    _finish_epochs(axes)
    figure.legend(loc="outside right upper", **LEGEND)
    return png(figure)


def prefix_figure(curves: Curves, *, title: str) -> bytes:
    """Norms of prefix sums, one curve an order: Figure 1(b) of the paper."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    _draw_prefixes(axes, curves)
    axes.set_title(title)
    figure.legend(loc="outside right upper", **LEGEND)
    return png(figure)


def summary_figure(runs: Mapping[str, Sequence[Run]], curves: Curves) -> bytes:
    """Loss and prefix norms side by side, 1200 x 450 pixels, for a page's top."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for position, name in enumerate(_README):
        losses = np.array([run.train_loss for run in runs[name]])
        _draw_band(left, ARMS[name], losses, style(position))
    _finish_loss(left)
    left.set_title("Logistic regression on digits: train loss")
    left.legend(**LEGEND)
    _draw_prefixes(right, curves)
    right.set_title("Herding: prefix sums of random vectors")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, **LEGEND)
    return png(figure, dpi=100)


def _finish_loss(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylabel("train loss (cross-entropy, nats; log scale)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _finish_epochs(axes)


def _draw_band(axes: Axes, label: str, values: NDArray[np.float64], look: Style, *, band: bool = True) -> None:
    """Mean and standard deviation over seeds ``[seeds, epochs + 1]``, from the first epoch's end on."""
    values = values[:, 1:]
    epochs, mean = np.arange(1, values.shape[1] + 1), values.mean(axis=0)
    axes.plot(epochs, mean, label=label, **look.line(max(1, len(mean) // 8)))
    if band and len(values) > 1:
        sd = values.std(axis=0, ddof=1)
        axes.fill_between(epochs, mean - sd, mean + sd, color=look.color, alpha=0.1, linewidth=0)


def _draw_prefixes(axes: Axes, curves: Curves) -> None:
    for position, (label, norms) in enumerate(curves.items()):
        at, shown = _thin(norms)
        axes.plot(at, shown, label=label, **style(position).line(max(1, len(at) // 8)))
    if all((_thin(norms)[1] > 0).all() for norms in curves.values()):
        axes.set_yscale("log")
    axes.set_xlabel("vectors in the prefix")
    axes.set_ylabel("l2 norm of the centred prefix sum")
    finish(axes)


def _thin(norms: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most ``_POINTS`` points, each the largest of its stretch; the last sum is left out, being zero."""
    kept = norms[:-1] if len(norms) > 1 else norms
    starts = np.unique(np.linspace(0, len(kept) - 1, min(_POINTS, len(kept))).astype(np.int64))
    return starts + 1, np.maximum.reduceat(kept, starts)


def _finish_epochs(axes: Axes) -> None:
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    finish(axes)
