"""The content of a report on a vector study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ordain.errors import InputError
from ordain.study.report.page_content import Content, Section, Table, Telling, commands, made_with
from ordain.study.report.training_figures import draw
from ordain.study.report.verdict_sentences import Sentence
from ordain.study.runs.record_lines import records_file
from ordain.study.runs.run_folder import Header
from ordain.study.strict_json import read_bytes

if TYPE_CHECKING:
    from ordain.study.vectors.vector_study import Study


def vector_content(folder: Path, header: Header) -> Content:
    """Build the report from the study's own sentences, figures and table."""
    from ordain.study.vectors import STUDIES  # not needed for training reports

    if header.kind not in STUDIES:
        raise InputError(
            f"a study of kind {header.kind!r} in {folder}",
            expected=f"training, {', '.join(STUDIES)}",
            remedy="Use the ordain that wrote it.",
        )
    study = STUDIES[header.kind]
    headings, rows = study.table(folder)
    figures = [
        draw(name, f"Figure: {name.replace('-', ' ')}", figure) for name, figure in study.figures(folder).items()
    ]
    return Content(
        title=study.title,
        facts="",
        warnings=_unfinished(study, folder, header),
        tellings=[Telling("", "", [Sentence("said", "", text) for text in study.sentences(folder)])],
        sections=[Section("Figures", "", figures)] if figures else [],
        tables=[Table("Numbers", headings, rows)] if rows else [],
        made_with=made_with(header),
        commands=commands(header),
    )


def _unfinished(study: Study[Any], folder: Path, header: Header) -> list[str]:
    """A warning if some configured points have not been measured."""
    asked = sum(1 for _ in study.points(study.sizes(False, **header.config)))
    measured = read_bytes(records_file(folder)).count(b"\n")
    return [f"Unfinished: {measured:,} of {asked:,} points have been measured."] if measured < asked else []
