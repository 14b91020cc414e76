"""Herding the paper's toy: the compiled stream against the word-for-word reference, and against Gram blocks."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.timing import interleaved, median_ratio
from ordain import Deterministic, herding, reference


def run() -> dict[str, float]:
    z = np.random.default_rng(0).random((10_000, 128))
    orders: dict[str, list[int]] = {}

    def fast() -> None:
        orders["fast"] = herding.herd(z, rounds=10).tolist()

    def slow() -> None:
        orders["slow"] = reference.herd(z, rounds=10)

    seconds = interleaved({"fast": fast, "slow": slow}, rounds=5)
    for name in seconds:
        print(f"  herd, n=10,000, d=128, ten rounds, {name}: {statistics.median(seconds[name]) * 1e3:.1f} ms")
    results = {
        "speedup": median_ratio(seconds["slow"], seconds["fast"]),
        "identical order": float(orders["fast"] == orders["slow"]),
    }
    for d in (16, 128, 1024, 8192):
        z = np.random.default_rng(0).random((20_480_000 // d // 10, d)) - 0.5
        jobs = {"stream": lambda z=z: herding.balance(z)}
        jobs |= {f"gram {size}": lambda z=z, size=size: gram_signs(z, size) for size in (32, 128)}
        seconds = interleaved(jobs, rounds=5)
        least = min(median_ratio(seconds[name], seconds["stream"]) for name in jobs if name != "stream")
        print(f"  one round, d={d}: Gram blocks take {least:.1f} times the stream's time (the better block size)")
        results[f"gram over stream, d={d}"] = least
    return results


def gram_signs(z: np.ndarray, size: int) -> list[int]:
    """The same signs from the Gram matrix of each block of rows, as for gradients that are not there as rows."""
    balancer, s, signs = Deterministic(), np.zeros(z.shape[1]), []
    state = balancer.start()
    for start in range(0, len(z), size):
        block = z[start : start + size]
        found = balancer.signs(block @ s, block @ block.T, n=len(z), d=z.shape[1], state=state)
        s += found @ block
        signs += found.tolist()
    return signs
