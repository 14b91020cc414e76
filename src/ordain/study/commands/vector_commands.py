"""``ordain herd`` and ``ordain simulate-ranks``: orders of plain vectors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from ordain import Deterministic, KernelHalving, SelfBalancingWalk, herding
from ordain.balancing import Balancer
from ordain.errors import InputError
from ordain.study.commands.terminal import plain_errors, show
from ordain.study.files import read_vectors, replacing, write_bytes
from ordain.study.progress import reporting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIMULATION = "simulate-ranks"
_POINTS = 600  # maximum number of points per curve, each the maximum of its interval
_BALANCERS: dict[str, Balancer] = {
    "deterministic": Deterministic(),
    "walk": SelfBalancingWalk(),
    "halving": KernelHalving(),
}


def herd(
    vectors: Annotated[Path, typer.Argument(help="A .npy file with an [n, d] array, one vector per row.")],
    out: Annotated[Path | None, typer.Option(help="Output .npy file for the order: n row indices.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for a plot of the prefix sum norms.")] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds of balancing and reordering.")] = 10,
    balancer: Annotated[
        Literal["deterministic", "walk", "halving"], typer.Option(help="Balancing rule.")
    ] = "deterministic",
    centering: Annotated[
        Literal["mean", "pair"], typer.Option(help="Balance centred vectors or differences of pairs.")
    ] = "mean",
    seed: Annotated[int, typer.Option(help="Random seed of the balancer and the plot.")] = 0,
) -> None:
    """Find an order of vectors whose prefix sums stay small (the herding problem)."""
    with plain_errors(), ExitStack() as files:
        if plot and plot.suffix.lower() != ".png":
            raise InputError(f"--plot {plot}", expected="a name that ends in .png", remedy="Only PNG is supported.")
        paths = [path.resolve() for path in (vectors, out, plot) if path]
        if len(set(paths)) < len(paths):
            expected = "different files for input and outputs"
            raise InputError("one path twice", expected=expected, remedy="Change --out or --plot.")
        if out and out.suffix.lower() != ".npy":
            came, remedy = f"--out {out}", "The order is written by np.save(); read it with np.load()."
            raise InputError(came, expected="a name that ends in .npy", remedy=remedy)
        z = read_vectors(vectors)
        order_file = files.enter_context(replacing(out)) if out else None
        plot_file = files.enter_context(replacing(plot)) if plot else None
        with reporting("herding") as report:
            order = herding.herd(
                z, rounds=rounds, balancer=_BALANCERS[balancer], centering=centering, seed=seed, progress=report
            )
        before, after = herding.prefix_norms(z), herding.prefix_norms(z, order)
        if order_file:
            np.save(order_file, order)
        if plot_file:
            from ordain.study.style import png  # matplotlib takes a while to import

            random = herding.prefix_norms(z, np.random.default_rng(seed).permutation(len(z)))
            curves = {"random": random, "as given": before, "herded": after}
            title = f"Prefix sums of {len(z):,} vectors of {z.shape[1]:,} numbers"
            plot_file.write(png(_prefix_figure(curves, title=title)))
        typer.echo(f"{len(z):,} vectors of {z.shape[1]:,} numbers")
        typer.echo(f"{'largest prefix sum':<28}{'given':>12}{'herded':>12}{'factor':>9}")
        objective = herding.herding_objective(z), herding.herding_objective(z, order)
        typer.echo(_compared("herding objective (l-inf)", *objective))
        typer.echo(_compared("l2 norm", float(before.max()), float(after.max())))
    typer.echo(f"Wrote the order ({len(z):,} row indices) to {out}" if out else "To save the order: --out order.npy")
    if plot:
        typer.echo(f"Wrote the plot to {plot}")


def _prefix_figure(curves: dict[str, NDArray[np.float64]], *, title: str) -> Figure:
    """One curve per label, of the norms of all prefixes ``[n]`` (Figure 1(b)); the last sum, zero, is not drawn."""
    from ordain.study.style import LEGEND, finish, grid_figure, style  # matplotlib takes a while to import

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


def _compared(what: str, before: float, after: float) -> str:
    factor = f"{before / after:.1f}x" if after else "-"
    return f"{what:<28}{before:>12.6g}{after:>12.6g}{factor:>9}"


def simulate_ranks(
    out: Annotated[Path, typer.Option(help="Folder of the records; an interrupted study resumes.")] = Path(
        "runs/simulate-ranks"
    ),
    plot: Annotated[Path | None, typer.Option(help="Output folder for the figures, as PNG and SVG.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds; default 2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes.")] = False,
) -> None:
    """Simulate ranks that order one data set together: how good their order is, and what they send."""
    from ordain.study.vectors import STUDIES, run_study

    study = STUDIES[_SIMULATION]
    with plain_errors(), reporting(_SIMULATION, lines=True) as tell:
        run_study(_SIMULATION, out, report=tell, seeds=seeds, quick=quick)
    with plain_errors():
        for text in study.sentences(out):
            typer.echo(text)
        headings, rows = study.configure(quick=quick).traffic_table()
        show(headings, *rows, title="Bytes that a rank contributes to a step", numbers_from=1)
        if plot:
            from ordain.study.style import png, svg

            for name, figure in study.figures(out).items():
                write_bytes(plot / f"{name}.png", png(figure))
                write_bytes(plot / f"{name}.svg", svg(figure))
