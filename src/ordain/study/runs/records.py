"""Read a training run's folder into pandas tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.runs.arms import plain_name
from ordain.study.runs.record_lines import DONE, PARTS, End, Epoch, Record, Start, read_records
from ordain.study.runs.run_folder import TRAINING, Header, read_header

_KEY = ["arm", "lr", "seed"]
_STARTED = [name for name in Start.model_fields if name not in ("kind", *_KEY)]
_ENDED = [name for name in End.model_fields if name not in ("kind", "epochs", "state")]
_MEASURED = [name for name in Epoch.model_fields if name not in ("kind", "epoch", "seconds")]


@dataclass(frozen=True)
class Arm:
    """One arm of a run and the learning rates it was run at, in increasing order."""

    name: str
    label: str
    order: str
    rates: tuple[float, ...] = ()
    ranks: int = 1
    mode: str | None = None


@dataclass(frozen=True)
class Run:
    """A training run; arms are in the registry's order, random reshuffling first."""

    folder: Path  # where
    header: Header  # its config.json
    arms: dict[str, Arm]  # by name
    # One row per job, indexed by (arm, lr, seed): settings, state, and the measurements of its last epoch.
    jobs: pd.DataFrame
    # One row per epoch, indexed by (arm, lr, seed, epoch): measurements, seconds of each part of the step, and
    # training_seconds, their sum without evaluation.
    epochs: pd.DataFrame

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings."""
        return self.header.config

    @cached_property
    def done(self) -> pd.DataFrame:
        """The finished jobs."""
        return self.jobs[self.jobs.state == DONE]

    @cached_property
    def length(self) -> int:
        """The number of epochs of a complete job: the maximum over finished jobs."""
        return 0 if self.done.empty else int(self.done.epoch.max())


def select(table: pd.DataFrame, arm: str, lr: float | None = None) -> pd.DataFrame:
    """Rows of one arm (at one rate) in ``jobs`` or ``epochs``, without these levels of the index."""
    found = table[table.index.get_level_values("arm") == arm].droplevel("arm")
    return found if lr is None else found[found.index.get_level_values("lr") == lr].droplevel("lr")


def read_run(folder: Path) -> Run:
    """Read everything that a training run has written so far.

    Raises:
        InputError: no such folder, another kind of study, or a record that does not fit the format.
    """
    header = read_header(folder)
    if header.kind != TRAINING:
        raise InputError(
            f"{folder}, a study of kind {header.kind!r}",
            expected="a training run",
            remedy="Use `ordain report`, which reads all studies.",
        )
    jobs, epochs = tables(read_records(folder))
    arms = [_arm(name, of) for name, of in jobs.groupby("arm", sort=False)]
    labels = [arm.label for arm in arms]
    told_apart = [
        replace(arm, label=f"{arm.label} ({arm.name})") if labels.count(arm.label) > 1 else arm for arm in arms
    ]
    return Run(folder, header, {arm.name: arm for arm in told_apart}, jobs, epochs)


def tables(records: Iterable[Record]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ``jobs`` and ``epochs`` tables of a :class:`Run`."""
    jobs, epochs = [], []
    for record in sorted(records, key=lambda record: (*_place(record.job.arm), record.job.lr, record.job.seed)):
        key = (record.job.arm, record.job.lr, record.job.seed)
        start, end = record.start, record.end
        ended = [getattr(end, name, None) for name in _ENDED]
        jobs.append((*key, *(getattr(start, name, None) for name in _STARTED), record.state, *ended))
        for line in record.epochs:
            numbers = [getattr(line, name) for name in _MEASURED]
            epochs.append(
                (*key, line.epoch, *numbers, *(line.seconds.get(part, 0.0) for part in (*PARTS, "evaluation")))
            )
    measured = pd.DataFrame(epochs, columns=[*_KEY, "epoch", *_MEASURED, *PARTS, "evaluation"])
    measured = measured.set_index([*_KEY, "epoch"]).astype(float)
    measured["training_seconds"] = measured[list(PARTS)].sum(axis=1)
    listed = pd.DataFrame(jobs, columns=[*_KEY, *_STARTED, "state", *_ENDED]).set_index(_KEY)
    doubled = listed.index[listed.index.duplicated()]
    if len(doubled):
        arm, lr, seed = doubled[0]
        raise InputError(
            f"two records of {arm}, rate {lr:g}, seed {seed}",
            expected="one file per job",
            remedy="Remove one of them: their paths write the rate or the seed differently.",
        )
    last = measured.reset_index("epoch").astype({"epoch": float}).groupby(_KEY, sort=False).tail(1)
    return listed.join(last), measured


def _arm(name: str, jobs: pd.DataFrame) -> Arm:
    begun = jobs[jobs.order.notna()]
    rates = tuple(dict.fromkeys(jobs.index.get_level_values("lr")))
    if begun.empty:
        return Arm(name, name, plain_name(name), rates)
    first = begun.iloc[0]
    ranks, mode = int(first.ranks or 1), first["mode"] if isinstance(first["mode"], str) else None
    return Arm(name, first.label.strip() or name, first.order, rates, ranks, mode)


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key: the registry's order, variants after their base (rr, rr+2, grab, grab@8, grab@64), then the rest."""
    known = list(ORDERS)
    base = plain_name(name)
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    return known.index(base) if base in known else len(known), numbers
