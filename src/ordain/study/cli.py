"""The command line: ``ordain herd`` and ``ordain demo``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import ordain
from ordain import Deterministic, KernelHalving, SelfBalancingWalk, herding
from ordain.balancing import Balancer
from ordain.errors import InputError, OrdainError
from ordain.study.files import read_vectors, replacing
from ordain.study.progress import reporting

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_TABLE_WIDTH = 130  # where no terminal says otherwise


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


@contextmanager
def _plain_errors() -> Iterator[None]:
    """One line on stderr and exit code 2 for what a user can mend; anything else is a bug and shows itself."""
    try:
        yield
    except OrdainError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
    else:
        return
    typer.echo(f"ordain: {message}", err=True)
    raise typer.Exit(2)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ordain {ordain.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Better orders in which to visit training data than random reshuffling."""


@app.command()
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
    with _plain_errors(), ExitStack() as files:
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
            from ordain.study.figures import prefix_figure  # matplotlib takes a while to import

            random = herding.prefix_norms(z, np.random.default_rng(seed).permutation(len(z)))
            curves = {"random": random, "as given": before, "herded": after}
            title = f"Prefix sums of {len(z):,} vectors of {z.shape[1]:,} numbers"
            plot_file.write(prefix_figure(curves, title=title))
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder to write; made if need be.")] = Path("demo-out"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each order runs with.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs each run trains for.")] = 20,
) -> None:
    """Train on scikit-learn's digits under every order, and write a page with what came of it."""
    from ordain.study.demo import Settings  # these import scikit-learn and matplotlib
    from ordain.study.report import write_demo
    from ordain.study.summary import HEADINGS, cells

    settings = Settings(seeds=seeds, epochs=epochs)
    with _plain_errors(), reporting("training", lines=True) as report:
        rows = write_demo(out, settings, report=report)
    table = Table(*HEADINGS, title=f"Digits, learning rate {settings.lr}, {epochs} epochs, {seeds} seeds")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(*cells(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_TABLE_WIDTH)
    console.print(table)
    console.print(
        "All orders at one rate, an illustration: no claim about the best of each. p: paired t test of the final train "
        f"loss against RR's; the verdict asks for p < 0.01. The page: {out / 'index.html'}",
        highlight=False,
        soft_wrap=True,
    )
