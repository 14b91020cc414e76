from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.stats import ttest_rel
from study.study_records import end, epoch, path_of, start, write_config, write_job, write_lines

from ordain.errors import InputError
from ordain.study.report import training_content, write_report
from ordain.study.report.arm_rows import COLUMNS, Spread, cells, reached, rows
from ordain.study.report.curves import draw_curves, styles
from ordain.study.report.number_text import plain
from ordain.study.report.verdict_sentences import headline, sentences
from ordain.study.report.views import (
    ACCURACY,
    TRAIN,
    VALID,
    VALID_ACCURACY,
    metrics,
    missing_jobs,
    problems,
    views,
    with_missing_arms,
)
from ordain.study.runs.records import read_run, select
from ordain.study.runs.run_folder import read_header

RR = [0.50, 0.52, 0.51, 0.50, 0.53]


def jobs(folder: Path, arm: str, finals: list[float], lr: float = 0.1) -> None:
    for seed, final in enumerate(finals):
        write_job(folder, arm, lr, seed, [2.0, 1.0, final])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    jobs(tmp_path, "rr", RR)
    return tmp_path


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_content, "training_figures", lambda run, found: {"own": [], "rr": [], "costs": []})


def rewrite(path: Path, **change: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [line | (change if line["kind"] == "epoch" else {}) for line in lines])


def test_each_at_its_own_rate_and_all_at_that_of_rr(folder: Path) -> None:
    jobs(folder, "rr", [0.6] * 5, lr=0.3)
    jobs(folder, "grab", [0.45] * 5, lr=0.1)
    jobs(folder, "grab", [0.40] * 5, lr=0.3)
    own, same = views(read_run(folder))
    assert (own.name, same.name) == ("own", "rr")
    assert [own.entries[name].rate for name in ("rr", "grab")] == [0.1, 0.3]
    assert [same.entries[name].rate for name in ("rr", "grab")] == [0.1, 0.1]
    assert sentences(own, TRAIN)[0].text.endswith("rate 0.3, RR at 0.1.")
    assert sentences(same, TRAIN)[0].text.endswith("5 seeds; rate 0.1.")
    assert "0.1" in same.title


def test_every_order_at_every_rate(folder: Path) -> None:
    """Each beside RR at the same rate, and over the seeds both have."""
    assert training_content.rates_table(read_run(folder)) is None
    ours, theirs = [0.41, 0.40, 0.42, 0.40], [0.60, 0.62, 0.61, 0.60, 0.90]
    jobs(folder, "rr", theirs, lr=0.3)
    jobs(folder, "grab", ours, lr=0.3)
    jobs(folder, "so", [0.5], lr=0.1)
    for seed in range(5):
        write_lines(path_of(folder, "greedy", 0.3, seed), [start("greedy", 0.3, seed), end(0, "refused", "too large")])
    table = training_content.rates_table(read_run(folder))
    assert table is not None
    assert table.headings == ("order", "at 0.1", "at 0.3")
    told = {row[0]: row[1:] for row in table.rows}
    share = 100 * (sum(ours) - sum(theirs[:4])) / sum(theirs[:4])
    p = ttest_rel(ours, theirs[:4]).pvalue
    assert told["random reshuffling"] == ("0.5120 ± 0.0130", "0.6660 ± 0.1311")
    assert told["GraB"] == ("not run at this rate", f"0.4075 ± 0.0096; {share:+.2f} %, p = {p:.2g}")
    assert told["shuffle once"] == ("0.5000; +0.00 %", "not run at this rate")  # one seed: no deviation, and no p
    assert told["greedy"] == ("not run at this rate", "refused")


def test_rates_are_chosen_by_validation_not_by_training(folder: Path) -> None:
    jobs(folder, "rr", [0.1] * 5, lr=0.3)
    for seed in range(5):
        rewrite(path_of(folder, "rr", 0.3, seed), valid_loss=3.0)
    (view,) = views(read_run(folder))
    assert view.entries["rr"].rate == 0.1


def test_of_two_rates_alike_the_larger(folder: Path) -> None:
    jobs(folder, "rr", RR, lr=0.3)
    assert views(read_run(folder))[0].entries["rr"].rate == 0.3


