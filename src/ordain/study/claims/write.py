"""The page of claims as files: ``README.md`` and ``index.html`` in the folder of runs, and its figure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ordain.errors import InputError
from ordain.study.claims import memory, training, vectors
from ordain.study.claims.evidence import Evidence
from ordain.study.claims.finding import FAILS, HOLDS, OPEN, Claim, Finding
from ordain.study.claims.pays import Gain, gains, pays_figure, tasks_figure
from ordain.study.claims.reasons import reasons
from ordain.study.files import write_bytes
from ordain.study.report import markdown
from ordain.study.report.content import Table, count_text, value_text
from ordain.study.report.figures import Drawn, draw
from ordain.study.report.page import embedded, render
from ordain.study.report.text import NOTHING, counted, p_text
from ordain.study.runs.header import TRAINING, Header, read_header
from ordain.study.tasks import TASKS

__all__ = ["CLAIMS", "Page", "read_claims", "write_claims"]

CLAIMS = (*training.CLAIMS, *memory.CLAIMS, *vectors.CLAIMS)
_NAMES = (*training.PAPER_TASKS, *training.TABLES)
_FIGURES = {
    "when-it-pays": (pays_figure, "What GraB gains over RR, in epochs and in processor seconds, by learning rate"),
    "when-it-pays-by-task": (tasks_figure, "The same for each task by itself: every seed, GraB and pairs"),
}
_NOTE = "note.md"  # in the folder, and in that of a run: what no record can say
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_HEADINGS = ("claim", "verdict", "the paper", "measured", "figure")


@dataclass(frozen=True)
class Page:
    """All that the page says; ``notes`` by run, "" for those on all."""

    found: list[tuple[Claim, Finding]]
    figures: list[Drawn]
    pays: Table
    reasons: list[str]
    runs: list[Header]
    names: list[str]
    notes: dict[str, str]

    @property
    def headline(self) -> str:
        """How many claims came to which verdict."""
        said = [finding.verdict for _, finding in self.found]
        held, failed = said.count(HOLDS), said.count(FAILS)
        return (
            f"Of {len(said)} claims {held} hold{'s' * (held == 1)}, {failed} do{'es' * (failed == 1)} not, and "
            f"{said.count(OPEN)} cannot be told."
        )


def write_claims(folder: Path) -> Page:
    """Write the page on the runs in ``folder`` into it.

    Raises:
        InputError: no run there, or records that cannot be read. Nothing has been written then.
    """
    page = read_claims(folder)
    for figure in page.figures:
        write_bytes(folder / f"{figure.name}.png", figure.png)
    write_bytes(folder / "README.md", _markdown(folder, page).encode())
    write_bytes(folder / "index.html", render("claims.html", **_values(folder, page)).encode())
    return page


def read_claims(folder: Path) -> Page:
    """What the runs in ``folder`` say on each claim."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json") if not path.parent.name.startswith("."))
    if not names:
        raise InputError(
            f"{folder}, in which there is no run",
            expected="a folder of runs' folders, named after their tasks and studies",
            remedy="Name the folder that holds them, as in: ordain claims runs",
        )
    evidence = Evidence(folder)
    found = gains(evidence, _NAMES)
    titles = {name: TASKS[name].title for name in _NAMES}
    drawn = {name: (make(found, titles), words) for name, (make, words) in _FIGURES.items()}
    return Page(
        [(claim, claim.find(evidence)) for claim in CLAIMS],
        [draw(name, words, figure) for name, (figure, words) in drawn.items() if figure],
        _pays_table(found),
        reasons(evidence, _NAMES, found),
        [read_header(folder / name) for name in names],
        names,
        {name: text for name in ("", *names) if (text := _note(folder / name))},
    )


def _note(folder: Path) -> str:
    path = folder / _NOTE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _pays_table(found: list[Gain]) -> Table:
    rates = {run: len({gain.rate for gain in found if gain.run == run}) for run in {gain.run for gain in found}}
    best = {run: " (RR's best)" if count > 1 else " (the only one)" for run, count in rates.items()}
    rows = [
        (
            gain.run,
            gain.label,
            f"{gain.rate:g}" + (best[gain.run] if gain.best else ""),
            _times(gain.median("epochs")),
            _times(gain.median("seconds")),
            f"{100 * gain.relative:+.2f} %",
            p_text(gain.loss.p),
            str(len(gain.loss.seeds)),
        )
        for gain in found
    ]
    headings = ("run", "order", "rate", "times fewer epochs", "times fewer seconds", "final loss", "p", "seeds")
    return Table("When does it pay?", headings, rows)


def _times(ratio: float | None) -> str:
    """The median seed's; it never got there if that is 0."""
    if ratio is None:
        return NOTHING
    return f"{ratio:.2f}" if ratio else "never"


def _facts(header: Header) -> str:
    """Seeds, epochs and what was reduced."""
    config, problem = header.config, header.problem
    if header.kind != TRAINING:
        return counted(config.get("seeds", "?"), "seed")
    rates = config.get("rates", [])
    told = [counted(len(config.get("seeds", [])), "seed"), counted(config.get("epochs"), "epoch")]
    told.append(f"{'rate' if len(rates) == 1 else 'rates'} {value_text(rates)}")
    told.append(f"batches of {config.get('batch_size')}")
    if config.get("optimizer", "sgd") != "sgd":
        told.append(str(config["optimizer"]))
    if config.get("limit") is not None:
        whole = TASKS[header.task].examples if header.task in TASKS else None
        told.append(f"REDUCED to {count_text(problem.get('train'))} of {count_text(whole)} training examples")
    return ", ".join(told)


