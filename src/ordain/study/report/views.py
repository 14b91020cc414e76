"""Views of a run: each arm at its own best learning rate, or all at RR's best rate (the paper's protocol).

Jobs that no view compares are listed as problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from ordain.orders import ORDERS
from ordain.study.report.number_text import counted
from ordain.study.report.statistics import Comparison, compare, corrected, number_or_none
from ordain.study.runs.arms import baseline_of, is_baseline
from ordain.study.runs.job import TUNING_SEEDS, best_rate
from ordain.study.runs.record_lines import DONE
from ordain.study.runs.records import Arm, Run, select

_LOST = ("diverged", "refused")


@dataclass(frozen=True)
class Metric:
    """A measured quantity: a ``column`` of the records, multiplied by ``scale`` for display."""

    name: str
    title: str
    column: str
    lower_is_better: bool = True
    scale: float = 1.0


TRAIN = Metric("train-loss", "training loss", "train_loss")
VALID = Metric("valid-loss", "validation loss", "valid_loss")
TEST = Metric("test-loss", "test loss", "test_loss")
ACCURACY = Metric("test-accuracy", "test accuracy, %", "test_accuracy", lower_is_better=False, scale=100)
HERDING = Metric("herding", "largest prefix sum (Eq. 3)", "herding")
STALENESS = Metric("stale-fresh", "cosine similarity with the previous epoch", "stale_fresh", lower_is_better=False)
VALID_ACCURACY = Metric("valid-accuracy", "validation accuracy, %", "valid_accuracy", lower_is_better=False, scale=100)


@dataclass(frozen=True)
class Entry:
    """An arm at the learning rate of a view."""

    arm: Arm  # which
    rate: float | None  # None if there is none; see reason
    jobs: pd.DataFrame  # finished jobs at that rate, by seed, with their final values
    epochs: pd.DataFrame  # epochs of these jobs, by (seed, epoch)
    reason: str = ""  # why jobs are missing, or ""

    @property
    def at_edge(self) -> bool:
        """Whether the rate is the smallest or the largest of those tried: one beyond it may be better."""
        return self.rate in (self.arm.rates[0], self.arm.rates[-1])

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the finished jobs."""
        return tuple(map(int, self.jobs.index))

    def final(self, metric: Metric) -> pd.Series:
        """Values after the last epoch, by seed; NaN if not measured."""
        return self.jobs[metric.column]


@dataclass(frozen=True)
class View:
    """All arms, each at one rate; ``name`` is "own" or "rr"."""

    name: str
    title: str
    entries: Mapping[str, Entry]

    def baseline(self, name: str) -> Entry | None:
        """The RR that an arm is compared with; None if it has no finished job."""
        found = baseline_of(name, self.entries)
        return self.entries[found] if found and self.entries[found].seeds else None

    @property
    def shown(self) -> dict[str, Entry]:
        """The arms with at least one finished job."""
        return {name: entry for name, entry in self.entries.items() if entry.seeds}

    def comparisons(self, metric: Metric) -> dict[str, Comparison]:
        """Compare the final values of each arm with its baseline's; Holm's correction is over the arms of this view."""
        return self.compared(lambda entry: entry.final(metric))

    def compared(self, values: Callable[[Entry], pd.Series]) -> dict[str, Comparison]:
        """The same for any values by seed."""
        found = {
            name: compare(values(entry), values(baseline))
            for name, entry in self.shown.items()
            if not is_baseline(name) and (baseline := self.baseline(name))
        }
        return corrected(found)


class Problem(NamedTuple):
    """Jobs of an arm that are not compared, and the reason."""

    label: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    state: str
    why: str = ""


def gathered(jobs: list[tuple[str, float, int, str, str]]) -> list[Problem]:
    """Merge (label, rate, seed, state, why) of jobs: one for all rates at which the same seeds have the same."""
    table, same = pd.DataFrame(jobs, columns=["label", "rate", "seed", "state", "why"]), ["label", "state", "why"]
    by_rate = table.groupby([*same, "rate"], sort=False).seed.agg(tuple).reset_index()
    found = by_rate.groupby([*same, "seed"], sort=False).rate.agg(tuple)
    return [Problem(label, rates, seeds, state, why) for (label, state, why, seeds), rates in found.items()]


def metrics(run: Run) -> list[Metric]:
    """The recorded metrics: training, validation and test loss, and test (or else validation) accuracy."""
    held_out = [metric for metric in (VALID, TEST, ACCURACY) if run.done[metric.column].notna().any()]
    if ACCURACY not in held_out and run.done[VALID_ACCURACY.column].notna().any():
        held_out.append(VALID_ACCURACY)
    return [TRAIN, *held_out]


def views(run: Run) -> list[View]:
    """The views "own" and "rr", or only one of them if they are the same."""
    rates = {name: _best_rate(run, arm) for name, arm in run.arms.items()}
    own = View("own", "each at its own best rate", {name: _entry(run, name, rate) for name, rate in rates.items()})
    baselines = {name: baseline_of(name, run.arms) for name in run.arms}
    shared = {name: rates[baseline] if baseline else None for name, baseline in baselines.items()}
    several = sorted({rate for rate in shared.values() if rate is not None})
    if not several:
        return [own]
    alone = all(set(arm.rates) <= set(several[:1]) for arm in run.arms.values())
    title = "all at one rate" if alone else "all at RR's best rate"
    title += f", {several[0]:g}" if len(several) == 1 else " with the same unit size"
    lost = {name for name, rate in rates.items() if rate is not None and shared[name] is None}
    entries = {
        name: _without(run, name, None, "RR has no best rate") if name in lost else _entry(run, name, rate)
        for name, rate in shared.items()
    }
    same = View("rr", title, entries)
    if all(rate in (None, shared[name]) for name, rate in rates.items()):
        return [same]
    return [own, same]


