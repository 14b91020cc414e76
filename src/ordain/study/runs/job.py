"""Jobs: one arm at one learning rate with one seed, its files, and the order in which jobs run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, StringConstraints
from pydantic.dataclasses import dataclass

from ordain.errors import InputError
from ordain.study.files import STRICT
from ordain.study.runs.arms import RETRAIN, SOURCE, baseline_of, is_baseline
from ordain.study.runs.config import RunConfig

# Arm names are used as folder names, file names and HTML anchors.
ArmName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9@._+-]{0,63}$")]


TUNING_SEEDS = 2  # under protocol "each"


@dataclass(config=STRICT, frozen=True)
class Job:
    """One training run of one arm."""

    arm: ArmName
    lr: PositiveFloat
    seed: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.arm}, lr {self.lr!r}, seed {self.seed}"

    def _file(self, out: Path, kind: str, suffix: str) -> Path:
        return out / kind / self.arm / f"lr-{self.lr!r}" / f"seed-{self.seed}{suffix}"

    def record(self, out: Path) -> Path:
        """Path of its record."""
        return self._file(out, "records", ".jsonl")

    def checkpoint(self, out: Path) -> Path:
        """Path of its checkpoint, which exists only while the job is unfinished."""
        return self._file(out, "checkpoints", ".pt")

    def order(self, out: Path) -> Path:
        """Path of the order of its last epoch, saved for ``"retrain"``."""
        return self._file(out, "orders", ".npy")

    def board(self, out: Path) -> Path:
        """Folder of its TensorBoard log."""
        return self._file(out, "tensorboard", "")

    def source(self) -> Job:
        """The GraB job whose last order a ``"retrain"`` job uses."""
        return Job(SOURCE, self.lr, self.seed)


def job_of(path: Path) -> Job:
    """Parse the path of a record file."""
    rate, seed = path.parent.name.removeprefix("lr-"), path.stem.removeprefix("seed-")
    try:
        return Job(path.parent.parent.name, float(rate), int(seed))
    except ValueError:
        raise InputError(
            f"{path}",
            expected="records/<arm>/lr-<rate>/seed-<seed>.jsonl, the arm of small letters, digits and @ . _ + -",
            remedy="Rename or remove the file.",
        ) from None


def best_rate(losses: Mapping[float, Sequence[float | None]]) -> float | None:
    """The rate with the lowest mean loss; rates with a None (a diverged seed) are excluded, ties go to the larger.

    >>> best_rate({0.1: [0.5, None], 0.01: [0.3, 0.2], 0.001: [0.25, 0.25]})
    0.01
    """
    means = {lr: float(np.mean([x for x in of if x is not None])) for lr, of in losses.items() if of and None not in of}
    return min(means, key=lambda lr: (means[lr], -lr)) if means else None


def stages(config: RunConfig, best: Mapping[str, float] | None) -> list[list[Job]]:
    """Group jobs into stages that run one after the other; within a stage, seeds are the outer loop.

    Args:
        config: the run's configuration.
        best: by name the best rate of each RR (protocol ``"paper"``) or of each arm (``"each"``); None until the jobs
            that decide it are finished.
    """
    last = [arm for arm in config.arms if arm == RETRAIN]
    if config.protocol == "each":
        tuning = _jobs(replace(config, seeds=config.seeds[:TUNING_SEEDS]), config.arms)
        rest = [] if best is None else [(arm, best[arm]) for arm in config.arms if arm in best]
        return [tuning, [Job(arm, lr, seed) for seed in config.seeds[TUNING_SEEDS:] for arm, lr in rest]]
    if config.protocol == "tuned":
        first = [arm for arm in config.arms if arm != RETRAIN]
        return [_jobs(config, first), _jobs(config, last)]
    tuned = _jobs(config, [arm for arm in config.arms if is_baseline(arm)])
    if best is None:
        return [tuned]
    others = [arm for arm in config.arms if not is_baseline(arm) and arm != RETRAIN]
    # Each arm runs at the best rate of its baseline.
    rates = {arm: best[baseline_of(arm, config.arms) or ""] for arm in (*others, *last)}
    return [tuned, *([Job(arm, rates[arm], seed) for seed in config.seeds for arm in arms] for arms in (others, last))]


def _jobs(config: RunConfig, arms: Sequence[str]) -> list[Job]:
    return [Job(arm, lr, seed) for seed in config.seeds for lr in config.rates for arm in arms]
