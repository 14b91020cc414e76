"""A run's folder: its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ordain.errors import InputError, StateError
from ordain.study.files import write_bytes
from ordain.study.runs import probe
from ordain.study.runs.arms import STORING, check_units, parse, stored_bytes
from ordain.study.runs.config import RunConfig
from ordain.study.runs.fields import Fields, read_object
from ordain.study.runs.header import TRAINING, read_header
from ordain.study.tasks import Problem

__all__ = ["FORMAT", "check_same", "describe", "read_config", "write_config"]

FORMAT = 1
_NAME = "config.json"
_COUNTS = ("train", "valid", "test", "parameters")


def read_config(out: Path) -> dict[str, Any] | None:
    """What :func:`write_config` wrote, or None where there is nothing yet."""
    path = out / _NAME
    if not path.exists():
        return None
    saved = read_object(path.read_bytes(), str(path))
    if saved.get("format") != FORMAT or saved.get("kind") != TRAINING:
        raise InputError(
            f"{path}, which is not of a training run", expected=f"format {FORMAT}", remedy="Use another folder: --out."
        )
    problem = Fields(read_header(out).problem, f"{path}, problem")
    for name in _COUNTS:
        problem.integer(name)
    problem.texts("notes")
    return saved


def write_config(out: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    write_bytes(out / _NAME, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def describe(problem: Problem, config: RunConfig, *, verify: bool) -> dict[str, Any]:
    """The problem in numbers and notes; refuses one unit of all examples, and what ``--herding`` could not hold."""
    n, d = len(problem.train_x), sum(p.numel() for p in problem.build(0).parameters() if p.requires_grad)
    arms = [parse(name, group=config.group) for name in config.arms]
    for arm in arms:
        check_units(arm, n)
    if config.herding:
        probe.check_size(n, d)
    return {
        "train": n,
        "valid": len(problem.valid_x),
        "test": 0 if problem.test_x is None else len(problem.test_x),
        "parameters": d,
        "notes": [*problem.notes, *([] if verify else ["The data's checksums were not compared."])],
        "stored_bytes": {arm.name: stored_bytes(arm, n, d) for arm in arms if arm.order in STORING},
    }


def check_same(saved: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse to go on with other data than those a run began with."""
    differing = [name for name in _COUNTS if saved[name] != found[name]]
    if differing:
        raise StateError(
            "data with " + ", ".join(f"{name} {found[name]:,}" for name in differing),
            expected=", ".join(f"{name} {saved[name]:,}" for name in differing) + ", as the folder's run began with",
            remedy="Use the same data, or run into a new folder with --out.",
        )
