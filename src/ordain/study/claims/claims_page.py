"""The claims page: ``README.md``, ``index.html`` and figures in the folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure

from ordain.study.claims import practice_page, training_claims, vector_claims
from ordain.study.claims.advice_check import checked, outcomes, read_pilots
from ordain.study.claims.evidence import FAILS, GROUPS, HOLDS, OPEN, Claim, Evidence, Finding
from ordain.study.claims.pays import Gain, gains, pays_figure, reasons, tasks_figure
from ordain.study.claims.practice import points
from ordain.study.files import write_bytes
from ordain.study.report.number_text import NOTHING, counted, p_text
from ordain.study.report.page import Table, count_text, embedded, render, value_text
from ordain.study.runs.run_folder import TRAINING, Header, read_header, run_folders
from ordain.study.style import Drawn, draw
from ordain.study.tasks import TASKS

CLAIMS = (*training_claims.CLAIMS, *vector_claims.CLAIMS)
_NAMES = (*training_claims.PAPER_TASKS, *training_claims.TABLES)
_FIGURES = {
    "when-it-pays": (pays_figure, "GraB's speed-up over RR, in epochs and in processor time, by learning rate"),
    "when-it-pays-by-task": (tasks_figure, "The same for each task: every seed, GraB and pairs"),
}


@dataclass(frozen=True)
class Page:
    """The content of the page."""

    verdict: str  # one sentence on tuned rates and equal processor time; empty without such runs
    practice: Table
    training: list[Drawn]  # a figure of the same, if there is one
    sweeps: Table  # over batch sizes and numbers of examples
    by_time: list[Drawn]  # a figure of test loss and accuracy
    details: Table  # of every order
    advised: str  # how often the advice was right, in one sentence
    advice: Table
    found: list[tuple[Claim, Finding]]
    figures: list[Drawn]
    pays: Table
    reasons: list[str]
    runs: list[dict[str, Any]]  # those listed at the end of the page
    machines: list[str]
    note: str

    @property
    def groups(self) -> list[tuple[str, str, list[tuple[Claim, Finding]]]]:
        """The claims by group, with the number per verdict in words."""
        by_group = {group: [one for one in self.found if one[0].group == group] for group in GROUPS}
        return [(group, _counts([finding for _, finding in of]), of) for group, of in by_group.items()]

    @property
    def headline(self) -> str:
        """The numbers of all groups."""
        return " ".join(f"{group}: {counts}." for group, counts, _ in self.groups)


def _counts(findings: list[Finding]) -> str:
    said = [finding.verdict for finding in findings]
    return ", ".join(f"{said.count(verdict)} {verdict}" for verdict in (HOLDS, FAILS, OPEN))


def write_claims(folder: Path) -> Page:
    """Check the claims against the runs in ``folder`` and write the page there.

    Raises:
        InputError: there is no run, or records cannot be read. Nothing is written then.
    """
    headers = {path: read_header(path) for path in run_folders(folder)}
    evidence = Evidence(folder)
    found = gains(evidence, _NAMES)
    titles = {name: TASKS[name].title for name in _NAMES}
    drawn = {name: (make(found, titles), words) for name, (make, words) in _FIGURES.items()}
    machines = [f"{value_text(header.machine)}; {value_text(header.versions)}" for header in headers.values()]
    pilots = read_pilots(folder)
    machines += [f"{value_text(made.machine)}; {value_text(made.versions)}" for made in pilots.commands]
    tuned = points(folder)
    page = Page(
        practice_page.headline(tuned),
        practice_page.table(tuned),
        _drawn("training-by-time", "Training loss against processor time", practice_page.training_by_time(tuned)),
        practice_page.sweeps(tuned),
        _drawn("by-time", "Test loss and test accuracy against processor time", practice_page.pays_by_time(tuned)),
        practice_page.details(tuned),
        *checked(outcomes(folder), pilots.pilots),
        [(claim, claim.find(evidence)) for claim in CLAIMS],
        [draw(name, words, figure) for name, (figure, words) in drawn.items() if figure],
        _pays_table(found),
        reasons(evidence, _NAMES, found),
        [_listed(path, header) for path, header in headers.items()],
        list(dict.fromkeys(machines)),
        _note(folder),
    )
    for figure in (*page.training, *page.by_time, *page.figures):
        write_bytes(folder / f"{figure.name}.png", figure.png)
    write_bytes(folder / "README.md", render("claims.md", page=page))
    write_bytes(folder / "index.html", render("claims.html", page=page, embedded=embedded))
    return page


def _drawn(name: str, words: str, figure: Figure | None) -> list[Drawn]:
    return [draw(name, words, figure)] if figure else []


def _note(folder: Path) -> str:
    """The hand-written note on a run or on all runs."""
    path = folder / "note.md"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _listed(path: Path, header: Header) -> dict[str, Any]:
    """Describe a run, with the path of its report if there is one; repeated commands are listed once."""
    commands = list(dict.fromkeys(made.command or "" for made in header.made))
    pages = [f"{quote(path.name)}/report/{page}" for page in ("index.html", "report.md") if _page(path, page).is_file()]
    links = {"html": pages[0] if pages else None, "link": pages[-1] if pages else None}
    return {"name": path.name, **links, "facts": _facts(header), "note": _note(path), "commands": commands}


def _page(run: Path, name: str) -> Path:
    return run / "report" / name


def _pays_table(found: list[Gain]) -> Table:
    rates = {run: len({gain.rate for gain in found if gain.run == run}) for run in {gain.run for gain in found}}
    best = {run: " (RR's best{})" if count > 1 else " (the only one)" for run, count in rates.items()}
    rows = [
        (
            gain.run,
            gain.label,
            f"{gain.rate:g}" + (best[gain.run].format("*" * gain.edge) if gain.best else ""),
            *(NOTHING if ratio is None else f"{ratio:.2f}" if ratio else "never" for ratio in gain.medians),
            f"{100 * gain.relative:+.2f} %",
            p_text(gain.loss.decides),
            str(len(gain.loss.seeds)),
        )
        for gain in found
    ]
    headings = ("run", "order", "rate", "speed-up, epochs", "speed-up, CPU time", "final loss", "p", "seeds")
    return Table("When does it pay?", headings, rows)


def _facts(header: Header) -> str:
    """One line about seeds, epochs, rates and reduced data."""
    config, problem = header.config, header.problem
    if header.kind != TRAINING:
        return counted(config.get("seeds", "?"), "seed")
    rates = config.get("rates", [])
    told = [counted(len(config.get("seeds", [])), "seed"), counted(config.get("epochs"), "epoch")]
    told.append(f"{'rate' if len(rates) == 1 else 'rates'} {value_text(rates)}")
    told.append(f"batches of {config.get('batch_size')}")
    if config.get("decay", "constant") != "constant":
        told.append(f"{config['decay']} decay")
    if config.get("optimizer", "sgd") != "sgd":
        told.append(str(config["optimizer"]))
    if config.get("limit") is not None:
        whole = TASKS[header.task].examples if header.task in TASKS else None
        told.append(f"REDUCED to {count_text(problem.get('train'))} of {count_text(whole)} training examples")
    return ", ".join(told)
