"""The demo: some orders, or all, on scikit-learn's digits at one learning rate; and the herding problem."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import pearsonr

from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.report import write_content
from ordain.study.report.arm_rows import rows
from ordain.study.report.number_text import p_equals
from ordain.study.report.page import Content, Section
from ordain.study.report.training_content import training_content
from ordain.study.report.views import TRAIN, views
from ordain.study.runs.arms import BASELINE, RETRAIN
from ordain.study.runs.config import RunConfig
from ordain.study.runs.records import Run, read_run
from ordain.study.runs.runner import Report, run
from ordain.study.style import draw
from ordain.study.tasks import TASKS
from ordain.study.vectors import STUDIES

RATE = 0.3  # the same for all orders, not tuned
_TRAINING, _TOY = "digits", "toy-herding"
FEW = ("rr", "grab", "grab-pair", "herding-head")  # the orders by default
_ILLUSTRATION = (
    f"This is an illustration, not a ranking: all orders use the same learning rate, {RATE:g}, which was not tuned for "
    "any of them."
)
_WHY = (
    "Norms of prefix sums of centred vectors drawn uniformly from a cube (Figure 1(b) of the GraB paper). Each round "
    "of herding balances the vectors and reorders them. Greedy works well on such vectors, at quadratic cost; "
    "on others it can be far worse than random."
)


def demo_config(*, seeds: int, epochs: int, every: bool = False, limit: int | None = None) -> RunConfig:
    """The configuration of the demo: four orders, or ``every`` one and retraining with GraB's last order."""
    settings: dict[str, Any] = asdict(TASKS[_TRAINING].defaults) | {"rates": (RATE,), "epochs": epochs}
    arms = (*ORDERS, RETRAIN) if every else FEW
    return RunConfig(task=_TRAINING, arms=arms, seeds=tuple(range(seeds)), limit=limit, **settings)


def write_demo(
    out: Path, config: RunConfig, *, report: Report | None = None, command: str = "", quick: bool = False
) -> Content:
    """Run the demo, write its page and figures to ``out``, and return the content of the page.

    Records of an earlier demo in ``out`` are removed. ``quick``: fewer and shorter vectors for herding.
    """
    for name in (_TRAINING, _TOY):
        _remove(out / name)
    outcome = run(config, out / _TRAINING, report=report, command=command)
    if outcome.failed:
        job, trace = next(iter(outcome.failed.items()))
        raise RuntimeError(f"{job} failed:\n{trace}")
    study = STUDIES[_TOY]
    study.run(study.configure(seeds=1, quick=quick), out / _TOY, lambda done, total: None, command=command)
    trained = read_run(out / _TRAINING)
    content = training_content(trained)
    (prefixes,) = study.figures(out / _TOY).values()
    why = Section("Why: small prefix sums", _WHY, [draw("prefix", "Norms of prefix sums in four orders", prefixes)])
    content = replace(
        content,
        title="Orders on one small task",
        lead=verdict(trained),
        warnings=[_ILLUSTRATION, *content.warnings],
        sections=[why, *content.sections],
    )
    write_content(content, out)
    return content


def verdict(trained: Run) -> str:
    """How the last epoch of GraB and of RR differ, in the mean and over seeds; empty for a single seed."""
    view = views(trained)[0]
    table = {row.name: row.train for row in rows(view)}
    ours, theirs, found = table["grab"], table[BASELINE], view.comparisons(TRAIN)["grab"]
    if ours.sd is None or theirs.sd is None or ours.mean is None or theirs.mean is None or found.p is None:
        return ""
    smaller = f"{theirs.sd / ours.sd:.0f} times" if ours.sd < theirs.sd / 2 else "not clearly"
    finals = pd.DataFrame({name: view.shown[name].final(TRAIN) for name in ("grab", BASELINE)}).dropna()
    both = finals.sum(axis=1), finals.diff(axis=1).iloc[:, 1]
    spread = f", {p_equals(float(pearsonr(*both).pvalue))} by Pitman and Morgan's test" if len(finals) > 2 else ""
    return (
        f"GraB ends at a training loss of {ours.mean:.4f} ± {ours.sd:.4f} over seeds, random reshuffling at "
        f"{theirs.mean:.4f} ± {theirs.sd:.4f} ({p_equals(found.p)} for the means). GraB's standard deviation is "
        f"{smaller} smaller{spread}."
    )


def _remove(folder: Path) -> None:
    """Remove the records of an earlier demo, which an older version may have written."""
    if not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder}, which is not the folder of a run",
            expected="an empty folder, or the records of an earlier demo, which are replaced",
            remedy="Use another --out.",
        )
    shutil.rmtree(folder)
