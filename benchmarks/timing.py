"""Interleaved timing: on a noisy machine only ratios of what ran side by side mean anything."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

import ordain


def interleaved(jobs: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each job in each round; every round runs every job once, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median over rounds of one job's time over another's."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def machine() -> str:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]} x {len(names)}" if names else cpu
    return (
        f"{cpu}; Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}, "
        f"ordain {ordain.__version__}; one thread"
    )
