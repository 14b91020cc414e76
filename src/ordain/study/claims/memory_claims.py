"""Claims on Greedy: convergence comparable to GraB, at many times its memory."""

from __future__ import annotations

from ordain.study.claims.evidence import NOT_RUN, Claim, Evidence, Finding, together
from ordain.study.report.arm_rows import rows
from ordain.study.report.number_text import bytes_text
from ordain.study.report.statistics import HELPS, WORSE, compare, verdict
from ordain.study.report.verdict_sentences import numbers
from ordain.study.report.views import TRAIN
from ordain.study.runs.arms import parse, stored_bytes
from ordain.study.tasks import TASKS

_RUN = "mnist-units-of-64"  # Greedy on single examples would take hours per epoch
_LARGE = ("wikitext2", "sst2", "qnli")
_TIMES = 100
_MACHINE = 32 * 2**30  # memory of the paper's machine in bytes


def _comparable(evidence: Evidence) -> Finding:
    """Both orders help, GraB is not significantly worse, and Greedy stores at least 100 times as much."""
    view, ours, theirs = evidence.at_rr(_RUN), evidence.entry(_RUN, "grab"), evidence.entry(_RUN, "greedy")
    if view is None or ours is None or theirs is None:
        return NOT_RUN
    found = compare(ours.final(TRAIN), theirs.final(TRAIN))
    votes: list[bool | None] = [verdict(found) != WORSE]
    lines = [f"Units of 64 examples: GraB {numbers(ours, theirs, TRAIN, found, whose='Greedy')}"]
    for arm, comparison in view.comparisons(TRAIN).items():
        baseline = view.baseline(arm)
        if arm in ("grab", "greedy") and baseline is not None:
            votes.append({HELPS: True, WORSE: False}.get(verdict(comparison)))
            lines.append(f"{view.entries[arm].arm.label}: {numbers(view.entries[arm], baseline, TRAIN, comparison)}")
    held = {row.name: row.order_bytes for row in rows(view)}
    greedy, grab = held.get("greedy") or 0, held.get("grab") or 0
    if grab:
        votes.append(greedy >= _TIMES * grab)
        lines.append(
            f"Greedy's order stores {bytes_text(greedy)}, GraB's {bytes_text(grab)}: {greedy / grab:,.0f} times."
        )
    return Finding(together(votes), tuple(lines), evidence.figure(_RUN, "rr-difference"))


def _too_large(evidence: Evidence) -> Finding:
    """Memory needed for the full data sets, and the refusals recorded by runs."""
    votes: list[bool | None] = []
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


CLAIMS = (
    Claim(
        "Greedy is comparable in epochs, at over 100 times the memory",
        "Greedy has “comparable convergence speed with respect to epochs”; GraB needs “less than 1% the memory”.",
        _comparable,
    ),
    Claim("Greedy runs out of memory on the larger tasks", "Out of memory on WikiText-2, QNLI and SST-2.", _too_large),
)
