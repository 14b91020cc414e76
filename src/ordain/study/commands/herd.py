"""``ordain herd``: an order for plain vectors."""

from __future__ import annotations

from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ordain import Deterministic, KernelHalving, SelfBalancingWalk, herding
from ordain.balancing import Balancer
from ordain.errors import InputError
from ordain.study.commands.plain import plain_errors
from ordain.study.files import read_vectors, replacing
from ordain.study.progress import reporting

__all__ = ["herd"]


class BalancerName(str, Enum):
    """How ``herd`` chooses signs."""

    deterministic = "deterministic"
    walk = "walk"
    halving = "halving"


class CenteringName(str, Enum):
    """What ``herd`` balances."""

    mean = "mean"
    pair = "pair"


_BALANCERS: dict[BalancerName, Balancer] = {
    BalancerName.deterministic: Deterministic(),
    BalancerName.walk: SelfBalancingWalk(),
    BalancerName.halving: KernelHalving(),
}


def herd(
    vectors: Annotated[Path, typer.Argument(help="A .npy file of an [n, d] array: one vector a row.")],
    out: Annotated[Path, typer.Option(help="Where to write the order: a .npy file of n row numbers.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the norms of prefix sums into this PNG file.")] = None,
    rounds: Annotated[int, typer.Option(help="How often to balance and reorder.")] = 10,
    balancer: Annotated[BalancerName, typer.Option(help="How to choose signs.")] = BalancerName.deterministic,
    centering: Annotated[
        CenteringName, typer.Option(help="Balance centred vectors, or differences of pairs.")
    ] = CenteringName.mean,
    seed: Annotated[int, typer.Option(help="For balancers that draw random numbers, and for the plot.")] = 0,
) -> None:
    """Find an order of vectors whose prefix sums stay small (the herding problem)."""
    with plain_errors(), ExitStack() as files:
        _check_distinct(vectors, out, plot)
        z = read_vectors(vectors)
        order_file = files.enter_context(replacing(out))
        plot_file = files.enter_context(replacing(plot)) if plot else None
        with reporting("herding") as report:
            order = herding.herd(
                z, rounds=rounds, balancer=_BALANCERS[balancer], centering=centering.value, seed=seed, progress=report
            )
        before, after = herding.prefix_norms(z), herding.prefix_norms(z, order)
        np.save(order_file, order)
        if plot_file:
            from ordain.study.prefix import prefix_figure  # matplotlib takes a while to import
            from ordain.study.style import png

            random = herding.prefix_norms(z, np.random.default_rng(seed).permutation(len(z)))
            curves = {"random": random, "as given": before, "herded": after}
            title = f"Prefix sums of {len(z):,} vectors of {z.shape[1]:,} numbers"
            plot_file.write(png(prefix_figure(curves, title=title)))
        typer.echo(f"{len(z):,} vectors of {z.shape[1]:,} numbers")
        typer.echo(f"{'largest prefix sum':<28}{'given':>12}{'herded':>12}{'factor':>9}")
        objective = herding.herding_objective(z), herding.herding_objective(z, order)
        typer.echo(_compared("herding objective (l-inf)", *objective))
        typer.echo(_compared("l2 norm", float(before.max()), float(after.max())))


def _compared(what: str, before: float, after: float) -> str:
    factor = f"{before / after:.1f}x" if after else "-"
    return f"{what:<28}{before:>12.6g}{after:>12.6g}{factor:>9}"


def _check_distinct(vectors: Path, out: Path, plot: Path | None) -> None:
    if plot and plot.suffix.lower() != ".png":
        raise InputError(f"--plot {plot}", expected="a name that ends in .png", remedy="PNG is what is drawn.")
    paths = [path.resolve() for path in (vectors, out, plot) if path]
    if len(set(paths)) < len(paths):
        raise InputError(
            "one path twice", expected="input and outputs in different files", remedy="Change --out or --plot."
        )
