"""Train one job, from the start or from its checkpoint, and write its record."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ordain import Order
from ordain.errors import MemoryLimitError, StateError
from ordain.herding import herding_objective
from ordain.study.runs import probe
from ordain.study.runs.arms import RETRAIN, SOURCE, STORING, Arm, build_order, parse, stored_bytes, too_slow
from ordain.study.runs.config import RunConfig
from ordain.study.runs.job import (
    Checkpoints,
    DamagedCheckpointError,
    Hear,
    Job,
    Message,
    check_seed,
    keep_order,
    kept_order,
)
from ordain.study.runs.loop import epoch_of_steps, evaluate, make_decay, make_optimizer, make_plateau, may_diverge
from ordain.study.runs.multi_rank import ALONE, Ranks
from ordain.study.runs.record_lines import PARTS, RecordWriter, read_record
from ordain.study.tasks import TASKS, LoadedTask

_AVERAGE = 0.999  # the decay of averaged weights, per step


@dataclass(frozen=True)
class Setting:
    """Settings that a worker gets once, when it starts."""

    config: RunConfig  # the run's configuration
    out: Path  # the run's folder
    folder: Path  # the folder of all data sets
    verify: bool = True  # check the data against their published checksums
    checkpoint_every: float = 20.0  # minimum number of seconds between checkpoints
    tensorboard: bool = False  # log to TensorBoard as well

    def load(self) -> LoadedTask:
        """The task's data and model."""
        config = self.config
        return TASKS[config.task].load(self.folder, config.limit, weights=config.weights, verify=self.verify)


def train(problem: LoadedTask, setting: Setting, job: Job, *, tell: Hear, ranks: Ranks = ALONE) -> str:
    """Run ``job`` to its end and return its state: ``"done"``, ``"diverged"`` or ``"refused"``.

    An unfinished job resumes from its checkpoint, and later lines of its record are rewritten. If the checkpoint is
    damaged, it is removed and the job restarts. All ranks call this function; only rank 0 writes.
    """
    checkpoints = Checkpoints(job.file(setting.out, "checkpoints"), every=setting.checkpoint_every)
    task = _Task(problem, setting, job, parse(job.arm, group=setting.config.group), ranks, checkpoints, tell)
    if ranks.rank:
        return task.follow()
    record = read_record(job.record(setting.out))
    if record.end:
        checkpoints.remove()  # the job was killed after its last line
        ranks.hear(None)
        return record.state
    try:
        saved = checkpoints.load() if record.lines else None
        if saved is not None and saved["lines"] > record.lines:
            raise DamagedCheckpointError
        return task.lead(saved)
    except DamagedCheckpointError:
        checkpoints.remove()
        tell(Message("restarted", job))
        return task.lead(None)


@dataclass(frozen=True)
class _Task:
    """A job with everything it needs on this rank."""

    problem: LoadedTask
    setting: Setting
    job: Job
    arm: Arm
    ranks: Ranks
    checkpoints: Checkpoints
    tell: Hear
    memory: probe.Memory = field(default_factory=probe.Memory.begin)

    def lead(self, saved: dict[str, Any] | None) -> str:
        """Rank 0: decide, train, measure and write."""
        arm, job, out, ranks = self.arm, self.job, self.setting.out, self.ranks
        board = job.file(out, "tensorboard") if self.setting.tensorboard else None
        writer = RecordWriter(job.record(out), keep=saved["lines"] if saved else 0, board=board)
        try:
            n, d = len(self.problem.train_x), _length(self.problem.build(job.seed))
            if saved is None:
                about = {"arm": arm.name, "label": arm.label, "order": arm.order, "lr": job.lr, "seed": job.seed}
                about |= {"group": arm.group, "threads": self.setting.config.threads, "ranks": arm.ranks}
                writer.write({"kind": "start", **about, "mode": arm.mode if arm.ranks > 1 else None})
            state, why = "refused", self._refusal(n, d)
            if why is None:
                ranks.hear((saved,))
                try:
                    training = _Training.begin(self, saved)
                except MemoryLimitError as error:
                    why = str(error)
                else:
                    state = training.go(writer)
                    why = "the loss is not finite" if state == "diverged" else None
                    if arm.order == SOURCE and arm.shares_first and state == "done":
                        keep_order(training.order, job.file(out, "orders"))
            more = {"needed_bytes": stored_bytes(arm, n, d)} if state == "refused" and arm.order in STORING else {}
            writer.write({"kind": "end", "epochs": max(writer.lines - 2, 0), "state": state, "why": why, **more})
        finally:
            writer.close()
        self.checkpoints.remove()
        ranks.hear(None)
        return state

    def follow(self) -> str:
        """Other ranks: train from what rank 0 tells them, without writing anything, until there is nothing more."""
        while (told := self.ranks.hear(None)) is not None:
            with suppress(MemoryLimitError, DamagedCheckpointError):  # rank 0 gets the same error and decides
                _Training.begin(self, told[0]).go(None)
        return "done"

    def _refusal(self, n: int, d: int) -> str | None:
        """The reason to refuse the job before it starts, or None."""
        if self.job.arm != RETRAIN:
            return too_slow(self.arm, self.setting.config, n, d)
        source, out = self.job.source(), self.setting.out
        state = read_record(source.record(out)).state
        if state == "unfinished" or (state == "done" and not source.file(out, "orders").exists()):
            raise StateError(
                f"no finished run of {source}",
                expected=f"a finished job in {out}, whose last order is reused",
                remedy="Run the same command again.",
            )
        return None if state == "done" else f"the GraB job has state {state!r}, so there is no order to reuse"


