"""Claims on training: GraB and other orders compared with random reshuffling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from ordain.study.claims.evidence import FAILS, HOLDS, NOT_RUN, OPEN, Claim, Evidence, Finding, together
from ordain.study.claims.reasons import LAST
from ordain.study.report.arm_rows import rows
from ordain.study.report.number_text import p_equals
from ordain.study.report.statistics import HELPS, WORSE, Comparison, compare, verdict
from ordain.study.report.verdict_sentences import numbers
from ordain.study.report.views import TRAIN, VALID, Entry, Metric, View
from ordain.study.runs.arms import BASELINE

PAPER_TASKS = {
    "mnist": "logistic regression on MNIST",
    "cifar10": "LeNet on CIFAR-10",
    "wikitext2": "an LSTM on WikiText-2",
    "sst2": "a BERT on SST-2",
    "qnli": "a BERT on QNLI",
}
TABLES = ("a9a", "w8a", "covtype")  # not in the paper
_MAIN = ("mnist", "cifar10", "wikitext2", "sst2")
_EVERY = (*PAPER_TASKS, *TABLES)
_LIKE = 0.01  # relative to RR's loss: an interval within this counts as equal
Vote = bool | None


def _faster(task: str, metric: Metric, evidence: Evidence) -> Finding:
    """Compare GraB with RR at RR's best rate, as in the paper; the result at GraB's own best rate is reported too."""
    view = evidence.at_rr(task)
    comparison = view.comparisons(metric).get("grab") if view else None
    ours, theirs = evidence.entry(task, "grab"), evidence.entry(task, BASELINE)
    if view is None or comparison is None or ours is None or theirs is None:
        return NOT_RUN
    rate = "RR's best rate" if len(theirs.arm.rates) > 1 else "the only rate"
    said = [f"At {rate}: {numbers(ours, theirs, metric, comparison)}"]
    # The mean over the last epochs is less noisy than the last iterate; it is reported but does not vote.
    _, late = _told(f"Mean over the last {LAST} epochs", *(_late(entry, metric) for entry in (ours, theirs)))
    said += late
    if metric is TRAIN:
        said += _sooner(view)
    else:  # compare the best epoch, i.e. the model one would keep
        lowest = (entry.epochs.valid_loss.groupby("seed").min() for entry in (ours, theirs))
        comparison, best = _told("The lowest validation loss of an epoch", *lowest)
        said += best
    tuned = evidence.tuned(task)
    if tuned is not None and tuned.name == "own" and (own := tuned.shown.get("grab")) is not None:
        found, baseline = tuned.comparisons(metric).get("grab"), tuned.baseline("grab")
        if found and baseline and own.rate != ours.rate:
            said.append(f"At its own best rate: {numbers(own, baseline, metric, found)}")
    words = {HELPS: HOLDS, WORSE: FAILS}
    figure = evidence.figure(task, f"rr-{metric.name}-epochs")
    return Finding(words.get(verdict(comparison), OPEN), tuple(said), figure)


def _told(what: str, ours: pd.Series, theirs: pd.Series) -> tuple[Comparison, list[str]]:
    """Compare values by seed, and describe the difference in a sentence if it could be tested."""
    found, base = compare(ours, theirs), theirs.mean()
    if found.difference is None or found.p is None or not base:
        return found, []
    word = "lower" if found.difference < 0 else "higher"
    return found, [f"{what}: {100 * abs(found.difference) / base:.2g} % {word} than RR's ({p_equals(found.p)})."]


def _late(entry: Entry, metric: Metric) -> pd.Series:
    """Mean over the last epochs, by seed, for jobs with more epochs than that."""
    values = entry.epochs[metric.column].groupby("seed")
    return values.agg(lambda of: of.tail(LAST).mean())[values.size() > LAST + 1]


def _sooner(view: View) -> list[str]:
    """The number of epochs until RR's best training loss is reached."""
    table = {row.name: row for row in rows(view)}
    ours, theirs = table["grab"].epochs_to_goal, table[BASELINE].epochs_to_goal
    if theirs is None:
        return []
    reached = f"is reached after {ours:g}" if ours is not None else "is not reached"
    return [f"RR's best training loss, reached by RR after {theirs:g} epochs, {reached} (median seed)."]


def _worse(found: Comparison, _: float) -> Vote:
    return {WORSE: True, HELPS: False}.get(verdict(found))


def _better(found: Comparison, _: float) -> Vote:
    return {HELPS: True, WORSE: False}.get(verdict(found))


