"""Processor seconds of an epoch of the study's tasks, by order: what the results page multiplies epochs with.

    python -m benchmarks.costs results/costs.json

Needs a machine that does nothing else, and the data of ``ordain data``. Each round trains a part of an epoch with every
order in turn; medians of several rounds, relative to random reshuffling in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import median_ratio
from ordain.study.data import data_dir
from ordain.study.runs.arms import build_order, parse
from ordain.study.runs.config import RunConfig
from ordain.study.runs.loop import epoch_of_steps, make_optimizer
from ordain.study.runs.run_folder import provenance
from ordain.study.tasks import TASKS

ROUNDS = 15  # a third of them where a part is long
LONG = 10_000  # examples
WARM_UP = 3  # epochs of the part, in which models are inspected
PARTS = {
    "mnist": 6400,
    "a9a": 6400,
    "cifar10": 12_800,  # the stored rows of all images do not fit in the cache, nor should these
    "cifar10-augmented": 12_800,
    "cifar10-resnet": 1280,
    "gpt": 640,
    "sst2": 640,
    "sst2-head": 640,
    "sst2-lora": 640,
}
BATCH_SIZES = dict.fromkeys(("sst2", "sst2-head", "sst2-lora"), 32)  # where the protocol's is not the task's own
ARMS = {
    "mnist": ("rr-ema", "stratified", "flipflop", "grab", "grab-pair", "grab-lazy"),
    "a9a": ("rr-ema", "flipflop", "grab", "grab-pair", "grab-lazy"),
    "cifar10": ("rr-ema", "stratified", "grab-pair", "grab-head", "herding-head", "herding-head-lazy"),
    "cifar10-augmented": ("stratified", "grab-head", "herding-head", "herding-head-lazy"),
    "cifar10-resnet": ("herding-head",),
    "gpt": ("grab-pair", "grab-pair-precond", "herding-head", "herding-head-lazy", "herding-head-precond"),
    "sst2": ("grab-pair", "herding-head", "herding-head-lazy"),
    "sst2-head": ("herding-head", "herding-head-lazy"),
    "sst2-lora": ("herding-head", "herding-head-lazy"),
}
CYCLE = 3  # epochs: a lazy order learns in one of them


def epoch_of(task: str, arm: str) -> Callable[[], None]:
    problem, defaults = TASKS[task].load(data_dir(), PARTS[task]), TASKS[task].defaults
    optimizer_name: Any = "adamw" if task == "gpt" or task in BATCH_SIZES else "sgd"
    config = RunConfig(
        task=task,
        arms=(arm,),
        rates=(1e-3,),
        seeds=(0,),
        epochs=1,
        batch_size=BATCH_SIZES.get(task, defaults.batch_size),
        momentum=defaults.momentum,
        weight_decay=defaults.weight_decay,
        optimizer=optimizer_name,
    )
    model = problem.build(0).train()
    optimizer = make_optimizer(model, config, 1e-3)
    n = len(problem.train_x)
    order = build_order(parse(arm), model, n, seed=0, memory_limit=2**31, labels=problem.labels, optimizer=optimizer)
    average = None
    if parse(arm).averaged:
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())

    def stepped() -> None:
        if average is not None:
            average.update_parameters(model)

    return lambda: epoch_of_steps(problem, config, model, optimizer, order, defaultdict(float), stepped=stepped)


def measure(task: str) -> dict[str, float]:
    jobs = {arm: epoch_of(task, arm) for arm in ("rr", *ARMS[task])}
    seconds: dict[str, list[float]] = {arm: [] for arm in jobs}
    rounds = ROUNDS // 3 if PARTS[task] > LONG else ROUNDS
    for number in range(WARM_UP + rounds):
        for arm, job in jobs.items():
            began = time.process_time()
            for _ in range(CYCLE if "lazy" in arm else 1):
                job()
            taken = (time.process_time() - began) / (CYCLE if "lazy" in arm else 1)
            if number >= WARM_UP:
                seconds[arm].append(taken)
    base = statistics.median(seconds["rr"]) * TASKS[task].examples / PARTS[task]
    return {arm: base * median_ratio(of, seconds["rr"]) for arm, of in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=PARTS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(options.out.read_text())["seconds"] if options.out.exists() else {}
    found = before | {task: measure(task) for task in options.task or PARTS}
    content = {**provenance("python -m benchmarks.costs"), "batch_sizes": BATCH_SIZES, "seconds": found}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    for task, of in found.items():
        print(
            f"{task}: RR {of['rr']:.1f} s an epoch;", ", ".join(f"{arm} {s / of['rr']:.2f}x" for arm, s in of.items())
        )


if __name__ == "__main__":
    main()
