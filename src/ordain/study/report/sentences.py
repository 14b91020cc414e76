"""What a run says about each arm, in a plain sentence with its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ordain.study.report.statistics import CANNOT_TELL, FEW_SEEDS, HELPS, WORSE, Comparison, mean, verdict
from ordain.study.report.text import number, p_text, places
from ordain.study.report.views import BASELINE, TRAIN, Entry, Metric, View

__all__ = ["Sentence", "headline", "sentences"]

_LEADS = {
    HELPS: "{} helps",
    WORSE: "{} does not help, it is worse",
    CANNOT_TELL: "Cannot tell whether {} helps",
    FEW_SEEDS: "Cannot tell whether {} helps (needs 5 seeds)",
}
OUT = "out"  # the verdict on an arm that has no finished job to compare


@dataclass(frozen=True)
class Sentence:
    """``lead: rest``; ``verdict`` is what it comes to."""

    verdict: str
    lead: str
    rest: str

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.lead}: {self.rest}"


def sentences(view: View, metric: Metric) -> list[Sentence]:
    """One for each arm but RR."""
    comparisons = view.comparisons(metric)
    return [
        _sentence(entry, view.baseline, metric, comparisons.get(name))
        for name, entry in view.entries.items()
        if name != BASELINE
    ]


def _sentence(entry: Entry, baseline: Entry | None, metric: Metric, comparison: Comparison | None) -> Sentence:
    label = entry.arm.label
    if not entry.jobs:
        return Sentence(OUT, f"{label} is not compared", f"{entry.reason}.")
    if baseline is None or comparison is None:
        return Sentence(OUT, f"{label} is not compared", "RR, to compare with, has no finished run.")
    said = verdict(comparison, lower_is_better=metric.lower_is_better)
    lead = _LEADS[said].format(label)
    if comparison.difference is None:
        return Sentence(said, lead, f"there is no {metric.title} that both have for the same seed.")
    return Sentence(said, lead, _numbers(entry, baseline, metric, comparison))


def _numbers(entry: Entry, baseline: Entry, metric: Metric, comparison: Comparison) -> str:
    seeds = comparison.seeds
    ours, theirs = (_mean_over(of, metric, seeds) for of in (entry, baseline))
    name, _, unit = metric.title.partition(", ")
    unit = f" {unit}" if unit else ""
    decimals = 2 if unit else places([ours, theirs])
    gap = ours - theirs
    direction = "lower" if gap < 0 else "higher"
    relative = "" if unit or not theirs else f" ({100 * abs(gap) / abs(theirs):.2g} %)"
    gap_text = f"{number(abs(gap), max(decimals, min(10, places([gap], digits=2))))}{' points' if unit else ''}"
    moved = "no different" if gap == 0 else f"{gap_text} {direction}{relative}"
    told = f"final {name} {number(ours, decimals)}{unit} against RR's {number(theirs, decimals)}{unit}, {moved}"
    test = "nothing to test" if comparison.p is None else f"p = {p_text(comparison.p)}, Holm {p_text(comparison.holm)}"
    return f"{told}; {test.replace('= <', '< ').replace('Holm <', 'Holm < ')}; {_seeds(entry, baseline, seeds)}; " + (
        f"rate {entry.rate:g}{'' if entry.rate == baseline.rate else f', RR at {baseline.rate:g}'}."
    )


def _seeds(entry: Entry, baseline: Entry, seeds: tuple[int, ...]) -> str:
    count = f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
    if entry.jobs.keys() == baseline.jobs.keys():
        return count
    return f"over the {count} that both have ({', '.join(str(seed) for seed in seeds)})"


def _mean_over(entry: Entry, metric: Metric, seeds: tuple[int, ...]) -> float:
    finals = entry.final(metric)
    found = mean([metric.scale * value for seed in seeds if (value := finals[seed]) is not None])
    return 0.0 if found is None else found


def headline(view: View) -> str:
    """How many arms end with a lower training loss than RR, in one sentence."""
    said = [sentence.verdict for sentence in sentences(view, TRAIN)]
    if not said:
        return "There is no order to compare with random reshuffling."
    if all(word == OUT for word in said):
        return "Nothing can be compared with random reshuffling yet."
    helps, worse = said.count(HELPS), said.count(WORSE)
    unclear = said.count(CANNOT_TELL) + said.count(FEW_SEEDS)
    parts = [f"{helps} end{'s' * (helps == 1)} with a lower training loss than random reshuffling"] * bool(helps)
    parts += [f"{worse} with a higher one" if helps else f"{worse} end{'s' * (worse == 1)} with a higher training loss"]
    parts = parts if worse else parts[:-1]
    parts += [f"{unclear} cannot be told apart" if parts else f"{unclear} cannot be told apart from it"] * bool(unclear)
    parts += [f"{said.count(OUT)} {'is' if said.count(OUT) == 1 else 'are'} not compared"] * (OUT in said)
    return f"Of {len(said)} order{'s' * (len(said) != 1)}, {', '.join(parts)}."
