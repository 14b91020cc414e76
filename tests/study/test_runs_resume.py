"""A run that is killed anywhere and started again gives the records of one that was not."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from study.recorded import DIGITS, call, fork_workers, repeatable
from study.study_records import start, write_lines
from torch.utils.data import BatchSampler

from ordain import RandomReshuffling
from ordain.errors import InputError
from ordain.study.runs.config import RunConfig
from ordain.study.runs.job import Job
from ordain.study.runs.runner import Progress, run
from ordain.study.tasks import TASKS

# Blind, frozen, storing and learning orders; each keeps its state in its own way.
CONFIG = replace(DIGITS, arms=("flipflop", "replacement", "herding", "grab", "grab-pair@4", "grab-1step", "retrain"))


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole")
    run(CONFIG, out)
    return repeatable(out)


def killing(job: Job, at: tuple[str, int]) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        message = progress.message
        if message.job == job and (message.kind, message.epoch) == at:
            raise Killed

    return report


# The last epoch is followed by the end, not by a checkpoint.
MOMENTS = [
    ("begun", 0),
    *(("epoch", k) for k in (0, 1)),
    ("checkpoint", 1),
    ("epoch", 2),
    ("checkpoint", 2),
    ("epoch", 3),
]


def is_killed(config: RunConfig, out: Path, job: Job, at: tuple[str, int]) -> bool:
    try:
        run(config, out, report=killing(job, at), checkpoint_every=0.0)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("arm", CONFIG.arms)
def test_killed_after_every_line_and_checkpoint(arm: str, tmp_path: Path, whole: dict[str, Any]) -> None:
    """One folder, killed at each moment of a job in turn, until nothing is left to do."""
    config = replace(CONFIG, arms=("grab", "retrain") if arm == "retrain" else (arm,))
    job = Job(arm, 0.1, 0)
    assert all([is_killed(config, tmp_path, job, at) for at in MOMENTS])  # noqa: C419 (each must be tried)
    run(config, tmp_path, checkpoint_every=0.0)
    assert repeatable(tmp_path).items() <= whole.items()
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_killed_within_a_line(every: float, tmp_path: Path, whole: dict[str, Any]) -> None:
    """The last line is cut off at each of some places; with checkpoints and without."""
    config = replace(CONFIG, arms=("grab",))
    with pytest.raises(Killed):
        run(config, tmp_path, report=killing(Job("grab", 0.1, 0), ("epoch", 2)), checkpoint_every=every)
    path = tmp_path / "records/grab/lr-0.1/seed-0.jsonl"
    text, saved = path.read_bytes(), list(tmp_path.rglob("*.pt"))
    assert len(saved) == (every == 0.0)
    kept = [file.read_bytes() for file in saved]
    last = text.rindex(b"\n", 0, -1) + 1
    for cut in (len(text) - 1, last + 20, last):
        path.write_bytes(text[:cut])
        for file, content in zip(saved, kept, strict=True):
            file.write_bytes(content)
        run(config, tmp_path)
        name = "records/grab/lr-0.1/seed-0.jsonl"
        assert repeatable(tmp_path)[name] == whole[name]


def test_killed_between_the_end_and_the_checkpoint(tmp_path: Path) -> None:
    """A finished job whose checkpoint is still there is finished; so is one whose record was lost begun anew."""
    config = replace(CONFIG, arms=("grab",))
    job = Job("grab", 0.1, 0)
    with pytest.raises(Killed):
        run(config, tmp_path, report=killing(job, ("checkpoint", 1)), checkpoint_every=0.0)
    left = job.file(tmp_path, "checkpoints").read_bytes()
    run(config, tmp_path)
    record = job.record(tmp_path).read_bytes()
    job.file(tmp_path, "checkpoints").write_bytes(left)
    assert run(config, tmp_path).states == {}
    assert job.record(tmp_path).read_bytes() == record
    expected = repeatable(tmp_path)
    job.record(tmp_path).unlink()
    run(config, tmp_path)
    assert repeatable(tmp_path) == expected


def test_a_checkpoint_has_no_pickled_objects(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("grab",), plateau=True, herding=True)
    job = Job("grab", 0.1, 0)
    with pytest.raises(Killed):
        run(config, tmp_path, report=killing(job, ("checkpoint", 2)), checkpoint_every=0.0)
    state = torch.load(job.file(tmp_path, "checkpoints"), weights_only=True)
    assert (state["epoch"], state["lines"]) == (2, 4)
    run(config, tmp_path)
    run(config, tmp_path / "fresh")
    assert repeatable(tmp_path) == repeatable(tmp_path / "fresh")


def test_checkpoints_are_spaced(tmp_path: Path) -> None:
    heard: list[Any] = []
    run(replace(CONFIG, arms=("rr",)), tmp_path, report=lambda progress: heard.append(progress.message.kind))
    assert "checkpoint" not in heard  # three epochs take less than twenty seconds


def test_the_schedule_divides_the_rate_after_six_epochs(tmp_path: Path) -> None:
    """The paper's ReduceLROnPlateau, whose threshold no loss meets, is a step every sixth epoch."""
    config = replace(CONFIG, arms=("rr",), plateau=True, epochs=8)
    job = Job("rr", 0.1, 0)
    with pytest.raises(Killed):
        run(config, tmp_path, report=killing(job, ("checkpoint", 6)), checkpoint_every=0.0)
    state = torch.load(job.file(tmp_path, "checkpoints"), weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    run(config, tmp_path)
    run(config, tmp_path / "fresh")
    assert repeatable(tmp_path) == repeatable(tmp_path / "fresh")


@pytest.mark.parametrize("decay", ["cosine", "step"])
def test_decay_and_averaged_weights(decay: Any, tmp_path: Path) -> None:
    """As in a plain loop; a job that was stopped has the same record."""
    config = replace(CONFIG, arms=("rr-ema",), decay=decay, epochs=4)
    run(config, tmp_path / "whole")
    problem = TASKS["digits"].load(tmp_path, config.limit)
    model, n = problem.build(0), len(problem.train_x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=config.momentum, weight_decay=config.weight_decay)
    steps, order = 4 * -(-n // config.batch_size), RandomReshuffling(n)
    average = [p.detach().clone() for p in model.parameters()]
    for step, rows in enumerate(row for _ in range(4) for row in BatchSampler(order.sampler, config.batch_size, False)):
        done = step / steps
        factor = (
            (1 + math.cos(math.pi * done)) / 2
            if decay == "cosine"
            else {0: 1, 1: 0.1, 2: 0.01}[(done >= 0.5) + (done >= 0.75)]
        )
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        problem.loss(model(problem.train_x[rows]), problem.train_y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.copy_(p.detach() if step == 0 else 0.999 * mean + 0.001 * p.detach())
    for mean, p in zip(average, model.parameters(), strict=True):
        p.data.copy_(mean)
    loss = problem.loss(model(problem.train_x), problem.train_y).item()
    job = Job("rr-ema", 0.1, 0)
    assert json.loads(job.record(tmp_path / "whole").read_text().splitlines()[-2])["train_loss"] == pytest.approx(loss)
    with pytest.raises(Killed):
        run(config, tmp_path / "cut", report=killing(job, ("checkpoint", 2)), checkpoint_every=0.0)
    heard: list[tuple[str, int]] = []
    run(config, tmp_path / "cut", report=lambda progress: heard.append((progress.message.kind, progress.message.epoch)))
    assert [epoch for kind, epoch in heard if kind == "epoch"] == [3, 4]
    assert repeatable(tmp_path / "cut") == repeatable(tmp_path / "whole")


_PROGRAM = """
import os, signal, sys
from dataclasses import asdict, replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from study.recorded import DIGITS
from ordain.study.runs.runner import run

def kill(progress):
    if (progress.message.kind, progress.message.epoch) == ("epoch", 2):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    run(replace(DIGITS, arms=("flipflop",)), Path(sys.argv[1]), report=kill, checkpoint_every=0.0, jobs=1)
"""


def test_sigkill(tmp_path: Path, whole: dict[str, Any]) -> None:
    """A true one, of the parent of a worker: both are gone, the lock is free, and the records become the same."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run"), str(Path(__file__).parents[1])]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    run(replace(CONFIG, arms=("flipflop",)), tmp_path / "run")
    name = "records/flipflop/lr-0.1/seed-0.jsonl"
    assert repeatable(tmp_path / "run")[name] == whole[name]


def test_a_worker_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job fails, the other goes on, and the same run does it again."""
    fork_workers(monkeypatch)
    config = replace(CONFIG, arms=("rr", "so"), seeds=(0, 1), epochs=1)
    killed: list[Job] = []

    def report(progress: Progress) -> None:
        import multiprocessing

        if progress.message.kind == "begun" and not killed:
            killed.append(progress.message.job)
            child = multiprocessing.active_children()[0]
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    outcome = run(config, tmp_path, jobs=1, report=report)
    assert list(outcome.failed) == killed
    assert "exit code -9" in outcome.failed[killed[0]]
    assert len(outcome.states) == 3
    assert list(run(config, tmp_path).states) == killed


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ordain.study.runs import team

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(team, "do", interrupted)
    words = ("run", "digits", "--jobs", 0, "--seeds", 1, "--epochs", 1, "--limit", 40, "--orders", "rr", "--lr", 0.1)
    result = call(*words, "--out", tmp_path)
    assert result.exit_code == 130
    assert "Run the same command to resume" in result.stderr
    monkeypatch.undo()
    assert call(*words, "--out", tmp_path).exit_code == 0


def test_a_damaged_checkpoint_begins_its_job_anew(tmp_path: Path, whole: dict[str, Any]) -> None:
    config, job = replace(CONFIG, arms=("grab",)), Job("grab", 0.1, 0)
    assert is_killed(config, tmp_path, job, ("checkpoint", 2))
    path, record = job.file(tmp_path, "checkpoints"), job.record(tmp_path)
    written, good = record.read_bytes(), torch.load(path, weights_only=True)
    path.write_bytes(b"garbage")
    for damaged in (None, {}, good | {"lines": 9}, good | {"model": {}}, good | {"order": {"n": 1}}):
        record.write_bytes(written)
        if damaged is not None:
            torch.save(damaged, path)
        heard: list[str] = []
        outcome = run(config, tmp_path, report=lambda progress, heard=heard: heard.append(progress.message.kind))  # type: ignore[misc]
        assert (outcome.failed, heard[:2]) == ({}, ["begun", "restarted"])
        assert repeatable(tmp_path).items() <= whole.items()
        assert not path.exists()


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[]", b'{"kind": "more"}', b'{"kind": "end"}'])
def test_a_damaged_record_is_named(line: bytes, tmp_path: Path) -> None:
    path = Job("rr", 0.1, 0).record(tmp_path)
    path.parent.mkdir(parents=True)
    write_lines(path, [start("rr", 0.1, 0)])
    path.write_bytes(path.read_bytes() + line + b'\n{"kind": "epoch"}\n')
    with pytest.raises(InputError, match=r"seed-0.jsonl, line 2.*Delete that file"):
        run(replace(CONFIG, arms=("rr",)), tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"config": None}, "config = None"),
        ({"config": asdict(DIGITS) | {"epochs": "3"}}, "epochs = '3'"),
        ({"config": asdict(DIGITS) | {"rates": [None]}}, r"rates\.0 = None"),
        ({"problem": {"train": 70}}, "'valid'"),
        ({"versions": 3}, "versions = 3"),
    ],
)
def test_a_damaged_config_is_named(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    problem = {"train": 70, "valid": 70, "test": 70, "parameters": 650, "notes": []}
    head = {"format": 1, "kind": "training", "task": "digits", "command": "", "versions": {}, "machine": {}}
    head |= {"revision": None, "started": "", "problem": problem, "config": asdict(DIGITS)}
    (tmp_path / "config.json").write_text(json.dumps(head | change))
    with pytest.raises(InputError, match=word) as caught:
        run(DIGITS, tmp_path)
    assert "config.json" in str(caught.value)


def test_a_damaged_seed_is_named(tmp_path: Path) -> None:
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "seed-0.json").write_text("{")
    outcome = run(replace(DIGITS, arms=("rr",)), tmp_path)
    assert "seed-0.json, which is not JSON" in outcome.failed[Job("rr", 0.1, 0)]
