"""Orders at their own rate and length: every number from records whose truth is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from study.study_records import path_of, write_config, write_job, write_lines

from ordain.errors import InputError
from ordain.study.claims import practice, practice_page
from ordain.study.claims.claims_page import write_claims
from ordain.study.report.statistics import compare

NOISE = [0.0, 0.002, -0.002, 0.001, -0.001]


def write(
    folder: Path,
    length: int,
    finals: dict[str, dict[float, float]],
    *,
    decay: str = "cosine",
    size: int = 64,
    limit: int | None = None,
) -> None:
    """Two seeds at every rate, five at the best one; epoch 0 has the lowest validation loss of all."""
    name = f"{decay}-{length}-{size}-{limit}"
    settings = {"task": "mnist", "protocol": "each", "decay": decay, "epochs": length, "batch_size": size}
    settings["limit"] = limit
    rates = sorted({rate for of in finals.values() for rate in of})
    config = settings | {"arms": list(finals), "rates": rates, "seeds": list(range(5))}
    write_config(folder / name, task="mnist", config=config)
    for arm, by_rate in finals.items():
        best = min(by_rate, key=lambda rate: by_rate[rate])
        for rate, final in by_rate.items():
            for seed in range(5 if rate == best else 2):
                own = NOISE[seed] * (1 if arm == "rr" else -1)
                losses = [0.01, *(final + own + 0.1 * (length - epoch) for epoch in range(1, length + 1))]
                write_job(folder / name, arm, rate, seed, losses)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 4, {"rr": {0.1: 0.6, 0.2: 0.5, 0.4: 0.7}, "grab": {0.1: 0.9, 0.2: 0.44, 0.4: 0.4}})
    write(tmp_path, 8, {"rr": {0.1: 0.3, 0.2: 0.4}})
    (tmp_path / "costs.json").write_text(json.dumps({"seconds": {"mnist": {"rr": 2.0, "grab": 3.0}}}))
    return tmp_path


def test_orders_at_their_own_rate_and_length(folder: Path) -> None:
    found = {(point.arm, point.epochs): point for point in practice.points(folder)}
    assert set(found) == {("rr", 4), ("rr", 8), ("grab", 4)}
    assert [(p.rate, p.edge, p.seconds) for p in found.values()] == [
        (0.2, False, 8.0),
        (0.1, True, 16.0),
        (0.4, True, 12.0),
    ]
    grab = found["grab", 4]
    theirs = {seed: 0.5 + noise for seed, noise in enumerate(NOISE)}
    ours = {seed: 0.4 - noise for seed, noise in enumerate(NOISE)}
    same = compare(ours, theirs)
    assert grab.same["train"].difference == pytest.approx(same.difference)
    assert grab.same["train"].holm == pytest.approx(same.p)
    assert practice_page.better(grab.same["train"], "train") is True
    # As long as RR with 6 epochs: between its runs of 4 and 8 epochs, in the logarithm of time.
    share = np.log(12 / 8) / np.log(2)
    between = {seed: (1 - share) * (0.5 + noise) + share * (0.3 + noise) for seed, noise in enumerate(NOISE)}
    equal = compare(ours, between)
    assert grab.equal["train"].difference == pytest.approx(equal.difference)
    assert practice_page.better(grab.equal["train"], "train") is False
    # Of accuracy in per cent, 0.017 is too little, however significant; and of a loss, 0.4 %.
    assert practice_page.better(grab.equal["train"], "accuracy") is None
    assert practice_page.better(replace(grab.equal["train"], difference=0.4), "accuracy") is True
    assert practice_page.better(replace(grab.equal["train"], relative=0.004), "train") is None
    assert practice_page.better(replace(grab.equal["train"], holm=0.06), "train") is None
    assert grab.same_rate == pytest.approx((0.4 - 0.001) / (0.7 + 0.001))  # of the two seeds at this rate
    assert found["rr", 4].same_rate is None
    assert grab.values["test"].to_dict() == pytest.approx(found["grab", 4].values["train"].to_dict(), abs=0.3)


def test_a_constant_rate_is_judged_by_its_last_fifth(tmp_path: Path) -> None:
    write(tmp_path, 10, {"rr": {0.1: 0.5}}, decay="constant")
    (point,) = practice.points(tmp_path)
    assert point.values["train"][0] == pytest.approx(0.55)  # of 0.6 and 0.5
    assert not point.equal


def test_the_page_begins_with_it(folder: Path) -> None:
    page = write_claims(folder)
    assert page.verdict == (
        "Ordering pays on none of 1 task: at the same processor time as random reshuffling with its own best rate and "
        "schedule, test loss is lower on none and higher on 1; test accuracy is higher on none and lower on "
        "none."
    )
    text = (folder / "README.md").read_text()
    claims = text.index("## The paper's claims")
    assert text.index(page.verdict) < text.index("![Test loss and test accuracy") < claims
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| Logistic regression on MNIST |"))
    assert lines[start : start + 3] == [
        "| Logistic regression on MNIST | random reshuffling | 4 | 1.00 | 0.500 | 90.0 | - |",
        "|  | random reshuffling | 8 | 2.00 | 0.300 | 90.0 | - |",
        "|  | GraB: GraB(model, n) | 4 | 1.50 | 0.400 | 90.0 | loss worse, accuracy no clear difference |",
    ]
    (detailed,) = (line for line in lines[start + 3 :] if "| GraB |" in line)
    assert r"| 4 | 0.4\* | 5 | 1.50 | 0.4000 ± 0.0016 |" in detailed
    assert all((folder / f"{name}.png").is_file() for name in ("by-time", "training-by-time"))
    assert page.verdict in (folder / "index.html").read_text()


def test_two_orders_at_equal_time(folder: Path) -> None:
    (alone,) = (point for point in practice.points(folder) if point.arm == "grab")
    write(folder, 4, {"rr": {0.1: 0.6, 0.2: 0.5, 0.4: 0.7}, "grab": {0.2: 0.44, 0.4: 0.3}, "grab-pair": {0.2: 0.35}})
    costs = {"rr": 2.0, "grab": 3.0, "grab-pair": 3.0}
    (folder / "costs.json").write_text(json.dumps({"seconds": {"mnist": costs}}))
    found = practice.points(folder)
    grab, pair = (next(point for point in found if point.arm == arm) for arm in ("grab", "grab-pair"))
    assert alone.equal["test"].holm == alone.equal["test"].p
    ps = sorted(point.equal["test"].p or 0.0 for point in (grab, pair))
    assert sorted(point.equal["test"].holm or 0.0 for point in (grab, pair)) == pytest.approx(
        [2 * ps[0], max(2 * ps[0], ps[1])]
    )
    # Both are better than RR: the headline tells of the one in the table, with the lower validation loss.
    gains = [-(point.equal["test"].relative or 0.0) for point in (grab, pair)]
    assert min(gains) > 0
    assert practice.validates_better(grab, pair)
    assert "Ordering pays on 1 of 1 task: at the same" in practice_page.headline(found)
    assert f"test loss is lower on 1 (by {100 * gains[0]:.1f} %)" in practice_page.headline(found)


def test_a_longer_run_of_reshuffling_that_is_worse_is_left_out(folder: Path) -> None:
    write(folder, 8, {"rr": {0.1: 0.55, 0.2: 0.56}})
    (grab,) = (point for point in practice.points(folder) if point.arm == "grab")
    theirs = {seed: 0.5 + noise for seed, noise in enumerate(NOISE)}
    assert grab.equal["train"].difference == pytest.approx(compare(grab.values["train"], theirs).difference)
    # More time than the longest run: more epochs would not help reshuffling.
    (folder / "costs.json").write_text(json.dumps({"seconds": {"mnist": {"rr": 2.0, "grab": 7.0}}}))
    (longer,) = (point for point in practice.points(folder) if point.arm == "grab")
    assert longer.equal["train"].difference == grab.equal["train"].difference


def test_lengths_are_compared_on_common_seeds(folder: Path) -> None:
    """Five more seeds of RR's 4 epochs, with bad initial weights, do not make 8 epochs worth running."""
    write(folder, 8, {"rr": {0.1: 0.55, 0.2: 0.56}})
    (before,) = (point for point in practice.points(folder) if point.arm == "grab")
    for seed in range(5, 10):
        write_job(folder / "cosine-4-64-None", "rr", 0.2, seed, [0.01, 1.2, 1.1, 1.0, 0.9])
    found = practice.points(folder)
    (after,) = (point for point in found if point.arm == "grab")
    assert after.equal["train"].difference == before.equal["train"].difference
    assert len(next(point.values["valid"] for point in found if (point.arm, point.epochs) == ("rr", 4))) == 10
    assert [row[4] for row in practice_page.table(found).rows] == ["0.500", "0.550", "0.400"]  # of five seeds


