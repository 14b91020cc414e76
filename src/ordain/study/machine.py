"""Provenance of results: versions, machine and revision."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("ordain", "torch", "numpy", "numba", "scipy", "scikit-learn", "matplotlib")


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
    top, git = Path(__file__).resolve().parents[3], shutil.which("git")
    if git is None or not (top / ".git").exists():
        return None
    words = [git, "-C", str(top), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip() or None
