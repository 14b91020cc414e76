"""One job from its first epoch, or from where it stopped, to its end, and what is written of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from ordain import Order
from ordain.errors import MemoryLimitError, OrdainError, OrdainWarning, StateError
from ordain.herding import herding_objective
from ordain.study.runs import probe
from ordain.study.runs.arms import RETRAIN, SOURCE, STORING, Arm, build_order, parse, stored_bytes
from ordain.study.runs.board import Board
from ordain.study.runs.checkpoint import Checkpoints, DamagedCheckpointError
from ordain.study.runs.config import RunConfig
from ordain.study.runs.greedy import too_slow
from ordain.study.runs.job import Job
from ordain.study.runs.loop import epoch_of_steps, make_optimizer, make_schedule
from ordain.study.runs.memory import Memory, order_bytes
from ordain.study.runs.meters import Seconds, evaluate
from ordain.study.runs.ranks import ALONE, Ranks
from ordain.study.runs.shared import check_seed, keep_order, kept_order
from ordain.study.runs.writer import RecordWriter, end_of, lines_of
from ordain.study.tasks import Problem

__all__ = ["Tell", "train"]

# ("epoch" or "checkpoint", epoch, train loss), after it is on disk; ("restarted", 0, None) without its checkpoint
Tell = Callable[[str, int, float | None], None]
_ANEW, _RESUMED, _GO, _OVER = range(4)  # what rank 0 tells the others


def train(
    problem: Problem,
    config: RunConfig,
    job: Job,
    out: Path,
    *,
    tell: Tell,
    checkpoint_every: float = 20.0,
    tensorboard: bool = False,
    ranks: Ranks = ALONE,
) -> str:
    """Run ``job`` to its end and give its state: ``"done"``, ``"diverged"`` or ``"refused"``.

    A record without an end is gone on with from its checkpoint; what was written after that is written again. If the
    checkpoint is damaged, it is removed and the job begun anew. All of ``ranks`` call this; rank 0 alone writes.
    """
    if ranks.rank:
        return _follow(problem, config, job, out, ranks)
    path = job.record(out)
    checkpoints = Checkpoints(job.checkpoint(out), every=checkpoint_every)
    ended = end_of(path)
    if ended is not None:
        checkpoints.remove()  # killed between the last line and this
        ranks.hear(_OVER)
        return str(ended["state"])
    lines, memory = len(lines_of(path)), Memory.begin()
    try:
        saved = checkpoints.load() if lines else None
        if saved is not None and saved["lines"] > lines:
            raise DamagedCheckpointError
        return _train(problem, config, job, out, tell, checkpoints, saved, memory, tensorboard, ranks)
    except DamagedCheckpointError:
        checkpoints.remove()
        tell("restarted", 0, None)
        return _train(problem, config, job, out, tell, checkpoints, None, memory, tensorboard, ranks)


def _train(
    problem: Problem,
    config: RunConfig,
    job: Job,
    out: Path,
    tell: Tell,
    checkpoints: Checkpoints,
    saved: dict[str, Any] | None,
    memory: Memory,
    tensorboard: bool,
    ranks: Ranks,
) -> str:
    path = job.record(out)
    writer = RecordWriter(path, keep=saved["lines"] if saved else 0)
    board = Board(out, job, first=saved["epoch"] + 1 if saved else 0) if tensorboard else None
    try:
        arm = parse(job.arm, group=config.group)
        n, d = len(problem.train_x), _length(problem.build(job.seed))
        if saved is None:
            writer.write(_start(arm, job, config))
        state, why = "refused", _refusal(arm, config, job, out, n, d)
        if why is None:
            ranks.hear(_RESUMED if saved else _ANEW)
            try:
                run = _Training.begin(problem, config, job, arm, out, saved, memory, ranks)
            except MemoryLimitError as error:
                why = str(error)
            else:
                ranks.hear(_GO)
                try:
                    state = run.go(writer, checkpoints, tell, board)
                finally:
                    run.order.detach()
                why = "a loss that is not finite" if state == "diverged" else None
                if arm.order == SOURCE and arm.shares_first and state == "done":  # also to compare numbers of ranks
                    keep_order(run.order, job.order(out))
        more = {"needed_bytes": stored_bytes(arm, n, d)} if state == "refused" and arm.order in STORING else {}
        epochs = sum(line["kind"] == "epoch" for line in lines_of(path)) - 1
        writer.write({"kind": "end", "epochs": max(epochs, 0), "state": state, "why": why, **more})
    finally:
        writer.close()
        if board:
            board.close()
    checkpoints.remove()
    ranks.hear(_OVER)
    return state


def _follow(problem: Problem, config: RunConfig, job: Job, out: Path, ranks: Ranks) -> str:
    """What another rank than 0 does: it trains along, and neither decides nor writes anything."""
    arm, memory = parse(job.arm, group=config.group), Memory.begin()
    checkpoints = Checkpoints(job.checkpoint(out), every=0.0)
    run: _Training | None = None
    while (word := ranks.hear(_OVER)[0]) != _OVER:
        if word == _GO:
            if run is None:
                raise StateError(
                    f"rank {ranks.rank} without the state that rank 0 goes on with",
                    expected=f"to read {job.checkpoint(out)} like rank 0",
                    remedy="Run the same command again.",
                )
            try:
                run.go(None, checkpoints, _silent, None)
            finally:
                run.order.detach()
            continue
        try:
            saved = checkpoints.load() if word == _RESUMED else None  # None too where rank 0 has just removed it
            run = _Training.begin(problem, config, job, arm, out, saved, memory, ranks)
        except (MemoryLimitError, DamagedCheckpointError):  # rank 0 finds the same and says what comes of it
            run = None
    return "done"


def _silent(kind: str, epoch: int, loss: float | None) -> None:
    pass


def _refusal(arm: Arm, config: RunConfig, job: Job, out: Path, n: int, d: int) -> str | None:
    """Why a job is not even begun, or None."""
    if job.arm != RETRAIN:
        return too_slow(arm, config, n, d)
    source = end_of(job.source().record(out))
    if source is None or (source["state"] == "done" and not job.source().order(out).exists()):
        raise StateError(
            f"no finished run of {job.source()}",
            expected=f"one in {out}, whose last order is kept",
            remedy="Run the same command again.",
        )
    return None if source["state"] == "done" else f"GraB's run has {source['state']}, so there is no order to keep"


@dataclass
class _Training:
    """A model, its optimizer and its order, after ``epoch`` epochs; ``config`` has this rank's part of a batch."""

    problem: Problem
    config: RunConfig
    arm: Arm
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.ReduceLROnPlateau | None
    order: Order
    memory: Memory
    ranks: Ranks
    parallel: nn.Module  # the model as it is trained: that of all ranks
    epoch: int = 0
    sent: int = 0  # bytes, until the last epoch
    stale: Tensor | None = None  # the last epoch's per-example gradients, with --herding

    @classmethod
    def begin(
        cls,
        problem: Problem,
        config: RunConfig,
        job: Job,
        arm: Arm,
        out: Path,
        saved: dict[str, Any] | None,
        memory: Memory,
        ranks: Ranks,
    ) -> _Training:
        """From the initial weights of the seed, or from a checkpoint."""
        config = replace(config, batch_size=config.batch_size // ranks.size)
        n, model = len(problem.train_x), problem.build(job.seed).train()
        parallel = ranks.parallel(problem, model, config.batch_size)
        fixed = kept_order(job.source(), out) if job.arm == RETRAIN else None
        order = build_order(arm, parallel, n, seed=job.seed, memory_limit=config.memory_limit, fixed=fixed)
        if saved is None and not ranks.rank:
            check_seed(out, job.seed, model, order if arm.shares_first else None)
        optimizer = make_optimizer(model, config, job.lr)
        schedule = make_schedule(optimizer) if config.plateau else None
        run = cls(problem, config, arm, model, optimizer, schedule, order, memory, ranks, parallel)
        if saved is not None:
            try:
                run._restore(saved)
            except MemoryError:
                raise
            except Exception as error:  # of torch or of the order, as many kinds as there are ways to be wrong
                order.detach()
                raise DamagedCheckpointError from error
        if config.herding and not ranks.rank:
            run.stale = probe.per_example_gradients(problem, model)
        run.sent = order.sent_bytes
        return run

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule:
            self.schedule.load_state_dict(saved["schedule"])
        alone = self.arm.mode == "independent"
        self.order.load_state_dict(saved["order"][self.ranks.rank] if alone else saved["order"])
        self.order.resume(self.order.n)  # the saved epoch is over
        self.epoch = saved["epoch"]

    def go(self, writer: RecordWriter | None, checkpoints: Checkpoints, tell: Tell, board: Board | None) -> str:
        """Epochs until the last, or until the loss is not finite; ``writer`` is rank 0's alone."""
        if self.epoch == 0:
            self._end_epoch(Seconds(), 0.0, writer, tell, board)
        while self.epoch < self.config.epochs:
            seconds, cpu = Seconds(), process_time()
            self.epoch += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OrdainWarning)  # of gradients that are not finite: see below
                try:
                    epoch_of_steps(self.problem, self.config, self.parallel, self.optimizer, self.order, seconds)
                except OrdainError:
                    if all(bool(p.isfinite().all()) for p in self.model.parameters()):
                        raise
            if not self._end_epoch(seconds, process_time() - cpu, writer, tell, board):
                return "diverged"
            if self.epoch < self.config.epochs:
                self._save(writer, checkpoints, tell)
        return "done"

    def _save(self, writer: RecordWriter | None, checkpoints: Checkpoints, tell: Tell) -> None:
        """If it is time to. Ranks with orders of their own hand them to rank 0: one file has all, or none."""
        alone = self.arm.mode == "independent"
        orders = self.ranks.every(self.order.state_dict()) if alone else None
        if writer is not None and checkpoints.save(lambda: self._state(writer.lines, orders)):
            tell("checkpoint", self.epoch, None)

    def _end_epoch(
        self, seconds: Seconds, cpu: float, writer: RecordWriter | None, tell: Tell, board: Board | None
    ) -> bool:
        """Hear from rank 0 whether the losses of training and validation are finite."""
        measured = self._write(seconds, cpu, writer, tell, board) if writer is not None else (False, 0.0)
        finite, valid = self.ranks.hear(*measured)
        if self.schedule and self.epoch and finite:
            self.schedule.step(valid)
        return bool(finite)

    def _write(
        self, seconds: Seconds, cpu: float, writer: RecordWriter, tell: Tell, board: Board | None
    ) -> tuple[bool, float]:
        """Measure and write a line; are the losses of training and validation finite, and what is the latter?"""
        start = perf_counter()
        problem, model = self.problem, self.model
        train = evaluate(problem, model, problem.train_x, problem.train_y)
        valid = evaluate(problem, model, problem.valid_x, problem.valid_y)
        test = None
        if problem.test_x is not None and problem.test_y is not None:
            test = evaluate(problem, model, problem.test_x, problem.test_y)
        finite = all(math.isfinite(score.loss) for score in (train, valid))  # a test set decides nothing
        herding, stale_fresh = self._probe() if finite else (None, None)
        seconds.evaluation += perf_counter() - start
        line = {
            "kind": "epoch",
            "epoch": self.epoch,
            "train_loss": _finite(train.loss),
            "valid_loss": _finite(valid.loss),
            "valid_accuracy": valid.accuracy,
            "test_loss": _finite(test.loss) if test else None,
            "test_accuracy": test.accuracy if test else None,
            "herding": herding,
            "stale_fresh": stale_fresh,
            "seconds": seconds.to_json(),
            "cpu_seconds": round(cpu, 6),
            "order_bytes": order_bytes(self.order, self.arm, len(problem.train_x), _length(model)),
            "peak_bytes": self.memory.peak_bytes(),
            "job_bytes": self.memory.job_bytes(),
            "sent_bytes": self._sent_per_step(),
        }
        writer.write(line)
        if board:
            board.add(line)
        tell("epoch", self.epoch, _finite(train.loss))
        return finite, valid.loss

    def _sent_per_step(self) -> int:
        """Bytes that the order has sent from this rank in a step: the mean over the last epoch."""
        sent, self.sent = self.order.sent_bytes - self.sent, self.order.sent_bytes
        return round(sent / -(-len(self.problem.train_x) // (self.config.batch_size * self.ranks.size)))

    def _probe(self) -> tuple[float | None, float | None]:
        """The herding objective of the epoch's order at the weights it ends with, and how stale gradients were."""
        if self.stale is None or self.epoch == 0:
            return None, None
        fresh = probe.per_example_gradients(self.problem, self.model)
        objective = None
        if self.arm.shares_first or self.arm.name == RETRAIN:  # a permutation
            objective = herding_objective(fresh, self.order.history(self.order.epoch))
        correlation = probe.stale_fresh(self.stale, fresh)
        self.stale = fresh
        return objective, correlation

    def _state(self, lines: int, orders: list[dict[str, Any]] | None) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "lines": lines,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "order": self.order.state_dict() if orders is None else orders,
        }


def _start(arm: Arm, job: Job, config: RunConfig) -> dict[str, Any]:
    return {
        "kind": "start",
        "arm": arm.name,
        "label": arm.label,
        "order": arm.order,
        "lr": job.lr,
        "seed": job.seed,
        "group": arm.group,
        "threads": config.threads,
        "ranks": arm.ranks,
        "mode": arm.mode if arm.ranks > 1 else None,
    }


def _length(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
