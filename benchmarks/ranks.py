"""Bytes and herding quality of each way to order over ranks: W gloo processes on this machine, one thread each.

Global batches of 64 examples. Bytes are what one rank hands over for ordering in a step; quality is the herding
objective of the order after five epochs of gradients that do not change (logistic regression on digits), beside that
of one process. CPU seconds are one process's own, so that they do not count the waiting of W processes for 2 cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = (1, 2, 4, 8)


def run() -> dict[str, float]:
    found = {ranks: _started(ranks) for ranks in SIZES}
    for name in found[1]["traffic"]:
        model, mode = name.split(", ")
        if mode != "rr":
            print(f"  {name}: " + "; ".join(_line(found[ranks], model, mode, ranks) for ranks in SIZES))
    results: dict[str, float] = {}
    for name in found[1]["quality"]:
        values = [found[ranks]["quality"][name] for ranks in SIZES]
        print(f"  herding objective, {name}: " + ", ".join(f"{value:.3g}" for value in values))
        mode, centering = name.split(", ")
        best = found[1]["quality"][f"exact, {centering}"]
        results[f"{name}, objective at W = 8 over one process"] = values[-1] / best
    for model in ("logistic", "lenet", "mlp"):
        for mode in ("exact", "sketch"):
            one = found[8]["traffic"][f"{model}, {mode}"]
            results[f"{model}, {mode}, bytes at W = 8 over the gradient's"] = one["bytes"] / one["gradient"]
    return results


def _line(found: dict[str, Any], model: str, mode: str, ranks: int) -> str:
    one, plain = found["traffic"][f"{model}, {mode}"], found["traffic"][f"{model}, rr"]
    return (
        f"W = {ranks} {one['bytes'] / 1e3:,.1f} kB (the backward {one['gradient'] / 1e3:,.0f}, "
        f"all gradients {one['batch x d'] / 1e3:,.0f}), CPU {one['cpu'] / plain['cpu']:.2f}x"
    )


def _started(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*command, "-m", "benchmarks.ranks_worker", str(out)], check=True, capture_output=True)  # noqa: S603
        found: dict[str, Any] = json.loads(out.read_text())
        return found
