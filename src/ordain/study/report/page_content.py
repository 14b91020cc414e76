"""What a report says, whatever the study: one shape for the page, the Markdown and the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ordain.study.report.training_figures import Drawn
from ordain.study.report.verdict_sentences import Sentence
from ordain.study.runs.run_folder import Header, Made

_LONGEST = 2000


@dataclass(frozen=True)
class Telling:
    """Sentences under a heading; ``more`` has further ones, each under its own."""

    title: str
    headline: str
    sentences: Sequence[Sentence]
    more: Sequence[tuple[str, Sequence[Sentence]]] = ()


@dataclass(frozen=True)
class Table:
    """Text in cells; ``verdicts`` is a word for each row that a page may colour it by."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdicts: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """Figures under a heading."""

    title: str
    note: str
    figures: Sequence[Drawn]


@dataclass(frozen=True)
class Content:
    """All of a report."""

    title: str  # of the page
    facts: str  # what was run, in a line
    warnings: Sequence[str]  # what a reader must know first: a reduced data set, an unfinished run
    tellings: Sequence[Telling]  # the sentences
    sections: Sequence[Section]  # the figures
    tables: Sequence[Table]  # the numbers
    made_with: Sequence[tuple[str, str]]  # enough to repeat it, (term, text)
    problems: Table | None = None  # a table of what is in no comparison
    commands: Table | None = None  # where several have worked on the run, each with what it ran on
    explained: bool = False  # say how a training run's report is to be read

    @property
    def figures(self) -> list[Drawn]:
        """Those of all sections."""
        return [figure for section in self.sections for figure in section.figures]


def made_with(header: Header) -> list[tuple[str, str]]:
    """The provenance of any study."""
    notes = header.problem.get("notes")
    found = [
        ("Command", header.command),
        ("Started", header.started),
        ("Revision", header.revision or "not known"),
        ("Machine", value_text(header.machine)),
        ("Versions", value_text(header.versions)),
        ("Settings", value_text(header.config)),
        ("Data", " ".join(value_text(note) for note in notes) if isinstance(notes, list) else ""),
    ]
    return [(term, text) for term, text in found if text]


def commands(header: Header) -> Table | None:
    """Every command that has worked on the folder, where there was more than one."""
    first, *others = header.made
    if not others:
        return None
    lines = [
        (made.command or "", made.started or "", made.revision or "not known", _changes(made, first))
        for made in header.made
    ]
    return Table("Commands", ("command", "started", "revision", "other than the first in"), lines)


def _changes(made: Made, first: Made) -> str:
    """What of the machine and the versions is not as it was for the first command."""
    mine, theirs = {**made.machine, **made.versions}, {**first.machine, **first.versions}
    return value_text({name: value for name, value in mine.items() if theirs.get(name) != value}) or "nothing"


def value_text(value: object) -> str:
    """A value of a JSON file as a person would write it."""
    if isinstance(value, dict):
        text = ", ".join(f"{_words(key)} {value_text(of)}" for key, of in value.items() if of is not None)
    elif isinstance(value, list | tuple):
        text = _seeds(value) or " ".join(value_text(of) for of in value)
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _words(key: object) -> str:
    return str(key).replace("_", " ")


def _seeds(values: Sequence[object]) -> str:
    """``0-4`` for 0, 1, 2, 3, 4."""
    whole = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(whole) < 3 or len(whole) < len(values) or whole != list(range(whole[0], whole[0] + len(whole))):
        return ""
    return f"{whole[0]}-{whole[-1]}"


def count_text(value: object) -> str:
    """A count with commas; whatever else it may be, as text."""
    return f"{value:,}" if isinstance(value, int) else value_text(value)
