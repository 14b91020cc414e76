"""The bookkeeping of orders at scale: microseconds and bytes an example, memory flat over epochs, nothing lost.

No model: whole epochs are drawn from the sampler and observed with synthetic gradients of a few numbers, so that what
is measured is what an order costs for having many examples. Each case runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from ordain import GraB, Order, RandomReshuffling

BATCH, DIM = 256, 4
MANY, MOST = 10_000_000, 100_000_000
ORDERS: dict[str, Callable[[int], Order]] = {
    "rr": RandomReshuffling,
    "mean": lambda n: GraB(None, n),
    "pair": lambda n: GraB(None, n, centering="pair"),
    "units of 4": lambda n: GraB(None, n + 1, group=4),  # the last unit is a short one
}


@dataclass(frozen=True)
class Soak:
    """One case: seconds of each epoch, bytes an example held after each and at the worst, and of its saved state."""

    seconds: list[float]
    held: list[float]
    worst: float
    saved: float
    whole: bool


def held_now() -> int:
    """Bytes in the process, once the allocator has given back what is free.

    glibc keeps freed arrays of up to 32 MB for the next one that fits: those are nobody's. (Elsewhere: as it is.)
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident("VmRSS")


def resident(name: str) -> int:
    """Bytes, by the kernel's name of them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def soak(name: str, n: int, epochs: int) -> Soak:
    torch.set_num_threads(1)
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(BATCH, DIM)) + 1.0)
    for warm in (ORDERS[name](100), ORDERS[name](BATCH)):  # compiled loops are no part of an order
        warm.observe(rows[: len(list(warm.sampler))])
        next(iter(warm.sampler))
    before = held_now()
    order = ORDERS[name](n)
    seconds, held, whole = [], [], True
    for _ in range(epochs):
        start = time.perf_counter()
        indices = iter(order.sampler)
        while batch := list(islice(indices, BATCH)):
            order.observe(rows[: len(batch)])
        seconds.append(time.perf_counter() - start)
        held.append((held_now() - before) / n)
        whole &= is_permutation(order.history(order.epoch))
    next(iter(order.sampler))
    worst = (resident("VmHWM") - before) / n
    state = order.state_dict()
    saved = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)) / n
    return Soak(seconds, held, worst, saved, whole)


def is_permutation(indices: np.ndarray) -> bool:
    seen = np.zeros(len(indices), dtype=bool)
    seen[indices] = True
    return bool(seen.all())


def apart(name: str, n: int, epochs: int) -> Soak:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(soak, name, n, epochs).result()


def run() -> dict[str, float]:
    results: dict[str, float] = {}
    print(f"  batches of {BATCH}, gradients of {DIM} numbers; bytes an example, in the process less before the order")
    print(f"  {'':12}{'n':>12}{'epochs':>8}{'us/example':>12}{'held, first':>13}{'last':>7}{'worst':>7}{'saved':>7}")
    for name, n, epochs in [*((name, MANY, 4) for name in ORDERS), ("rr", MOST, 2), ("mean", MOST, 2)]:
        found = apart(name, n, epochs)
        each = min(found.seconds) / n * 1e6
        row = f"  {name:12}{n:12,}{epochs:8}{each:12.2f}{found.held[0]:13.1f}"
        print(row + f"{found.held[-1]:7.1f}{found.worst:7.1f}{found.saved:7.1f}", flush=True)
        results[f"{name}, {n:,}, permutation"] = float(found.whole)
        results[f"{name}, {n:,}, bytes an example at the worst"] = found.worst
        # Epochs are remembered at two bits a unit; beyond that and an epoch's own temporaries nothing may grow.
        results[f"{name}, {n:,}, growth over epochs"] = found.held[-1] - found.held[min(1, epochs - 1)]
    return results