def test_a_rate_at_which_a_seed_diverged_is_out(folder: Path) -> None:
    jobs(folder, "rr", [0.1] * 5, lr=0.3)
    lines = [start("rr", 0.3, 4), epoch(0, 2.0), epoch(1, None), end(1, "diverged", "not finite")]
    write_lines(path_of(folder, "rr", 0.3, 4), lines)
    run = read_run(folder)
    assert views(run)[0].entries["rr"].rate == 0.1
    (problem,) = problems(run)
    assert (problem.rates, problem.seeds, problem.state, problem.why) == ((0.3,), (4,), "diverged", "not finite")


def test_an_arm_that_diverges_at_rrs_rate_is_told_not_dropped(folder: Path) -> None:
    jobs(folder, "grab", [0.6] * 5, lr=0.05)
    jobs(folder, "grab", [0.1] * 4, lr=0.1)
    lines = [start("grab", 0.1, 4), epoch(0, 2.0), epoch(1, None), end(1, "diverged")]
    write_lines(path_of(folder, "grab", 0.1, 4), lines)
    own, same = views(read_run(folder))
    assert own.entries["grab"].rate == 0.05
    (said,) = sentences(same, TRAIN)  # the four lucky seeds are no comparison
    assert (said.verdict, said.text) == ("out", "GraB is not compared: diverged.")
    assert rows(same)[1].verdict == "diverged"


def test_refused_and_unfinished_arms_are_listed(folder: Path) -> None:
    for seed in (0, 1):
        lines = [start("greedy", 0.1, seed), end(0, "refused", "too large", needed_bytes=1 << 40)]
        write_lines(path_of(folder, "greedy", 0.1, seed), lines)
    write_lines(path_of(folder, "grab", 0.1, 0), [start("grab", 0.1, 0), epoch(0, 2.0), epoch(1, 1.0)])
    run = read_run(folder)
    (view,) = views(run)
    assert [row.verdict for row in rows(view)] == ["the baseline", "refused", "unfinished"]
    assert {problem.label: (problem.seeds, problem.state, problem.why) for problem in problems(run)} == {
        "greedy": ((0, 1), "refused", "too large (needs 1,099,511,627,776 bytes)"),
        "GraB": ((0,), "unfinished", "1 epoch so far"),
    }
    assert headline(view).endswith("2 have no finished jobs to compare.")


def test_seeds_that_differ_are_said(folder: Path) -> None:
    jobs(folder, "grab", [0.4, 0.4, 0.4])
    (view,) = views(read_run(folder))
    (said,) = sentences(view, TRAIN)
    assert said.verdict == "inconclusive (needs 5 seeds)"
    assert "over the 3 seeds that both have (0, 1, 2)" in said.rest
    assert "0.4000 against RR's 0.5100" in said.rest  # the mean of RR over those three


def test_a_job_that_ended_early_is_not_compared(folder: Path) -> None:
    jobs(folder, "grab", [0.4] * 5)
    write_job(folder, "grab", 0.1, 4, [2.0, 1.0])
    run = read_run(folder)
    assert views(run)[0].entries["grab"].seeds == (0, 1, 2, 3)
    assert problems(run)[0].state == "shorter"
    assert rows(views(run)[0])[1].verdict == "inconclusive (needs 5 seeds); 1 of 5 seeds not finished"


def test_without_rr_there_is_nothing_to_compare(tmp_path: Path) -> None:
    write_config(tmp_path)
    jobs(tmp_path, "grab", [0.4] * 5)
    (view,) = views(read_run(tmp_path))
    assert rows(view)[0].verdict == "no RR baseline"
    assert sentences(view, TRAIN)[0].verdict == "out"


