"""A run's folder as `ordain run` writes it, with numbers made up: what tests of readers and reports read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

LABELS = {
    "grab@16": "GraB, units of 16",
    "rr": "random reshuffling",
    "grab": "GraB",
    "so": "shuffle once",
    "greedy": "greedy",
}
CONFIG: dict[str, Any] = {
    "format": 1,
    "kind": "training",
    "task": "mnist",
    "command": "ordain run mnist --orders rr,grab --seeds 5",
    "config": {"epochs": 3, "batch_size": 64, "seeds": [0, 1, 2, 3, 4], "limit": 1000, "data_dir": None},
    "problem": {"train": 900, "valid": 100, "test": 200, "parameters": 7850, "notes": ["the first 1,000 images"]},
    "versions": {"python": "3.11.2", "torch": "2.6.0"},
    "machine": {"platform": "Linux", "cpu": "a processor", "logical_cpus": 2},
    "revision": "0123456789abcdef",
    "started": "2025-01-02T03:04:05+00:00",
}


def start(arm: str, lr: float, seed: int, **other: Any) -> dict[str, Any]:
    base = arm.partition("@")[0]
    line = {
        "kind": "start",
        "arm": arm,
        "label": LABELS.get(arm, LABELS.get(base, arm)),
        "order": base,
        "lr": lr,
        "seed": seed,
    }
    return line | {"group": 1, "threads": 1} | other


def epoch(number: int, loss: float | None, **other: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "epoch", "epoch": number, "train_loss": loss, "valid_loss": loss}
    line |= {"valid_accuracy": 0.9, "test_loss": loss, "test_accuracy": 0.9, "herding": None, "stale_fresh": None}
    parts = ("data", "forward", "backward", "ordering", "optimizer", "evaluation")
    line |= {
        "seconds": dict.fromkeys(parts, 0.5 * (number > 0)),
        "cpu_seconds": 2.0 * (number > 0),
        "order_bytes": 8,
        "peak_bytes": 1 << 30,
        "job_bytes": 1 << 20,
    }
    return line | other


def end(epochs: int, state: str = "done", why: str | None = None, **other: Any) -> dict[str, Any]:
    return {"kind": "end", "epochs": epochs, "state": state, "why": why} | other


def write_config(folder: Path, **other: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | other))


def path_of(folder: Path, arm: str, lr: float | str, seed: int) -> Path:
    return folder / "records" / arm / f"lr-{lr}" / f"seed-{seed}.jsonl"


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_job(folder: Path, arm: str, lr: float, seed: int, losses: list[float], **other: Any) -> Path:
    """A finished job whose losses after each epoch (the first: before training) are given."""
    epochs = [epoch(number, loss) for number, loss in enumerate(losses)]
    return write_lines(path_of(folder, arm, lr, seed), [start(arm, lr, seed, **other), *epochs, end(len(losses) - 1)])


def write_run(
    folder: Path,
    speeds: dict[str, float],
    *,
    rates: tuple[float, ...] = (0.1,),
    seeds: int = 5,
    epochs: int = 3,
    **config: Any,
) -> Path:
    """A run whose losses fall by an arm's speed an epoch and rate, with noise that arms of one seed share."""
    write_config(folder, **config)
    for arm, speed in speeds.items():
        for lr in rates:
            for seed in range(seeds):
                rng = np.random.default_rng((seed, round(1000 * lr)))
                noise, own = 0.02 * rng.standard_normal(), 0.002 * np.random.default_rng((seed, *arm.encode())).random()
                at = np.arange(epochs + 1)
                loss = 0.2 + own + noise * (at > 0) + 2.1 * np.exp(-speed * at * lr)
                lines = [start(arm, lr, seed)]
                for number in range(epochs + 1):
                    worth = float(loss[number])
                    seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.2 * (number > 0))
                    seconds |= {"ordering": 0.3 * (number > 0) * (arm not in ("rr", "so")), "evaluation": 1.0}
                    lines.append(
                        epoch(
                            number,
                            worth,
                            valid_loss=worth + 0.03 * lr,
                            valid_accuracy=1 - worth / 4,
                            test_accuracy=1 - worth / 3.9,
                            seconds=seconds,
                            order_bytes=0 if arm == "rr" else 3 * 7850 * 4,
                            herding=10 / (1 + speed * number) if number else None,
                            stale_fresh=1 - 1 / (1 + number) if arm.startswith("grab") and number else None,
                        )
                    )
                write_lines(path_of(folder, arm, lr, seed), [*lines, end(epochs)])
    return folder
