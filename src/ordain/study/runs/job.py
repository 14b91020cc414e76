"""One job: an arm at a rate with a seed, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ordain.study.runs.arms import BASELINE, RETRAIN, SOURCE
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


def stages(config: RunConfig, best: float | None) -> list[list[Job]]:
    """Jobs by what must be finished before them; in a stage, seeds are outermost, so that noise hits all arms alike.

    Args:
        config: of the run.
        best: RR's best rate under the protocol ``"paper"``; None as long as RR is not finished.
    """
    others = [arm for arm in config.arms if arm not in (BASELINE, RETRAIN)]
    last = [arm for arm in config.arms if arm == RETRAIN]
    if config.protocol == "tuned":
        first = [arm for arm in config.arms if arm != RETRAIN]
        return [_jobs(config, first, config.rates), _jobs(config, last, config.rates)]
    baseline = _jobs(config, [BASELINE], config.rates)
    if best is None:
        return [baseline]
    return [baseline, _jobs(config, others, (best,)), _jobs(config, last, (best,))]


def _jobs(config: RunConfig, arms: list[str], rates: tuple[float, ...]) -> list[Job]:
    return [Job(arm, lr, seed) for seed in config.seeds for lr in rates for arm in arms]
