"""One sentence per arm: the verdict and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ordain.study.report.number_text import capital, counted, number, p_equals, places
from ordain.study.report.statistics import CANNOT_TELL, FEW_SEEDS, HELPS, SAME, WORSE, Comparison, verdict
from ordain.study.report.views import TRAIN, Entry, Metric, View
from ordain.study.runs.arms import is_baseline

_LEADS = {
    HELPS: "{} helps",
    WORSE: "{} is worse",
    CANNOT_TELL: "{} shows no significant difference",
    FEW_SEEDS: "{} is inconclusive (needs 5 seeds)",
    SAME: "{} is identical to RR",
}
_CORRECTED = "“Significantly” means that Holm's p, which is corrected for the number of orders, is below 0.01."
OUT = "out"  # verdict on an arm without a finished job
_RANKS = (*_LEADS, OUT)


@dataclass(frozen=True)
class Sentence:
    """A sentence ``lead: rest`` and its verdict."""

    verdict: str
    lead: str
    rest: str

    @property
    def text(self) -> str:
        """The complete sentence."""
        return f"{self.lead}: {self.rest}" if self.lead else self.rest


def sentences(view: View, metric: Metric) -> list[Sentence]:
    """One sentence per arm except RR, sorted by verdict."""
    comparisons = view.comparisons(metric)
    found = [
        _sentence(entry, view.baseline(name), metric, comparisons.get(name))
        for name, entry in view.entries.items()
        if not is_baseline(name)
    ]
    return sorted(found, key=lambda sentence: _RANKS.index(sentence.verdict))


def _sentence(entry: Entry, baseline: Entry | None, metric: Metric, comparison: Comparison | None) -> Sentence:
    label = capital(entry.arm.label)
    if not entry.seeds:
        return Sentence(OUT, f"{label} is not compared", f"{entry.reason}.")
    if baseline is None or comparison is None:
        return Sentence(OUT, f"{label} is not compared", "there is no finished RR run to compare with.")
    said = verdict(comparison, lower_is_better=metric.lower_is_better)
    lead = _LEADS[said].format(label)
    if comparison.difference is None:
        return Sentence(said, lead, f"there is no seed for which both have a {metric.title}.")
    return Sentence(said, lead, numbers(entry, baseline, metric, comparison))


def numbers(entry: Entry, baseline: Entry, metric: Metric, comparison: Comparison, *, whose: str = "RR") -> str:
    """Final values of an arm and its baseline (called ``whose``), with p-value, seeds and rate."""
    ours, theirs = (mean_over(of, metric, comparison.seeds) for of in (entry, baseline))
    name, _, unit = metric.title.partition(", ")
    unit = f" {unit}" if unit else ""
    decimals = 2 if unit else places([ours, theirs])
    reached = f"final {name} {number(ours, decimals)}{unit} against {whose}'s {number(theirs, decimals)}{unit}"
    rates = f"rate {entry.rate:g}" + ("" if entry.rate == baseline.rate else f", {whose} at {baseline.rate:g}")
    told = [f"{reached}, {_gap(ours - theirs, theirs, decimals, unit)}", p_and_holm(comparison)]
    return "; ".join([*told, _seeds(entry, baseline, comparison.seeds), rates]) + "."


def _gap(gap: float, theirs: float, decimals: int, unit: str) -> str:
    if gap == 0:
        return "identical"
    size = number(abs(gap), max(decimals, places([gap], digits=2)))
    points, word = " points" if unit else "", "lower" if gap < 0 else "higher"
    percent = 100 * abs(gap / theirs) if theirs else 0.0
    share = f" ({percent:.0f} %)" if percent >= 10 else f" ({percent:.2g} %)"
    return f"{size}{points} {word}{'' if unit or not theirs else share}"


def p_and_holm(comparison: Comparison) -> str:
    """The p-value, and Holm's if several orders were compared."""
    if comparison.p is None:
        return "no test"
    if comparison.holm is None:  # a single comparison is not corrected
        return p_equals(comparison.p)
    return f"{p_equals(comparison.p)}, {p_equals(comparison.holm, 'Holm p')}"


def _seeds(entry: Entry, baseline: Entry, seeds: tuple[int, ...]) -> str:
    count = counted(len(seeds), "seed")
    if entry.seeds == baseline.seeds:
        return count
    return f"over the {count} that both have ({', '.join(str(seed) for seed in seeds)})"


def mean_over(entry: Entry, metric: Metric, seeds: tuple[int, ...]) -> float:
    """Mean of the final values over the given seeds, scaled for display; 0 if there are none."""
    finals = metric.scale * entry.final(metric).loc[list(seeds)].dropna()
    return 0.0 if finals.empty else float(finals.mean())


def headline(view: View) -> str:
    """A summary of the verdicts on the training loss."""
    said = [sentence.verdict for sentence in sentences(view, TRAIN)]
    if not said:
        return "There is no order to compare with random reshuffling."
    counts = {
        "a significantly lower training loss than random reshuffling": said.count(HELPS),
        "a significantly higher one": said.count(WORSE),
        "an inconclusive difference": said.count(CANNOT_TELL) + said.count(FEW_SEEDS),
        "an identical loss": said.count(SAME),
        "no finished jobs to compare": said.count(OUT),
    }
    parts = [f"{count} {'has' if count == 1 else 'have'} {what}" for what, count in counts.items() if count]
    if not said.count(HELPS):
        parts.insert(0, "none has a significantly lower training loss than random reshuffling")
    summary = f"Of {counted(len(said), 'order')}, {', '.join(parts)}."
    tested = sum(comparison.p is not None for comparison in view.comparisons(TRAIN).values())
    return f"{summary} {_CORRECTED}" if tested > 1 else summary
