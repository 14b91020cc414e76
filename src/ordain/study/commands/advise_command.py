"""``ordain advise``: whether to order, from a short pilot."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ordain.errors import InputError, did_you_mean
from ordain.study.commands.terminal import plain_errors, show
from ordain.study.progress import reporting

_HEURISTIC = (
    "This is a heuristic from a short run on part of the data, and it considers only the training loss. "
    "results/README.md lists its hits and misses. For your own loop, see Herding(...).report()."
)


def advise(
    name: Annotated[str, typer.Argument(help="A task (see ordain tasks), or a folder of runs to check the advice on.")],
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: the task's first.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size.")] = None,
    optimizer: Annotated[Literal["sgd", "adamw"], typer.Option(help="As for ordain run.")] = "sgd",
    decay: Annotated[Literal["constant", "cosine", "step"], typer.Option(help="As for ordain run.")] = "constant",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of examples in each set.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Maximum number of steps per epoch of the pilot.")] = 200,
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds per order.")] = 2,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    verify: Annotated[bool, typer.Option(help="Check the data against their published checksums.")] = True,
) -> None:
    """Advise whether to order the data of a task, from three short epochs with and without ordering."""
    from ordain.study.advice import advise as advise_on
    from ordain.study.advice import run_pilot
    from ordain.study.data import data_dir as data_folder
    from ordain.study.runs.config import RunConfig
    from ordain.study.runs.runner import check_config
    from ordain.study.runs.team import limited_threads
    from ordain.study.tasks import TASKS

    with plain_errors():
        data = data_folder(data_dir)
        if name not in TASKS and Path(name).is_dir():
            _check(Path(name), data, verify=verify)
            return
        if name not in TASKS:
            came, expected = f"the task {name!r}", f"one of {', '.join(TASKS)}, or a folder of runs"
            raise InputError(came, expected=expected, remedy=did_you_mean(name, TASKS, otherwise="See: ordain tasks"))
        defaults = TASKS[name].defaults
        chosen: dict[str, Any] = {"rates": (defaults.rates[0] if lr is None else lr,), "limit": limit}
        chosen |= {"batch_size": batch_size or defaults.batch_size, "optimizer": optimizer, "decay": decay}
        config = RunConfig(**asdict(defaults) | chosen, task=name, arms=("rr",), seeds=(0,))
        check_config(config)
        problem = TASKS[name].load(data, limit, verify=verify)
        with limited_threads(config.threads), reporting("pilot", lines=True) as tell:
            pilot = run_pilot(problem, config, steps=steps, seeds=seeds, report=tell)
        found = advise_on(pilot)
        measured = (
            ("final training loss, random reshuffling", ", ".join(f"{loss:.4g}" for loss in pilot.rr)),
            ("final training loss, ordered by the head", ", ".join(f"{loss:.4g}" for loss in pilot.ordered)),
            ("share of the loss that is sampling noise", f"{100 * pilot.noise:.1f} %"),
            ("similarity of gradients, epoch to epoch", "-" if pilot.similarity is None else f"{pilot.similarity:.2f}"),
            ("processor time of an epoch, with / without", f"{pilot.cost:.2f}"),
        )
        title = f"{TASKS[name].title}, rate {config.rates[0]:g}, {decay}"
        typer.echo(f"{found.verdict.capitalize()}: {found.reason}")
        if found.setting:
            typer.echo(f"    order = {found.setting}")
        show(("measured", ""), *measured, notes=[_HEURISTIC], title=title, numbers_from=1)


def _check(folder: Path, data: Path, *, verify: bool) -> None:
    """Run the pilots of the settings in a folder of runs, and print what they got right."""
    from ordain.study.claims.advice_check import checked, outcomes, run_pilots
    from ordain.study.runs.team import limited_threads

    command = shlex.join(["ordain", "advise", str(folder), *([] if verify else ["--no-verify"])])
    with limited_threads(1), reporting("pilots", lines=True) as tell:
        ran = run_pilots(folder, data, verify=verify, command=command, report=tell)
    headline, found = checked(outcomes(folder), ran.pilots)
    typer.echo(headline)
    show(found.headings, *found.rows, numbers_from=4)