@dataclass
class _Training:
    """Training state after ``epoch`` epochs; ``config.batch_size`` is that of this rank."""

    task: _Task
    config: RunConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.ReduceLROnPlateau | None  # stepped after each epoch
    decay: torch.optim.lr_scheduler.LambdaLR | None  # stepped after each step
    average: AveragedModel | None  # of the weights: what is evaluated, if there is one
    order: Order
    parallel: nn.Module  # the model, wrapped for several ranks
    epoch: int = 0
    sent: int = 0  # bytes sent up to the last epoch
    stale: Tensor | None = None  # per-example gradients of the last epoch, with --herding

    @classmethod
    def begin(cls, task: _Task, saved: dict[str, Any] | None) -> _Training:
        """Start from the initial weights of the seed, or from a checkpoint."""
        arm, job, ranks, problem = task.arm, task.job, task.ranks, task.problem
        config, out = task.setting.config, task.setting.out
        config = replace(config, batch_size=config.batch_size // ranks.size)
        n, model = len(problem.train_x), problem.build(job.seed).train()
        parallel = ranks.parallel(problem, model, config.batch_size)
        fixed = kept_order(job.source(), out) if job.arm == RETRAIN else None
        optimizer = make_optimizer(model, config, job.lr)
        order = build_order(
            arm,
            parallel,
            n,
            seed=job.seed,
            memory_limit=config.memory_limit,
            labels=problem.labels,
            optimizer=optimizer,
            fixed=fixed,
        )
        if saved is None and not ranks.rank:
            check_seed(out, job.seed, model, order if arm.shares_first else None)
        decay = make_decay(optimizer, task.setting.config, n)
        schedule = make_plateau(optimizer) if config.plateau and decay is None else None
        average = None
        if arm.averaged:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_AVERAGE), use_buffers=True)  # type: ignore[no-untyped-call]
        run = cls(task, config, model, optimizer, schedule, decay, average, order, parallel)
        if saved is not None:
            try:
                run.restore(saved)
            except MemoryError:
                raise
            except Exception as error:  # torch and orders raise many kinds of errors
                order.detach()
                raise DamagedCheckpointError from error
        if config.herding and not ranks.rank:
            run.stale = probe.per_example_gradients(problem, model)
        run.sent = order.sent_bytes
        return run

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name, part in self._parts().items():
            if part is not None:
                part.load_state_dict(saved[name])
        alone = self.task.arm.mode == "independent"
        self.order.load_state_dict(saved["order"][self.task.ranks.rank] if alone else saved["order"])
        self.order.resume(self.order.n)  # the saved epoch is over
        self.epoch = saved["epoch"]

    def go(self, writer: RecordWriter | None) -> str:
        """Train until the last epoch or until the loss is not finite; only rank 0 has a ``writer``."""
        try:
            if self.epoch == 0:
                self._end_epoch(defaultdict(float), 0.0, writer)
            while self.epoch < self.config.epochs:
                seconds, cpu = defaultdict[str, float](float), process_time()
                self.epoch += 1
                with may_diverge(self.model):
                    epoch_of_steps(
                        self.task.problem,
                        self.config,
                        self.parallel,
                        self.optimizer,
                        self.order,
                        seconds,
                        seed=self.task.job.seed + 1_000_003 * self.epoch,
                        stepped=self._stepped,
                    )
                if not self._end_epoch(seconds, process_time() - cpu, writer):
                    return "diverged"
                if self.epoch < self.config.epochs:
                    self._save(writer)
        finally:
            self.order.detach()
        return "done"

    def _stepped(self) -> None:
        if self.decay is not None:
            self.decay.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def _save(self, writer: RecordWriter | None) -> None:
        """Save a checkpoint if it is time to. Independent orders are gathered, so that one file holds all of them."""
        task = self.task
        orders = task.ranks.every(self.order.state_dict()) if task.arm.mode == "independent" else None
        if writer is not None and task.checkpoints.save(lambda: self._state(writer.lines, orders)):
            task.tell(Message("checkpoint", task.job, self.epoch))

    def _state(self, lines: int, orders: list[dict[str, Any]] | None) -> dict[str, Any]:
        parts = {name: part.state_dict() if part is not None else None for name, part in self._parts().items()}
        order = self.order.state_dict() if orders is None else orders
        return {"epoch": self.epoch, "lines": lines, **parts, "order": order}

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return parts | {"decay": self.decay, "average": self.average}

    def _end_epoch(self, seconds: defaultdict[str, float], cpu: float, writer: RecordWriter | None) -> bool:
        """Evaluate on rank 0 and broadcast whether training and validation loss are finite."""
        finite, valid = self.task.ranks.hear(self._write(seconds, cpu, writer) if writer else None)
        if self.schedule and self.epoch and finite:
            self.schedule.step(valid)
        return bool(finite)

    def _write(self, seconds: defaultdict[str, float], cpu: float, writer: RecordWriter) -> tuple[bool, float]:
        """Measure and write a line; returns whether the losses are finite, and the validation loss."""
        start = perf_counter()
        task, problem = self.task, self.task.problem
        model = self.model if self.average is None else self.average.module
        train = evaluate(problem, model, problem.train_x, problem.train_y)
        valid = evaluate(problem, model, problem.valid_x, problem.valid_y)
        test = evaluate(problem, model, problem.test_x, problem.test_y)
        finite = all(math.isfinite(score.loss) for score in (train, valid))  # the test loss does not end a job
        herding, stale_fresh = self._probe() if finite else (None, None)
        seconds["evaluation"] += perf_counter() - start
        steps = -(-len(problem.train_x) // task.setting.config.batch_size)
        sent, self.sent = self.order.sent_bytes - self.sent, self.order.sent_bytes
        line: dict[str, Any] = {
            "kind": "epoch",
            "epoch": self.epoch,
            "train_loss": _finite(train.loss),
            "valid_loss": _finite(valid.loss),
            "valid_accuracy": valid.accuracy,
            "test_loss": _finite(test.loss),
            "test_accuracy": test.accuracy,
            "herding": herding,
            "stale_fresh": stale_fresh,
            "seconds": {part: round(seconds[part], 6) for part in (*PARTS, "evaluation")},
            "cpu_seconds": round(cpu, 6),
            "order_bytes": probe.order_bytes(self.order, task.arm, len(problem.train_x), _length(self.model)),
            "peak_bytes": task.memory.peak_bytes(),
            "job_bytes": task.memory.job_bytes(),
            "sent_bytes": round(sent / steps),
        }
        writer.write(line)
        task.tell(Message("epoch", task.job, self.epoch, line["train_loss"]))
        return finite, valid.loss

    def _probe(self) -> tuple[float | None, float | None]:
        """Herding objective of the epoch's order at its final weights, and gradient staleness."""
        if self.stale is None or self.epoch == 0:
            return None, None
        fresh = probe.per_example_gradients(self.task.problem, self.model)
        objective = None
        if self.task.arm.is_permutation:
            objective = herding_objective(fresh, self.order.history(self.order.epoch))
        correlation = probe.stale_fresh(self.stale, fresh)
        self.stale = fresh
        return objective, correlation


def _length(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
