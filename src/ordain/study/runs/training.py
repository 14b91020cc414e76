"""One job from its first epoch, or from where it stopped, to its end: the README's loop, and what is written of it."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from ordain import Order, RandomReshuffling
from ordain.errors import InputError, MemoryLimitError, OrdainError, OrdainWarning, StateError
from ordain.herding import herding_objective
from ordain.study.files import replacing, write_bytes
from ordain.study.runs import probe
from ordain.study.runs.arms import RETRAIN, SOURCE, STORING, Arm, build_order, parse, stored_bytes
from ordain.study.runs.board import Board
from ordain.study.runs.checkpoint import Checkpoints, DamagedCheckpointError
from ordain.study.runs.config import RunConfig
from ordain.study.runs.fields import read_object
from ordain.study.runs.greedy import too_slow
from ordain.study.runs.job import Job
from ordain.study.runs.meters import Seconds, evaluate, order_bytes, peak_bytes, reset_peak
from ordain.study.runs.writer import RecordWriter, end_of, lines_of
from ordain.study.tasks import Problem

__all__ = ["Tell", "epoch_of_steps", "make_optimizer", "train"]

# ("epoch" or "checkpoint", epoch, train loss), after it is on disk; ("restarted", 0, None) without its checkpoint
Tell = Callable[[str, int, float | None], None]


def train(
    problem: Problem,
    config: RunConfig,
    job: Job,
    out: Path,
    *,
    tell: Tell,
    checkpoint_every: float = 20.0,
    tensorboard: bool = False,
) -> str:
    """Run ``job`` to its end and give its state: ``"done"``, ``"diverged"`` or ``"refused"``.

    A record without an end is gone on with from its checkpoint; what was written after that is written again. If the
    checkpoint is damaged, it is removed and the job begun anew.
    """
    path = job.record(out)
    checkpoints = Checkpoints(job.checkpoint(out), every=checkpoint_every)
    ended = end_of(path)
    if ended is not None:
        checkpoints.remove()  # killed between the last line and this
        return str(ended["state"])
    reset_peak()
    lines = len(lines_of(path))
    try:
        saved = checkpoints.load() if lines else None
        if saved is not None and saved["lines"] > lines:
            raise DamagedCheckpointError
        return _train(problem, config, job, out, tell, checkpoints, saved, tensorboard)
    except DamagedCheckpointError:
        checkpoints.remove()
        tell("restarted", 0, None)
        return _train(problem, config, job, out, tell, checkpoints, None, tensorboard)


def _train(
    problem: Problem,
    config: RunConfig,
    job: Job,
    out: Path,
    tell: Tell,
    checkpoints: Checkpoints,
    saved: dict[str, Any] | None,
    tensorboard: bool,
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
            try:
                run = _Training.begin(problem, config, job, arm, out, saved)
            except MemoryLimitError as error:
                why = str(error)
            else:
                try:
                    state = run.go(writer, checkpoints, tell, board)
                finally:
                    run.order.detach()
                why = "a loss that is not finite" if state == "diverged" else None
                if job.arm == SOURCE and state == "done":
                    _keep_order(run.order, job.order(out))
        more = {"needed_bytes": stored_bytes(arm, n, d)} if state == "refused" and arm.order in STORING else {}
        epochs = sum(line["kind"] == "epoch" for line in lines_of(path)) - 1
        writer.write({"kind": "end", "epochs": max(epochs, 0), "state": state, "why": why, **more})
    finally:
        writer.close()
        if board:
            board.close()
    checkpoints.remove()
    return state


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
    """A model, its optimizer and its order, after ``epoch`` epochs."""

    problem: Problem
    config: RunConfig
    arm: Arm
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.ReduceLROnPlateau | None
    order: Order
    epoch: int = 0
    stale: Tensor | None = None  # the last epoch's per-example gradients, with --herding

    @classmethod
    def begin(
        cls, problem: Problem, config: RunConfig, job: Job, arm: Arm, out: Path, saved: dict[str, Any] | None
    ) -> _Training:
        """From the initial weights of the seed, or from a checkpoint."""
        n, model = len(problem.train_x), problem.build(job.seed).train()
        fixed = _kept_order(job.source(), out) if job.arm == RETRAIN else None
        order = build_order(arm, model, n, seed=job.seed, memory_limit=config.memory_limit, fixed=fixed)
        if saved is None:
            _check_seed(out, job.seed, model, order if arm.shares_first else None)
        optimizer = make_optimizer(model, config, job.lr)
        schedule = _schedule(optimizer) if config.plateau else None
        run = cls(problem, config, arm, model, optimizer, schedule, order)
        if saved is not None:
            try:
                run._restore(saved)
            except MemoryError:
                raise
            except Exception as error:  # of torch or of the order, as many kinds as there are ways to be wrong
                order.detach()
                raise DamagedCheckpointError from error
        if config.herding:
            run.stale = probe.per_example_gradients(problem, model)
        return run

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule:
            self.schedule.load_state_dict(saved["schedule"])
        self.order.load_state_dict(saved["order"])
        self.order.resume(len(self.problem.train_x))  # the saved epoch is over
        self.epoch = saved["epoch"]

    def go(self, writer: RecordWriter, checkpoints: Checkpoints, tell: Tell, board: Board | None) -> str:
        """Epochs until the last, or until the loss is not finite."""
        if self.epoch == 0:
            self._write(Seconds(), writer, tell, board)
        while self.epoch < self.config.epochs:
            seconds = Seconds()
            self.epoch += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OrdainWarning)  # of gradients that are not finite: see below
                try:
                    epoch_of_steps(self.problem, self.config, self.model, self.optimizer, self.order, seconds)
                except OrdainError:
                    if all(bool(p.isfinite().all()) for p in self.model.parameters()):
                        raise
            if not self._write(seconds, writer, tell, board):
                return "diverged"
            if self.epoch < self.config.epochs and checkpoints.save(lambda: self._state(writer.lines)):
                tell("checkpoint", self.epoch, None)
        return "done"

    def _write(self, seconds: Seconds, writer: RecordWriter, tell: Tell, board: Board | None) -> bool:
        """Measure, write a line, and say whether the losses of training and validation are finite."""
        start = perf_counter()
        problem, model = self.problem, self.model
        train = evaluate(problem, model, problem.train_x, problem.train_y)
        valid = evaluate(problem, model, problem.valid_x, problem.valid_y)
        test = None
        if problem.test_x is not None and problem.test_y is not None:
            test = evaluate(problem, model, problem.test_x, problem.test_y)
        finite = all(math.isfinite(score.loss) for score in (train, valid))  # a test set decides nothing
        herding, stale_fresh = self._probe() if finite else (None, None)
        if self.schedule and self.epoch and finite:
            self.schedule.step(valid.loss)
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
            "order_bytes": order_bytes(self.order, self.arm, len(problem.train_x), _length(model)),
            "peak_bytes": peak_bytes(),
        }
        writer.write(line)
        if board:
            board.add(line)
        tell("epoch", self.epoch, _finite(train.loss))
        return finite

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

    def _state(self, lines: int) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "lines": lines,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "order": self.order.state_dict(),
        }


def epoch_of_steps(
    problem: Problem,
    config: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: Order,
    seconds: Seconds,
) -> None:
    """One epoch of the README's loop, with a clock between its lines."""
    x, y, forward, loss = problem.train_x, problem.train_y, problem.forward, problem.loss
    parameters = list(model.parameters())
    # A DataLoader would draw from order.sampler in the same way; on tensors in memory, fetching and collating single
    # examples would take longer than training and hide what an order costs.
    batches = iter(BatchSampler(order.sampler, config.batch_size, drop_last=False))
    start = perf_counter()
    batch = next(batches, None)
    data = perf_counter()
    seconds.ordering += data - start  # the first draw adopts the epoch's order: Greedy herds here
    while batch is not None:
        rows = torch.tensor(batch)
        batch_x, batch_y = x.index_select(0, rows), y.index_select(0, rows)
        forth = perf_counter()
        found = loss(forward(model, batch_x), batch_y)
        back = perf_counter()
        found.backward()  # type: ignore[no-untyped-call]
        ordering = perf_counter()
        order.step()
        stepping = perf_counter()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        end = perf_counter()
        seconds.data += forth - data
        seconds.forward += back - forth
        seconds.backward += ordering - back
        seconds.ordering += stepping - ordering
        seconds.optimizer += end - stepping
        data = end
        batch = next(batches, None)