def test_no_costs_of_ours(folder: Path) -> None:
    (folder / "costs.json").write_text("[]")
    with pytest.raises(InputError, match=r"benchmarks\.costs"):
        practice.points(folder)


def test_the_cost_of_an_order_that_learns_in_some_epochs(tmp_path: Path) -> None:
    write(tmp_path, 8, {"rr": {0.1: 0.3}, "herding-head-lazy": {0.1: 0.3}})
    (tmp_path / "costs.json").write_text(json.dumps({"seconds": {"mnist": {"rr": 2.0, "herding-head-lazy": 2.5}}}))
    found = {point.arm: point.seconds for point in practice.points(tmp_path)}
    # Half a second more an epoch is 1.5 for each that learns: of eight epochs 0, 1, 4 and 7.
    assert found == {"rr": 16.0, "herding-head-lazy": 16.0 + 4 * 1.5}


def test_each_order_at_its_best_schedule(folder: Path) -> None:
    write(folder, 4, {"rr": {0.1: 0.8, 0.2: 0.9}, "grab": {0.1: 0.35, 0.2: 0.36}}, decay="step")
    found = practice.points(folder)
    shown = {(point.arm, point.epochs): point.decay for point in practice.at_best_schedule(found)}
    assert shown == {("rr", 4): "cosine", ("rr", 8): "cosine", ("grab", 4): "step"}
    # At equal time, RR has its own best schedule; at as many epochs, that of the order.
    (step,) = (point for point in found if (point.arm, point.decay) == ("grab", "step"))
    theirs = step.values["test"].mean() - (step.equal["test"].difference or 0.0)
    share = np.log(12 / 8) / np.log(2)
    assert theirs == pytest.approx((1 - share) * 0.5 + share * 0.3)
    assert step.same["test"].difference == pytest.approx(0.35 - 0.8)