def at_rate(run: Run, rate: float) -> View:
    """The view of all arms at a given rate."""
    return View(f"{rate:g}", f"all at {rate:g}", {name: _entry(run, name, rate) for name in run.arms})


def _best_rate(run: Run, arm: Arm) -> float | None:
    """The rate with the lowest mean validation loss after the last epoch; ties go to the larger rate.

    Rates at which a seed diverged or was refused are excluded. A single remaining rate needs no validation loss. Under
    protocol ``"each"`` only the seeds that ran at every rate decide, by the epoch that validation keeps.
    """
    jobs, each = select(run.jobs, arm.name), run.config.get("protocol") == "each"
    if each:
        jobs = jobs[jobs.index.isin(_list(run, "seeds", int)[:TUNING_SEEDS], level="seed")]
    lost = jobs[jobs.state.isin(_LOST)].index.unique("lr")
    done = jobs[(jobs.state == DONE) & (jobs.epoch == run.length)].drop(lost, level="lr")
    judged = done.valid_loss
    if each:
        of_each = select(run.epochs, arm.name).valid_loss.drop(index=0, level="epoch").groupby(["lr", "seed"])
        judged = of_each.min().reindex(done.index)
    losses = {lr: [number_or_none(loss) for loss in of] for lr, of in judged.groupby("lr")}
    return next(iter(losses)) if len(losses) == 1 else best_rate(losses)


def problems(run: Run) -> list[Problem]:
    """All jobs that are not compared: unfinished, diverged, refused, or with fewer epochs than the others."""
    length, found = run.length, []
    last = run.jobs.epoch.fillna(0).astype(int)
    needed = run.jobs.needed_bytes.fillna(0).astype(int)
    for key, state in run.jobs.state.items():
        arm, lr, seed = key
        why = run.jobs.why[key] if isinstance(run.jobs.why[key], str) else ""
        if state == DONE and last[key] != length:
            state, why = "shorter", f"ended after epoch {last[key]}; others after {length}"
        elif state == "unfinished":
            why = f"{counted(last[key], 'epoch')} so far"
        if needed[key]:
            why += f" (needs {needed[key]:,} bytes)"
        if state != DONE:
            found.append((run.arms[arm].label, lr, seed, state, why.strip()))
    return gathered(found)


def _entry(run: Run, name: str, rate: float | None) -> Entry:
    mine = select(run.jobs, name)
    if mine.empty:
        return _without(run, name, None, "not started")
    jobs = mine if rate is None else select(run.jobs, name, rate)
    states = sorted({*jobs.state} - {DONE})
    if rate is None:
        reason = f"{' or '.join(states)} at every rate" if states else "no validation loss to select a rate"
        return _without(run, name, None, reason)
    if jobs.empty:
        return _without(run, name, rate, "not run at this rate")
    done = jobs[(jobs.state == DONE) & (jobs.epoch == run.length)]
    if done.empty or not {*_LOST}.isdisjoint(states):  # the remaining seeds would be a biased sample
        return _without(run, name, rate, " and ".join(states) or "ended earlier than the others")
    left = len(jobs) - len(done)
    epochs = select(run.epochs, name, rate)
    epochs = epochs[epochs.index.get_level_values("seed").isin(done.index)]
    return Entry(run.arms[name], rate, done, epochs, f"{left} of {len(jobs)} seeds not finished" if left else "")


def _without(run: Run, name: str, rate: float | None, reason: str) -> Entry:
    """An entry without finished jobs."""
    return Entry(run.arms[name], rate, select(run.jobs, "", 0.0), select(run.epochs, "", 0.0), reason)


def with_missing_arms(run: Run) -> Run:
    """Add an empty arm for each configured arm without records."""
    names = [name for name in _list(run, "arms", str) if name not in run.arms]
    empty = {name: Arm(name, ORDERS[name].label if name in ORDERS else name, name) for name in names}
    return replace(run, arms={**run.arms, **empty})


def missing_jobs(run: Run, found: Sequence[View]) -> list[Problem]:
    """The configured jobs without a record."""
    return gathered(
        [
            (run.arms[name].label, rate, seed, "not started", "")
            for name in _list(run, "arms", str)
            for rate in _rates_of(name, run, found)
            for seed in _seeds_of(name, rate, run, found)
            if (name, rate, seed) not in run.jobs.index
        ]
    )


def _seeds_of(name: str, rate: float, run: Run, found: Sequence[View]) -> list[int]:
    """The seeds an arm runs with; under protocol ``"each"`` the first ones, and the others at its best rate."""
    seeds = _list(run, "seeds", int)
    own = found[0].entries.get(name)
    return seeds[:TUNING_SEEDS] if run.config.get("protocol") == "each" and own and own.rate != rate else seeds


def _rates_of(name: str, run: Run, found: Sequence[View]) -> list[float]:
    """The rates an arm runs at; under protocol ``"paper"`` only the best rate of its RR, once that is known."""
    if run.config.get("protocol") != "paper" or is_baseline(name):
        return [float(rate) for rate in _list(run, "rates", (int, float))]
    baseline = found[0].baseline(name)
    return [baseline.rate] if baseline and baseline.rate is not None else []


def _list(run: Run, key: str, kind: Any) -> list[Any]:
    """The items of a setting that have the expected type."""
    value = run.config.get(key)
    return [one for one in value if isinstance(one, kind)] if isinstance(value, list) else []
