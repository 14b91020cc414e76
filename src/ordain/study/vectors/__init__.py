"""Studies of plain vectors and small problems: the paper's claims, measured.

A study writes a folder with ``config.json`` and ``records.jsonl``, one line for each measured point.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ordain.errors import InputError
from ordain.study.progress import Report
from ordain.study.vectors.balancing_rules import BalancingRules
from ordain.study.vectors.convergence_rates import ConvergenceRates
from ordain.study.vectors.convex import Convex
from ordain.study.vectors.rank_simulation import RankSimulation
from ordain.study.vectors.statement1 import Statement1
from ordain.study.vectors.toy_herding import ToyHerding
from ordain.study.vectors.vector_study import Settings, Study

__all__ = ["STUDIES", "Study", "run_study"]

_KINDS: tuple[type[Settings], ...] = (ToyHerding, BalancingRules, Statement1, ConvergenceRates, Convex, RankSimulation)
STUDIES: dict[str, Study] = {kind.name: Study(kind) for kind in _KINDS}


def run_study(name: str, out: Path, *, report: Report, seeds: int | None = None, quick: bool = False) -> None:
    """Run one study into the folder ``out``, or resume it."""
    if name not in STUDIES:
        raise InputError(f"a study {name!r}", expected=f"one of {', '.join(STUDIES)}", remedy="Check the name.")
    study = STUDIES[name]
    words = ["ordain", "run", name, "--out", str(out)]
    words += [] if seeds is None else ["--seeds", str(seeds)]
    words += ["--quick"] if quick else []
    study.run(study.configure(seeds=seeds, quick=quick), out, report, command=shlex.join(words))