def test_batch_sizes_and_numbers_of_examples(folder: Path) -> None:
    write(folder, 4, {"rr": {0.1: 0.6}, "grab": {0.1: 0.3}}, size=256)
    write(folder, 4, {"rr": {0.1: 0.9}, "grab": {0.1: 0.9}}, limit=1000)
    found = practice.points(folder)
    rows = {row[1:4]: row[4:] for row in practice_page.sweeps(found).rows}
    assert set(rows) == {("64", "54,000", "GraB"), ("256", "54,000", "GraB"), ("64", "1,000", "GraB")}
    assert rows["256", "54,000", "GraB"][1].startswith("-50.00 % (p = ")
    assert rows["64", "1,000", "GraB"][1].startswith("+0.00 % (p = ")
    assert (rows["64", "54,000", "GraB"][0], rows["256", "54,000", "GraB"][0]) == ("1.50", "1.00")
    # They have no row of their own where RR has several lengths, and costs are of the usual batch size only.
    assert {point.problem for point in practice_page.main_points(found)} == {("mnist", "64", "None")}
    # The costs are 2 and 3 seconds; the records of every run say 2.
    assert {point.problem[1]: point.seconds for point in found if point.arm == "grab"} == {"64": 12.0, "256": 8.0}


def test_stratified_order_is_a_baseline(folder: Path) -> None:
    write(folder, 4, {"rr": {0.1: 0.6, 0.2: 0.5}, "grab": {0.2: 0.4}, "stratified": {0.2: 0.35}})
    costs = {"rr": 2.0, "grab": 3.0, "stratified": 2.01}  # the same as RR's, but for how exactly it is measured
    (folder / "costs.json").write_text(json.dumps({"seconds": {"mnist": costs}}))
    found = practice.points(folder)
    rr, stratified = (next(p for p in found if (p.arm, p.epochs) == (arm, 4)) for arm in ("rr", "stratified"))
    alone = compare(stratified.values["test"], rr.values["test"])
    assert stratified.equal["test"].difference == pytest.approx(alone.difference)
    assert "stratified" not in practice_page.headline(found)  # GraB does not pay
    assert [row[1] for row in practice_page.table(found).rows][-2:] == ["stratified", "GraB: GraB(model, n)"]


