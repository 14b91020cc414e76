"""One job: an arm at a rate with a seed, and where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ordain.study.runs.arms import RETRAIN, SOURCE, baseline_of, is_baseline
from ordain.study.runs.config import RunConfig

__all__ = ["Job", "stages"]


@dataclass(frozen=True)
class Job:
    """What one worker trains from beginning to end."""

    arm: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm}, lr {self.lr!r}, seed {self.seed}"

    def _file(self, out: Path, kind: str, suffix: str) -> Path:
        return out / kind / self.arm / f"lr-{self.lr!r}" / f"seed-{self.seed}{suffix}"

    def record(self, out: Path) -> Path:
        """What it measured."""
        return self._file(out, "records", ".jsonl")

    def checkpoint(self, out: Path) -> Path:
        """Where it goes on; only while it runs."""
        return self._file(out, "checkpoints", ".pt")

    def order(self, out: Path) -> Path:
        """The order of its last epoch, kept for ``"retrain"``."""
        return self._file(out, "orders", ".npy")

    def source(self) -> Job:
        """The GraB run whose last order a ``"retrain"`` job keeps."""
        return Job(SOURCE, self.lr, self.seed)


def stages(config: RunConfig, best: Mapping[str, float] | None) -> list[list[Job]]:
    """Jobs by what must be finished before them; in a stage, seeds are outermost, so that noise hits all arms alike.

    Args:
        config: of the run.
        best: under the protocol ``"paper"``, the best rate of each RR by name; None as long as one is not finished.
    """
    last = [arm for arm in config.arms if arm == RETRAIN]
    if config.protocol == "tuned":
        first = [arm for arm in config.arms if arm != RETRAIN]
        return [_jobs(config, first, config.rates), _jobs(config, last, config.rates)]
    baselines = [arm for arm in config.arms if is_baseline(arm)]
    others = [arm for arm in config.arms if arm not in (*baselines, RETRAIN)]
    tuned = _jobs(config, baselines, config.rates)
    if best is None:
        return [tuned]
    return [
        tuned,
        *([_at_best(arm, config, best, seed) for seed in config.seeds for arm in arms] for arms in (others, last)),
    ]


def _at_best(arm: str, config: RunConfig, best: Mapping[str, float], seed: int) -> Job:
    """At the best rate of the RR that the arm is compared with: the one of the same units, where there is one."""
    baseline = baseline_of(arm, config.arms)
    if baseline is None:
        raise AssertionError(f"{arm} without an RR was let through")
    return Job(arm, best[baseline], seed)


def _jobs(config: RunConfig, arms: Sequence[str], rates: Sequence[float]) -> list[Job]:
    return [Job(arm, lr, seed) for seed in config.seeds for lr in rates for arm in arms]