def test_units_are_compared_with_rr_in_the_same_units(tmp_path: Path) -> None:
    write_config(tmp_path)
    for units, shift in ((1, 0.0), (8, 0.3)):
        jobs(tmp_path, f"rr@{units}", [loss + shift for loss in RR])
        jobs(tmp_path, f"grab@{units}", [loss + shift - 0.1 - 0.001 * seed for seed, loss in enumerate(RR)])
    (view,) = views(read_run(tmp_path))
    assert {row.name: row.verdict for row in rows(view)} == {
        "rr@1": "the baseline",
        "rr@8": "the baseline",
        "grab@1": "helps",
        "grab@8": "helps",
    }
    assert {name: found.difference for name, found in view.comparisons(TRAIN).items()} == {
        name: pytest.approx(-0.102) for name in ("grab@1", "grab@8")
    }
    assert [("0.5120" in said.rest, "0.8120" in said.rest) for said in sentences(view, TRAIN)] == [
        (True, False),
        (False, True),
    ]
    jobs(tmp_path, "rr@8", [loss + 0.2 for loss in RR], lr=0.3)
    own, same = views(read_run(tmp_path))
    assert (own.entries["rr@8"].rate, own.entries["grab@8"].rate) == (0.3, 0.1)
    assert [same.entries[name].rate for name in ("rr@1", "grab@1", "rr@8", "grab@8")] == [0.1, 0.1, 0.3, 0.3]
    assert same.title == "all at RR's best rate with the same unit size"
    jobs(tmp_path, "grab", RR)  # and no plain rr
    own, same = views(read_run(tmp_path))
    assert (own.entries["grab"].rate, same.entries["grab"].reason) == (0.1, "RR has no best rate")


def test_units_without_their_rr_are_compared_with_rr(folder: Path) -> None:
    jobs(folder, "grab@8", [loss - 0.1 for loss in RR])
    assert views(read_run(folder))[0].comparisons(TRAIN)["grab@8"].difference == pytest.approx(-0.1)


def test_verdicts_and_sentences(folder: Path) -> None:
    jobs(folder, "grab", [0.40, 0.42, 0.405, 0.41, 0.42])
    jobs(folder, "so", [0.60, 0.61, 0.605, 0.61, 0.62])
    jobs(folder, "flipflop", [0.51, 0.50, 0.52, 0.49, 0.53])
    jobs(folder, "grab-1step", RR)
    (view,) = views(read_run(folder))
    table = {row.name: row for row in rows(view)}
    words = ["the baseline", "worse", "inconclusive", "helps", "identical"]
    assert [row.verdict for row in table.values()] == words
    assert [row.epochs_to_goal for row in table.values()] == [2, None, 2, 2, 2]
    leads = [sentence.lead for sentence in sentences(view, TRAIN)]
    assert leads[:2] == ["GraB helps", "Shuffle once is worse"]
    assert "final training loss 0.4110 against RR's 0.5120, 0.1010 lower (20 %); p = " in sentences(view, TRAIN)[0].rest
    assert sentences(view, TRAIN)[-1].rest.startswith(
        "final training loss 0.5120 against RR's 0.5120, identical; no test"
    )
    assert headline(view) == (
        "Of 4 orders, 1 has a significantly lower training loss than random reshuffling, 1 has a significantly higher "
        "one, 1 has an inconclusive difference, 1 has an identical loss. “Significantly” means that Holm's p, which is "
        "corrected for the number of orders, is below 0.01."
    )
    assert sentences(view, TRAIN)[-1].lead == "Grab-1step is identical to RR"


def test_one_epoch_is_identical(folder: Path) -> None:
    jobs(folder, "grab", RR)
    (view,) = views(read_run(folder))
    assert headline(view) == (
        "Of 1 order, none has a significantly lower training loss than random reshuffling, 1 has an identical loss."
    )


@pytest.mark.usefixtures("unpainted")
def test_a_study_of_memory_tells_bytes(folder: Path) -> None:
    write_config(folder, config={"study": "memory", "epochs": 1})
    jobs(folder, "grab", RR)
    content = training_content.training_content(read_run(folder))
    (telling,) = content.tellings
    assert [sentence.text for sentence in telling.sentences] == [
        "Random reshuffling: the order's state takes 8 B; the job took at most 1.0 MiB.",
        "GraB: the order's state takes 8 B; the job took at most 1.0 MiB.",
    ]
    assert telling.headline == "Memory use of the orders. Losses are not compared."
    assert "; 1 epoch" in content.facts
    assert "1 epochs" not in content.facts


