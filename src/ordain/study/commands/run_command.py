"""``ordain run``: train a task with several orders, or resume."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ordain.errors import InputError, did_you_mean
from ordain.study.commands.terminal import compared, plain_errors, show, stoppable
from ordain.study.progress import displaying, reporting

if TYPE_CHECKING:
    from ordain.study.runs.config import RunConfig
    from ordain.study.runs.runner import Outcome

_SEEDS = 5
_Number = TypeVar("_Number", int, float)
_ORDERS = "rr,so,flipflop,herding,grab,grab-pair"


def run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A task, an ablation or a vector study: see ordain tasks.")] = "digits",
    out: Annotated[Path | None, typer.Option(help="The run's folder; default runs/NAME.")] = None,
    task: Annotated[str, typer.Option(help="The task for an ablation.")] = "mnist",
    orders: Annotated[str | None, typer.Option(help="Comma-separated orders; grab@8 uses units of 8.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds per order; default 5.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs.")] = None,
    lr: Annotated[str | None, typer.Option(help="Comma-separated learning rates.")] = None,
    protocol: Annotated[
        Literal["tuned", "each", "paper"],
        typer.Option(
            help="tuned: every order at every rate; each: two seeds at every rate, the others at the order's best one; "
            "paper: RR at every rate, other orders at RR's best one."
        ),
    ] = "tuned",
    jobs: Annotated[int, typer.Option(min=0, help="Number of worker processes; 0 runs jobs in this process.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads per worker.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data sets.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of examples in each of the training, validation and test sets."),
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Examples per unit of ordering.")] = 1,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size.")] = None,
    ranks: Annotated[str, typer.Option(help="Comma-separated numbers of ranks to run every order on.")] = "1",
    ranks_mode: Annotated[
        Literal["exact", "independent"],
        typer.Option(help="exact: the order of a single process; independent: each rank orders its own shard."),
    ] = "exact",
    herding: Annotated[bool, typer.Option("--herding", help="Measure the herding objective after each epoch.")] = False,
    optimizer: Annotated[
        Literal["sgd", "adamw"],
        typer.Option(help="sgd: with momentum, as in the paper; adamw: with the same weight decay."),
    ] = "sgd",
    decay: Annotated[
        Literal["constant", "cosine", "step"],
        typer.Option(help="Of the learning rate: cosine goes to 0; step divides by ten at 1/2 and 3/4."),
    ] = "constant",
    weights: Annotated[
        str | None, typer.Option(help="Initial BERT weights: a folder, or owner/name on the Hugging Face hub.")
    ] = None,
    memory_limit: Annotated[float, typer.Option(help="Memory limit of Greedy and herding in GiB.")] = 2.0,
    greedy_hours: Annotated[
        float, typer.Option(help="Refuse Greedy if its herding would take more hours in all.")
    ] = 1.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard as well.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Run a vector study with small sizes.")] = False,
    verify: Annotated[bool, typer.Option(help="Check the data against their published checksums.")] = True,
) -> None:
    """Train a task with several orders. The same command resumes an interrupted run."""
    from ordain.study.runs.arms import on_ranks
    from ordain.study.runs.config import ABLATIONS, RunConfig
    from ordain.study.runs.runner import run as run_all
    from ordain.study.tasks import TASKS
    from ordain.study.tasks.bert import settled
    from ordain.study.vectors import STUDIES, run_study

    folder = out or Path("runs") / name
    if name in STUDIES:
        with plain_errors():
            _refuse_others(context, name, {"name", "out", "seeds", "quick"})
        with plain_errors(), stoppable(folder), reporting(name, lines=True) as tell:
            run_study(name, folder, report=tell, seeds=seeds, quick=quick)
        with plain_errors():
            for sentence in STUDIES[name].sentences(folder):
                typer.echo(sentence)
        _tell_next(folder)
        return
    with plain_errors():
        ablation = ABLATIONS.get(name)
        _refuse_others(context, name, set(context.params) - ({"quick"} if ablation else {"quick", "task"}))
        asked = task if ablation else name
        trained = TASKS.get(asked)
        if trained is None:
            known = list(TASKS) if ablation else [*TASKS, *ABLATIONS, *STUDIES]
            remedy = did_you_mean(asked, known, otherwise="See: ordain tasks")
            raise InputError(f"the task {asked!r}", expected=f"one of {', '.join(known)}", remedy=remedy)
        if not (math.isfinite(memory_limit) and memory_limit > 0):
            came, expected = f"--memory-limit {memory_limit}", "a finite number of GiB above 0"
            raise InputError(came, expected=expected, remedy="Leave it out for 2.")
        defaults = trained.defaults
        own = ",".join(ablation.arms) if ablation else _ORDERS
        rates = (
            _listed("--lr", lr, float, expected="comma-separated numbers", example="0.1,0.01")
            if lr is not None
            else (defaults.rates[:1] if ablation and ablation.one_rate else defaults.rates)
        )
        named = [word.strip() for word in (own if orders is None else orders).split(",")]
        counts = _listed("--ranks", ranks, int, expected="different positive integers", example="1,2")
        chosen: dict[str, Any] = {"rates": rates, "batch_size": batch_size or defaults.batch_size}
        chosen["epochs"] = epochs or (ablation.epochs if ablation else None) or defaults.epochs
        config = RunConfig(
            **asdict(defaults) | chosen,
            task=trained.name,
            arms=on_ranks(named, counts, ranks_mode),
            seeds=tuple(range(seeds or _SEEDS)),
            study=ablation.name if ablation else "training",
            protocol=protocol,
            group=group,
            limit=limit,
            herding=herding,
            threads=threads,
            memory_limit=max(1, round(memory_limit * 2**30)),
            greedy_hours=greedy_hours,
            weights=settled(weights) if weights else None,
            optimizer=optimizer,
            decay=decay,
        )
        with stoppable(folder), displaying(config.epochs) as report:
            outcome = run_all(
                config,
                folder,
                report=report,
                data=data_dir,
                jobs=jobs,
                command=shlex.join(["ordain", *sys.argv[1:]]),
                verify=verify,
                tensorboard=tensorboard,
            )
    _tell(outcome, config, folder)
    if outcome.failed:
        raise typer.Exit(1)


def _refuse_others(context: typer.Context, name: str, taken: set[str]) -> None:
    """Raise InputError for options that ``name`` would ignore."""
    for option in context.params:
        source = context.get_parameter_source(option)
        if option not in taken and source is not None and source.name != "DEFAULT":
            raise InputError(
                f"--{option.replace('_', '-')} with {name}",
                expected=f"an option of {name}",
                remedy="Leave it out: it would have no effect.",
            )


def _listed(option: str, words: str, kind: type[_Number], *, expected: str, example: str) -> tuple[_Number, ...]:
    """Parse a comma-separated list of numbers."""
    try:
        found = tuple(kind(word) for word in words.split(","))
    except ValueError:
        found = ()
    if not found or (kind is int and (min(found) < 1 or len(set(found)) < len(found))):
        came = f"{option} {shlex.quote(words)}"
        raise InputError(came, expected=expected, remedy=f"Write {option} {example}.")
    return found


def _tell(outcome: Outcome, config: RunConfig, folder: Path) -> None:
    """Print a summary of the run."""
    said = [f"{count} {state}" for state, count in Counter(outcome.states.values()).items()]
    said += [f"{outcome.before} finished earlier"] if outcome.before else []
    said += [f"{len(outcome.failed)} FAILED"] if outcome.failed else []
    typer.echo(f"{config.task}: {', '.join(said) or 'nothing to do'}. Records: {folder / 'records'}")
    for job, trace in outcome.failed.items():
        typer.echo(f"ordain: {job} failed: {trace.strip().splitlines()[-1]}", err=True)
    if outcome.failed:
        typer.echo("ordain: run the same command to retry failed jobs.", err=True)
    if outcome.states or outcome.before:
        with plain_errors():
            _show_results(folder)
        _tell_next(folder)


def _show_results(folder: Path) -> None:
    """Print the table of each view of the report."""
    from ordain.study.report.training_content import numbers_table  # these import pandas, matplotlib and scipy
    from ordain.study.report.views import views, with_missing_arms
    from ordain.study.runs.records import read_run

    for view in views(with_missing_arms(read_run(folder))):
        numbers = numbers_table(view)
        show(*compared(numbers.headings, numbers.rows), title=numbers.title, numbers_from=2)


def _tell_next(folder: Path) -> None:
    typer.echo(f"Next, the report with its figures: {shlex.join(['ordain', 'report', str(folder)])}")
