"""GraB in JAX, in a process of its own: once JAX is imported, a process that forks (a loader's workers) may hang."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "jax_cases.py"


def test_cases_of_jax() -> None:
    for package in ("jax", "optax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    # Most of the time is XLA's compilation of functions that run a few times.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    ended = subprocess.run(  # noqa: S603
        command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "passed" in ended.stdout
