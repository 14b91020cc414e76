"""A whole run: its folder, its configuration, and the jobs that are still to be done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ordain.errors import InputError
from ordain.study.data import data_dir
from ordain.study.lock import only_one
from ordain.study.machine import provenance
from ordain.study.runs.arms import RETRAIN, SOURCE, baseline_of, is_baseline, parse
from ordain.study.runs.board import check_installed
from ordain.study.runs.config import RunConfig, merged
from ordain.study.runs.job import Job, best_rate, stages
from ordain.study.runs.record_lines import DONE, UNFINISHED, read_record, unpack
from ordain.study.runs.run_folder import FORMAT, TRAINING, check_same, describe, read_config, write_config
from ordain.study.runs.team import Message, do_here, do_in_processes
from ordain.study.runs.train_job import Setting
from ordain.study.runs.worker import load_problem
from ordain.study.tasks import TASKS

_LARGEST = 1e38  # of a rate: float32 holds little more


@dataclass(frozen=True)
class Progress:
    """A message of a job, and how many jobs of this command are over and known of so far."""

    message: Message
    done: int
    total: int


@dataclass(frozen=True)
class Outcome:
    """What a command has done."""

    states: dict[Job, str]  # of the jobs that were run now
    before: int  # how many were finished before
    failed: dict[Job, str]  # the traceback of each job that raised


Report = Callable[[Progress], None]


def run(
    config: RunConfig,
    out: Path,
    *,
    report: Report | None = None,
    data: Path | None = None,
    jobs: int = 0,
    command: str = "",
    verify: bool = True,
    checkpoint_every: float = 20.0,
    tensorboard: bool = False,
) -> Outcome:
    """Do what is not done yet of ``config`` in ``out``.

    Args:
        config: of the run; must be that of the folder, but for more arms, rates and seeds.
        out: the run's folder, made if need be.
        report: called with what is heard of each job.
        data: the folder of all data sets; by default as :func:`ordain.study.data.data_dir` finds it.
        jobs: worker processes; 0 does the work in this one.
        command: to be recorded.
        verify: compare the data with their publishers' checksums.
        checkpoint_every: seconds between a job's checkpoints, at least.
        tensorboard: write for TensorBoard too.
    """
    check(config)
    if tensorboard:
        check_installed()
    setting = Setting(config, out, data_dir(data), verify, checkpoint_every, tensorboard)
    problem = None
    if not (out / "config.json").exists():
        problem = load_problem(setting)
        describe(problem, config, verify=verify)  # what it refuses leaves no folder behind
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out):
        saved = read_config(out)
        unpack(out)
        whole = (
            merged(RunConfig.from_json(saved["config"], where=f"the configuration in {out / 'config.json'}"), config)
            if saved
            else config
        )
        before = sum(_state(job, out) != UNFINISHED for job in _known(config, out))
        states: dict[Job, str] = {}
        failed: dict[Job, str] = {}
        if saved and not _next(config, out, failed):
            return Outcome(states, before, failed)
        problem = problem or load_problem(setting)
        described = describe(problem, whole, verify=verify)
        if saved:
            check_same(saved["problem"], described)
            described["notes"] = list(dict.fromkeys([*saved["problem"]["notes"], *described["notes"]]))
        made = provenance(command)
        # The fields of the first command stay; every command, with what it ran on, is listed after them.
        header = saved or {"format": FORMAT, "kind": TRAINING, "task": config.task, **made}
        commands = [*header.get("commands", []), made]
        write_config(out, header | {"config": whole.to_json(), "problem": described, "commands": commands})

        def hear(message: Message) -> None:
            if message.kind == "finished":
                states[message.job] = message.state
            elif message.kind == "failed":
                failed[message.job] = message.trace
            if report:
                report(Progress(message, before + len(states) + len(failed), len(_known(config, out))))

        while todo := _next(config, out, failed):
            if jobs:
                do_in_processes(todo, setting, min(jobs, len(todo)), hear)
            else:
                do_here(todo, setting, problem, hear)
        return Outcome(states, before, failed)


def check(config: RunConfig) -> None:
    """Refuse what cannot be run, before anything is made."""
    if config.task not in TASKS:
        raise InputError(f"the task {config.task!r}", expected=f"one of {', '.join(TASKS)}", remedy="See: ordain tasks")
    for arm in (parse(name, group=config.group) for name in config.arms):
        if config.batch_size % arm.ranks:
            raise InputError(
                f"{arm.name} with batches of {config.batch_size}",
                expected=f"batches that {arm.ranks} ranks can share alike",
                remedy=f"Write --batch-size {-(-config.batch_size // arm.ranks) * arm.ranks}, or take fewer ranks.",
            )
    lists = {"orders": config.arms, "rates": config.rates, "seeds": config.seeds}
    for name, given in lists.items():
        if not given or len(set(given)) < len(given):
            came = f"no {name}" if not given else f"{name} {', '.join(map(str, given))}"
            raise InputError(came, expected=f"different {name}, at least one", remedy="Name each once.")
    if any(not 0 < lr <= _LARGEST for lr in config.rates):
        raise InputError(
            f"rates {', '.join(map(str, config.rates))}",
            expected=f"rates above 0, up to {_LARGEST:g}",
            remedy="Write --lr 0.1,0.01, say.",
        )
    if min(config.epochs, config.batch_size, config.group, config.threads) < 1 or min(config.seeds) < 0:
        raise InputError(
            "a number of epochs, examples, seeds or threads below 1", expected="1 or more", remedy="Leave it out."
        )
    for option, limit in (("--greedy-hours", config.greedy_hours), ("--memory-limit", config.memory_limit)):
        if not (math.isfinite(limit) and limit > 0):
            raise InputError(f"{option} {limit}", expected="a finite number above 0", remedy="Leave it out.")
    alone = [arm for arm in config.arms if baseline_of(arm, config.arms) is None]
    if config.protocol == "paper" and alone:
        raise InputError(
            f"the paper's protocol without rr for {', '.join(alone)}",
            expected="rr, or rr in the same units, whose best rate the others get",
            remedy="Add rr to --orders.",
        )
    if RETRAIN in config.arms and SOURCE not in config.arms:
        raise InputError("retrain without grab", expected="grab, whose last order it keeps", remedy="Add grab.")


def _known(config: RunConfig, out: Path) -> list[Job]:
    """All jobs, as far as they are known: under the paper's protocol the others' rate is, once RR is finished."""
    return [job for stage in _stages(config, out) for job in stage]


def _stages(config: RunConfig, out: Path) -> list[list[Job]]:
    return stages(config, baseline_rates(config, out) if config.protocol == "paper" else None)


def _next(config: RunConfig, out: Path, failed: Mapping[Job, str]) -> list[Job]:
    """The jobs to do now: what is unfinished in the first stage that has any."""
    for stage in _stages(config, out):
        todo = [job for job in stage if job not in failed and _state(job, out) == UNFINISHED]
        if todo:
            return todo
    return []


def _state(job: Job, out: Path) -> str:
    return read_record(job.record(out)).state


def baseline_rates(config: RunConfig, out: Path) -> dict[str, float] | None:
    """Of each RR (``"rr"``, ``"rr@8"``) the best rate by the validation loss after the last epoch.

    That is the rate that the paper's protocol gives to every other arm of the same units. None as long as a job of
    one of them is unfinished.
    """
    found: dict[str, float] = {}
    for arm in filter(is_baseline, config.arms):
        losses: dict[float, list[float | None]] = {lr: [] for lr in config.rates}
        for job in (Job(arm, lr, seed) for lr in config.rates for seed in config.seeds):
            record = read_record(job.record(out))
            if record.end is None:
                return None
            losses[job.lr].append(record.epochs[-1].valid_loss if record.state == DONE else None)
        best = best_rate(losses)
        if best is None:
            raise InputError(
                f"a random reshuffling ({arm}) that diverged at every rate",
                expected="one rate at which it trains",
                remedy="Add smaller rates: --lr 0.001.",
            )
        found[arm] = best
    return found
