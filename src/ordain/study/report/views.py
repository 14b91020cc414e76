"""Which rate each arm is shown at: its own best, or that of random reshuffling (the paper's protocol)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ordain.study.report.statistics import Comparison, compare, corrected, mean
from ordain.study.report.text import counted
from ordain.study.runs.arms import baseline_of, is_baseline
from ordain.study.runs.records import DONE, Arm, Epoch, Job, Run

__all__ = ["Entry", "Metric", "Problem", "View", "at_rate", "best_rate", "gathered", "metrics", "problems", "views"]


@dataclass(frozen=True)
class Metric:
    """A number of each epoch: ``get`` takes it out; ``scale`` is what it is shown multiplied by."""

    name: str
    title: str
    get: Callable[[Epoch], float | None]
    lower_is_better: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Entry:
    """An arm at the rate a view gives it.

    Attributes:
        arm: which.
        rate: None if it has none, and then ``reason`` says why.
        jobs: the finished ones at that rate, by seed.
        reason: "" if there is nothing to say.
    """

    arm: Arm
    rate: float | None
    jobs: Mapping[int, Job]
    reason: str = ""

    def final(self, metric: Metric) -> dict[int, float | None]:
        """After the last epoch, by seed."""
        return {seed: metric.get(job.epochs[-1]) for seed, job in self.jobs.items()}

    def finals(self, metric: Metric) -> list[float]:
        """The same, as far as there is a number."""
        return [value for value in self.final(metric).values() if value is not None]


@dataclass(frozen=True)
class View:
    """Every arm at one rate: ``name`` is "own" or "rr"."""

    name: str
    title: str
    entries: Mapping[str, Entry]

    def baseline(self, name: str) -> Entry | None:
        """The random reshuffling that an arm is compared with, if it has a finished job."""
        found = baseline_of(name, self.entries)
        return self.entries[found] if found and self.entries[found].jobs else None

    @property
    def shown(self) -> dict[str, Entry]:
        """The arms that have something to draw."""
        return {name: entry for name, entry in self.entries.items() if entry.jobs}

    def comparisons(self, metric: Metric) -> dict[str, Comparison]:
        """Each other arm against its baseline, with Holm's p over the arms of this view."""
        found = {
            name: compare(entry.final(metric), baseline.final(metric))
            for name, entry in self.shown.items()
            if not is_baseline(name) and (baseline := self.baseline(name))
        }
        return corrected(found)


@dataclass(frozen=True)
class Problem:
    """Jobs of an arm that are in no comparison, and why."""

    label: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    state: str
    why: str = ""


def gathered(found: Mapping[tuple[str, str, str], Mapping[float, Sequence[int]]]) -> list[Problem]:
    """From ``found[label, state, why][rate]``, one problem for the rates at which the same seeds have it."""
    problems = []
    for (label, state, why), by_rate in found.items():
        rates: dict[tuple[int, ...], list[float]] = {}
        for rate, seeds in by_rate.items():
            rates.setdefault(tuple(seeds), []).append(rate)
        problems += [Problem(label, tuple(at), seeds, state, why) for seeds, at in rates.items()]
    return problems


TRAIN = Metric("train-loss", "training loss", lambda epoch: epoch.train_loss)
VALID = Metric("valid-loss", "validation loss", lambda epoch: epoch.valid_loss)
TEST = Metric("test-loss", "test loss", lambda epoch: epoch.test_loss)
ACCURACY = Metric(
    "test-accuracy", "test accuracy, %", lambda epoch: epoch.test_accuracy, lower_is_better=False, scale=100
)
VALID_ACCURACY = Metric(
    "valid-accuracy", "validation accuracy, %", lambda epoch: epoch.valid_accuracy, lower_is_better=False, scale=100
)


def metrics(run: Run) -> list[Metric]:
    """Training loss, validation loss, and those of the test set (or else validation accuracy) that were recorded."""
    finals = [job.epochs[-1] for arm in run.arms.values() for job in arm.jobs if job.state == DONE]
    held_out = [metric for metric in (VALID, TEST, ACCURACY) if any(metric.get(epoch) is not None for epoch in finals)]
    if ACCURACY not in held_out and any(VALID_ACCURACY.get(epoch) is not None for epoch in finals):
        held_out.append(VALID_ACCURACY)
    return [TRAIN, *held_out]