def _commands(header: Header) -> list[str]:
    """Those that worked on a run, once each: one that was stopped and started again is the same."""
    return list(dict.fromkeys(made.command for made in header.made))


def _machine(headers: list[Header]) -> list[str]:
    """Each machine and set of versions that the runs were made with, once."""
    found = [f"{value_text(header.machine)}; {value_text(header.versions)}" for header in headers]
    return list(dict.fromkeys(found))


def _markdown(folder: Path, page: Page) -> str:
    parts = ["# Results\n", markdown.escape(page.headline) + " Each verdict, number and p below comes from the records"]
    parts[-1] += " beside this file: `ordain claims FOLDER` wrote it, and `index.html` says the same.\n"
    parts.append(page.notes.get("", "") + "\n")
    parts.append("## When does it pay?\n")
    parts.append(markdown.pictures((figure.text, f"{figure.name}.png") for figure in page.figures))
    parts.append(f"{_HOW_PAYS}\n")
    parts.append(markdown.table(page.pays.headings, page.pays.rows))
    parts += ["## The paper's claims\n", f"{_HOW_CLAIMS}\n"]
    lines = ["| " + " | ".join(_HEADINGS) + " |", "| --- |" + " --- |" * (len(_HEADINGS) - 1)]
    for claim, finding in page.found:
        measured = "<br>".join(markdown.cell(line) for line in finding.measured)
        shown = f"[figure]({quote(finding.figure)})" if finding.figure else NOTHING
        cells = (markdown.cell(claim.title), f"**{finding.verdict}**", markdown.cell(claim.paper), measured, shown)
        lines.append("| " + " | ".join(cells) + " |")
    parts.append("\n".join(lines) + "\n")
    parts += ["## Where it differs, and why\n", markdown.bullets(page.reasons)]
    parts.append("## Runs\n")
    lines = ["| run | what | command |", "| --- | --- | --- |"]
    for name, header in zip(page.names, page.runs, strict=True):
        report = folder / name / "report" / "report.md"
        link = f"[{name}]({quote(name)}/report/report.md)" if report.is_file() else name
        note = f" {page.notes[name]}" if name in page.notes else ""
        ran = "<br>".join(f"`{command}`" for command in _commands(header))
        lines.append(f"| {link} | {markdown.cell(_facts(header))}.{note} | {ran} |")
    parts.append("\n".join(lines) + "\n")
    parts += ["Made with:\n", markdown.bullets(_machine(page.runs))]
    return "\n".join(part for part in parts if part.strip())


_HOW_PAYS = (
    "How many times fewer epochs, or processor seconds, GraB needs until it is within a thousandth of the lowest "
    "training loss that RR reaches at the same rate and seed (median seed; by task every seed, faint). Below 1 "
    "it needs more. The final training loss is against RR's at that rate; p is of a paired t test over seeds."
)
_HOW_CLAIMS = (
    "A claim holds, or does not, by paired t tests over at least five seeds at p < 0.01, each comparison by itself "
    "(Holm's p, beside it, is corrected for the number of orders). In training it is the final loss that is compared, "
    "in validation the lowest of an epoch: the model that one would keep. The exponents hold if GraB's loss falls "
    "faster in n than RR's by three standard errors on every problem; how near the paper's they are is told. A claim "
    "on several tasks holds if it does on each, and does not if one contradicts it. Everything else is “cannot tell”. "
    "All orders start from the same weights and, but for retraining and draws with replacement, the same first epoch; "
    "units are single examples unless said otherwise. “RR's best rate” is the paper's protocol; “own best rate” tunes "
    "each order. The best rate is that of the lowest mean validation loss after the last epoch."
)


def _plain(note: str) -> str:
    """A note's words, without the little Markdown that it may have.

    >>> _plain("See [the figure](a.png) of `mnist`.")
    'See the figure of mnist.'
    """
    return _LINK.sub(r"\1", note).replace("`", "")


def _values(folder: Path, page: Page) -> dict[str, Any]:
    """What the template needs."""
    kinds = {HOLDS: "good", FAILS: "bad", OPEN: "open"}
    runs = [
        {
            "name": name,
            "link": f"{quote(name)}/report/report.md" if (folder / name / "report" / "report.md").is_file() else None,
            "facts": _facts(header),
            "note": _plain(page.notes.get(name, "")),
            "commands": _commands(header),
        }
        for name, header in zip(page.names, page.runs, strict=True)
    ]
    return {
        "page": page,
        "figures": [embedded(figure) for figure in page.figures],
        "claims": [(claim, finding, kinds[finding.verdict]) for claim, finding in page.found],
        "runs": runs,
        "machines": _machine(page.runs),
        "how_pays": _HOW_PAYS,
        "how_claims": _HOW_CLAIMS,
        "note": _plain(page.notes.get("", "")),
    }
