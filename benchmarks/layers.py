"""What ordering by a part of the model is worth: losses, the herding objective of full gradients, and the price.

    python -m benchmarks.layers results/layers.jsonl --seeds 5 [--task cifar10]
    python -m benchmarks.layers results/layers.jsonl --show    # the table, and docs/images/layers.png

One line of JSON a run; runs that are there already are not made again, so that it can be stopped at any time. Needs
the data of ``ordain data`` (mnist, cifar10, wikitext-2).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler

from benchmarks.charts import layers_chart, layers_table
from benchmarks.timing import median_ratio
from ordain import Every, GraB, Herding, Order, RandomReshuffling, Stratified
from ordain.herding import herding_objective
from ordain.study.data import data_dir
from ordain.study.data.datasets import load
from ordain.study.runs.run_folder import provenance
from ordain.study.tasks.images import lenet
from ordain.study.tasks.language import Gpt

STEPS, WARM_UP, ROUNDS = 60, 3, 6


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained; ``layers`` names what may be ordered by, from the output backwards."""

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    layers: dict[str, Any]
    epochs: int
    size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


def images(name: str, n: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    splits = load(name, data_dir())
    parts = []
    for part, count in ((splits.train, n), (splits.test, test)):
        x = torch.from_numpy(np.array(part.x[:count], dtype=np.float32)) / 127.5 - 1
        parts += [x, torch.from_numpy(np.array(part.y[:count], dtype=np.int64))]
    return tuple(parts)  # type: ignore[return-value]


def text(n: int, test: int, length: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Characters of WikiText-2: ``[n, length]`` and the same one further."""
    parts = []
    for split, count in (("train", n), ("valid", test)):
        raw = characters(split)[: count * length + 1]
        ids = torch.from_numpy(np.frombuffer(raw.encode("ascii", "replace"), dtype=np.uint8).copy()).long()
        parts += [ids[:-1].view(count, length), ids[1:].view(count, length)]
    return tuple(parts)  # type: ignore[return-value]


def characters(split: str) -> str:
    folder = data_dir() / "wikitext-2"
    packed = folder / f"{split}.txt.xz"
    return lzma.open(packed, "rt").read() if packed.exists() else (folder / f"{split}.txt").read_text()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=rate, momentum=0.9)


TASKS = {
    "cifar10": Task(
        lenet,
        lambda: images("cifar10", 10_000, 10_000),
        {"last": "11", "last two": ["9", "11"], "last block": ["6", "9", "11"], "all": None},
        epochs=8,
        size=16,
        optimizer=sgd(0.004),
    ),
    "mnist": Task(
        mlp,
        lambda: images("mnist", 10_000, 10_000),
        {"last": "5", "last two": ["3", "5"], "all": None},
        epochs=8,
        size=16,
        optimizer=sgd(0.01),
    ),
    "gpt": Task(
        Gpt,
        lambda: text(2_500, 1_000),
        {
            "last": "head",
            "last two": ["blocks.1.up", "blocks.1.down"],
            "last block": "blocks.1",
            "all": None,
        },
        epochs=6,
        size=16,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    ),
}


def arms(task: Task) -> dict[str, Callable[[nn.Module, Tensor, int], Order]]:
    """By name: an order for a model, the labels and a seed."""
    found: dict[str, Callable[[nn.Module, Tensor, int], Order]] = {
        "rr": lambda model, y, seed: RandomReshuffling(len(y), seed=seed),
    }
    if task is not TASKS["gpt"]:
        found["stratified"] = lambda model, y, seed: Stratified(y, seed=seed)

    def grab(params: Any, **options: Any) -> Callable[[nn.Module, Tensor, int], Order]:
        return lambda model, y, seed: GraB(model, len(y), params=params, centering="pair", seed=seed, **options)

    def herd(params: Any, **options: Any) -> Callable[[nn.Module, Tensor, int], Order]:
        return lambda model, y, seed: Herding(
            model, len(y), params=params, seed=seed, memory_limit=8 * 2**30, **options
        )

    for name, params in task.layers.items():
        found[f"GraB, {name}"] = grab(params)
        found[f"herding, {name}"] = herd(params, sketch=1024)
    for k in (64, 256):
        found[f"herding, last, k = {k}"] = herd(task.layers["last"], sketch=k)
    for rounds in (1, 2):
        found[f"herding, last, {rounds} rounds"] = herd(task.layers["last"], sketch=1024, rounds=rounds)
    found["herding, last, every third epoch"] = herd(task.layers["last"], sketch=1024, learn=Every(3, after=2))
    return found


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = model(x)
    return cross_entropy(output.flatten(0, -2), y.flatten())


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The mean loss, and the share of right answers."""
    losses, right = 0.0, 0.0
    with torch.no_grad():
        for start in range(0, len(x), 500):
            output = model(x[start : start + 500]).flatten(0, -2)
            labels = y[start : start + 500].flatten()
            losses += float(cross_entropy(output, labels, reduction="sum"))
            right += float((output.argmax(1) == labels).sum())
    return losses / y.numel(), right / y.numel()


def objective(task: Task, model: nn.Module, x: Tensor, y: Tensor, order: np.ndarray) -> float:
    """Of sketches of the full gradients at these weights, under ``order``: its share of that under a random order."""
    kept: list[Any] = []
    n = min(2_000, len(y))
    chosen = np.sort(order[:n]) if len(order) > n else np.sort(order)  # some examples, in the order found

    def keep(z: Tensor) -> Any:
        kept.append(z.clone())
        return np.arange(len(z))

    store = Herding(model, n, routine=keep, sketch=2048, seed=1, tolerance=0.0)
    seen: list[int] = []
    for indices in BatchSampler(store.sampler, task.size, drop_last=False):
        rows = chosen[indices]
        loss_of(model, x[rows], y[rows]).backward()
        store.step()
        model.zero_grad()
        seen += indices
    next(iter(store.sampler))  # ends the epoch
    store.detach()
    z = np.empty_like(kept[0].numpy())
    z[seen] = kept[0].numpy()
    place = {int(example): row for row, example in enumerate(chosen)}
    found = [place[int(example)] for example in order if int(example) in place]
    random = np.mean([herding_objective(z, np.random.default_rng(s).permutation(n), norm=2) for s in range(5)])
    return float(herding_objective(z, found, norm=2) / random)


def epoch_of_steps(
    task: Task, model: nn.Module, order: Order, optimizer: torch.optim.Optimizer, schedule: Any, x: Tensor, y: Tensor
) -> None:
    for indices in BatchSampler(order.sampler, task.size, drop_last=False):
        loss_of(model, x[indices], y[indices]).backward()
        order.step()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def prices(task: Task) -> dict[str, float]:
    """Processor time of epochs over that of random reshuffling, each order in turn."""
    x, y, _, _ = task.data()
    x, y = x[: STEPS * task.size], y[: STEPS * task.size]
    jobs = {}
    for arm, build in arms(task).items():
        model = task.build()
        order, optimizer = build(model, y, 0), task.optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        jobs[arm] = partial(epoch_of_steps, task, model, order, optimizer, schedule, x, y)
    seconds: dict[str, list[float]] = {arm: [] for arm in jobs}
    for number in range(WARM_UP + ROUNDS):
        for arm, job in jobs.items():
            began = time.thread_time()
            job()
            if number >= WARM_UP:
                seconds[arm].append(time.thread_time() - began)
    rr = seconds["rr"]
    # An order that learns in one epoch of three has done so in two of six.
    return {arm: sum(of) / sum(rr) if "third" in arm else median_ratio(of, rr) for arm, of in seconds.items()}


def run(task: Task, build: Callable[[nn.Module, Tensor, int], Order], seed: int) -> dict[str, Any]:
    x, y, test_x, test_y = task.data()
    torch.manual_seed(seed)
    model = task.build()
    order = build(model, y, seed)
    optimizer = task.optimizer(model.parameters())
    steps = task.epochs * math.ceil(len(x) / task.size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(task.epochs):
        epoch_of_steps(task, model, order, optimizer, schedule, x, y)
    following = np.fromiter(order.sampler, dtype=np.int64)
    loss, accuracy = evaluate(model, test_x, test_y)
    order.detach()
    return {
        "train loss": evaluate(model, x, y)[0],
        "test loss": loss,
        "test accuracy": accuracy,
        "objective": objective(task, model, x, y, following),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("records", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--arm", action="append")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--price", action="store_true", help="on a machine that does nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.price:
        for name in options.task or TASKS:
            with options.records.open("a") as file:
                file.write(json.dumps({"task": name, "prices": prices(TASKS[name])}) + "\n")
        return
    if options.show:
        lines = [json.loads(line) for line in options.records.read_text().splitlines()[1:]]
        price = {line["task"]: line["prices"] for line in lines if "prices" in line}
        records = [line | {"price": price.get(line["task"], {}).get(line["arm"])} for line in lines if "arm" in line]
        layers_chart(records, Path("docs/images/layers.png"))
        print(layers_table(records))
        return
    done = set()
    if options.records.exists():
        lines = [json.loads(line) for line in options.records.read_text().splitlines()]
        done = {(line["task"], line["arm"], line["seed"]) for line in lines if "arm" in line}
    else:
        options.records.parent.mkdir(parents=True, exist_ok=True)
        options.records.write_text(json.dumps(provenance("python -m benchmarks.layers")) + "\n")
    jobs = [
        (name, arm, seed)
        for seed in range(options.seeds)
        for name in options.task or TASKS
        for arm in arms(TASKS[name])
        if not options.arm or arm in options.arm
    ]
    for number, (name, arm, seed) in enumerate(jobs):
        if (name, arm, seed) in done:
            continue
        record = {"task": name, "arm": arm, "seed": seed} | run(TASKS[name], arms(TASKS[name])[arm], seed)
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if sys.stderr.isatty():
            print(f"{number + 1} of {len(jobs)}: {name}, {arm}, seed {seed}", file=sys.stderr)


if __name__ == "__main__":
    main()
