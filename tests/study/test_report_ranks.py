"""Reports of runs on several numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study.study_records import path_of, write_run

from ordain.study.report import training_content
from ordain.study.report.rank_comparison import ranks_section, ranks_table
from ordain.study.report.views import views
from ordain.study.runs.records import read_run

SPEEDS = {"rr": 1.0, "rr+2": 1.0, "grab": 2.0, "grab+2": 2.0, "grab+4-sum": 2.0, "so": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = write_run(tmp_path_factory.mktemp("runs") / "mnist", SPEEDS, seeds=2)
    for arm in SPEEDS:
        order, _, rest = arm.partition("+")
        for seed in range(2):
            path = path_of(out, arm, 0.1, seed)
            head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            ranks = int(rest[:1] or 1)
            head |= {"order": order, "label": arm, "ranks": ranks, "mode": rest[2:] or "exact" if rest else None}
            for line in (line for line in lines if line["kind"] == "epoch"):
                line["sent_bytes"] = 2048 * (line["epoch"] > 0) if rest and order == "grab" else 0
                line["train_loss"] = 1.0 - line["epoch"] / 10 + (0.001 * (seed + 1) if ranks == 4 else 0)
            path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    return out


def test_the_table(folder: Path) -> None:
    run = read_run(folder)
    table = ranks_table(run, views(run)[0])
    assert table is not None
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["rr", "rr+2", "grab", "grab+2", "grab+4-sum"]  # so was run on one rank alone
    # 900 examples in batches of 64 are 15 steps; an epoch trains for 0.8 s, and 0.3 s more in GraB's step().
    assert rows["rr"] == ("1", "-", "0.700000", "-", "53.33 ms", "0.00 ms", "0 B")
    assert rows["grab+2"] == ("2", "exact", "0.700000", "0.0e+00", "73.33 ms", "20.00 ms", "2.0 KiB")
    assert rows["grab+4-sum"][:4] == ("4", "sum", "0.701500", "2.0e-03")


def test_each_is_compared_with_rr_on_as_many_ranks(folder: Path) -> None:
    view = views(read_run(folder))[0]
    named = {name: found.arm.name for name in SPEEDS if (found := view.baseline(name))}
    assert {name: named[name] for name in ("grab", "grab+2", "grab+4-sum")} == {
        "grab": "rr",
        "grab+2": "rr+2",
        "grab+4-sum": "rr",
    }


def test_the_figure_has_a_panel_for_each_order(folder: Path) -> None:
    section = ranks_section(views(read_run(folder))[0])
    assert section is not None
    assert [figure.name for figure in section.figures] == ["rr-ranks"]


def test_only_where_there_are_ranks(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_content, "training_figures", lambda run, found: {"own": [], "rr": [], "costs": []})
    alone = read_run(write_run(tmp_path / "alone", {"rr": 1.0, "grab": 2.0}, seeds=2))
    assert ranks_section(views(alone)[0]) is None
    assert ranks_table(alone, views(alone)[0]) is None
    assert "Ranks: numbers" in [table.title for table in training_content.training_content(read_run(folder)).tables]
