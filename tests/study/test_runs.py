"""Whole runs: like with like, protocols, ablations, what is refused and what diverges."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study.recorded import DIGITS, call, fork_workers, record, repeatable
from study.standard_files import write_mnist
from study.study_records import end, epoch, start, write_lines
from torch import nn

from ordain import FixedOrder, RandomReshuffling
from ordain.errors import InputError, StateError
from ordain.herding import herding_objective
from ordain.orders import ORDERS
from ordain.study import vectors
from ordain.study.report.views import missing_jobs, views
from ordain.study.runs import arms, job, loop, probe, runner, train_job
from ordain.study.runs.arms import greedy_seconds
from ordain.study.runs.config import RunConfig, merged
from ordain.study.runs.job import Job, best_rate, stages
from ordain.study.runs.records import read_run
from ordain.study.runs.run_folder import describe, read_header
from ordain.study.runs.runner import best_rates, run
from ordain.study.tasks import TASKS

EVERY = (*ORDERS, "retrain")
SMALL = ("--jobs", 0, "--seeds", 1, "--epochs", 2, "--limit", 70, "--lr", 0.1)


def problem(limit: int = 70) -> Any:
    return TASKS["digits"].load(Path(), limit)


def by_hand(config: RunConfig, order: Any, model: nn.Module, lr: float) -> list[float]:
    """The README's loop, and the loss of the whole training set before it and after each epoch."""
    data = problem(config.limit or 70)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.weight_decay)
    losses = []
    for number in range(config.epochs + 1):
        if number:
            batch: list[int] = []
            for index in order.sampler:
                batch.append(index)
                if len(batch) == config.batch_size or index == order.history(order.epoch)[-1]:
                    nn.functional.cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()
                    order.step()
                    optimizer.step()
                    optimizer.zero_grad()
                    batch = []
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(data.train_x), data.train_y)))
    return losses


def test_a_run_is_the_loop(tmp_path: Path) -> None:
    """Every order with two seeds: as by hand, from the same weights and the same first epoch."""
    config = replace(DIGITS, arms=EVERY, seeds=(0, 3))
    outcome = run(config, tmp_path)
    assert set(outcome.states.values()) == {"done"}
    assert len(outcome.states) == len(EVERY) * 2
    for lr in config.rates:
        for seed in config.seeds:
            data = problem()
            for arm in ("rr", "flipflop", "stratified", "herding", "grab", "grab-pair", "grab-lazy"):
                model = data.build(seed)
                labels = {"labels": data.train_y} if arm == "stratified" else {}
                order = ORDERS[arm].build(model, 70, seed=seed, **labels)
                expected = by_hand(config, order, model, lr)
                found = [line["train_loss"] for line in record(tmp_path, arm, lr, seed)[1:-1]]
                assert found == pytest.approx(expected, rel=1e-5), arm
                if arm == "grab":
                    again = data.build(seed)
                    expected = by_hand(config, FixedOrder.from_(order), again, lr)
                    found = [line["train_loss"] for line in record(tmp_path, "retrain", lr, seed)[1:-1]]
                    assert found == pytest.approx(expected, rel=1e-5)
            firsts = {
                (record(tmp_path, arm, lr, seed)[1]["train_loss"], record(tmp_path, arm, lr, seed)[2]["train_loss"])
                for arm in EVERY
                if arm not in ("stratified", "replacement", "retrain")
            }
            assert len(firsts) == 1  # the same weights, and the same first epoch
    lines = record(tmp_path, "grab")
    assert lines[0] == {
        "kind": "start",
        "arm": "grab",
        "label": "GraB",
        "order": "grab",
        "lr": 0.1,
        "seed": 0,
        "group": 1,
        "threads": 1,
        "ranks": 1,
        "mode": None,
    }
    assert set(lines[2]) == {
        "kind", "epoch", "train_loss", "valid_loss", "valid_accuracy", "test_loss", "test_accuracy", "herding",
        "stale_fresh", "seconds", "cpu_seconds", "order_bytes", "peak_bytes", "job_bytes", "sent_bytes",
    }  # fmt: skip
    assert set(lines[2]["seconds"]) == {"data", "forward", "backward", "ordering", "optimizer", "evaluation"}
    assert lines[2]["peak_bytes"] > 10**7
    assert not list((tmp_path / "checkpoints").rglob("*.pt")) if (tmp_path / "checkpoints").exists() else True