def views(run: Run) -> list[View]:
    """Each arm at its own best rate, and all at RR's; one view where those are the same, or no other was run."""
    length = _length(run)
    rates = {name: best_rate(arm, length=length) for name, arm in run.arms.items()}
    own = View("own", "each at its own best rate", _entries(run, rates, length))
    baselines = {name: baseline_of(name, run.arms) for name in run.arms}
    shared = {name: rates[baseline] if baseline else None for name, baseline in baselines.items()}
    several = sorted({rate for rate in shared.values() if rate is not None})
    if not several:
        return [own]
    alone = all(set(arm.rates) <= set(several[:1]) for arm in run.arms.values())
    title = "all at one rate" if alone else "all at RR's best rate"
    title += f", {several[0]:g}" if len(several) == 1 else " in units of the same size"
    lost = {name for name, rate in rates.items() if rate is not None and shared[name] is None}
    entries = _entries(run, shared, length)
    entries |= {name: Entry(run.arms[name], None, {}, "RR, to take the rate from, has none") for name in lost}
    same = View("rr", title, entries)
    if all(rate in (None, shared[name]) for name, rate in rates.items()):
        return [same]
    return [own, same]


def at_rate(run: Run, rate: float) -> View:
    """All arms at this one."""
    return View(f"{rate:g}", f"all at {rate:g}", _entries(run, dict.fromkeys(run.arms, rate), _length(run)))


def best_rate(arm: Arm, *, length: int) -> float | None:
    """The rate of the lowest mean validation loss after the last epoch; of two, the larger.

    A rate at which a seed diverged (or was refused) is out. Where only one is left there is nothing to choose.
    """
    open_rates: dict[float, float | None] = {}
    for rate, jobs in arm.rates.items():
        done = _finished(jobs, length)
        if done and not any(job.state in ("diverged", "refused") for job in jobs.values()):
            losses = [loss for job in done.values() if (loss := VALID.get(job.epochs[-1])) is not None]
            open_rates[rate] = mean(losses) if len(losses) == len(done) else None
    if len(open_rates) == 1:
        return next(iter(open_rates))
    tuned = [(loss, -rate) for rate, loss in open_rates.items() if loss is not None]
    return -min(tuned)[1] if tuned else None


def problems(run: Run) -> list[Problem]:
    """Every job that is in no comparison: unfinished, diverged, refused, or ended at another epoch than the rest."""
    length = _length(run)
    found: dict[tuple[str, str, str], dict[float, list[int]]] = {}
    for arm in run.arms.values():
        for job in arm.jobs:
            state, why = job.state, job.why or ""
            if job.state == DONE and job.epochs[-1].epoch != length:
                state, why = "shorter", f"it ended after epoch {job.epochs[-1].epoch}, others after {length}"
            elif state == "unfinished":
                last = job.epochs[-1].epoch if job.epochs else 0
                why = f"{counted(last, 'epoch')} so far"
            if job.needed_bytes:
                why += f" (needs {job.needed_bytes:,} bytes)"
            if state != DONE:
                found.setdefault((arm.label, state, why.strip()), {}).setdefault(job.lr, []).append(job.seed)
    return gathered(found)


def _length(run: Run) -> int:
    """How many epochs a whole job has: the most of any that is done."""
    return max((job.epochs[-1].epoch for arm in run.arms.values() for job in arm.jobs if job.state == DONE), default=0)


def _finished(jobs: Mapping[int, Job], length: int) -> dict[int, Job]:
    return {seed: job for seed, job in jobs.items() if job.state == DONE and job.epochs[-1].epoch == length}


def _entries(run: Run, rates: Mapping[str, float | None], length: int) -> dict[str, Entry]:
    return {name: _entry(arm, rates[name], length) for name, arm in run.arms.items()}


def _entry(arm: Arm, rate: float | None, length: int) -> Entry:
    if not arm.rates:
        return Entry(arm, None, {}, "not started")
    if rate is None:
        states = sorted({job.state for job in arm.jobs} - {DONE})
        reason = f"{' or '.join(states)} at every rate" if states else "no validation loss to choose a rate by"
        return Entry(arm, None, {}, reason)
    jobs = arm.rates.get(rate, {})
    states = sorted({job.state for job in jobs.values()} - {DONE})
    done = _finished(jobs, length)
    if not jobs:
        return Entry(arm, rate, {}, "not run at this rate")
    if not done or "diverged" in states or "refused" in states:  # the seeds that went well would be a choice of luck
        return Entry(arm, rate, {}, " and ".join(states) or "ended before the others")
    left = len(jobs) - len(done)
    return Entry(arm, rate, done, f"{left} of {len(jobs)} seeds not finished" if left else "")
