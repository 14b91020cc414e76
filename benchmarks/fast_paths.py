"""What each fast path is worth: the time of a step with it switched off alone, over the time with all of them.

A fast path stays if it brings 10 % on two models, or 20 % on one. Times are those of the process, interleaved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from benchmarks import step
from benchmarks.timing import interleaved, median_ratio
from ordain.gradients import Dense, Factored
from ordain.gradients.param_grads import OuterProduct, ParamGrads

ROUNDS = 16


@contextmanager
def without_linear_layer() -> Iterator[None]:
    """The compiled pass where one small linear layer is the whole model."""
    with mock.patch.object(Factored, "linear_layer", return_value=None):
        yield


@contextmanager
def without_sums_by_sign() -> Iterator[None]:
    """The sums of e_i g_i and of g_i from those over either sign's examples."""
    with mock.patch.object(OuterProduct, "add_signed", ParamGrads.add_signed):
        yield


@contextmanager
def without_scratch() -> Iterator[None]:
    """Buffers that are reused from step to step for what is materialised."""
    with mock.patch.object(OuterProduct, "in_scratch", OuterProduct.materialize):
        yield


@contextmanager
def without_one_row() -> Iterator[None]:
    """A whole batch's gradient in parts, without a Gram matrix."""
    with mock.patch.object(Dense, "one_row", return_value=None):
        yield


PATHS = {
    "compiled linear layer": without_linear_layer,
    "sums by sign": without_sums_by_sign,
    "scratch buffers": without_scratch,
}
ONE_ROW = {"one row": without_one_row}
PATHS_OF = {"mean": PATHS, "pair": PATHS, "whole batches, mean": ONE_ROW, "whole batches, pair": ONE_ROW}


def switched(job: Callable[[], object], off: Callable[[], Iterator[None]] | None) -> Callable[[], object]:
    def go() -> None:
        if off is None:
            job()
        else:
            with off():  # type: ignore[attr-defined]
                job()

    return go


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    for name, case in step.CASES.items():
        builds = {**step.ORDERS, **step.whole_batches(case.size)}
        for order, paths in PATHS_OF.items():
            jobs = {key: switched(step.job(case, builds[order]), off) for key, off in {"all": None, **paths}.items()}
            with mock.patch("benchmarks.timing.time.perf_counter", time.process_time):
                seconds = interleaved(jobs, rounds=ROUNDS)
            worth = {key: median_ratio(seconds[key], seconds["all"]) for key in paths}
            print(f"  {name}, {order}: " + ", ".join(f"without {key} {value:.2f}x" for key, value in worth.items()))
            results |= {f"{key}, {name}, {order}": value for key, value in worth.items()}
    return results
