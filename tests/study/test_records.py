from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study.study_records import CONFIG, end, epoch, path_of, start, write_config, write_job, write_lines, write_run

from ordain.errors import InputError
from ordain.study.runs.job import Job
from ordain.study.runs.record_lines import read_record
from ordain.study.runs.records import read_run, select
from ordain.study.runs.run_folder import read_header

GOOD = [start("grab", 0.1, 0), epoch(0, 2.3), epoch(1, 1.0), end(1)]


def job_file(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    return write_lines(path_of(tmp_path, "grab", 0.1, 0), lines)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {"grab": 1.5, "rr": 1.0}, rates=(0.1, 0.01), seeds=3))
    assert list(run.arms) == ["rr", "grab"]  # the registry's order, not the folder's
    assert run.arms["rr"].rates == (0.01, 0.1)
    assert list(select(run.jobs, "rr", 0.1).index) == [0, 1, 2]
    job, epochs = run.jobs.loc[("grab", 0.1, 2)], select(run.epochs, "grab", 0.1).loc[2]
    assert (job.state, job.label, job.order, job.group, job.threads) == ("done", "GraB", "grab", 1, 1)
    assert list(epochs.index) == [0, 1, 2, 3]
    written = [json.loads(line) for line in path_of(tmp_path, "grab", 0.1, 2).read_text().splitlines()]
    assert epochs.train_loss.tolist() == [line["train_loss"] for line in written[1:-1]]
    assert job.train_loss == written[-2]["train_loss"]
    assert epochs.training_seconds[0] == 0
    assert epochs.training_seconds[1] == pytest.approx(4 * 0.2 + 0.3)  # and not the second of evaluation
    assert epochs.training_seconds.sum() == pytest.approx(3 * 1.1)
    assert run.config["limit"] == 1000
    assert run.header.problem["train"] == 900
    assert len(select(run.jobs, "rr")) == 6


def test_arms_are_in_the_registrys_order_and_units_by_size(tmp_path: Path) -> None:
    write_config(tmp_path)
    for arm in ("retrain", "grab@64", "grab@8", "grab", "so", "rr", "grab-pair"):
        write_job(tmp_path, arm, 0.1, 0, [2.0, 1.0])
    run = read_run(tmp_path)
    assert list(run.arms) == ["rr", "so", "grab", "grab@8", "grab@64", "grab-pair", "retrain"]
    assert [run.arms[name].label for name in ("grab", "grab@8", "retrain")] == [
        "GraB (grab)",
        "GraB (grab@8)",
        "retrain",
    ]


def test_states(tmp_path: Path) -> None:
    diverged = job_file(
        tmp_path, [start("grab", 0.1, 0), epoch(0, 2.3), epoch(1, None), end(1, "diverged", "not finite")]
    )
    job = read_record(diverged)
    assert job.end is not None
    assert (job.state, job.end.why, job.epochs[1].train_loss) == ("diverged", "not finite", None)
    refused = job_file(tmp_path, [start("grab", 0.1, 0), end(0, "refused", "too large", needed_bytes=5 << 30)])
    job = read_record(refused)
    assert job.end is not None
    assert (job.state, job.end.needed_bytes) == ("refused", 5 << 30)


def test_every_cut_of_a_file_is_unfinished(tmp_path: Path) -> None:
    path = job_file(tmp_path, GOOD)
    whole = path.read_bytes()
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        job = read_record(path)
        assert job.state == "unfinished"
        assert job.job == Job("grab", 0.1, 0)
        assert [epoch.epoch for epoch in job.epochs] == list(range(len(job.epochs)))
    path.write_bytes(whole[:-1])  # only the newline is missing
    assert read_record(path).state == "done"
    path.write_bytes(whole[:300] + b"\0" * 40)  # what a crash can leave
    assert read_record(path).state == "unfinished"


