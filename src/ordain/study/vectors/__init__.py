"""Studies of plain vectors and small problems: the paper's claims, measured.

A study writes a folder with ``config.json`` and ``records.jsonl``, one line for each measured point.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.progress import Report
from ordain.study.vectors import balancing_rules, convergence_rates, rank_simulation, statement1, toy_herding
from ordain.study.vectors.vector_study import Study

__all__ = ["STUDIES", "Study", "run_study"]

STUDIES: dict[str, Study[Any]] = {
    module.STUDY.name: module.STUDY
    for module in (toy_herding, balancing_rules, statement1, convergence_rates, rank_simulation)
}


def run_study(name: str, out: Path, *, report: Report, seeds: int | None = None, quick: bool = False) -> None:
    """Run one study into the folder ``out``, or resume it."""
    if name not in STUDIES:
        raise InputError(f"a study {name!r}", expected=f"one of {', '.join(STUDIES)}", remedy="Check the name.")
    study = STUDIES[name]
    words = ["ordain", "run", name, "--out", str(out)]
    words += [] if seeds is None else ["--seeds", str(seeds)]
    words += ["--quick"] if quick else []
    study.run(study.configure(seeds=seeds, quick=quick), out, report, command=shlex.join(words))
