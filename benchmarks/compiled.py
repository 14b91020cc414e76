"""What Numba is worth and what it costs: ``python -m benchmarks.compiled``.

The loops over signs, compiled and not; and the first step of a process, with an empty cache and with a full one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from ordain import Deterministic, reference
from ordain.herding import herd
from ordain.kernels.torch_signs import torch_signs

FIRST_STEP = """
import time
from torch import nn, randn
from ordain import GraB
model = {model}
order = GraB(model, 64)
drawn = iter(order.sampler)
[next(drawn) for _ in range(64)]
model(randn(64, 8)).square().mean().backward()
start = time.process_time()
order.step()
print(time.process_time() - start)
"""
MODELS = {
    "one linear layer, or the head": "nn.Linear(8, 2)",
    "several layers": "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))",
}


def numpy_signs(dots: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Algorithm 5 with one NumPy operation a vector."""
    dots, signs = dots.copy(), np.empty(len(dots))
    for t in range(len(dots)):
        signs[t] = 1.0 if dots[t] < 0.0 else -1.0
        dots[t + 1 :] += signs[t] * gram[t, t + 1 :]
    return signs


def seconds(run: Callable[[], object], *, times: int) -> float:
    """The median processor time of a call, after one that does not count."""
    run()
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return median(found)


def signs() -> None:
    print("signs of a batch, ms: compiled, NumPy, torch")
    for size in (16, 64, 256):
        z = np.random.default_rng(0).standard_normal((size, 100))
        dots, gram, state = np.zeros(size), z @ z.T, np.zeros(3)
        slow = torch.from_numpy(dots), torch.from_numpy(gram)
        assert (Deterministic().signs(dots, gram, n=size, d=100, state=np.zeros(3)) == numpy_signs(dots, gram)).all()
        found = (
            seconds(lambda: Deterministic().signs(dots, gram, n=size, d=100, state=state), times=200),  # noqa: B023
            seconds(lambda: numpy_signs(dots, gram), times=200),  # noqa: B023
            seconds(lambda: torch_signs(0, *slow, None, [0.0, 0.0, 0.0], 0.0), times=50),  # noqa: B023
        )
        print(f"  B = {size}: " + ", ".join(f"{1e3 * one:.3f}" for one in found))


def herding() -> None:
    z = np.random.default_rng(0).random((10_000, 128))
    fast, slow = seconds(lambda: herd(z, rounds=1), times=5), seconds(lambda: reference.herd(z, rounds=1), times=1)
    print(f"a round of herding 10,000 vectors of 128 numbers, ms: compiled {1e3 * fast:.0f}, NumPy {1e3 * slow:.0f}")


def first_steps() -> None:
    print("processor seconds of a process's first step: nothing cached, cached")
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"NUMBA_CACHE_DIR": folder}
            command = [sys.executable, "-W", "ignore", "-c", FIRST_STEP.format(model=model)]
            found = [
                float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)  # noqa: S603
                for _ in range(2)
            ]
        print(f"  {name}: {found[0]:.1f}, {found[1]:.1f}")


if __name__ == "__main__":
    signs()
    herding()
    first_steps()
