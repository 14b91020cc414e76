"""Herding the paper's toy: compiled stream against the word-for-word reference."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.timing import interleaved, median_ratio
from ordain import herding, reference


def run() -> dict[str, float]:
    z = np.random.default_rng(0).random((10_000, 128))
    orders: dict[str, list[int]] = {}

    def fast() -> None:
        orders["fast"] = herding.herd(z, rounds=10).tolist()

    def slow() -> None:
        orders["slow"] = reference.herd(z, rounds=10)

    seconds = interleaved({"fast": fast, "slow": slow}, rounds=5)
    same = orders["fast"] == orders["slow"]
    ratio = median_ratio(seconds["slow"], seconds["fast"])
    for name in seconds:
        print(f"  herd, n=10,000, d=128, ten rounds, {name}: {statistics.median(seconds[name]) * 1e3:.1f} ms")
    return {"speedup": ratio, "identical order": float(same)}