def test_adamw_is_the_loop_too(tmp_path: Path) -> None:
    config = replace(DIGITS, arms=("rr", "grab"), rates=(0.01,), optimizer="adamw")
    assert set(run(config, tmp_path).states.values()) == {"done"}
    for arm in config.arms:
        model = problem().build(0)
        expected = by_hand(config, ORDERS[arm].build(model, 70, seed=0), model, 0.01)
        found = [line["train_loss"] for line in record(tmp_path, arm, 0.01, 0)[1:-1]]
        assert found == pytest.approx(expected, rel=1e-5), arm
    with pytest.raises(InputError, match="optimizer"):
        run(replace(config, optimizer="sgd", seeds=(1,)), tmp_path)


def test_processes_give_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch)
    config = replace(DIGITS, arms=("rr", "so", "flipflop"), epochs=1)
    run(config, tmp_path / "here")
    outcome = run(config, tmp_path / "there", jobs=2)
    assert outcome.failed == {}
    assert repeatable(tmp_path / "there") == repeatable(tmp_path / "here")
    heard: list[Any] = []
    again = run(config, tmp_path / "there", jobs=2, report=heard.append)
    assert (again.states, again.before, heard) == ({}, 3, [])


def test_scores_are_means_over_all_rows() -> None:
    data = replace(problem(), chunk=9)  # 70 rows: the last chunk is smaller
    model = data.build(0)
    score = loop.evaluate(data, model, data.train_x, data.train_y)
    logits = model(data.train_x)
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(logits, data.train_y).detach()), rel=1e-5)
    assert score.accuracy == pytest.approx(float((logits.argmax(1) == data.train_y).double().mean()))
    assert model.training


