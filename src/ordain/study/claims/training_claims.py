"""Claims on training: GraB and other orders compared with random reshuffling, and the memory that Greedy needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from ordain.study.claims.evidence import (
    ABLATIONS,
    FAILS,
    HOLDS,
    MECHANICS,
    NOT_RUN,
    OPEN,
    TRAINING,
    Claim,
    Evidence,
    Finding,
    together,
)
from ordain.study.claims.pays import LAST, share
from ordain.study.report.arm_rows import rows
from ordain.study.report.number_text import bytes_text
from ordain.study.report.statistics import HELPS, WORSE, Comparison, compare, verdict
from ordain.study.report.verdict_sentences import numbers, p_and_holm
from ordain.study.report.views import TRAIN, VALID, Entry, Metric, View
from ordain.study.runs.arms import BASELINE, parse, stored_bytes
from ordain.study.tasks import TASKS

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
_ALIKE = "alike"
_LIKE = 0.01  # relative to RR's loss: an interval within this counts as equal
Vote = bool | None
_UNITS = "mnist-units-of-64"  # Greedy on single examples would take hours per epoch
_LARGE = ("wikitext2", "sst2", "qnli")
_TIMES = 100
_MACHINE = 32 * 2**30  # memory of the paper's machine in bytes


def _faster(task: str, metric: Metric, evidence: Evidence) -> Finding:
    """Compare GraB with RR at RR's best rate, as in the paper; the result at GraB's own best rate is reported too."""
    view = evidence.at_rr(task)
    comparison = view.comparisons(metric).get("grab") if view else None
    ours, theirs = evidence.entry(task, "grab"), evidence.entry(task, BASELINE)
    if view is None or comparison is None or ours is None or theirs is None:
        return NOT_RUN
    rate = f"RR's best rate{_star(theirs)}" if len(theirs.arm.rates) > 1 else "the only rate"
    said = [f"At {rate}: {numbers(ours, theirs, metric, comparison)}"]
    # The mean over the last epochs is less noisy than the last iterate; it is reported but does not vote.
    said += _told(f"Mean over the last {LAST} epochs", compare(*(_late(entry, metric) for entry in (ours, theirs))))
    if metric is TRAIN:
        said += _sooner(view)
    else:  # compare the best epoch, i.e. the model one would keep
        comparison = view.compared(_lowest)["grab"]
        said += _told("The lowest validation loss of an epoch", comparison)
    tuned = evidence.tuned(task)
    if tuned is not None and tuned.name == "own" and (own := tuned.shown.get("grab")) is not None:
        found, baseline = tuned.comparisons(metric).get("grab"), tuned.baseline("grab")
        if found and baseline and own.rate != ours.rate:
            said.append(f"At its own best rate{_star(own)}: {numbers(own, baseline, metric, found)}")
    words = {HELPS: HOLDS, WORSE: FAILS}
    figure = evidence.figure(task, f"rr-{metric.name}-epochs")
    return Finding(words.get(verdict(comparison), OPEN), tuple(said), figure)


def _star(entry: Entry) -> str:
    """The mark of a rate at the edge of those tried."""
    return "*" if entry.at_edge else ""


def _told(what: str, found: Comparison) -> list[str]:
    """Describe a difference to RR in a sentence if it could be tested."""
    if found.relative is None or found.p is None:
        return []
    return [f"{what}: {share(found.relative)} than RR's ({p_and_holm(found)})."]


def _lowest(entry: Entry) -> pd.Series:
    """The lowest validation loss of an epoch, by seed; epoch 0 is no candidate."""
    return entry.epochs.valid_loss.drop(index=0, level="epoch").groupby("seed").min()


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


def _vote(expected: str, found: Comparison, base: float = 0.0) -> Vote:
    """Whether a significant difference is the ``expected`` one: HELPS, WORSE or _ALIKE.

    Equality needs the whole 99 % interval within 1 % of the baseline's loss (a large p does not show it).
    """
    if verdict(found) in (HELPS, WORSE):
        return verdict(found) == expected
    close = expected == _ALIKE and found.interval is not None and max(map(abs, found.interval)) <= _LIKE * abs(base)
    return True if close and len(found.seeds) > 1 else None


@dataclass(frozen=True)
class _Comparison:
    """Comparison of the final training loss of two arms at RR's best rate, on several tasks.

    A comparison that does not count is reported without a vote.
    """

    tasks: Sequence[str]
    arm: str
    expected: str  # HELPS, WORSE or _ALIKE
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
            view = evidence.at_rr(task)
            if view is not None and self.against == BASELINE:  # one of several orders
                found = view.comparisons(TRAIN)[self.arm]
            if found.difference is None:
                continue
            votes.append(_vote(self.expected, found, theirs.final(TRAIN).mean()))
            whose = theirs.arm.label if self.against != BASELINE else "RR"
            lines.append(f"{task}{_star(theirs)}: {numbers(ours, theirs, TRAIN, found, whose=whose)}")
        return votes if self.counts else [], lines


def _compared(comparisons: Sequence[_Comparison], figure: tuple[str, str], note: str, evidence: Evidence) -> Finding:
    """The combined verdict of several comparisons, with the figure of a run by the names of both."""
    votes: list[Vote] = []
    told = [note] if note else []
    for comparison in comparisons:
        cast, lines = comparison.votes(evidence)
        votes += cast
        told += lines
    return Finding(together(votes), tuple(dict.fromkeys(told)), evidence.figure(*figure))


def _against_rr(view: View) -> Iterator[tuple[str, Comparison, str]]:
    """Each arm of a view, its comparison with its RR, and a line about it."""
    for arm, found in view.comparisons(TRAIN).items():
        entry, theirs = view.entries[arm], view.baseline(arm)
        if theirs is not None and found.difference is not None:
            yield arm, found, f"{entry.arm.label}: {numbers(entry, theirs, TRAIN, found)}"


def _finer(evidence: Evidence) -> Finding:
    """Compare GraB on single examples with GraB on units of 64; each unit size is also compared with its RR."""
    view = evidence.at_rr("granularity")
    if view is None:
        return NOT_RUN
    lines = [line for _, _, line in _against_rr(view)]
    fine, coarse = view.shown.get("grab@1"), view.shown.get("grab@64")
    if fine is None or coarse is None:
        return Finding(OPEN, tuple(lines)) if lines else NOT_RUN
    found = compare(fine.final(TRAIN), coarse.final(TRAIN))
    lines.append(f"One example against 64: {numbers(fine, coarse, TRAIN, found, whose='64')}")
    return Finding(together([_vote(HELPS, found)]), tuple(lines), evidence.figure("granularity", "rr-difference"))


def _comparable(evidence: Evidence) -> Finding:
    """Both orders help, GraB is not significantly worse, and Greedy stores at least 100 times as much."""
    view = evidence.at_rr(_UNITS)
    ours, theirs = evidence.entry(_UNITS, "grab"), evidence.entry(_UNITS, "greedy")
    if view is None or ours is None or theirs is None:
        return NOT_RUN
    found = compare(ours.final(TRAIN), theirs.final(TRAIN))
    votes: list[Vote] = [verdict(found) != WORSE]
    lines = [f"Units of 64 examples: GraB {numbers(ours, theirs, TRAIN, found, whose='Greedy')}"]
    for arm, comparison, line in _against_rr(view):
        if arm in ("grab", "greedy"):
            votes.append(_vote(HELPS, comparison))
            lines.append(line)
    held = {row.name: row.order_bytes for row in rows(view)}
    greedy, grab = held.get("greedy") or 0, held.get("grab") or 0
    if grab:
        votes.append(greedy >= _TIMES * grab)
        lines.append(
            f"Greedy's order stores {bytes_text(greedy)}, GraB's {bytes_text(grab)}: {greedy / grab:,.0f} times."
        )
    return Finding(together(votes), tuple(lines), evidence.figure(_UNITS, "rr-difference"))


def _too_large(evidence: Evidence) -> Finding:
    """Memory needed for the full data sets, and the refusals recorded by runs."""
    votes: list[Vote] = []
    lines = []
    for task in (TASKS[name] for name in _LARGE):
        needed, fewer = (stored_bytes(parse(arm), task.examples, task.parameters) for arm in ("greedy", "greedy@8"))
        votes.append(needed > _MACHINE)
        lines.append(
            f"{task.name}: {task.examples:,} gradients of {task.parameters:,} numbers, {bytes_text(needed)} "
            f"(in units of 8: {bytes_text(fewer)})."
        )
        run = evidence.run(f"memory-{task.name}")
        refused = run.jobs[run.jobs.state == "refused"].label.unique() if run else []
        if len(refused):
            lines.append(f"{task.name}, refused in a run:  {'; '.join(refused)}.")
    lines.append("The paper's machine had 32 GB.")
    return Finding(together(votes), tuple(lines), evidence.figure("memory-mnist", "memory"))


_GENERALLY = "“In general, GraB is able to converge faster in terms of both training and validation loss.”"
_BOTH, _CONVEX, _OTHER = ("mnist", "cifar10"), ("mnist",), ("cifar10",)


def _claim(
    title: str, paper: str, figure: tuple[str, str], *comparisons: _Comparison, group: str = ABLATIONS, note: str = ""
) -> Claim:
    return Claim(title, paper, partial(_compared, comparisons, figure, note), group)


CLAIMS = (
    *(
        Claim(f"GraB {how}: {what}", _GENERALLY, partial(_faster, task, metric), TRAINING)
        for how, metric in (("trains faster", TRAIN), ("validates better", VALID))
        for task, what in PAPER_TASKS.items()
    ),
    _claim(
        "No tuning beyond RR's",
        "GraB reuses RR's hyperparameters: an in-place improvement.",
        ("mnist", "rates"),
        _Comparison(tuple(PAPER_TASKS), "grab", HELPS),
        group=TRAINING,
    ),
    _claim(
        "Shuffle once is the worst",
        "“Shuffle Once performs worst in all the cases.”",
        ("mnist", "rr-difference"),
        _Comparison(_EVERY, "so", WORSE),
    ),
    _claim(
        "FlipFlop is like RR",
        "“FlipFlop is generally the same as RR.”",
        ("cifar10", "rr-difference"),
        _Comparison(_EVERY, "flipflop", _ALIKE),
        note="“Like RR” means that the 99 % interval of the difference is within 1 % of RR's loss.",
    ),
    _claim(  # supported if worse than GraB; the comparison with RR does not vote
        "1-step GraB fails",
        "Keeping the order that the first epoch finds “does not work well”.",
        ("mnist", "rr-train-loss-epochs"),
        _Comparison(_BOTH, "grab-1step", WORSE, against="grab"),
        _Comparison(_BOTH, "grab-1step", HELPS, counts=False),
    ),
    _claim(  # better than RR on the convex task and worse than GraB on the other
        "Retrain from GraB works on convex tasks only",
        "Training again in GraB's last order is comparable to GraB on MNIST, “but not on the non-convex one”.",
        ("mnist", "rr-difference"),
        _Comparison(_CONVEX, "retrain", HELPS),
        _Comparison(_OTHER, "retrain", WORSE, against="grab"),
        _Comparison(_CONVEX, "retrain", WORSE, against="grab", counts=False),
        _Comparison(_OTHER, "retrain", HELPS, counts=False),
    ),
    Claim("Finer units order better", "Ordering whole batches “would compromise the benefits”.", _finer, ABLATIONS),
    Claim(
        "Greedy is comparable in epochs, at over 100 times the memory",
        "Greedy has “comparable convergence speed with respect to epochs”; GraB needs “less than 1% the memory”.",
        _comparable,
        MECHANICS,
    ),
    Claim(
        "Greedy runs out of memory on the larger tasks",
        "Out of memory on WikiText-2, QNLI and SST-2.",
        _too_large,
        MECHANICS,
    ),
)