@pytest.mark.usefixtures("unpainted")
def test_best_rates_at_the_edge_are_said(folder: Path) -> None:
    for rate, loss in ((0.05, 0.7), (0.3, 0.6)):
        jobs(folder, "rr", [loss] * 5, lr=rate)
        jobs(folder, "grab", [1 - rate] * 5, lr=rate)
        jobs(folder, "so", [rate] * 5, lr=rate)
    jobs(folder, "greedy", RR)  # one rate is no choice
    edges = [
        text
        for text in training_content.training_content(read_run(folder)).warnings
        if text.startswith("The best rate")
    ]
    assert edges == [
        "The best rate is the largest tried for GraB; a rate beyond it may be better.",
        "The best rate is the smallest tried for shuffle once; a rate beyond it may be better.",
    ]


def test_higher_accuracy_helps(folder: Path) -> None:
    jobs(folder, "grab", RR)
    for seed in range(5):
        rewrite(path_of(folder, "grab", 0.1, seed), test_accuracy=0.95 + 0.001 * seed)
    (view,) = views(read_run(folder))
    (said,) = sentences(view, ACCURACY)
    assert said.lead == "GraB helps"
    assert said.rest.startswith("final test accuracy 95.20 % against RR's 90.00 %, 5.20 points higher; p = ")


def test_metrics_are_those_recorded(folder: Path) -> None:
    assert [metric.name for metric in metrics(read_run(folder))] == [
        "train-loss",
        "valid-loss",
        "test-loss",
        "test-accuracy",
    ]
    for seed in range(5):
        rewrite(path_of(folder, "rr", 0.1, seed), test_loss=None, test_accuracy=None)
    assert metrics(read_run(folder)) == [TRAIN, VALID, VALID_ACCURACY]


def test_row_numbers(folder: Path) -> None:
    jobs(folder, "grab", [0.4, 0.42, 0.41, 0.4, 0.43])
    parts = dict.fromkeys(("data", "forward", "backward", "optimizer", "evaluation"), 1.0) | {"ordering": 4.0}
    for seed in range(5):
        rewrite(
            path_of(folder, "grab", 0.1, seed),
            seconds=parts,
            cpu_seconds=2.0,
            order_bytes=100 + seed,
            job_bytes=3 << 20,
        )
    run = read_run(folder)
    baseline, row = rows(views(run)[0])
    assert baseline.time_ratio == 1.0
    assert baseline.seconds_to_goal == pytest.approx(2 * 5 * 0.5)
    assert row.time_ratio == pytest.approx(3 * 8 / (2 * 2.5))  # epoch 0 was given seconds too
    assert row.cpu_ratio == pytest.approx(3 * 2 / (2 * 2))
    assert row.ordering == pytest.approx(0.5)
    assert (row.order_bytes, row.job_bytes) == (104, 3 << 20)
    assert row.train == Spread(pytest.approx(0.412), pytest.approx(0.013038, abs=1e-6))
    text = cells([baseline, row])[1]
    assert len(text) == len(COLUMNS)
    assert text[:2] == ("GraB", "helps")
    assert text[2:4] == ("0.1", "0.4120 ± 0.0130")
    assert text[6:8] == ("0.4120 ± 0.0130", "90.00 ± 0.00")
    assert text[10:15] == ("4.80", "1.50", "50 %", "104 B", "3.0 MiB")
    until = reached(select(run.epochs, "rr", 0.1), pd.Series({0: 1.0, 1: 0.1}), seconds="training_seconds")
    assert until.loc[0].tolist() == [1.0, 2.5]
    assert until.loc[1].isna().all()


