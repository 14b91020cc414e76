"""Jobs of several processes: what one process finds, whatever happens to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study.recorded import DIGITS, call, fork_workers, record, repeatable

from ordain.errors import InputError
from ordain.study.runs.arms import parse
from ordain.study.runs.job import Job
from ordain.study.runs.records import read_run, select
from ordain.study.runs.runner import Progress, run

EXACT = ("rr", "grab", "grab-pair")
TOGETHER = ("rr+2", "grab+2", "grab-pair+2", "grab+2-independent")
CONFIG = replace(DIGITS, arms=(*EXACT, *TOGETHER), limit=80)  # 80 examples go round
FEATURES, CLASSES = 64, 10


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    assert run(CONFIG, out).failed == {}
    return out


def column(out: Path, arm: str, name: str) -> list[Any]:
    return [line[name] for line in record(out, arm) if line["kind"] == "epoch"]


@pytest.mark.parametrize("arm", EXACT)
def test_two_ranks_are_one_process(arm: str, whole: Path) -> None:
    for name in ("train_loss", "valid_loss", "test_loss"):
        assert column(whole, f"{arm}+2", name) == pytest.approx(column(whole, arm, name), rel=1e-5)
    assert len(set(column(whole, arm, "train_loss"))) == 4


def test_the_last_order_is_the_same(whole: Path) -> None:
    alone, together = (np.load(Job(arm, 0.1, 0).file(whole, "orders")) for arm in ("grab", "grab+2"))
    assert alone.tolist() == together.tolist()


def test_independent_ranks_share_the_first_epoch_only(whole: Path) -> None:
    ours, theirs = column(whole, "grab+2-independent", "train_loss"), column(whole, "grab", "train_loss")
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)
    assert ours[2:] != pytest.approx(theirs[2:], rel=1e-5)


def test_what_is_recorded(whole: Path) -> None:
    found = read_run(whole)
    arms = found.arms
    assert list(arms)[:2] == ["rr", "rr+2"]
    assert [(arms[arm].ranks, arms[arm].mode) for arm in ("grab", "grab+2", "grab+2-independent")] == [
        (1, None),
        (2, "exact"),
        (2, "independent"),
    ]
    assert arms["grab+2-independent"].label == "GraB, 2 ranks (independent)"
    sent = {arm: select(found.epochs, arm).sent_bytes.tolist() for arm in arms}
    for arm in (*EXACT, "rr+2", "grab+2-independent"):
        assert set(sent[arm]) == {0}
    mine = DIGITS.batch_size // 2
    factors = 4 * mine * (FEATURES + CLASSES)  # of the one layer: what went in, and the gradient of what came out
    products = 4 * (2 * mine) * (2 * mine + 1) // 2
    for arm in ("grab+2", "grab-pair+2"):
        assert sent[arm][0] == 0
        assert all(factors < one < factors + 2 * products + 512 for one in sent[arm][1:])


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def test_killed_damaged_and_gone_on_with(whole: Path, tmp_path: Path) -> None:
    """A rank dies, then all are killed; with a checkpoint that only looks like one beside it. Then it is run again."""
    config = replace(CONFIG, arms=("grab+2", "grab+2-independent"))
    failed: list[str] = []

    def report(progress: Progress) -> None:
        message = progress.message
        if message.job.arm == "grab+2":
            if message.kind == "begun":
                victim = min(multiprocessing.active_children(), key=lambda child: child.pid or 0)
                os.kill(victim.pid or 0, signal.SIGKILL)
            if message.kind == "failed":
                failed.append(message.trace)
        elif (message.kind, message.epoch) == ("checkpoint", 1):
            raise Killed

    with pytest.raises(Killed):
        run(config, tmp_path, report=report, checkpoint_every=0.0)
    assert multiprocessing.active_children() == []
    assert [trace.splitlines()[-1] for trace in failed] in (
        ["rank 0: rank 0 ended with exit code -9"],
        ["rank 1: rank 1 ended with exit code -9"],
    )

    lost = Job("rr+2", 0.1, 0)
    lost.record(tmp_path).parent.mkdir(parents=True)
    lines = lost.record(whole).read_bytes().splitlines(keepends=True)
    lost.record(tmp_path).write_bytes(b"".join(lines[:3]))
    lost.file(tmp_path, "checkpoints").parent.mkdir(parents=True)
    empty = dict.fromkeys(("model", "optimizer", "schedule", "decay", "average", "order"), None)
    torch.save({"epoch": 1, "lines": 3, **empty}, lost.file(tmp_path, "checkpoints"))
    heard: list[tuple[str, str]] = []
    outcome = run(
        replace(config, arms=(*config.arms, "rr+2")),
        tmp_path,
        report=lambda progress: heard.append((progress.message.kind, progress.message.job.arm)),
        checkpoint_every=0.0,
    )
    assert outcome.failed == {}
    assert [arm for kind, arm in heard if kind == "restarted"] == ["rr+2"]
    assert repeatable(tmp_path).items() <= repeatable(whole).items()
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--ranks", "3"), "a batch size that is divisible by 3 ranks"),
        (("--ranks", "0"), "different positive integers"),
        (("--ranks", "2,2"), "different positive integers"),
        (("--ranks", "two"), "different positive integers"),
        (("--ranks", "2", "--ranks-mode", "sum"), "Invalid value for '--ranks-mode'"),
        (("--orders", "grab+2-sum"), "number of ranks"),
        (("--ranks", "2", "--orders", "grab,grab+2"), "at least one of orders, without repetition"),
        (("--ranks", "2", "--orders", "grab,retrain"), "the order 'retrain+2'"),
    ],
)
def test_refused_before_anything_is_made(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    result = call("run", "digits", "--out", tmp_path / "run", *words)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["grab+", "grab+1", "grab+02", "grab+2-", "grab+2-exact", "grab+x", "grab+2@8", "grab+²"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="number of ranks"):
        parse(name)


def test_names_of_units_and_ranks() -> None:
    arm = parse("grab-pair@8+4-independent")
    assert (arm.order, arm.group, arm.ranks, arm.mode) == ("grab-pair", 8, 4, "independent")
    assert arm.label == "GraB, pairs, units of 8, 4 ranks (independent)"
