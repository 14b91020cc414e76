"""Whole epochs under GraB, ours and others', relative to the same epochs under random reshuffling, and peak memory.

``make bench-peers`` installs the others beside the environment and runs this. Processor time of one thread,
interleaved: every round runs an epoch of every contender, and a ratio is between epochs of the same round. A slow
contender has shorter epochs; ratios are those of a step. Results are added to ``results/peers/peers.json`` as they
come; what is there already is not measured again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import BY_ROWS, CASES, OURS, PEERS, Data, Epoch
from benchmarks.memory import peak_of
from ordain import herding
from ordain.study.machine import provenance

FILE = Path("results/peers/peers.json")
SIZES = (64, 16, 256)
STEPS = 40  # in an epoch
SLOW = 0.15  # seconds of a step under reshuffling: half as many steps from here on
SHARE = 2.0  # seconds that a peer may take in a round, unless it makes only one step
BUDGET, ROUNDS = 45.0, (3, 11)  # seconds for the rounds of a case, and how many there are at least and at most
ALL = OURS | PEERS
PACKAGES = ("opacus", "backpack-for-pytorch", "grab-sampler")
Record = dict[str, Any]


def prepared(case: str, name: str, size: int, steps: int) -> Epoch:
    make, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    return ALL[name](model, Data(*batch(size * steps), size))


def seconds_of(go: Epoch) -> float:
    start = time.process_time()
    go()
    return time.process_time() - start


def check_rows(case: str, name: str) -> None:
    """Are these the gradients of single examples?"""
    make, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    x, y = batch(4)
    one_by_one = [
        torch.autograd.grad(nn.functional.cross_entropy(model(a), b), list(model.parameters()))
        for a, b in zip(x.split(1), y.split(1), strict=True)
    ]
    wanted = torch.stack([torch.cat([g.flatten() for g in grads]) for grads in one_by_one])
    torch.testing.assert_close(BY_ROWS[name](model)(x, y), wanted, rtol=1e-3, atol=1e-5)


def time_case(case: str, size: int) -> Record:
    """Seconds a step of each contender over those of reshuffling, by round."""
    warnings.simplefilter("ignore")  # of the peers, about hooks and batching rules
    herding.herd(torch.randn(64, 16), rounds=2, tolerance=0.02)  # compiled once
    one = seconds_of(prepared(case, "RR", size, 4)) / 4
    most = STEPS if one < SLOW else STEPS // 2
    epochs: dict[str, Epoch] = {}
    steps: dict[str, int] = {}
    found: Record = {}
    warm = 0.0  # seconds of a round
    for name in ALL:
        try:
            if name in BY_ROWS:
                check_rows(case, name)
            steps[name] = most
            if name in PEERS:
                epochs[name] = prepared(case, name, size, 1)
                steps[name] = max(1, min(most, int(SHARE / seconds_of(epochs[name]))))
            if steps[name] > 1:
                epochs[name] = prepared(case, name, size, steps[name])
            warm += seconds_of(epochs[name])
        except Exception as error:
            epochs.pop(name, None)
            found[name] = {"reason": f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]}
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(BUDGET / warm)))
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    load = [os.getloadavg()[0]]
    for _ in range(rounds):
        for name, go in epochs.items():
            seconds[name].append(seconds_of(go) / steps[name])
        load.append(os.getloadavg()[0])
    for name, each in seconds.items():
        ratios = [a / b for a, b in zip(each, seconds["RR"], strict=True)]
        found[name] = {"steps": steps[name], "ms": statistics.median(each) * 1e3, "ratios": ratios}
    return {"load": load, "contenders": found}


def measure_memory(case: str, name: str, size: int) -> int:
    """The most bytes alive from making the order to the end of its first three steps."""
    warnings.simplefilter("ignore")
    make, batch = CASES[case]
    torch.manual_seed(0)
    model, data = make(), Data(*batch(size * (3 if name in OURS else 2)), size)

    def go() -> None:
        ALL[name](model, data)()

    return peak_of(go)


def apart(job: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, forked from this one, which has computed nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(job, *args).result()


def load() -> Record:
    if FILE.exists():
        return json.loads(FILE.read_text())
    record = provenance("python -m benchmarks peers") | {"time": {}, "memory": {}}
    for name in PACKAGES:
        try:
            record["versions"][name] = version(name)
        except PackageNotFoundError:
            record["versions"][name] = None
    return record


def save(record: Record) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    part = FILE.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(FILE)


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    digits = 2 if middle < 10 else 0
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def measure(record: Record) -> None:
    keys = [(case, size) for size in SIZES for case in CASES]
    for number, (case, size) in enumerate(keys, 1):
        key = f"{case}/{size}"
        if key not in record["time"]:
            print(f"  [{number}/{len(keys)}] {case}, B={size}: time", flush=True)
            record["time"][key] = apart(time_case, case, size)
            save(record)
        for name, one in record["time"][key]["contenders"].items():
            print(f"    {name:14} {spread(one['ratios']) if 'ratios' in one else '- ' + one['reason']}", flush=True)
        memory = record["memory"].setdefault(key, {})
        for name, one in record["time"][key]["contenders"].items():
            if name not in memory and "ratios" in one:
                try:
                    memory[name] = apart(measure_memory, case, name, size)
                except BrokenProcessPool:
                    memory[name] = None
                save(record)
        extra = {name: (peak - memory["RR"]) / 1e6 for name, peak in memory.items() if peak is not None}
        print(
            "    extra MB: " + ", ".join(f"{name} {mb:.1f}" for name, mb in extra.items() if name != "RR"), flush=True
        )


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    record = load()
    measure(record)
    from benchmarks.charts import peers_chart, peers_tables

    peers_chart(record, Path("docs/images/peers.png"))
    print(peers_tables(record))
    results = {}
    for key, case in record["time"].items():
        medians = {
            name: statistics.median(one["ratios"]) for name, one in case["contenders"].items() if "ratios" in one
        }
        results |= {f"{key}, {name}": ratio for name, ratio in medians.items()}
    return results
