"""Jobs: one arm at one learning rate with one seed, its files, and the order in which jobs run.

Its files, besides its record: checkpoint, order of the last epoch, and the digest of its seed's weights.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, StringConstraints
from pydantic.dataclasses import dataclass
from torch import nn

from ordain import Order, RandomReshuffling
from ordain.errors import InputError, StateError
from ordain.study.files import STRICT, replacing, validated, write_bytes
from ordain.study.runs.arms import RETRAIN, SOURCE, baseline_of, is_baseline
from ordain.study.runs.config import RunConfig

# Arm names are used as folder names, file names and HTML anchors.
ArmName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9@._+-]{0,63}$")]


TUNING_SEEDS = 2  # under protocol "each"
# Folders of a run. A checkpoint exists only while its job is unfinished; orders are those of the last epoch of the arm
# that ``"retrain"`` reuses; tensorboard holds a folder for each job.
FILES = {"records": ".jsonl", "checkpoints": ".pt", "orders": ".npy", "tensorboard": ""}


@dataclass(config=STRICT, frozen=True)
class Job:
    """One training run of one arm."""

    arm: ArmName
    lr: PositiveFloat
    seed: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.arm}, lr {self.lr!r}, seed {self.seed}"

    def file(self, out: Path, kind: str) -> Path:
        """Path of its file of a kind in ``FILES``."""
        return out / kind / self.arm / f"lr-{self.lr!r}" / f"seed-{self.seed}{FILES[kind]}"

    def record(self, out: Path) -> Path:
        """Path of its record."""
        return self.file(out, "records")

    def source(self) -> Job:
        """The GraB job whose last order a ``"retrain"`` job uses."""
        return Job(SOURCE, self.lr, self.seed)


class Message(NamedTuple):
    """A message from a job; sent after what it tells is on disk."""

    kind: Literal["begun", "restarted", "epoch", "checkpoint", "finished", "failed"]  # what happened
    job: Job  # which job
    epoch: int = 0  # for "epoch" and "checkpoint"
    loss: float | None = None  # on the training set, for "epoch"; None if it is not finite
    state: str = ""  # for "finished"
    trace: str = ""  # for "failed"


Hear = Callable[[Message], None]


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

    ``best`` is the best rate of each RR (protocol ``"paper"``) or of each arm (``"each"``); None until the jobs
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


_SHARE = 20
_KEYS = {"epoch", "lines", "model", "optimizer", "schedule", "decay", "average", "order"}


class DamagedCheckpointError(Exception):
    """The checkpoint cannot be loaded; the job must restart."""


class Checkpoints:
    """The checkpoint of one job.

    Saving n gradients (Greedy, Herding) can take seconds and gigabytes, so after a checkpoint that took t seconds the
    next one is at least 20 t later; ``every`` is the minimum in seconds, and 0 saves after every epoch.
    """

    def __init__(self, path: Path, *, every: float) -> None:
        self._path, self._every = path, every
        self._last, self._took = time.monotonic(), 0.0

    def load(self) -> dict[str, Any] | None:
        """Load the checkpoint, or None if there is none."""
        if not self._path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self._path, weights_only=True)
            if state.keys() != _KEYS or not state["lines"] == state["epoch"] + 2 >= 3:  # a start line, epochs 0 and 1
                raise DamagedCheckpointError
        except (OSError, MemoryError):  # a problem of the machine, not of the file
            raise
        except Exception as error:  # torch raises many kinds of errors for damaged files
            raise DamagedCheckpointError from error
        return state

    def save(self, state: Callable[[], dict[str, Any]]) -> bool:
        """Save ``state()`` if enough time has passed; returns whether it did."""
        start = time.monotonic()
        if self._every and start - self._last < max(self._every, _SHARE * self._took):
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            torch.save(state(), file)
        self._last = time.monotonic()
        self._took = self._last - start
        return True

    def remove(self) -> None:
        """Delete the checkpoint."""
        self._path.unlink(missing_ok=True)


def check_seed(out: Path, seed: int, model: nn.Module, order: Order | None) -> None:
    """Check that all arms of a seed share the initial weights and the first epoch; otherwise raise StateError."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    path = out / "seeds" / f"seed-{seed}.json"
    mine = {"weights": digest.hexdigest()}
    if path.exists():
        if validated(dict[str, Any], path.read_bytes(), str(path)) != mine:
            raise StateError(
                f"different initial weights for seed {seed} from those of earlier arms",
                expected="the same weights, according to the digest in seeds/",
                remedy="Use the versions listed in config.json, or a new folder.",
            )
    else:
        write_bytes(path, json.dumps(mine).encode())
    if order is None:
        return
    first = RandomReshuffling(order.n, seed=seed, distributed=False).history(0)
    if not np.array_equal(order.history(0), first):
        raise StateError(
            f"{order!r}, whose first epoch is different",
            expected="the first epoch shared by all orders of a seed",
            remedy="This is a bug in that order; please report it.",
        )


def keep_order(order: Order, path: Path) -> None:
    """Save the order of the last epoch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.save(file, order.history(order.epoch).astype(np.int32))


def kept_order(job: Job, out: Path) -> NDArray[Any]:
    """Load the order that :func:`keep_order` saved for ``job``."""
    path = job.file(out, "orders")
    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path}, which is not a complete .npy file",
            expected="the order of GraB's last epoch",
            remedy=f"Delete it and {job.record(out)}; running the same command creates both again.",
        ) from error
    return found
