"""Shared by tests of runs: commands in this process, worker processes, records without what differs by run."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ordain.study import cli
from ordain.study.runs.config import RunConfig

DIGITS = RunConfig(
    task="digits",
    arms=("rr", "grab"),
    rates=(0.1,),
    seeds=(0,),
    epochs=3,
    batch_size=16,
    momentum=0.9,
    weight_decay=1e-4,
    limit=70,
)


def call(*words: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start worker processes from one that has imported what they need, which is most of what starting them takes.

    They get their jobs, fail and end as those that are spawned, which the test of a true SIGKILL has.
    """
    context = multiprocessing.get_context("forkserver")
    modules = ["ordain.study.runs.team", "ordain.kernels.linear_layer", "sklearn.datasets", "torch._dynamo"]
    context.set_forkserver_preload(modules)
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.__getitem__)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(out: Path, arm: str, lr: float = 0.1, seed: int = 0) -> list[dict[str, Any]]:
    return lines(out / "records" / arm / f"lr-{lr!r}" / f"seed-{seed}.jsonl")


def repeatable(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Every record of a run, without seconds and bytes."""
    found = {}
    for path in sorted((out / "records").rglob("*.jsonl")):
        kept = [{k: v for k, v in line.items() if not k.endswith(("seconds", "_bytes"))} for line in lines(path)]
        found[path.relative_to(out).as_posix()] = kept
    return found
