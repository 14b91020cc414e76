from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from scipy.stats import t as student_t
from typer.testing import CliRunner

from ordain.errors import InputError
from ordain.orders import ORDERS
from ordain.study import cli, demo, style
from ordain.study.report.number_text import p_equals
from ordain.study.runs.arms import parse
from ordain.study.runs.records import Run, read_run, select
from ordain.study.runs.runner import run

ARMS = (*ORDERS, "retrain")
TINY = demo.demo_config(seeds=2, epochs=2, every=True, limit=120)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    with pytest.MonkeyPatch.context() as patch:  # the report's own tests paint its figures
        patch.setattr(style, "png", lambda figure, dpi: b"png")
        patch.setattr(style, "svg", lambda figure: SVG)
        demo.write_demo(out, TINY, command="ordain demo <b>", quick=True)
    return out


@pytest.fixture(scope="module")
def trained(folder: Path) -> Run:
    return read_run(folder / "digits")


def test_folder_holds_what_it_should(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "report.md", "prefix.svg", "digits", "toy-herding"} <= names


def test_every_arm_has_run(trained: Run) -> None:
    assert list(trained.arms) == list(ARMS)
    for name in ARMS:
        jobs = select(trained.jobs, name)
        assert list(jobs.index) == [(demo.RATE, 0), (demo.RATE, 1)]
        assert list(jobs.state) == ["done"] * 2
        assert list(select(trained.epochs, name).index.get_level_values("epoch")) == [0, 1, 2] * 2


def test_runs_of_a_seed_share_weights_and_first_epoch(trained: Run) -> None:
    for seed in (0, 1):
        losses = {name: select(trained.epochs, name, demo.RATE).train_loss[seed].tolist() for name in trained.arms}
        assert len({loss[0] for loss in losses.values()}) == 1
        permutations = [name for name in ORDERS if parse(name).shares_first]
        assert len({losses[name][1] for name in permutations}) == 1
        assert len({losses[name][2] for name in permutations}) > 2


def test_page_needs_nothing_else_and_says_what_it_is(folder: Path, trained: Run) -> None:
    page = (folder / "index.html").read_text()
    assert not re.search(r"https?://|file:|<script|<link|@import", page)
    assert set(re.findall(r'(?:src|href)="([^:]*:[^;]*);', page)) == {"data:image/svg+xml"}
    assert all(arm.label in page for arm in trained.arms.values())
    assert "an illustration, not a ranking" in page
    assert "which they differ" not in page
    ours, theirs = (select(trained.jobs, name).train_loss.tolist() for name in ("grab", "rr"))
    assert f"GraB ends at a training loss of {statistics.mean(ours):.4f} ± {statistics.stdev(ours):.4f}" in page
    assert f"reshuffling at {statistics.mean(theirs):.4f} ± {statistics.stdev(theirs):.4f} (p = " in page
    assert (
        page.index("GraB ends at") < page.index("<table") < page.index("small prefix sums") < page.index("in sentences")
    )
    assert "All at one rate, 0.3" in page
    assert "small prefix sums" in page
    assert "ordain demo &lt;b&gt;" in page


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "png", lambda figure, dpi: b"png")
    monkeypatch.setattr(style, "svg", lambda figure: SVG)
    monkeypatch.setattr(demo, "demo_config", lambda **options: config(**options, limit=80))
    monkeypatch.setattr(demo, "write_demo", lambda *args, **more: write(*args, **more, quick=True))
    config, write = DEMO
    (tmp_path / "index.html").write_text("old")
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "config.json").write_text(json.dumps({"of": "an earlier demo"}))
    threads = torch.get_num_threads()
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--seeds", "1", "--epochs", "1"])
    assert result.exit_code == 0, result.stderr
    assert "<!doctype html>" in (tmp_path / "index.html").read_text()
    assert all(ORDERS[name].label.split()[-1] in result.stdout for name in demo.FEW)
    assert "FlipFlop" not in result.stdout
    assert "learning rate 0.3, 1 epoch, 1 seed\n" in re.sub(" +\n", "\n", result.stdout)
    assert "illustration" in result.stdout
    assert read_run(tmp_path / "digits").header.command.endswith("--seeds 1 --epochs 1")
    assert torch.get_num_threads() == threads


DEMO = demo.demo_config, demo.write_demo


def test_what_is_no_demos_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="another --out"):
        demo.write_demo(tmp_path, TINY)
    assert (tmp_path / "digits" / "thesis.txt").exists()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert result.stderr.startswith("ordain: ")


def test_the_spreads_over_seeds_are_compared(tmp_path: Path) -> None:
    run(demo.demo_config(seeds=3, epochs=2, limit=60), tmp_path / "run")
    trained = read_run(tmp_path / "run")
    ours, theirs = (select(trained.jobs, name).train_loss.tolist() for name in ("grab", "rr"))
    ratio, r = statistics.variance(theirs) / statistics.variance(ours), statistics.correlation(ours, theirs)
    t = (ratio - 1) / (2 * math.sqrt(ratio * (1 - r**2)))  # of Pitman's test, with one degree of freedom
    assert f"smaller, {p_equals(2 * student_t.sf(abs(t), 1))} by Pitman and Morgan" in demo.verdict(trained)
