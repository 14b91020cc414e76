"""The advice held against recorded runs: for each setting, what a pilot says and what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from ordain.study.advice import DO_NOT, USE, WORTH, Pilot, advise, gain, run_pilot
from ordain.study.claims.practice import LEVEL, final_values
from ordain.study.files import STRICT, validated, write_bytes
from ordain.study.report.number_text import counted, p_text
from ordain.study.report.page import Table
from ordain.study.report.statistics import ENOUGH_SEEDS, compare
from ordain.study.report.views import at_rate
from ordain.study.runs.arms import BASELINE
from ordain.study.runs.config import RunConfig
from ordain.study.runs.records import read_run
from ordain.study.runs.run_folder import TRAINING, Made, provenance, read_header, run_folders
from ordain.study.tasks import TASKS

FILE = "advice.json"  # the pilots, by setting
_ORDERS = ("herding-head", "grab-head", "herding", "grab-pair", "grab")  # the first that was run stands for ordering


@dataclass(frozen=True)
class Outcome:
    """What ordering did to the training loss in a run at one rate, with as many epochs."""

    run: str
    config: RunConfig  # with that rate only
    label: str  # of the order
    relative: float  # difference to RR's loss, as a share of it
    p: float | None

    @property
    def key(self) -> str:
        """The setting, as far as a pilot depends on it."""
        config = self.config
        words = (config.task, f"{config.rates[0]:g}", config.batch_size, config.decay, config.optimizer)
        return " ".join(map(str, words)) + ("" if config.limit is None else f" limit={config.limit}")

    @property
    def paid(self) -> bool:
        """Whether the loss was lower by at least ``WORTH``, significantly."""
        return self.relative <= -WORTH and self.p is not None and self.p < LEVEL


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Of each training run in ``folder`` with at least five seeds of RR and of an order that learns."""
    for path in run_folders(folder):
        header = read_header(path)
        if header.kind != TRAINING or header.config.get("study", TRAINING) != TRAINING:
            continue
        run, config = read_run(path), RunConfig.from_json(header.config, where=str(path))
        arm = next((name for name in _ORDERS if name in run.arms), None)
        for rate in run.arms[arm].rates if arm and BASELINE in run.arms else ():
            entries = [at_rate(run, rate).entries[name] for name in (arm or "", BASELINE)]
            if min(len(entry.seeds) for entry in entries) < ENOUGH_SEEDS:
                continue
            ours, theirs = (final_values(entry, config.decay)["train"] for entry in entries)
            found = compare(ours, theirs)
            if found.relative is not None:
                label = entries[0].arm.label
                yield Outcome(path.name, replace(config, rates=(rate,)), label, found.relative, found.p)


@checked_dataclass(config=STRICT | {"allow_inf_nan": True}, frozen=True)
class Pilots:
    """The content of ``advice.json``: pilots by setting, and the commands that ran them."""

    commands: tuple[Made, ...] = ()
    pilots: dict[str, Pilot] = field(default_factory=dict)


def read_pilots(folder: Path) -> Pilots:
    """The pilots that :func:`run_pilots` has written."""
    path = folder / FILE
    if not path.is_file():
        return Pilots()
    found: Pilots = validated(Pilots, path.read_bytes(), str(path), remedy="Remove it and run the pilots again.")
    return found


def run_pilots(folder: Path, data: Path, *, verify: bool, command: str, report: Callable[[int, int], None]) -> Pilots:
    """Run the pilot of every setting that has an outcome and no pilot yet; resumable."""
    found, wanted = read_pilots(folder), {outcome.key: outcome.config for outcome in outcomes(folder)}
    made: dict[str, Any] = provenance(command)
    commands = (*found.commands, Made(**made)) if wanted.keys() - found.pilots.keys() else found.commands
    for count, (key, config) in enumerate(wanted.items(), 1):
        if key not in found.pilots:
            problem = TASKS[config.task].load(data, config.limit, weights=config.weights, verify=verify)
            found = Pilots(commands, {**found.pilots, key: run_pilot(problem, config)})
            write_bytes(folder / FILE, json.dumps(asdict(found), indent=1).encode() + b"\n")
        report(count, len(wanted))
    return found


def checked(found: Iterable[Outcome], pilots: Mapping[str, Pilot]) -> tuple[str, Table]:
    """How often the advice was right, and the table of all outcomes with a pilot."""
    rows, verdicts = [], []
    for outcome in found if pilots else ():  # without pilots, runs need not be complete enough for one
        if (pilot := pilots.get(outcome.key)) is None:
            continue
        advice = advise(pilot)
        right = {USE: outcome.paid, DO_NOT: not outcome.paid}.get(advice.verdict)
        verdicts.append("no advice" if right is None else "hit" if right else "miss")
        measured, said = (f"{100 * share:+.1f} %" for share in (outcome.relative, -gain(pilot)))
        rows.append(
            (
                f"{outcome.run}: {outcome.key}",
                advice.verdict,
                verdicts[-1],
                outcome.label,
                measured,
                p_text(outcome.p),
                said,
                f"{100 * pilot.noise:.1f} %",
                "-" if pilot.similarity is None else f"{pilot.similarity:.2f}",
                f"{pilot.cost:.2f}",
            )
        )
    headings: tuple[str, ...] = ("setting", "advice", "right?", "order in the run", "its training loss / RR's", "p")
    headings += ("the same in the pilot", "noise", "similarity", "cost")
    hits, misses = verdicts.count("hit"), verdicts.count("miss")
    unsaid = len(verdicts) - hits - misses
    headline = f"The advice was right in {hits} of {counted(hits + misses, 'setting')}"
    return f"{headline}{f'; in {unsaid} more it could not tell' if unsaid else ''}.", Table(
        "Was the advice right?", headings, rows, [{"hit": "helps", "miss": "worse"}.get(v, "-") for v in verdicts]
    )