def test_an_order_that_pays_is_compared_with_stratified_order(folder: Path) -> None:
    write(folder, 4, {"rr": {0.1: 0.6, 0.2: 0.5}, "grab": {0.2: 0.3}, "stratified": {0.2: 0.301}})
    told = practice_page.headline(practice.points(folder))
    assert "Ordering pays on 1 of 1 task" in told
    assert told.endswith(
        "On Logistic regression on MNIST, there is no clear difference from stratified order, which costs nothing "
        "(test loss 0.3 % lower, p < 1e-16)."
    )
    write(folder, 4, {"rr": {0.1: 0.6, 0.2: 0.5}, "grab": {0.2: 0.3}, "stratified": {0.2: 0.25}})
    assert "it is worse than stratified order" in practice_page.headline(practice.points(folder))


def test_an_order_as_fast_as_the_only_length_of_rr(tmp_path: Path) -> None:
    write(tmp_path, 4, {"rr": {0.2: 0.5}, "grab": {0.2: 0.3}, "stratified": {0.2: 0.4}})
    costs = {"rr": 2.0, "grab": 2.1, "stratified": 1.99}
    (tmp_path / "costs.json").write_text(json.dumps({"seconds": {"mnist": costs}}))
    equal = {point.arm: point.equal for point in practice.points(tmp_path)}
    assert equal["stratified"]["test"].difference == pytest.approx(0.4 - 0.5, abs=1e-3)
    assert not equal["grab"]


def test_accuracy_has_its_own_curve(folder: Path) -> None:
    """RR's 8 epochs have the higher loss, and are left out for it, but the higher accuracy."""
    write(folder, 8, {"rr": {0.1: 0.55, 0.2: 0.56}})
    for seed in range(5):
        path = path_of(folder / "cosine-8-64-None", "rr", 0.1, seed)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(
            path,
            [line | ({"valid_accuracy": 0.95, "test_accuracy": 0.94} if "epoch" in line else {}) for line in lines],
        )
    (grab,) = (point for point in practice.points(folder) if point.arm == "grab")
    assert grab.equal["test"].difference == pytest.approx(0.4 - 0.5)
    share = np.log(12 / 8) / np.log(2)
    assert grab.equal["accuracy"].difference == pytest.approx(90 - (90 + 4 * share))
    # More time than RR's longest run: its loss would not improve, but its accuracy might.
    (folder / "costs.json").write_text(json.dumps({"seconds": {"mnist": {"rr": 2.0, "grab": 7.0}}}))
    found = practice.points(folder)
    (grab,) = (point for point in found if point.arm == "grab")
    assert set(grab.equal) == {"train", "test"}
    assert practice_page.table(found).rows[-1][-1] == "loss better, accuracy RR was not run for as long"
    assert "test loss is lower on 1 (by 20.0 %)" in practice_page.headline(found)


def test_rates_are_chosen_by_the_epoch_that_is_kept(folder: Path) -> None:
    """At 0.1 the last epoch is the worst of all, after one that is better than any at 0.2."""
    for seed in range(5):
        write_job(folder / "cosine-4-64-None", "rr", 0.1, seed, [0.01, 0.7, 0.45, 0.8, 0.9])
    (rr,) = (point for point in practice.points(folder) if (point.arm, point.epochs) == ("rr", 4))
    assert (rr.rate, rr.values["valid"].mean(), rr.values["train"].mean()) == (0.1, 0.45, pytest.approx(0.9))


def test_the_table_accounts_for_the_number_of_tasks(folder: Path) -> None:
    """A p of 0.03 pays where it is the only one, not as one of two."""
    points = practice.points(folder)
    rr, one = (next(point for point in points if (point.arm, point.epochs) == (arm, 4)) for arm in ("rr", "grab"))
    longer = next(point for point in points if point.epochs == 8)
    weak = replace(compare({0: 1.0}, {0: 2.0}), seeds=tuple(range(5)), p=0.03, holm=0.03)
    one = replace(one, equal={"test": weak, "accuracy": replace(weak, difference=1.0)})
    assert "pays on 1 of 1 task" in practice_page.headline([rr, longer, one])
    other = [replace(point, problem=("digits", "32", "None")) for point in (rr, longer, one)]
    assert "pays on none of 2 tasks" in practice_page.headline([rr, longer, one, *other])
    assert [row[-1] for row in practice_page.table([rr, longer, one, *other]).rows if row[1].startswith("GraB")] == [
        "no clear difference"
    ] * 2