def test_a_job_s_memory_is_its_own() -> None:
    """What one job has freed is not lent to the next, and its peak is not the next one's."""
    memory, size = probe.Memory.begin(), 48 << 20
    if memory.start is None:
        pytest.skip("this system cannot reset the peak of a process")
    held = [bytearray(b"x" * 4096) for _ in range(size // 4096)]  # small pieces: the C library keeps what is freed
    first = memory.job_bytes()
    assert first is not None
    assert 0.9 * size <= first <= 1.5 * size
    held.clear()
    memory = probe.Memory.begin()
    second = memory.job_bytes()
    assert second is not None
    assert second < size / 4
    held += [bytearray(b"x" * 4096) for _ in range(size // 4096)]
    again = memory.job_bytes()
    assert again is not None
    assert 0.9 * size <= again <= 1.5 * size
    assert memory.peak_bytes() > again


def test_herding_is_measured_on_fresh_gradients(tmp_path: Path) -> None:
    config = replace(DIGITS, arms=("grab", "replacement"), herding=True, epochs=2)
    run(config, tmp_path)
    data, stale = problem(), None
    model = data.build(0)
    order = ORDERS["grab"].build(model, 70, seed=0)
    for epochs, line in enumerate(record(tmp_path, "grab")[1:-1]):
        model = data.build(0)
        order = ORDERS["grab"].build(model, 70, seed=0)
        by_hand(replace(config, epochs=epochs), order, model, 0.1)
        rows = []
        for i in range(70):
            loss = nn.functional.cross_entropy(model(data.train_x[i : i + 1]), data.train_y[i : i + 1])
            rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
        fresh = torch.stack(rows)
        if stale is None:
            assert (line["herding"], line["stale_fresh"]) == (None, None)
        else:
            objective = herding_objective(fresh, order.history(order.epoch))
            assert line["herding"] == pytest.approx(objective, rel=1e-3)
            cosines = nn.functional.cosine_similarity(stale, fresh)
            assert line["stale_fresh"] == pytest.approx(float(cosines.mean()), rel=1e-4)
        stale = fresh
    last = record(tmp_path, "replacement")[-2]
    assert last["herding"] is None
    assert last["stale_fresh"] is not None
    assert probe.stale_fresh(torch.zeros(2, 3), torch.ones(2, 3)) is None
    with pytest.raises(InputError, match="--limit 8548"):
        probe.check_size(54_000, 7850)


def test_the_paper_s_protocol(tmp_path: Path) -> None:
    """Others run at RR's best rate alone; at 1e6 RR diverges, and 1e-7 learns nothing."""
    config = replace(
        DIGITS, arms=("rr", "so", "grab", "retrain"), rates=(1e-7, 1e30, 0.1), protocol="paper", seeds=(0, 1)
    )
    outcome = run(config, tmp_path)
    ran = {(job.arm, job.lr) for job in outcome.states}
    assert ran == {("rr", lr) for lr in config.rates} | {(arm, 0.1) for arm in ("so", "grab", "retrain")}
    assert outcome.states[Job("rr", 1e30, 0)] == "diverged"
    assert run(config, tmp_path).states == {}


def test_the_paper_s_protocol_in_units(tmp_path: Path) -> None:
    """grab@8 gets the rate of rr@8, and grab that of rr; without an rr@2, grab@2 gets rr's."""
    config = replace(
        DIGITS, arms=("rr@8", "grab", "grab@8", "rr", "grab@2", "retrain"), rates=(0.1, 0.3), seeds=(0, 1), epochs=1
    )
    config = replace(config, protocol="paper")
    for arm, losses in (("rr", {0.1: 1.0, 0.3: 2.0}), ("rr@8", {0.1: 2.0, 0.3: 1.0})):
        for (lr, loss), seed in product(losses.items(), config.seeds):
            path = Job(arm, lr, seed).record(tmp_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, [start(arm, lr, seed), epoch(0, 3.0), epoch(1, loss), end(1)])
        if arm == "rr":
            assert best_rates(config, tmp_path) is None  # rr@8 is not finished
    best = best_rates(config, tmp_path)
    assert best == {"rr@8": 0.3, "rr": 0.1}
    first, others, last = stages(config, best)
    assert {job.arm for job in first} == {"rr", "rr@8"}
    assert {(job.arm, job.lr) for job in others} == {("grab", 0.1), ("grab@8", 0.3), ("grab@2", 0.1)}
    assert last == [Job("retrain", 0.1, 0), Job("retrain", 0.1, 1)]


def test_each_at_its_own_rate(tmp_path: Path) -> None:
    """Two seeds at every rate; then the others at the best rate of those two, whatever they bring there."""
    config = replace(DIGITS, arms=("rr", "so"), rates=(1e-7, 1e30, 0.1), protocol="each", seeds=(0, 1, 2, 3))
    outcome = run(config, tmp_path)
    tuning = {(arm, lr, seed) for arm in config.arms for lr in config.rates for seed in (0, 1)}
    assert {(job.arm, job.lr, job.seed) for job in outcome.states} == tuning | {
        (arm, 0.1, seed) for arm in config.arms for seed in (2, 3)
    }
    assert run(config, tmp_path).states == {}
    later = Job("rr", 0.1, 3).record(tmp_path)
    write_lines(later, [start("rr", 0.1, 3), epoch(0, 3.0), epoch(1, 9.0), epoch(2, 9.0), epoch(3, 9.0), end(3)])
    found = read_run(tmp_path)
    (view,) = views(found)
    assert [(entry.rate, entry.seeds) for entry in view.entries.values()] == [(0.1, (0, 1, 2, 3))] * 2
    assert missing_jobs(found, [view]) == []
    assert best_rates(config, tmp_path) == {"rr": 0.1, "so": 0.1}
    for seed in (0, 1):  # an epoch with the lowest loss of all, before a bad end: validation keeps it
        kept = [epoch(0, 3.0), epoch(1, 9.0), epoch(2, 0.01), epoch(3, 8.0)]
        write_lines(Job("rr", 1e-7, seed).record(tmp_path), [start("rr", 1e-7, seed), *kept, end(3)])
    assert best_rates(config, tmp_path) == {"rr": 1e-7, "so": 0.1}
    assert views(read_run(tmp_path))[0].entries["rr"].rate == 1e-7
    with pytest.raises(InputError, match="retrain, with each order at its own rate"):
        run(replace(config, arms=("grab", "retrain")), tmp_path / "other")


def test_an_order_preconditioned_by_the_optimizer(tmp_path: Path) -> None:
    """Another order than by raw gradients, from the second epoch on; SGD has nothing to scale by."""
    config = replace(DIGITS, arms=("grab-pair", "grab-pair-precond"), optimizer="adamw")
    assert set(run(config, tmp_path).states.values()) == {"done"}
    plain, scaled = (record(tmp_path, arm) for arm in config.arms)
    assert scaled[0]["label"] == "GraB, pairs, preconditioned"
    assert plain[2]["train_loss"] == scaled[2]["train_loss"]
    assert plain[-2]["train_loss"] != scaled[-2]["train_loss"]
    failed = run(replace(config, arms=("grab-precond",), optimizer="sgd"), tmp_path / "sgd").failed
    assert "SGD" in str(failed)


def test_the_best_rate() -> None:
    assert best_rate({0.1: [0.25, 0.5], 0.01: [0.375, 0.375], 0.001: [0.1, None]}) == 0.1  # equal: the larger
    assert best_rate({0.01: [0.375, 0.375], 0.1: [0.25, 0.5]}) == 0.1
    assert best_rate({0.1: [None]}) is None


def test_no_rate_at_which_rr_trains(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="diverged at every rate"):
        run(replace(DIGITS, rates=(1e30,), protocol="paper"), tmp_path)


@pytest.mark.parametrize("arm", ["rr", "grab", "grab-pair", "herding", "grab@8"])
def test_divergence_ends_a_job(arm: str, tmp_path: Path) -> None:
    outcome = run(replace(DIGITS, arms=(arm,), rates=(1e30,)), tmp_path)
    assert list(outcome.states.values()) == ["diverged"]
    *_, last, end = record(tmp_path, arm, 1e30)
    assert last["train_loss"] is None
    assert (end["state"], end["epochs"]) == ("diverged", last["epoch"])
    assert end["why"] == "the loss is not finite"


def test_retraining_on_what_diverged_is_refused(tmp_path: Path) -> None:
    run(replace(DIGITS, arms=("grab", "retrain"), rates=(1e30,)), tmp_path)
    assert [line["kind"] for line in record(tmp_path, "retrain", 1e30)] == ["start", "end"]
    assert "the GraB job has state 'diverged'" in record(tmp_path, "retrain", 1e30)[-1]["why"]


def test_greedy_is_refused_with_its_figure(tmp_path: Path) -> None:
    config = replace(DIGITS, arms=("rr", "greedy", "herding", "greedy@8"), memory_limit=100_000)
    assert run(config, tmp_path).states == {
        Job("rr", 0.1, 0): "done",
        Job("greedy", 0.1, 0): "refused",
        Job("herding", 0.1, 0): "refused",
        Job("greedy@8", 0.1, 0): "done",
    }
    start, end = record(tmp_path, "greedy")
    assert (start["kind"], end["needed_bytes"]) == ("start", 70 * 650 * 4)
    assert "memory_limit" in end["why"]
    assert record(tmp_path, "greedy@8")[-2]["order_bytes"] == 9 * 650 * 4


def test_greedy_that_would_take_hours_is_refused(tmp_path: Path) -> None:
    assert greedy_seconds(54_000, 7850) > 3600  # MNIST
    config = replace(DIGITS, arms=("greedy", "greedy@64"), greedy_hours=1e-7)
    assert list(run(config, tmp_path).states.values()) == ["refused", "done"]
    assert "hours per epoch" in record(tmp_path, "greedy")[-1]["why"]
    once = replace(config, epochs=1, arms=("greedy",))  # nothing is herded after the last epoch
    assert list(run(once, tmp_path / "once").states.values()) == ["done"]


def test_an_order_by_class_needs_classes() -> None:
    config = replace(DIGITS, arms=("rr", "stratified"))
    data = problem()
    assert describe(data, config, verify=True)["train"] == 70
    tokens = replace(data, train_y=data.train_y[:, None].expand(-1, 3))
    assert tokens.labels is None
    with pytest.raises(InputError, match=r"stratified on a task without classes.*Leave it out"):
        describe(tokens, config, verify=True)
    with pytest.raises(InputError, match="no labels; expected labels="):
        ORDERS["stratified"].build(None, 70)
    with pytest.raises(InputError, match="70 labels for 71 examples"):
        ORDERS["stratified"].build(None, 71, labels=data.train_y)


def test_units_are_the_same_for_every_order(tmp_path: Path) -> None:
    """RR in units of 8 shuffles the units that GraB orders."""
    for name in ("rr", "so", "flipflop", "grab"):
        arm = arms.parse(f"{name}@8")
        order = arms.build_order(arm, nn.Linear(2, 2), 70, seed=1, memory_limit=10**9)
        assert order.group == 8
        np.testing.assert_array_equal(order.history(0), RandomReshuffling(70, seed=1).history(0))
    assert arms.parse("rr", group=8).group == 8
    units = {frozenset(RandomReshuffling(70, group=8, seed=1).history(0)[k : k + 8].tolist()) for k in range(0, 70, 8)}
    second = ORDERS["rr"].build(None, 70, seed=1, group=8).history(1).tolist()
    assert any(set(second[:k]) in units for k in (6, 8))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arms": ("rr", "best")}, "'best'"),
        ({"arms": ("grab@0",)}, "integer after @"),
        ({"arms": ("grab@x",)}, "integer after @"),
        ({"arms": ("replacement@2",)}, "units of 1"),
        ({"arms": ("stratified@2",)}, "units of 1"),
        ({"arms": ()}, "no orders"),
        ({"arms": ("rr", "rr")}, "at least one of orders, without repetition"),
        ({"rates": (0.0,)}, "rates above 0"),
        ({"rates": (float("nan"),)}, "rates above 0"),
        ({"epochs": 0}, "1 or more"),
        ({"arms": ("grab",), "protocol": "paper"}, "without rr for grab"),
        ({"arms": ("grab", "rr@8", "grab@8"), "protocol": "paper"}, "without rr for grab;"),
        ({"arms": ("retrain",)}, "retrain without grab"),
        ({"task": "none"}, "the task 'none'"),
        ({"limit": 10**6}, "--limit"),
        ({"rates": (1e300,)}, r"rates 1e\+300"),
        ({"arms": ("grab@" + "9" * 24,)}, "9 digits"),
        ({"arms": ("grab@5000",), "limit": None}, "units of 5,000 on 1,294 examples"),
        ({"arms": ("grab",), "group": 70}, "grab in units of 70 on 70 examples"),
    ],
)
def test_what_cannot_be_run(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=word):
        run(replace(DIGITS, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_orders_rates_and_seeds_are_added(tmp_path: Path) -> None:
    first = replace(DIGITS, arms=("rr", "so"))
    run(first, tmp_path)
    before = (tmp_path / "records/rr/lr-0.1/seed-0.jsonl").read_bytes()
    more = replace(first, arms=("flipflop", "so"), rates=(0.03, 0.1), seeds=(0, 1))
    outcome = run(more, tmp_path)
    assert (len(outcome.states), outcome.before) == (7, 1)
    saved = RunConfig.from_json(json.loads((tmp_path / "config.json").read_text())["config"])
    assert saved == replace(first, arms=("rr", "so", "flipflop"), rates=(0.1, 0.03), seeds=(0, 1))
    assert (tmp_path / "records/rr/lr-0.1/seed-0.jsonl").read_bytes() == before
    fresh = tmp_path / "fresh"
    run(more, fresh)
    assert repeatable(fresh).items() <= repeatable(tmp_path).items()


@pytest.mark.parametrize("change", [{"epochs": 4}, {"batch_size": 8}, {"limit": 60, "group": 2}, {"task": "mnist"}])
def test_another_configuration_is_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        merged(DIGITS, replace(DIGITS, **change))
    assert all(name in str(caught.value) for name in change)
    with pytest.raises(InputError, match="more = 1 at a saved configuration"):
        RunConfig.from_json(asdict(DIGITS) | {"more": 1})
    saved = json.loads(json.dumps(asdict(DIGITS)))
    assert RunConfig.from_json(saved) == DIGITS
    del saved["optimizer"]  # from before there was a choice
    assert RunConfig.from_json(saved) == DIGITS


def test_other_data_are_refused(tmp_path: Path) -> None:
    config = replace(DIGITS, task="mnist", limit=None, arms=("rr",), epochs=1)
    write_mnist(tmp_path / "one")
    write_mnist(tmp_path / "two", train=80)
    run(config, tmp_path / "run", data=tmp_path / "one", verify=False)
    with pytest.raises(StateError, match=r"train 72.*expected train 54"):
        run(replace(config, arms=("so",)), tmp_path / "run", data=tmp_path / "two", verify=False)
    notes = json.loads((tmp_path / "run" / "config.json").read_text())["problem"]["notes"]
    assert "The data's checksums were not compared." in notes


def test_every_command_that_worked_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(DIGITS, arms=("rr",), epochs=1)
    run(config, tmp_path, command="first", verify=False)
    first = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(runner, "provenance", lambda command: {"command": command, "revision": "another"})
    run(config, tmp_path, command="nothing to do")
    run(replace(config, arms=("so",)), tmp_path, command="second")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["commands"] == [*first["commands"], {"command": "second", "revision": "another"}]
    assert [one["command"] for one in first["commands"]] == ["first"]
    assert (saved["command"], saved["revision"]) == ("first", first["revision"])
    assert "The data's checksums were not compared." in saved["problem"]["notes"]  # of the first command
    header = read_header(tmp_path)
    assert header.command == "first"
    assert [(made.command, made.revision) for made in header.made] == [
        ("first", first["revision"]),
        ("second", "another"),
    ]


def test_arms_that_start_elsewhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights than the seed's first arm had; an order with a first epoch of its own."""
    model = nn.Linear(2, 2)
    job.check_seed(tmp_path, 0, model, None)
    job.check_seed(tmp_path, 0, model, RandomReshuffling(9, seed=0))
    with pytest.raises(StateError, match="different initial weights for seed 0"):
        job.check_seed(tmp_path, 0, nn.Linear(2, 2), None)
    with pytest.raises(StateError, match="first epoch is different"):
        job.check_seed(tmp_path, 0, model, FixedOrder(np.roll(RandomReshuffling(9, seed=0).history(0), 1)))


def test_one_command_to_a_folder(tmp_path: Path) -> None:
    from ordain.study.files import only_one

    with only_one(tmp_path), pytest.raises(StateError, match="another command"):
        run(DIGITS, tmp_path)
    run(replace(DIGITS, arms=("rr",)), tmp_path)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    head: dict[str, Any] = {"format": 1, "kind": "toy-herding", "command": "", "started": ""}
    head |= {"config": {}, "versions": {}, "machine": {}}
    (tmp_path / "config.json").write_text(json.dumps(head))
    with pytest.raises(InputError, match="not a training run's"):
        run(DIGITS, tmp_path)


def test_missing_data_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(replace(DIGITS, task="mnist"), tmp_path / "run", data=tmp_path / "none")
    assert not (tmp_path / "run").exists()


def test_a_test_loss_does_not_end_a_job(tmp_path: Path) -> None:
    data, setting = problem(), train_job.Setting(DIGITS, tmp_path, tmp_path)
    data = replace(data, test_x=torch.full_like(data.test_x, torch.inf))
    assert train_job.train(data, setting, Job("rr", 0.1, 0), tell=lambda *_: None) == "done"
    assert [line["test_loss"] for line in record(tmp_path, "rr")[1:-1]] == [None] * 4
    data = replace(data, valid_x=torch.full_like(data.valid_x, torch.inf))
    assert train_job.train(data, setting, Job("so", 0.1, 0), tell=lambda *_: None) == "diverged"


def test_jobs_by_stage() -> None:
    config = replace(DIGITS, arms=("retrain", "grab", "rr"), rates=(0.1, 0.01), seeds=(0, 1))
    first, last = stages(config, None)
    assert [job.seed for job in first] == [0, 0, 0, 0, 1, 1, 1, 1]  # seeds are outermost
    assert {job.arm for job in first} == {"rr", "grab"}
    assert {job.arm for job in last} == {"retrain"}
    assert stages(replace(config, protocol="paper"), None) == [[Job("rr", lr, s) for s in (0, 1) for lr in (0.1, 0.01)]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fixed-orders", {"rr", "so", "grab", "grab-1step", "retrain"}),
        ("granularity", {f"{order}@{unit}" for order in ("rr", "grab") for unit in (1, 2, 8, 64)}),
        ("memory", {"rr", "grab", "grab-pair", "herding", "greedy", "greedy@8"}),
    ],
)
def test_ablations(name: str, expected: set[str], tmp_path: Path) -> None:
    result = call("run", name, "--task", "digits", *SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "records").iterdir()} == expected
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["kind"], saved["task"], saved["config"]["study"]) == ("training", "digits", name)
    if name == "memory":
        assert saved["problem"]["stored_bytes"]["greedy"] == 70 * 650 * 4
        assert record(tmp_path, "greedy")[-2]["order_bytes"] == 70 * 650 * 4
        assert record(tmp_path, "greedy@8")[-2]["order_bytes"] == 9 * 650 * 4


def test_a_failing_job_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = train_job.build_order

    def build(arm: Any, *rest: Any, **options: Any) -> Any:
        if arm.name == "so":
            raise ZeroDivisionError("a fault")
        return original(arm, *rest, **options)

    monkeypatch.setattr(train_job, "build_order", build)
    words = ("run", "digits", *SMALL, "--orders", "so,rr", "--out", tmp_path)
    result = call(*words)
    assert result.exit_code == 1
    assert "so, lr 0.1, seed 0 failed: ZeroDivisionError: a fault" in result.stderr
    assert record(tmp_path, "rr")[-1]["state"] == "done"
    monkeypatch.undo()
    assert call(*words).exit_code == 0
    assert record(tmp_path, "so")[-1]["state"] == "done"


def test_vector_studies_are_dispatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = vectors.run_study

    def run_study(*words: Any, report: Any, **options: Any) -> None:
        seen.append((*words, options))
        original(*words, report=report, **options)

    monkeypatch.setattr(vectors, "run_study", run_study)
    result = call("run", "statement1", "--out", tmp_path, "--seeds", 2, "--quick")
    assert result.exit_code == 0, result.output
    assert seen == [("statement1", tmp_path, {"seeds": 2, "quick": True})]
    sentences = vectors.STUDIES["statement1"].sentences(tmp_path)
    said = [*sentences, f"Next, the report with its figures: ordain report {tmp_path}"]
    assert result.stdout.splitlines() == said


def test_a_run_ends_with_its_results_and_the_next_command(tmp_path: Path) -> None:
    words = ("run", "digits", *SMALL, "--orders", "rr,grab", "--out", tmp_path / "a run")
    first, again = call(*words), call(*words)
    assert first.exit_code == again.exit_code == 0
    assert first.stdout.startswith("digits: 2 done. ")
    assert again.stdout.startswith("digits: 2 finished earlier. ")
    assert first.stdout.splitlines()[1:] == again.stdout.splitlines()[1:]
    assert f"{record(tmp_path / 'a run', 'grab')[-2]['train_loss']:.3f}"[:-1] in first.stdout
    assert "random" in first.stdout
    told = f"Next, the report with its figures: ordain report '{tmp_path / 'a run'}'"
    assert first.stdout.splitlines()[-1] == told


@pytest.mark.parametrize(
    "words", [("--orders", "rr"), ("--epochs", 1), ("--lr", 0.1), ("--limit", 9), ("--no-verify",), ("--jobs", 1)]
)
def test_vector_studies_refuse_what_they_do_not_take(words: tuple[Any, ...], tmp_path: Path) -> None:
    result = call("run", "toy-herding", "--quick", *words, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert f"{str(words[0]).replace('no-', '')} with toy-herding" in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_plainly(tmp_path: Path) -> None:
    for words, said in (
        (("none",), "'none'"),
        (("digits", "--lr", "fast"), "--lr fast"),
        (("digits", "--orders", "best"), "'best'"),
        (("fixed-orders", "--task", "none"), "'none'"),
        (("digits", "--orders", ""), "the order ''"),
        (("digits", "--lr", ""), "--lr ''"),
        (("digits", "--task", "mnist"), "--task with digits"),
        (("digits", "--quick"), "--quick with digits"),
        (("memory", "--quick"), "--quick with memory"),
        (("digits", "--greedy-hours", "inf"), "--greedy-hours inf"),
        (("digits", "--greedy-hours", "nan"), "--greedy-hours nan"),
        (("digits", "--memory-limit", "nan"), "--memory-limit nan"),
        (("digits", "--memory-limit", "inf"), "--memory-limit inf"),
        (("digits", "--memory-limit", "-3"), "--memory-limit -3"),
    ):
        result = call("run", *words, "--jobs", 0, "--out", tmp_path / "run")
        assert result.exit_code == 2
        assert result.stderr.startswith("ordain: got ")
        assert said in result.stderr
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path: Path) -> None:
    from importlib.util import find_spec

    result = call("run", "digits", *SMALL, "--orders", "rr", "--out", tmp_path, "--tensorboard")
    if find_spec("tensorboard") is None:
        assert result.exit_code == 2
        assert "pip install tensorboard" in result.stderr
    else:
        assert result.exit_code == 0
        assert list((tmp_path / "tensorboard" / "rr").rglob("events*"))


def test_the_run_can_be_called_and_reports(tmp_path: Path) -> None:
    heard: list[runner.Progress] = []
    run(replace(DIGITS, arms=("rr",), epochs=2), tmp_path, report=heard.append)
    assert [(one.message.kind, one.message.epoch) for one in heard] == [
        ("begun", 0),
        ("epoch", 0),
        ("epoch", 1),
        ("epoch", 2),
        ("finished", 0),
    ]
    assert (heard[-1].done, heard[-1].total) == (1, 1)
