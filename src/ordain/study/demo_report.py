"""A demo from start to end: train, herd, and write the folder."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ordain import herding
from ordain.study import figures
from ordain.study.demo import Digits, Run, Settings, run_all
from ordain.study.files import replacing, write_bytes
from ordain.study.machine import machine, versions
from ordain.study.page import render
from ordain.study.progress import Report
from ordain.study.summary import Row, summarise

__all__ = ["prefix_curves", "write_demo"]

Curves = dict[str, NDArray[np.float64]]


def write_demo(out: Path, settings: Settings, *, report: Report) -> list[Row]:
    """Run the demo and write its page, figures and numbers into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "results.json") as file:  # opened first: a folder that cannot be written is found at once
        runs, curves = run_all(settings, report=report), prefix_curves(settings)
        rows = summarise(runs)
        results = _results(out, settings, runs, rows, curves)
        file.write(json.dumps(results, indent=1, allow_nan=False).encode())
        title = f"Prefix sums of {settings.prefix_vectors:,} vectors from $[0,1]^{{{settings.prefix_dim}}}$ (log scale)"
        drawn = {
            "loss": figures.loss_figure(runs),
            "accuracy": figures.accuracy_figure(runs),
            "prefix": figures.prefix_figure(curves, title=title),
        }
        for name, png in (drawn | {"summary": figures.summary_figure(runs, curves)}).items():
            write_bytes(out / f"{name}.png", png)
        write_bytes(out / "index.html", render(rows, results, drawn).encode())
    return rows


def _results(
    out: Path, settings: Settings, runs: dict[str, list[Run]], rows: list[Row], curves: Curves
) -> dict[str, Any]:
    data = Digits.load()
    options = {"--out": out, "--seeds": settings.seeds, "--epochs": settings.epochs}
    return {
        "command": shlex.join(["ordain", "demo", *(str(word) for option in options.items() for word in option)]),
        "settings": asdict(settings),
        "seeds": list(range(settings.seeds)),
        "data": {"name": "sklearn.datasets.load_digits", "train": len(data.x), "test": len(data.test_x)},
        "threads": 1,
        "versions": versions(),
        "machine": machine(),
        "summary": [asdict(row) for row in rows],
        "runs": {name: [asdict(run) for run in of] for name, of in runs.items()},
        "prefix": {label: {"largest_l2_norm": float(norms.max())} for label, norms in curves.items()},
    }


def prefix_curves(settings: Settings) -> Curves:
    """Figure 1(b): prefix norms of uniform random vectors in four orders."""
    rng = np.random.default_rng(0)
    z = rng.random((settings.prefix_vectors, settings.prefix_dim))
    orders = {
        "random": rng.permutation(len(z)),
        "greedy": herding.greedy(z),
        "herding, 1 round": herding.herd(z, rounds=1),
        "herding, 10 rounds": herding.herd(z, rounds=10),
    }
    return {label: herding.prefix_norms(z, order) for label, order in orders.items()}
