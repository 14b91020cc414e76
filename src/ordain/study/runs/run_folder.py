"""``config.json`` in the folder of a run or study: settings and provenance."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from dataclasses import field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from ordain.errors import InputError, StateError
from ordain.study.files import STRICT, validated, write_bytes
from ordain.study.runs import probe
from ordain.study.runs.arms import STORING, parse, stored_bytes
from ordain.study.runs.config import RunConfig
from ordain.study.tasks import LoadedTask

TRAINING = "training"  # kind of a training run
FORMAT = 1
_PACKAGES = ("ordain", "torch", "numpy", "numba", "scipy", "scikit-learn", "matplotlib")
_NAME = "config.json"
_COUNTS = ("train", "valid", "test", "parameters")


@dataclass(config=STRICT, frozen=True)
class Made:
    """One command that wrote to a folder, with machine and versions."""

    command: str | None = ""
    started: str | None = ""
    revision: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(config=STRICT, frozen=True)
class Header:
    """The content of ``config.json``; top-level provenance is that of the first command."""

    format: Literal[1]
    kind: str
    command: str
    config: dict[str, Any]
    versions: dict[str, Any]
    machine: dict[str, Any]
    started: str
    revision: str | None = None
    task: str = ""
    problem: dict[str, Any] = field(default_factory=dict)
    commands: tuple[Made, ...] = ()

    @property
    def made(self) -> list[Made]:
        """Every command that wrote to the folder, in order."""
        first = Made(self.command, self.started, self.revision, self.machine, self.versions)
        return [first, *(made for made in self.commands if made != first)]


@dataclass(config=STRICT, frozen=True)
class _Problem:
    """The description of the data in ``config.json``."""

    train: int
    valid: int
    test: int
    parameters: int
    notes: list[str]


def read_header(folder: Path) -> Header:
    """Read the ``config.json`` of a run or study."""
    path = folder / _NAME
    if not path.is_file():
        raise InputError(
            f"no config.json in {folder}", expected="the folder of a run", remedy="`ordain run` writes one."
        )
    found: Header = validated(Header, path.read_bytes(), str(path))
    return found


def run_folders(folder: Path) -> list[Path]:
    """The run folders in ``folder``, sorted by name; raises InputError if there are none."""
    found = sorted(path.parent for path in folder.glob(f"*/{_NAME}") if not path.parent.name.startswith("."))
    if not found:
        raise InputError(
            f"no run in {folder}",
            expected="a folder of runs, each in a folder with a config.json",
            remedy="Pass the parent of that folder." if (folder / _NAME).is_file() else "`ordain run` writes a run.",
        )
    return found


def read_config(out: Path) -> dict[str, Any] | None:
    """Read ``config.json`` of a training run, or None if there is none yet."""
    path = out / _NAME
    if not path.exists():
        return None
    header = read_header(out)
    if header.kind != TRAINING:
        came = f"{path}, which is not a training run's"
        raise InputError(came, expected=f"kind {TRAINING!r}", remedy="Use another folder: --out.")
    validated(_Problem, json.dumps(header.problem).encode(), f"{path}, problem")
    saved: dict[str, Any] = json.loads(path.read_bytes())
    return saved


def describe(problem: LoadedTask, config: RunConfig, *, verify: bool) -> dict[str, Any]:
    """Sizes and notes of a problem; raises InputError if the configuration cannot run on it."""
    n, d = len(problem.train_x), sum(p.numel() for p in problem.build(0).parameters() if p.requires_grad)
    arms = [parse(name, group=config.group) for name in config.arms]
    for arm in arms:
        if arm.group > 1 and n <= arm.group:
            came = f"{arm.name} in units of {arm.group:,} on {n:,} examples"
            raise InputError(came, expected="at least two units", remedy="Use smaller units, after @ or with --group.")
        if arm.needs_labels and problem.labels is None:
            came, remedy = f"{arm.name} on a task without classes", "Leave it out of --orders."
            raise InputError(came, expected="a task with one class for each example", remedy=remedy)
    if config.herding:
        probe.check_size(n, d)
    return {
        "train": n,
        "valid": len(problem.valid_x),
        "test": len(problem.test_x),
        "parameters": d,
        "notes": [*problem.notes, *([] if verify else ["The data's checksums were not compared."])],
        "stored_bytes": {arm.name: stored_bytes(arm, n, d) for arm in arms if arm.order in STORING},
    }


def check_same(saved: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise StateError if the data differ from those the run was started with."""
    differing = [name for name in _COUNTS if saved[name] != found[name]]
    if differing:
        raise StateError(
            "data with " + ", ".join(f"{name} {found[name]:,}" for name in differing),
            expected=", ".join(f"{name} {saved[name]:,}" for name in differing) + ", as when the run was started",
            remedy="Use the same data, or a new folder with --out.",
        )


def write_header(folder: Path, saved: dict[str, Any], made: dict[str, Any], **content: Any) -> None:
    """Write ``config.json``: top-level provenance stays that of the first command; "commands" lists every command."""
    head = made | saved | content | {"commands": [*saved.get("commands", []), made]}
    write_bytes(folder / _NAME, json.dumps(head, indent=1, allow_nan=False).encode() + b"\n")


def provenance(command: str) -> dict[str, Any]:
    """The provenance recorded for each command: versions of Python and packages, machine, and git commit."""
    return {
        "command": command,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "machine": {"platform": platform.platform(), "cpu": _cpu(), "logical_cpus": os.cpu_count() or 1},
        "revision": _revision(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _revision() -> str | None:
    """The git commit of a source checkout, with ``-dirty`` if files have changed; None otherwise."""
    top, git = Path(__file__).resolve().parents[4], shutil.which("git")
    if git is None or not (top / ".git").exists():
        return None
    words = [git, "-C", str(top), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip() or None
