"""What it costs to inspect a pass, against an ordinary step: ``python -m benchmarks inspections``.

One pass in 499 is inspected, once the first are behind: the share of the time is printed for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from benchmarks.step import CASES, loss_of
from ordain import GraB
from ordain.gradients.sources.spot_checks import MOST_APART, SpotChecks

STEPS = {"logistic": 60}  # of each kind; the others less


def saying(due: bool, real: Callable[[SpotChecks], bool] = SpotChecks.due) -> Callable[[SpotChecks], bool]:
    """``SpotChecks.due`` with another answer; it goes on counting."""
    return lambda checks: (real(checks), due)[1]


def run(names: list[str] | None = None) -> dict[str, float]:
    torch.set_num_threads(1)
    results = {}
    for name in names or ("logistic", "mlp", "lenet", "bert", "lstm"):
        case, steps = CASES[name], STEPS.get(name, 12)
        torch.manual_seed(0)
        model = case.build()
        order = GraB(model, case.size * (2 * steps + 8))
        indices = iter(order.sampler)
        x, y = case.batch(case.size)
        seconds = {False: 0.0, True: 0.0}
        for number in range(2 * steps + 8):
            due = number < 8 or number % 2 == 1
            for _ in range(case.size):
                next(indices)
            start = time.process_time()
            with patch.object(SpotChecks, "due", saying(due)):
                loss_of(model(x), y).backward()
            order.step()
            seconds[due] += time.process_time() - start if number >= 8 else 0.0
        extra = seconds[True] / seconds[False] - 1
        results[name] = extra / MOST_APART
        print(
            f"  {name}: an inspected step takes {1 + extra:.2f} times an ordinary one: {results[name]:.2%} of the time"
        )
    return results
