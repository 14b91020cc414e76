"""The one reader of a run's folder: what was asked for, and what each job has written so far.

A folder holds ``config.json`` and ``records/<arm>/lr-<rate>/seed-<seed>.jsonl``: a start line, a line an epoch
(epoch 0 is before training), and an end line. A file without an end is unfinished; a last line that was cut off by
a crash is left out. Anything else that does not fit is an error that names the file and the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study.runs.arms import plain_name
from ordain.study.runs.fields import Fields, read_object
from ordain.study.runs.header import TRAINING, Header, read_header

__all__ = ["DONE", "PARTS", "UNFINISHED", "Arm", "Epoch", "Job", "Run", "read_job", "read_run"]

DONE, UNFINISHED = "done", "unfinished"
PARTS = ("data", "forward", "backward", "ordering", "optimizer")  # of a training step; evaluation is no part of it
_STATES = (DONE, "diverged", "refused")
_ARM = re.compile(r"[a-z0-9][a-z0-9@._+-]{0,63}", re.ASCII)  # a name of a folder, an anchor and a file: nothing else


@dataclass(frozen=True)
class Epoch:
    """What was measured after one epoch; None where it was not, or was not finite.

    Attributes:
        epoch: 0 is before training.
        train_loss: over the whole training set, as are the others over theirs.
        valid_loss: mean over examples (and tokens).
        valid_accuracy: in [0, 1].
        test_loss: as ``valid_loss``.
        test_accuracy: in [0, 1].
        herding: the herding objective (Eq. 3) of the epoch's gradients in the epoch's order.
        stale_fresh: correlation of the stale gradients that decided the order with those of the epoch.
        seconds: of this epoch alone, by part of the step, and ``evaluation``.
        cpu_seconds: of this epoch's training, of the process and all its threads; waiting is not in it.
        order_bytes: what the order held.
        peak_bytes: the most memory the process has used.
        job_bytes: how far that is above what it used when the job began.
        sent_bytes: what the order of rank 0 sent to other ranks in a step, mean over the epoch.
    """

    epoch: int
    train_loss: float | None
    valid_loss: float | None
    valid_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    herding: float | None
    stale_fresh: float | None
    seconds: Mapping[str, float]
    cpu_seconds: float | None
    order_bytes: int | None
    peak_bytes: int | None
    job_bytes: int | None
    sent_bytes: int | None = None

    @property
    def training_seconds(self) -> float:
        """Of this epoch, without evaluation."""
        return sum(self.seconds.get(part, 0.0) for part in PARTS)


@dataclass(frozen=True)
class Job:
    """One arm at one rate with one seed.

    Attributes:
        arm: "grab", or with a suffix for an ablation, "grab@64".
        label: what people call it.
        order: the name in :data:`ordain.orders.ORDERS`; "" if the start line is not there yet.
        lr: the learning rate.
        seed: of the weights and of the order.
        group: examples in a unit of ordering.
        threads: of torch.
        ranks: processes that trained together.
        mode: how the order worked with the other ranks; None if there were none.
        epochs: in order, from 0.
        state: "done", "diverged", "refused" or "unfinished".
        why: in words, where the state has a reason.
        needed_bytes: what a refused order would have stored, if known.
    """

    arm: str
    label: str
    order: str
    lr: float
    seed: int
    group: int = 1
    threads: int | None = None
    ranks: int = 1
    mode: str | None = None
    epochs: tuple[Epoch, ...] = ()
    state: str = UNFINISHED
    why: str | None = None
    needed_bytes: int | None = None

    @property
    def training_seconds(self) -> float:
        """Of all its epochs, without evaluation."""
        return sum(epoch.training_seconds for epoch in self.epochs)


@dataclass(frozen=True)
class Arm:
    """One order (or variant of one) at every rate and seed that was run: ``rates[rate][seed]``."""

    name: str
    label: str
    order: str
    rates: Mapping[float, Mapping[int, Job]]

    @property
    def jobs(self) -> list[Job]:
        """All of them, by rate and seed."""
        return [job for seeds in self.rates.values() for job in seeds.values()]


@dataclass(frozen=True)
class Run:
    """A folder of training records; arms in the registry's order, random reshuffling first."""

    folder: Path
    header: Header
    arms: Mapping[str, Arm]

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the run, as they were given."""
        return self.header.config


def read_run(folder: Path) -> Run:
    """Everything that a training run has written so far.

    Raises:
        InputError: no such folder, another kind of study, or a record that does not fit the format.
    """
    header = read_header(folder)
    if header.kind != TRAINING:
        raise InputError(
            f"{folder}, a study of kind {header.kind!r}",
            expected="a training run",
            remedy="Its own study reads it: see `ordain report`.",
        )
    arms: dict[str, list[Job]] = {}
    for path in _record_files(folder / "records"):
        job = read_job(path)
        arms.setdefault(job.arm, []).append(job)
    made = sorted((_arm(name, jobs) for name, jobs in arms.items()), key=_place)
    labels = [arm.label for arm in made]
    told_apart = (
        replace(arm, label=f"{arm.label} ({arm.name})") if labels.count(arm.label) > 1 else arm for arm in made
    )
    return Run(folder, header, {arm.name: arm for arm in told_apart})


def read_job(path: Path) -> Job:
    """One record file. Its arm, rate and seed are in its path, and again in its first line."""
    job = _from_path(path)
    content = path.read_bytes()
    lines = content.splitlines()
    if lines and not content.endswith(b"\n") and not _is_whole(lines[-1]):
        lines.pop()  # being written, or cut off by a crash
    epochs: list[Epoch] = []
    ended = False
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        fields = Fields(read_object(line, where), where)
        kind = fields.choice("kind", ("start", "epoch", "end"))
        if ended or (kind == "start") != (number == 1):
            raise InputError(
                f"{kind!r} at {where}",
                expected="one start line, then epochs, then one end line",
                remedy="Delete the file and run again: that job alone is repeated.",
            )
        if kind == "start":
            job = _started(job, fields)
        elif kind == "epoch":
            epochs.append(_epoch(fields, expected=len(epochs)))
        else:
            job, ended = _ended(job, fields, epochs), True
    return replace(job, epochs=tuple(epochs))


def _is_whole(line: bytes) -> bool:
    try:
        return bool(read_object(line, ""))
    except InputError:
        return False


def _record_files(records: Path) -> Iterator[Path]:
    if not records.is_dir():
        return
    for path in sorted(records.glob("*/lr-*/seed-*.jsonl")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(records).parts):
            yield path


def _from_path(path: Path) -> Job:
    arm, rate, seed = path.parent.parent.name, path.parent.name.removeprefix("lr-"), path.stem.removeprefix("seed-")
    if not _ARM.fullmatch(arm):
        raise InputError(
            f"a folder of records named {arm!r}",
            expected="a name of small letters, digits and @ . _ + -",
            remedy=f"Rename or remove {path.parent.parent}.",
        )
    try:
        lr, number = float(rate), int(seed)
    except ValueError:
        lr, number = 0.0, -1
    if not 0 < lr < float("inf") or number < 0:
        raise InputError(
            f"{path}", expected="records/<arm>/lr-<rate>/seed-<seed>.jsonl", remedy="Rename or remove the file."
        )
    return Job(arm=arm, label=arm, order="", lr=lr, seed=number)


def _started(job: Job, fields: Fields) -> Job:
    inside = (fields.text("arm"), fields.number("lr"), fields.integer("seed"))
    if inside != (job.arm, job.lr, job.seed):
        raise InputError(
            f"arm, lr, seed = {inside} at {fields.where}",
            expected=f"those of its path, {(job.arm, job.lr, job.seed)}",
            remedy="Was the file moved? Put it back.",
        )
    return replace(
        job,
        label=fields.text("label").strip() or job.arm,
        order=fields.text("order"),
        group=fields.integer("group"),
        threads=fields.maybe_integer("threads"),
        ranks=fields.maybe_integer("ranks") or 1,
        mode=fields.maybe_text("mode"),
    )


def _epoch(fields: Fields, *, expected: int) -> Epoch:
    found = fields.integer("epoch")
    if found != expected:
        raise InputError(
            f"epoch {found} at {fields.where}",
            expected=f"epoch {expected}",
            remedy="Delete the file and run again: that job alone is repeated.",
        )
    seconds = Fields(fields.mapping("seconds"), f"{fields.where}, seconds")
    return Epoch(
        epoch=found,
        train_loss=fields.maybe_number("train_loss"),
        valid_loss=fields.maybe_number("valid_loss"),
        valid_accuracy=fields.maybe_share("valid_accuracy"),
        test_loss=fields.maybe_number("test_loss"),
        test_accuracy=fields.maybe_share("test_accuracy"),
        herding=fields.maybe_number("herding"),
        stale_fresh=fields.maybe_number("stale_fresh"),
        seconds={part: seconds.count(part) for part in (*PARTS, "evaluation") if part in seconds.values},
        cpu_seconds=fields.maybe_number("cpu_seconds"),
        order_bytes=fields.maybe_integer("order_bytes"),
        peak_bytes=fields.maybe_integer("peak_bytes"),
        job_bytes=fields.maybe_integer("job_bytes"),
        sent_bytes=fields.maybe_integer("sent_bytes"),
    )


def _ended(job: Job, fields: Fields, epochs: list[Epoch]) -> Job:
    state = fields.choice("state", _STATES)
    if state == DONE and (not epochs or epochs[-1].train_loss is None):
        raise InputError(
            f"the state 'done' at {fields.where}, after no epoch with a loss",
            expected="an epoch before it whose train_loss is a number",
            remedy="Delete the file and run again: that job alone is repeated.",
        )
    return replace(job, state=state, why=fields.maybe_text("why"), needed_bytes=fields.maybe_integer("needed_bytes"))


def _arm(name: str, jobs: list[Job]) -> Arm:
    rates: dict[float, dict[int, Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.lr, job.seed)):
        at_rate = rates.setdefault(job.lr, {})
        if job.seed in at_rate:
            raise InputError(
                f"two records of {name}, rate {job.lr:g}, seed {job.seed}",
                expected="one file a job",
                remedy="Remove one of them: the rate or the seed is written in two ways.",
            )
        at_rate[job.seed] = job
    begun = next((job for job in jobs if job.order), jobs[0])
    return Arm(name, begun.label, begun.order or plain_name(name), rates)


def _place(arm: Arm) -> tuple[int, list[tuple[int, str]]]:
    """As in the registry, variants after what they vary: rr, rr+2, ..., grab, grab@8, grab@64, ..., anything else."""
    known = list(ORDERS)
    base = plain_name(arm.name)
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", arm.name)]
    return known.index(base) if base in known else len(known), numbers
