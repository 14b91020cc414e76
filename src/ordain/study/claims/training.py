"""Claims on training: GraB beside random reshuffling, and the other orders beside both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ordain.study.claims.evidence import Evidence
from ordain.study.claims.finding import FAILS, HOLDS, OPEN, Claim, Finding, together
from ordain.study.claims.reasons import LAST
from ordain.study.report.rows import rows
from ordain.study.report.sentences import numbers
from ordain.study.report.statistics import HELPS, WORSE, Comparison, compare, mean, verdict
from ordain.study.report.text import p_equals
from ordain.study.report.views import TRAIN, VALID, Entry, Metric, View
from ordain.study.runs.arms import BASELINE

__all__ = ["CLAIMS", "PAPER_TASKS", "TABLES"]

PAPER_TASKS = {
    "mnist": "logistic regression on MNIST",
    "cifar10": "LeNet on CIFAR-10",
    "wikitext2": "an LSTM on WikiText-2",
    "sst2": "a BERT on SST-2",
    "qnli": "a BERT on QNLI",
}
TABLES = ("a9a", "w8a", "covtype")  # not in the paper
_MAIN = ("mnist", "cifar10", "wikitext2", "sst2")
_LIKE = 0.01  # of RR's loss: a difference within this, with its whole interval, is none
_NOT_RUN = "Not run."
Vote = bool | None


def _faster(task: str, metric: Metric, evidence: Evidence) -> Finding:
    """At RR's rate, as in the paper; GraB's own best rate is told beside."""
    view = evidence.at_rr(task)
    comparison = view.comparisons(metric).get("grab") if view else None
    ours, theirs = evidence.entry(task, "grab"), evidence.entry(task, BASELINE)
    if view is None or comparison is None or ours is None or theirs is None:
        return Finding(OPEN, (_NOT_RUN,))
    rate = "RR's best rate" if len(theirs.arm.rates) > 1 else "the only rate"
    said = [f"At {rate}: {numbers(ours, theirs, metric, comparison)}"]
    said += _settled(ours, theirs, metric)
    if metric is TRAIN:
        said += _sooner(view)
    else:  # what is validated is the model that one would keep: a faster way to overfitting is no claim of anybody's
        comparison = compare(_lowest(ours), _lowest(theirs))
        said += _told("The lowest validation loss of an epoch", comparison, mean(list(_lowest(theirs).values())))
    tuned = evidence.tuned(task)
    if tuned is not None and tuned.name == "own" and (own := tuned.shown.get("grab")) is not None:
        found = tuned.comparisons(metric).get("grab")
        best = tuned.baseline("grab")
        if found and best and own.rate != ours.rate:
            said.append(f"At its own best rate: {numbers(own, best, metric, found)}")
    words = {HELPS: HOLDS, WORSE: FAILS}
    file = "train-loss" if metric is TRAIN else "valid-loss"
    figure = evidence.figure(task, f"rr-{file}-epochs")
    return Finding(words.get(verdict(comparison), OPEN), tuple(said), figure)


def _settled(ours: Entry, theirs: Entry, metric: Metric) -> list[str]:
    """The mean over the last epochs, in which the noise of the last iterate is less; told, and no part of a verdict."""
    base = _late(theirs, metric)
    found = compare(_late(ours, metric), base)
    return _told(f"Mean over the last {LAST} epochs", found, mean([v for v in base.values() if v is not None]))


def _told(what: str, found: Comparison, base: float | None) -> list[str]:
    if found.difference is None or found.p is None or not base:
        return []
    word = "lower" if found.difference < 0 else "higher"
    share = f"{100 * abs(found.difference) / base:.2g} % {word} than RR's"
    return [f"{what}: {share} ({p_equals(found.p)})."]


def _lowest(entry: Entry) -> dict[int, float]:
    """By seed, the lowest validation loss of an epoch."""
    losses = {seed: [VALID.get(epoch) for epoch in job.epochs] for seed, job in entry.jobs.items()}
    return {seed: min(loss for loss in found if loss is not None) for seed, found in losses.items() if any(found)}


def _late(entry: Entry, metric: Metric) -> dict[int, float | None]:
    """By seed, the mean over the last epochs of a job that has more than those."""
    jobs = {seed: job.epochs[-LAST:] for seed, job in entry.jobs.items() if len(job.epochs) > LAST + 1}
    return {seed: mean([v for epoch in late if (v := metric.get(epoch)) is not None]) for seed, late in jobs.items()}


def _sooner(view: View) -> list[str]:
    """How soon RR's best training loss is reached, in epochs."""
    table = {row.name: row for row in rows(view)}
    ours, theirs = table["grab"].epochs_to_goal, table[BASELINE].epochs_to_goal
    if theirs is None:
        return []
    reached = f"is reached after {ours:g}" if ours is not None else "is not reached"
    return [f"RR's best training loss, reached by RR after {theirs:g} epochs, {reached} (median seed)."]


def _each(
    evidence: Evidence, tasks: Sequence[str], arm: str, vote: Callable[[Comparison, float], Vote], *, against: str
) -> tuple[list[Vote], list[str]]:
    """A vote and a line for each task that has both arms at RR's rate, of the final training loss."""
    votes: list[Vote] = []
    lines = []
    for task in tasks:
        ours, theirs = evidence.entry(task, arm), evidence.entry(task, against)
        if ours is None or theirs is None:
            if task in _MAIN:  # a claim on all tasks needs them all
                votes.append(None)
                lines.append(f"{task}: not run.")
            continue
        found = compare(ours.final(TRAIN), theirs.final(TRAIN))
        base = mean(theirs.finals(TRAIN)) or 0.0
        if found.difference is None:
            continue
        votes.append(vote(found, base))
        whose = theirs.arm.label if against != BASELINE else "RR"
        lines.append(f"{task}: {numbers(ours, theirs, TRAIN, found, whose=whose)}")
    return votes, lines


