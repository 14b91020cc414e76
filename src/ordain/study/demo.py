"""The demo: some orders, or all, on scikit-learn's digits at one learning rate; and the herding problem."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.files import write_bytes
from ordain.study.prefix import Curve, draw_prefixes
from ordain.study.report import write_content
from ordain.study.report.arm_rows import rows
from ordain.study.report.curves import draw_curves
from ordain.study.report.page_content import Content, Section
from ordain.study.report.training_content import training_content
from ordain.study.report.training_figures import draw
from ordain.study.report.views import TRAIN, views
from ordain.study.runs.arms import BASELINE, RETRAIN
from ordain.study.runs.config import RunConfig
from ordain.study.runs.records import Run, read_run
from ordain.study.runs.runner import Report, run
from ordain.study.style import LEGEND, png, style
from ordain.study.tasks import TASKS
from ordain.study.vectors import STUDIES
from ordain.study.vectors.toy_herding import prefix_curves

RATE = 0.3  # the same for all orders, not tuned
_TRAINING, _TOY = "digits", "toy-herding"
FEW = ("rr", "grab", "grab-pair", "herding-head")  # the orders by default, and those in summary.png
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
    """Run the demo, write its page, figures and ``summary.png`` to ``out``, and return the content of the page.

    Args:
        out: created if needed; records of an earlier demo in it are removed.
        config: the configuration of the training run.
        report: called with the progress of each job.
        command: the command line to record.
        quick: use fewer and shorter vectors for herding.
    """
    out.mkdir(parents=True, exist_ok=True)
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
    curves = study.shown(prefix_curves, out / _TOY)
    (prefixes,) = study.figures(out / _TOY).values()
    why = Section("Why: small prefix sums", _WHY, [draw("prefix", "Norms of prefix sums in four orders", prefixes)])
    content = replace(
        content,
        title="Orders on one small task",
        facts=" ".join([*verdict(trained), content.facts]),
        warnings=[_ILLUSTRATION, *content.warnings],
        sections=[why, *content.sections],
    )
    write_content(content, out)
    write_bytes(out / "summary.png", png(_summary(trained, curves), dpi=100))
    return content


def verdict(trained: Run) -> list[str]:
    """How the last epoch of GraB and of RR differ, in the mean and over seeds; nothing for a single seed."""
    table = {row.name: row.train for row in rows(views(trained)[0])}
    ours, theirs = table["grab"], table[BASELINE]
    if ours.sd is None or theirs.sd is None or ours.mean is None or theirs.mean is None:
        return []
    steadier = f"{theirs.sd / ours.sd:.0f} times steadier" if ours.sd < theirs.sd / 2 else "no steadier"
    return [
        f"GraB ends at a training loss of {ours.mean:.4f} ± {ours.sd:.4f} over seeds, random reshuffling at "
        f"{theirs.mean:.4f} ± {theirs.sd:.4f}: {steadier}."
    ]


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


def _summary(trained: Run, curves: Mapping[str, Curve]) -> Figure:
    """Loss curves and prefix norms side by side, 1200 x 450 pixels."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    view = views(trained)[0]
    looks = {name: style(position) for position, name in enumerate(FEW)}
    few = replace(view, entries={name: view.entries[name] for name in FEW})
    draw_curves(left, few, looks, TRAIN)
    left.set_ylabel("train loss (cross-entropy, nats)")
    left.set_title("Logistic regression on digits: train loss")
    left.legend(**LEGEND)
    draw_prefixes(right, curves)
    right.set_title("Herding: prefix sums of random vectors")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, **LEGEND)
    return figure
