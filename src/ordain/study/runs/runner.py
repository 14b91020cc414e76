"""Run all unfinished jobs of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ordain.errors import InputError
from ordain.study.data import data_dir
from ordain.study.files import only_one
from ordain.study.runs.arms import RETRAIN, SOURCE, baseline_of, is_baseline, parse
from ordain.study.runs.config import RunConfig, merged
from ordain.study.runs.job import TUNING_SEEDS, Job, Message, best_rate, stages
from ordain.study.runs.record_lines import DONE, UNFINISHED, check_installed, read_record, unpack
from ordain.study.runs.run_folder import FORMAT, TRAINING, check_same, describe, provenance, read_config, write_header
from ordain.study.runs.team import do_here, do_in_processes
from ordain.study.runs.train_job import Setting
from ordain.study.tasks import TASKS

_LARGEST = 1e38  # largest rate: close to the float32 maximum


@dataclass(frozen=True)
class Progress:
    """A message from a job, with the number of finished jobs and the number of jobs known so far."""

    message: Message
    done: int
    total: int


@dataclass(frozen=True)
class Outcome:
    """The result of :func:`run`."""

    states: dict[Job, str]  # of the jobs run by this call
    before: int  # number of jobs finished earlier
    failed: dict[Job, str]  # tracebacks of failed jobs


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
    """Run the jobs of ``config`` that are not finished in ``out``.

    Args:
        config: must equal the folder's configuration, except for additional arms, rates and seeds.
        out: the run's folder; created if needed.
        report: called with the progress of each job.
        data: the folder of all data sets; default :func:`ordain.study.data.data_dir`.
        jobs: number of worker processes; 0 runs jobs in this process.
        command: the command line to record.
        verify: check the data against their published checksums.
        checkpoint_every: minimum number of seconds between checkpoints of a job.
        tensorboard: log to TensorBoard as well.
    """
    check_config(config)
    if tensorboard:
        check_installed()
    setting = Setting(config, out, data_dir(data), verify, checkpoint_every, tensorboard)
    problem = None
    if not (out / "config.json").exists():
        problem = setting.load()
        describe(problem, config, verify=verify)  # raise before creating a folder
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out):
        saved = read_config(out)
        unpack(out)
        whole = config
        if saved:
            where = f"the configuration in {out / 'config.json'}"
            whole = merged(RunConfig.from_json(saved["config"], where=where), config)
        before = sum(_state(job, out) != UNFINISHED for stage in _stages(config, out) for job in stage)
        states: dict[Job, str] = {}
        failed: dict[Job, str] = {}
        if saved and not _next(config, out, failed):
            return Outcome(states, before, failed)
        problem = problem or setting.load()
        described = describe(problem, whole, verify=verify)
        if saved:
            check_same(saved["problem"], described)
            described["notes"] = list(dict.fromkeys([*saved["problem"]["notes"], *described["notes"]]))
        header = saved or {"format": FORMAT, "kind": TRAINING, "task": config.task}
        write_header(out, header, provenance(command), config=asdict(whole), problem=described)

        def hear(message: Message) -> None:
            if message.kind == "finished":
                states[message.job] = message.state
            elif message.kind == "failed":
                failed[message.job] = message.trace
            if report:
                total = sum(map(len, _stages(config, out)))
                report(Progress(message, before + len(states) + len(failed), total))

        while todo := _next(config, out, failed):
            if jobs:
                do_in_processes(todo, setting, min(jobs, len(todo)), hear)
            else:
                do_here(todo, setting, problem, hear)
        return Outcome(states, before, failed)


def check_config(config: RunConfig) -> None:
    """Raise InputError for a configuration that cannot be run."""
    for came, expected, remedy in _faults(config):
        raise InputError(came, expected=expected, remedy=remedy)


def _faults(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """What is wrong with a configuration, what was expected, and the remedy."""
    if config.task not in TASKS:
        yield f"the task {config.task!r}", f"one of {', '.join(TASKS)}", "See: ordain tasks"
    size = config.batch_size
    for arm in (parse(name, group=config.group) for name in config.arms):
        if size % arm.ranks:
            remedy = f"Write --batch-size {-(-size // arm.ranks) * arm.ranks}, or use fewer ranks."
            yield f"{arm.name} with batches of {size}", f"a batch size that is divisible by {arm.ranks} ranks", remedy
    for name, given in {"orders": config.arms, "rates": config.rates, "seeds": config.seeds}.items():
        if not given or len(set(given)) < len(given):
            came = f"no {name}" if not given else f"{name} {', '.join(map(str, given))}"
            yield came, f"at least one of {name}, without repetition", "List each once."
    if any(not 0 < lr <= _LARGEST for lr in config.rates):
        came, remedy = f"rates {', '.join(map(str, config.rates))}", "Write --lr 0.1,0.01, for example."
        yield came, f"rates above 0, up to {_LARGEST:g}", remedy
    if min(config.epochs, size, config.group, config.threads) < 1 or min(config.seeds) < 0:
        yield "a number of epochs, examples, seeds or threads below 1", "1 or more", "Leave it out."
    for option, limit in (("--greedy-hours", config.greedy_hours), ("--memory-limit", config.memory_limit)):
        if not (math.isfinite(limit) and limit > 0):
            yield f"{option} {limit}", "a finite number above 0", "Leave it out."
    alone = [arm for arm in config.arms if baseline_of(arm, config.arms) is None]
    if config.protocol == "paper" and alone:
        expected = "rr, or rr with the same unit size: other orders run at its best rate"
        yield f"the paper's protocol without rr for {', '.join(alone)}", expected, "Add rr to --orders."
    if config.protocol == "each" and RETRAIN in config.arms:
        yield "retrain, with each order at its own rate", "orders that do not need another's run", "Leave out retrain."
    if RETRAIN in config.arms and SOURCE not in config.arms:
        yield "retrain without grab", "grab, whose last order it reuses", "Add grab."


def _stages(config: RunConfig, out: Path) -> list[list[Job]]:
    """The stages known so far; under protocols ``"paper"`` and ``"each"``, results decide which jobs come later."""
    return stages(config, None if config.protocol == "tuned" else best_rates(config, out))


def _next(config: RunConfig, out: Path, failed: Mapping[Job, str]) -> list[Job]:
    """The unfinished jobs of the first stage that has any."""
    left = ([job for job in of if job not in failed and _state(job, out) == UNFINISHED] for of in _stages(config, out))
    return next(filter(None, left), [])


def _state(job: Job, out: Path) -> str:
    return read_record(job.record(out)).state


def best_rates(config: RunConfig, out: Path) -> dict[str, float] | None:
    """The best rate of each RR (protocol ``"paper"``), or of each arm by the first seeds (``"each"``), if it has one.

    Under ``"paper"`` the other arms with the same unit size run at RR's rate. None until all jobs that decide are
    finished.
    """
    paper = config.protocol == "paper"
    seeds = config.seeds if paper else config.seeds[:TUNING_SEEDS]
    found: dict[str, float] = {}
    for arm in (arm for arm in config.arms if is_baseline(arm) or not paper):
        losses: dict[float, list[float | None]] = {lr: [] for lr in config.rates}
        for job in (Job(arm, lr, seed) for lr in config.rates for seed in seeds):
            record = read_record(job.record(out))
            if record.end is None:
                return None
            judged = record.epochs[-1:] if paper else record.epochs[1:]  # the last, or the one that validation keeps
            known = [epoch.valid_loss for epoch in judged if epoch.valid_loss is not None]
            losses[job.lr].append(min(known, default=None) if record.state == DONE else None)
        best = best_rate(losses)
        if best is not None:
            found[arm] = best
        elif paper:
            raise InputError(
                f"random reshuffling ({arm}), which diverged at every rate",
                expected="at least one rate at which it does not diverge",
                remedy="Add smaller rates: --lr 0.001.",
            )
    return found
