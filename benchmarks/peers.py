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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.charts import peers_chart, peers_tables, spread
from benchmarks.contenders import BY_ROWS, CASES, OURS, PEERS, Data, Epoch
from benchmarks.memory import allocations, peak_of
from ordain import herding
from ordain.study.runs.run_folder import provenance

FILE = Path("results/peers/peers.json")
SIZES = (64, 16, 256)
STEPS = 40  # in an epoch
SLOW = 0.15  # seconds of a step under reshuffling: half as many steps from here on
SHARE = 2.0  # seconds that a peer may take in a round, unless it makes only one step
BUDGET, ROUNDS = 45.0, (3, 11)  # seconds for the rounds of a case, and how many there are at least and at most
ALL = OURS | PEERS
KEYS = [(case, size) for size in SIZES for case in CASES]
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
        except Exception as error:  # noqa: PERF203
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


def measure_memory(case: str, name: str, size: int) -> dict[str, int]:
    """The most bytes alive above the model and the data: from the making of the order on, and in a later epoch."""
    warnings.simplefilter("ignore")
    make, batch = CASES[case]
    torch.manual_seed(0)
    model, data = make(), Data(*batch(size * (3 if name in OURS else 1)), size)
    epochs: list[Epoch] = []

    def begin() -> None:
        epochs.append(ALL[name](model, data))
        epochs[0]()

    first = allocations(begin)
    return {"first": peak_of(first), "later": sum(first) + peak_of(allocations(epochs[0]))}


def apart(job: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, forked from this one, which has computed nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(job, *args).result()


def load() -> Record:
    if FILE.exists():
        return json.loads(FILE.read_text())
    record = provenance("python -m benchmarks peers") | {"time": {}, "memory": {}}
    record["versions"] |= {name: version(name) for name in PACKAGES}
    return record


def save(record: Record) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    part = FILE.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(FILE)


def measure_times(record: Record) -> None:
    for number, (case, size) in enumerate(KEYS, 1):
        key = f"{case}/{size}"
        if key not in record["time"]:
            print(f"  time {number}/{len(KEYS)}: {case}, B={size}", flush=True)
            record["time"][key] = apart(time_case, case, size)
            save(record)
            for name, one in record["time"][key]["contenders"].items():
                print(f"    {name:14} {spread(one['ratios']) if 'ratios' in one else '- ' + one['reason']}", flush=True)


def measure_memories(record: Record) -> None:
    for number, (case, size) in enumerate(KEYS, 1):
        key = f"{case}/{size}"
        memory = record["memory"].setdefault(key, {})
        todo = [name for name, one in record["time"][key]["contenders"].items() if "ratios" in one]
        if set(memory) >= set(todo):
            continue
        print(f"  memory {number}/{len(KEYS)}: {case}, B={size}", flush=True)
        for name in todo:
            if name not in memory:
                memory[name] = apart(measure_memory, case, name, size)
                save(record)
        extra = {name: (peak["later"] - memory["RR"]["later"]) / 1e6 for name, peak in memory.items()}
        print("    extra MB: " + ", ".join(f"{name} {mb:.1f}" for name, mb in extra.items()), flush=True)


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    record = load()
    measure_times(record)
    measure_memories(record)
    peers_chart(record, Path("docs/images/peers.png"))
    print(peers_tables(record))
    results = {}
    for key, case in record["time"].items():
        medians = {
            name: statistics.median(one["ratios"]) for name, one in case["contenders"].items() if "ratios" in one
        }
        results |= {f"{key}, {name}": ratio for name, ratio in medians.items()}
    return results