def _worse(found: Comparison, _: float) -> Vote:
    return {WORSE: True, HELPS: False}.get(verdict(found))


def _better(found: Comparison, _: float) -> Vote:
    return {HELPS: True, WORSE: False}.get(verdict(found))


def _alike(found: Comparison, base: float) -> Vote:
    """True only if the whole 99 % interval is within a hundredth of the baseline's loss: no p says “equal”."""
    if verdict(found) in (HELPS, WORSE):
        return False
    close = found.interval is not None and max(map(abs, found.interval)) <= _LIKE * abs(base)
    return True if close and len(found.seeds) > 1 else None


def _no_tuning(evidence: Evidence) -> Finding:
    votes, lines = _each(evidence, tuple(PAPER_TASKS), "grab", _better, against=BASELINE)
    return Finding(together(votes), tuple(lines), evidence.figure("mnist", "rates"))


def _shuffle_once(evidence: Evidence) -> Finding:
    votes, lines = _each(evidence, (*PAPER_TASKS, *TABLES), "so", _worse, against=BASELINE)
    return Finding(together(votes), tuple(lines), evidence.figure("mnist", "rr-difference"))


def _flipflop(evidence: Evidence) -> Finding:
    votes, lines = _each(evidence, (*PAPER_TASKS, *TABLES), "flipflop", _alike, against=BASELINE)
    note = "Like RR: the 99 % interval of the difference lies within one hundredth of RR's loss."
    return Finding(together(votes), (note, *lines), evidence.figure("cifar10", "rr-difference"))


def _one_step(evidence: Evidence) -> Finding:
    """It fails if it is worse than GraB; whether it helps at all is told beside."""
    tasks = ("mnist", "cifar10")
    votes, lines = _each(evidence, tasks, "grab-1step", _worse, against="grab")
    _, beside = _each(evidence, tasks, "grab-1step", _better, against=BASELINE)
    return Finding(
        together(votes), tuple(dict.fromkeys((*lines, *beside))), evidence.figure("mnist", "rr-train-loss-epochs")
    )


def _retrain(evidence: Evidence) -> Finding:
    """Better than RR on the convex task, and worse than GraB on the other; the other two comparisons beside."""
    convex, first = _each(evidence, ("mnist",), "retrain", _better, against=BASELINE)
    other, second = _each(evidence, ("cifar10",), "retrain", _worse, against="grab")
    _, third = _each(evidence, ("mnist",), "retrain", _worse, against="grab")
    _, fourth = _each(evidence, ("cifar10",), "retrain", _better, against=BASELINE)
    lines = tuple(dict.fromkeys((*first, *second, *third, *fourth)))
    return Finding(together([*convex, *other]), lines, evidence.figure("mnist", "rr-difference"))


def _finer(evidence: Evidence) -> Finding:
    """GraB's loss in units of one example against that in units of 64; every unit beside its own RR."""
    name = "granularity"
    view = evidence.at_rr(name)
    if view is None:
        return Finding(OPEN, (_NOT_RUN,))
    lines = []
    for arm, found in view.comparisons(TRAIN).items():
        theirs = view.baseline(arm)
        if theirs is not None and found.difference is not None:
            lines.append(f"{view.entries[arm].arm.label}: {numbers(view.entries[arm], theirs, TRAIN, found)}")
    fine, coarse = view.shown.get("grab@1"), view.shown.get("grab@64")
    if fine is None or coarse is None:
        return Finding(OPEN, tuple(lines) or (_NOT_RUN,))
    found = compare(fine.final(TRAIN), coarse.final(TRAIN))
    lines.append(f"One example against 64: {numbers(fine, coarse, TRAIN, found, whose='64')}")
    return Finding(together([_better(found, 0.0)]), tuple(lines), evidence.figure(name, "rr-difference"))


_GENERALLY = "“In general, GraB is able to converge faster in terms of both training and validation loss.”"

CLAIMS = (
    *(
        Claim(f"GraB trains faster: {what}", _GENERALLY, partial(_faster, task, TRAIN))
        for task, what in PAPER_TASKS.items()
    ),
    *(
        Claim(f"GraB validates better: {what}", _GENERALLY, partial(_faster, task, VALID))
        for task, what in PAPER_TASKS.items()
    ),
    Claim(
        "No tuning beyond RR's",
        "GraB reuses RR's hyperparameters: an in-place improvement.",
        _no_tuning,
    ),
    Claim("Shuffle once is the worst", "“Shuffle Once performs worst in all the cases.”", _shuffle_once),
    Claim("FlipFlop is like RR", "“FlipFlop is generally the same as RR.”", _flipflop),
    Claim("1-step GraB fails", "An order from the first epoch, kept, “does not work well”.", _one_step),
    Claim(
        "Retrain from GraB works on convex tasks only",
        "GraB's last order, kept in a new run, is comparable to GraB on MNIST, “but not on the non-convex one”.",
        _retrain,
    ),
    Claim("Finer units order better", "Ordering whole batches “would compromise the benefits”.", _finer),
)
