"""Faults in the user's loop, at every stage: what was not learned is left out, and the rest is learned rightly."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from faulty_run import BATCH, EPOCHS, Fault, N, Run, plain_hooks
from helpers import Regression, batches, is_permutation
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ordain
from ordain import GraB
from ordain.errors import StepError


@contextlib.contextmanager
def raising(run: Run, stage: str, error: type[BaseException]) -> Iterator[None]:
    """Raise in the middle of the model's forward or of its backward."""

    def fail(*_: Any) -> None:
        raise error("fault")

    # A backward has done the last layer, and not the first, when it comes to the last one's weight.
    hooked = {"forward": run.model[2].register_forward_pre_hook, "backward": run.model[2].weight.register_hook}
    handle = hooked[stage](fail) if stage in hooked else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


STAGES = ["loading", "forward", "loss", "backward", "before step", "after step"]


def faulty_batch(run: Run, batch: list[int], stage: str, error: type[BaseException]) -> None:
    with raising(run, stage, error):
        if stage == "loading":
            raise error("fault")
        rows, loss = run.rows(batch) if stage == "after step" else None, run.loss(batch)
        if stage == "loss":
            raise error("fault")
        loss.backward()
        if stage == "before step":
            raise error("fault")
        run.order.step()
        run.tell(rows)
        raise error("fault")


def answers(stage: str) -> list[str]:
    """What can be done about it: after step() it has been learned, and before it step() is what is left to do."""
    return ["skip", "break"] if stage in ("before step", "after step") else ["skip", "break", "again"]


CASES = [(stage, answer, 2) for stage in STAGES for answer in answers(stage)]
CASES += [(stage, answer, 0) for stage in ("forward", "backward") for answer in ("skip", "again")]  # the very first


# Only what is raised inside of the model goes through code of ours.
FAULTS = [(Fault, *case) for case in CASES]
FAULTS += [(KeyboardInterrupt, *case) for case in CASES if case[0] in ("forward", "backward")]


@pytest.mark.parametrize(("error", "stage", "answer", "when"), FAULTS)
@pytest.mark.parametrize(
    ("source", "centering"), [("exact", "mean"), ("exact", "pair"), ("func", "pair"), ("microbatch", "mean")]
)
def test_a_fault_at_every_stage(
    source: str, centering: str, error: type[BaseException], stage: str, answer: str, when: int
) -> None:
    run = Run(source, centering)
    for epoch in range(EPOCHS):
        for number, batch in enumerate(run.epoch()):
            if (epoch, number) != (1 if when else 0, when):
                run.learn(batch)
                continue
            with pytest.raises(error):
                faulty_batch(run, batch, stage, error)
            if stage == "after step":
                run.update()
            elif answer == "skip":
                run.skip(batch)
            elif answer == "again":
                run.optimizer.zero_grad()
                run.learn(batch)
            if answer == "break":
                run.optimizer.zero_grad()
                break
    run.check()


def test_gradients_of_batches_before_one_that_is_passed_over_count() -> None:
    """Accumulation: two backwards, a batch passed over after its forward, another backward, one step."""
    run = Run()
    for batch in run.epoch():
        whole = len(batch) == BATCH
        for part, backward in ([batch[:1], True], [batch[1:2], not whole], [batch[2:], True]):
            if not part:
                continue
            rows, loss = run.rows(part), run.loss(part)
            if backward:
                loss.backward()
                run.tell(rows)
            else:
                run.order.skip(len(part))
                run.shadow.skip(len(part))
        run.order.step()
        run.update()
    run.check()


def test_a_backward_that_is_done_again_on_its_own_graph_counts_once() -> None:
    run = Run()
    for number, batch in enumerate(run.epoch()):
        rows, loss = run.rows(batch), run.loss(batch)
        if number == 1:
            with raising(run, "backward", Fault), pytest.raises(Fault):
                loss.backward(retain_graph=True)
            run.optimizer.zero_grad()
            with pytest.raises(StepError, match="no new gradients"):
                run.order.step()
        loss.backward()
        run.order.step()
        run.tell(rows)
        run.update()
    run.check()


class Worker(Dataset[tuple[Tensor, Tensor, int]]):
    """Fails for one example, in a worker process."""

    def __init__(self, data: Regression, bad: int, error: type[BaseException]) -> None:
        self.data, self.bad, self.error = data, bad, error

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if index == self.bad:
            raise self.error("fault")
        return *self.data[index], index


def test_a_worker_that_fails_costs_its_batch() -> None:
    """The loader goes on after an error that is caught; the batch is passed over with skip()."""
    run = Run()
    bad = int(run.order.history(0)[BATCH * 2 + 1])
    loader = DataLoader(Worker(run.data, bad, Fault), batch_size=BATCH, sampler=run.order.sampler, num_workers=2)
    for _ in range(2):
        drawn, positions = iter(loader), batches(run.shadow, BATCH)
        while True:
            try:
                _, _, indices = next(drawn)
            except StopIteration:
                break
            except Fault:
                run.skip(next(positions))
                continue
            batch = next(positions)
            assert indices.tolist() == batch
            run.learn(batch)
    run.check()


# --- an interrupt at any line of ours --------------------------------------------------------------

OURS = str(Path(ordain.__file__).parent)


@contextlib.contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """KeyboardInterrupt at the given line, counted over all lines of ours that run; the count comes back."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("source", "centering"), [("exact", "mean"), ("exact", "pair"), ("func", "mean")])
@pytest.mark.parametrize("after", ["go on", "next epoch"])
def test_an_interrupt_at_any_line_of_a_step(source: str, centering: str, after: str) -> None:
    """Ctrl-C wherever it falls: no order loses an example, all sums are finite, the state loads, no hook stays."""

    def batch_of(run: Run, batch: list[int]) -> None:
        run.loss(batch).backward()
        run.order.step()

    def one(line: int) -> int:
        run = Run(source, centering)
        order = run.order
        indices = list(order.sampler)
        batch_of(run, indices[:3])
        taken = order.state_dict()["taken"]
        with interrupted_at(line) as count, contextlib.suppress(KeyboardInterrupt):
            batch_of(run, indices[3:6])
        run.optimizer.zero_grad()
        if after == "go on":
            order.skip(6 - order.state_dict()["taken"])
            batch_of(run, indices[6:9])
            assert order.state_dict()["taken"] == 9 >= taken
        for _ in range(2):
            indices = list(order.sampler)
            assert is_permutation(indices, N)
            for lo in range(0, N, 3):
                batch_of(run, indices[lo : lo + 3])
        assert all(torch.isfinite(vector).all() for vector in order.state_dict()["vectors"].values())
        GraB(None, N, centering=centering).load_state_dict(order.state_dict())
        order.detach()
        assert plain_hooks(run.model) == run.before
        return count[0]

    lines = one(-1)
    for line in np.random.default_rng(0).choice(lines, 8, replace=False):
        one(1 + int(line))