def test_files_that_are_no_records_are_left_alone(tmp_path: Path) -> None:
    write_run(tmp_path, {"rr": 1.0}, seeds=1)
    beside = path_of(tmp_path, "rr", 0.1, 0)
    beside.with_suffix(".pt").write_bytes(b"\x80")
    beside.with_name(".seed-1.jsonl.abcd.tmp").write_bytes(b"{")
    (tmp_path / "records" / ".git").mkdir()
    assert list(read_run(tmp_path).jobs.index) == [("rr", 0.1, 0)]
    write_config(tmp_path / "empty")
    assert read_run(tmp_path / "empty").arms == {}
    assert read_run(tmp_path / "empty").jobs.empty


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([epoch(0, 2.3)], "one start line"),
        ([GOOD[0], GOOD[0]], "one start line"),
        ([*GOOD, epoch(2, 0.5)], "line 5"),
        ([GOOD[0], epoch(1, 1.0)], "expected epoch 0"),
        ([GOOD[0], GOOD[1], GOOD[1]], "expected epoch 1"),
        ([GOOD[0], end(0)], "no epoch with a loss"),
        ([GOOD[0], epoch(0, None), end(0)], "no epoch with a loss"),
        ([GOOD[0], epoch(0, "low")], "train_loss = 'low'"),  # type: ignore[arg-type]
        ([GOOD[0], epoch(0, True)], "train_loss = True"),
        ([GOOD[0], epoch(0, 1.0, valid_accuracy=90)], "less than or equal to 1"),
        ([GOOD[0], epoch(0, 1.0, seconds={"data": -1})], "greater than or equal to 0"),
        ([GOOD[0], epoch(0, 1.0, seconds=3)], "an object"),
        ([GOOD[0], epoch(0, 1.0, order_bytes=1.5)], "a valid integer"),
        ([GOOD[0], epoch(0, 1.0, peak_bytes=-1)], "greater than or equal to 0"),
        ([GOOD[0], epoch(0, 10**400)], "a finite number"),
        ([GOOD[0], {"kind": "epoch"}], "no 'epoch'"),
        ([GOOD[0], {"kind": "middle"}], "'start', 'epoch', 'end'"),
        ([GOOD[0], {}], "discriminator 'kind'"),
        ([GOOD[0], GOOD[1], end(0, "fine")], "'refused'"),
        ([start("grab", 0.1, 1)], "as its path says"),
        ([start("rr", 0.1, 0)], "as its path says"),
        ([start("grab", 0.1, 0, label=None)], "a valid string"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match="line ") as caught:
        read_record(job_file(tmp_path, lines))
    assert message in str(caught.value)
    assert "seed-0.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[1]", b'"x"', b"\xff\xfe", b'{"kind": NaN}', b"[" * 100_000, b"1" * 5000, b"", b'{"a": 1']
)
def test_hostile_lines(tmp_path: Path, line: bytes) -> None:
    path = job_file(tmp_path, GOOD)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    with pytest.raises(InputError, match="line 2"):
        read_record(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(st.sampled_from(range(len(GOOD))), st.data(), json_values)
def test_any_field_of_any_type_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, data: st.DataObject, value: Any
) -> None:
    name = data.draw(st.sampled_from(sorted(GOOD[at])))
    lines = [dict(line) for line in GOOD]
    lines[at][name] = value
    try:
        job = read_record(job_file(tmp_path_factory.getbasetemp(), lines))
    except InputError:
        return
    assert job.state in ("done", "diverged", "refused")


@pytest.mark.parametrize("arm", ["<script>", "Grab", "a b", "x" * 65, "grab\n", "-x", "é"])
def test_names_of_arms_are_checked(tmp_path: Path, arm: str) -> None:
    write_config(tmp_path)
    write_job(tmp_path, arm, 0.1, 0, [2.0, 1.0])
    with pytest.raises(InputError, match="small letters"):
        read_run(tmp_path)


@pytest.mark.parametrize("rate", ["fast", "nan", "-0.1", "inf", "0"])
def test_rates_are_checked(tmp_path: Path, rate: str) -> None:
    write_config(tmp_path)
    write_lines(path_of(tmp_path, "grab", rate, 0), GOOD)
    with pytest.raises(InputError, match="lr-<rate>"):
        read_run(tmp_path)


def test_one_rate_in_two_ways(tmp_path: Path) -> None:
    write_config(tmp_path)
    for rate in ("0.1", "1e-1"):
        write_lines(path_of(tmp_path, "grab", rate, 0), GOOD)
    with pytest.raises(InputError, match="two records"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format = 2"),
        ({"format": None}, "format = None"),
        ({"versions": []}, "an object"),
        ({"revision": 3}, "a valid string"),
        ({"task": None}, "a valid string"),
        ({"kind": "rates"}, "kind 'rates'"),
    ],
)
def test_configs_are_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_config(tmp_path, **change)
    with pytest.raises(InputError, match=message):
        read_run(tmp_path)


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_header(tmp_path)
    write_config(tmp_path, kind="toy-herding")
    header = read_header(tmp_path)
    assert (header.kind, header.command) == ("toy-herding", CONFIG["command"])