def make_optimizer(model: nn.Module, config: RunConfig, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    # Word for word from the paper's appendix. A relative threshold of 5 is met by no loss, so that this divides the
    # rate by ten after every sixth epoch.
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.1, patience=5, threshold=5)


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
    }


def _check_seed(out: Path, seed: int, model: nn.Module, order: Order | None) -> None:
    """All arms of a seed start from the same weights and visit their first epoch alike, or the comparison is void."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    path = out / "seeds" / f"seed-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {"weights": digest.hexdigest()}
    if path.exists():
        if read_object(path.read_bytes(), str(path)) != mine:
            raise StateError(
                f"other initial weights for seed {seed} than those of the arms that ran before",
                expected="the same, by the digest in seeds/",
                remedy="Run with the versions named in config.json, or into a new folder.",
            )
    else:
        write_bytes(path, json.dumps(mine).encode())
    if order is not None and not np.array_equal(order.history(0), RandomReshuffling(order.n, seed=seed).history(0)):
        raise StateError(
            f"{order!r}, whose first epoch is its own",
            expected="the first epoch that all orders of a seed share",
            remedy="This is a fault of that order: report it.",
        )


def _keep_order(order: Order, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.save(file, order.history(order.epoch).astype(np.int32))


def _kept_order(job: Job, out: Path) -> NDArray[Any]:
    path = job.order(out)
    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{path}, which is no whole .npy file",
            expected="the order of GraB's last epoch",
            remedy=f"Delete it and {job.record(out)}: the same command makes both again.",
        ) from error
    return found


def _length(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