def test_what_was_asked_for_and_not_begun(tmp_path: Path) -> None:
    asked = {"arms": ["rr", "grab"], "rates": [0.1, 0.3], "seeds": [0, 1], "protocol": "tuned"}
    write_config(tmp_path, config=asked)
    jobs(tmp_path, "rr", [0.5, 0.6])
    run = with_missing_arms(read_run(tmp_path))
    left = [(problem.label, problem.rates, problem.seeds) for problem in missing_jobs(run, views(run))]
    assert left == [("random reshuffling", (0.3,), (0, 1)), ("GraB", (0.1, 0.3), (0, 1))]
    assert rows(views(run)[0])[1].verdict == "not started"
    write_config(tmp_path, config=asked | {"protocol": "paper"})
    run = with_missing_arms(read_run(tmp_path))
    left = [(problem.label, problem.rates, problem.seeds) for problem in missing_jobs(run, views(run))]
    assert left == [("random reshuffling", (0.3,), (0, 1)), ("GraB", (0.1,), (0, 1))]
    write_config(tmp_path, config=asked | {"protocol": "paper", "arms": ["rr", "grab@8", "rr@8"], "rates": [0.1]})
    jobs(tmp_path, "rr@8", [0.5, 0.6], lr=0.3)
    run = with_missing_arms(read_run(tmp_path))
    left = [(problem.label, problem.rates, problem.seeds) for problem in missing_jobs(run, views(run))]
    assert ("grab@8", (0.3,), (0, 1)) in left  # the rate of RR in its units


@pytest.mark.parametrize(
    "config", [{}, {"arms": 3, "seeds": "many"}, {"arms": [None, {}], "rates": ["fast"], "seeds": [0]}]
)
def test_settings_of_other_shapes_ask_for_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    write_config(tmp_path, config=config)
    run = with_missing_arms(read_run(tmp_path))
    assert missing_jobs(run, views(run)) == []


def test_labels_in_figures_are_no_mathematics() -> None:
    assert plain("cost $x$") == r"cost \$x\$"
    assert plain("_hidden")[0] == " "
    assert plain("a\nb\x00") == "ab"
    assert len(plain("x" * 100)) == 40


def test_every_command_is_told(tmp_path: Path, unpainted: None) -> None:
    """Where several have worked on a run: each with its revision, and what it ran on if that is another."""
    jobs(tmp_path, "rr", [0.5])
    write_config(tmp_path)
    head = json.loads((tmp_path / "config.json").read_text())
    first = {name: head[name] for name in ("command", "started", "revision", "machine", "versions")}
    write_config(tmp_path, commands=[first])
    assert write_report(tmp_path).commands is None
    second = first | {"command": "ordain run <b>", "revision": None, "versions": first["versions"] | {"torch": "2.7.1"}}
    write_config(tmp_path, commands=[first, second])
    told = write_report(tmp_path).commands
    assert told is not None
    assert told.rows == [
        (head["command"], head["started"], "0123456789abcdef", "none"),
        ("ordain run <b>", head["started"], "unknown", "torch 2.7.1"),
    ]
    assert "ordain run &lt;b&gt;" in (tmp_path / "report" / "index.html").read_text()
    assert r"| ordain run &lt;b&gt; |" in (tmp_path / "report" / "report.md").read_text()
    write_config(tmp_path, commands=[second])  # of a folder that was begun before commands were listed
    assert [made.command for made in read_header(tmp_path).made] == [head["command"], "ordain run <b>"]
    for wrong in (3, [3], [{"command": 3}], [{"machine": "a"}]):
        write_config(tmp_path, commands=wrong)
        with pytest.raises(InputError, match=r"command|machine"):
            read_header(tmp_path)


def test_a_halted_job_bends_no_curve(tmp_path: Path) -> None:
    """Seconds of a figure are the median seed's: one of five that is halted for an hour changes nothing."""
    for name in ("whole", "halted"):
        jobs(tmp_path / name, "rr", [0.5, 0.6, 0.5, 0.6, 0.5])
        write_config(tmp_path / name)
    rewrite(path_of(tmp_path / "halted", "rr", 0.1, 3), seconds={"forward": 3600.0})
    ends = []
    for name in ("whole", "halted"):
        axes = Figure().subplots()
        run = read_run(tmp_path / name)
        draw_curves(axes, views(run)[0], styles(run), TRAIN, seconds=True)
        ends.append(axes.lines[0].get_xdata().tolist())  # type: ignore[union-attr]
    assert ends[0] == ends[1]
    assert ends[0] == [2.5, 5.0]