def _alike(found: Comparison, base: float) -> Vote:
    """True only if the whole 99 % interval is within 1 % of the baseline's loss (a large p does not show equality)."""
    if verdict(found) in (HELPS, WORSE):
        return False
    close = found.interval is not None and max(map(abs, found.interval)) <= _LIKE * abs(base)
    return True if close and len(found.seeds) > 1 else None


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the final training loss of two arms at RR's best rate, on several tasks.

    A comparison that does not count is reported without a vote.
    """

    tasks: Sequence[str]
    arm: str
    vote: Callable[[Comparison, float], Vote]
    against: str = BASELINE
    counts: bool = True

    def votes(self, evidence: Evidence) -> tuple[list[Vote], list[str]]:
        """One vote and one line per task."""
        votes: list[Vote] = []
        lines = []
        for task in self.tasks:
            ours, theirs = evidence.entry(task, self.arm), evidence.entry(task, self.against)
            if ours is None or theirs is None:
                if task in _MAIN:  # a claim on all tasks needs all of them
                    votes.append(None)
                    lines.append(f"{task}: not run.")
                continue
            found = compare(ours.final(TRAIN), theirs.final(TRAIN))
            if found.difference is None:
                continue
            votes.append(self.vote(found, theirs.final(TRAIN).mean()))
            whose = theirs.arm.label if self.against != BASELINE else "RR"
            lines.append(f"{task}: {numbers(ours, theirs, TRAIN, found, whose=whose)}")
        return votes if self.counts else [], lines


def _compared(comparisons: Sequence[_Comparison], run: str, file: str, evidence: Evidence, note: str = "") -> Finding:
    """The combined verdict of several comparisons; the figure is ``file`` in the report on ``run``."""
    votes: list[Vote] = []
    told = [note] if note else []
    for comparison in comparisons:
        cast, lines = comparison.votes(evidence)
        votes += cast
        told += lines
    return Finding(together(votes), tuple(dict.fromkeys(told)), evidence.figure(run, file))


def _finer(evidence: Evidence) -> Finding:
    """Compare GraB on single examples with GraB on units of 64; each unit size is also compared with its RR."""
    view = evidence.at_rr("granularity")
    if view is None:
        return NOT_RUN
    lines = [
        f"{view.entries[arm].arm.label}: {numbers(view.entries[arm], theirs, TRAIN, found)}"
        for arm, found in view.comparisons(TRAIN).items()
        if (theirs := view.baseline(arm)) is not None and found.difference is not None
    ]
    fine, coarse = view.shown.get("grab@1"), view.shown.get("grab@64")
    if fine is None or coarse is None:
        return Finding(OPEN, tuple(lines)) if lines else NOT_RUN
    found = compare(fine.final(TRAIN), coarse.final(TRAIN))
    lines.append(f"One example against 64: {numbers(fine, coarse, TRAIN, found, whose='64')}")
    return Finding(together([_better(found, 0.0)]), tuple(lines), evidence.figure("granularity", "rr-difference"))


_GENERALLY = "“In general, GraB is able to converge faster in terms of both training and validation loss.”"
_BOTH, _CONVEX, _OTHER = ("mnist", "cifar10"), ("mnist",), ("cifar10",)

CLAIMS = (
    *(
        Claim(f"GraB {how}: {what}", _GENERALLY, partial(_faster, task, metric))
        for how, metric in (("trains faster", TRAIN), ("validates better", VALID))
        for task, what in PAPER_TASKS.items()
    ),
    Claim(
        "No tuning beyond RR's",
        "GraB reuses RR's hyperparameters: an in-place improvement.",
        partial(_compared, [_Comparison(tuple(PAPER_TASKS), "grab", _better)], "mnist", "rates"),
    ),
    Claim(
        "Shuffle once is the worst",
        "“Shuffle Once performs worst in all the cases.”",
        partial(_compared, [_Comparison(_EVERY, "so", _worse)], "mnist", "rr-difference"),
    ),
    Claim(
        "FlipFlop is like RR",
        "“FlipFlop is generally the same as RR.”",
        partial(
            _compared,
            [_Comparison(_EVERY, "flipflop", _alike)],
            "cifar10",
            "rr-difference",
            note="“Like RR” means that the 99 % interval of the difference is within 1 % of RR's loss.",
        ),
    ),
    Claim(  # supported if worse than GraB; the comparison with RR does not vote
        "1-step GraB fails",
        "An order from the first epoch, kept, “does not work well”.",
        partial(
            _compared,
            [
                _Comparison(_BOTH, "grab-1step", _worse, against="grab"),
                _Comparison(_BOTH, "grab-1step", _better, counts=False),
            ],
            "mnist",
            "rr-train-loss-epochs",
        ),
    ),
    Claim(  # better than RR on the convex task and worse than GraB on the other
        "Retrain from GraB works on convex tasks only",
        "GraB's last order, kept in a new run, is comparable to GraB on MNIST, “but not on the non-convex one”.",
        partial(
            _compared,
            [
                _Comparison(_CONVEX, "retrain", _better),
                _Comparison(_OTHER, "retrain", _worse, against="grab"),
                _Comparison(_CONVEX, "retrain", _worse, against="grab", counts=False),
                _Comparison(_OTHER, "retrain", _better, counts=False),
            ],
            "mnist",
            "rr-difference",
        ),
    ),
    Claim("Finer units order better", "Ordering whole batches “would compromise the benefits”.", _finer),
)
