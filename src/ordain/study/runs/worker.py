"""Workers: hold the problem in memory and run jobs, after compiling each kind of order once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from threadpoolctl import threadpool_limits

from ordain.study.runs.arms import RETRAIN, Arm, build_order, parse
from ordain.study.runs.job import Job
from ordain.study.runs.loop import Seconds, epoch_of_steps, make_optimizer
from ordain.study.runs.multi_rank import ALONE, Ranks
from ordain.study.runs.train_job import Setting, Tell, train
from ordain.study.tasks import TASKS
from ordain.study.tasks import LoadedTask as Problem


def load_problem(setting: Setting) -> Problem:
    """Load the task's problem."""
    config = setting.config
    return TASKS[config.task].load(setting.folder, config.limit, weights=config.weights, verify=setting.verify)


class Worker:
    """Runs jobs on one problem, as one of ``ranks``."""

    def __init__(self, setting: Setting, problem: Problem, ranks: Ranks = ALONE) -> None:
        self._setting, self._problem, self._ranks = setting, problem, ranks
        self._warm: set[tuple[str, int, str]] = set()

    def do(self, job: Job, tell: Tell) -> str:
        """Run one job and return its state."""
        setting = self._setting
        arm = parse(job.arm, group=setting.config.group)
        kind = arm.order, arm.group, arm.mode
        if arm.name != RETRAIN and kind not in self._warm:
            self._warm_up(arm)
            self._warm.add(kind)
        return train(self._problem, setting, job, tell=tell, ranks=self._ranks)

    def _warm_up(self, arm: Arm) -> None:
        """Trigger just-in-time compilation, so that it does not count as training time."""
        config, problem = self._setting.config, self._problem
        few = min(len(problem.train_x), 2 * config.batch_size + 1)
        problem = replace(problem, train_x=problem.train_x[:few], train_y=problem.train_y[:few])
        config = replace(config, batch_size=config.batch_size // self._ranks.size)
        model = problem.build(0).train()
        parallel = self._ranks.parallel(problem, model, config.batch_size)
        order = build_order(arm, model, few, seed=0, memory_limit=2**40)
        optimizer = make_optimizer(model, config, lr=0.0)
        for _ in range(2):
            epoch_of_steps(problem, config, parallel, optimizer, order, Seconds())
        order.detach()


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Limit torch and BLAS (used by herding through NumPy) to ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(limits=count):
            yield
    finally:
        torch.set_num_threads(before)
