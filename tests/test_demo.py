from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from ordain.orders import ORDERS
from ordain.study import cli, demo, demo_report, summary
from ordain.study.demo import ARMS, Run, Settings
from ordain.study.page import render

FILES = ["accuracy.png", "index.html", "loss.png", "prefix.png", "results.json", "summary.png"]
TINY = Settings(seeds=2, epochs=2, batch_size=64, prefix_vectors=300, prefix_dim=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    demo_report.write_demo(out, TINY, report=lambda done, total: None)
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_folder_holds_what_it_should(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    for name in FILES:
        if name.endswith(".png"):
            assert imread(folder / name).std() > 0
    assert imread(folder / "summary.png").shape[:2] == (450, 1200)


def test_results_have_every_arm_and_how_they_were_made(results: Any) -> None:
    assert list(results["runs"]) == [row["name"] for row in results["summary"]] == list(ARMS)
    assert set(ORDERS) < set(ARMS)
    for runs in results["runs"].values():
        assert [run["seed"] for run in runs] == results["seeds"] == [0, 1]
        assert all(len(run["train_loss"]) == len(run["test_accuracy"]) == 3 for run in runs)
    assert {"python", "torch", "numpy", "ordain"} <= set(results["versions"])
    assert {"platform", "cpu", "logical_cpus"} <= set(results["machine"])
    assert results["settings"]["lr"] == TINY.lr
    assert results["command"].endswith("--seeds 2 --epochs 2")


def test_runs_of_a_seed_share_weights_and_first_epoch(results: Any) -> None:
    for seed in results["seeds"]:
        runs = {name: of[seed]["train_loss"] for name, of in results["runs"].items()}
        assert len({loss[0] for loss in runs.values()}) == 1
        permutations = [name for name, recipe in ORDERS.items() if recipe.is_permutation]
        assert len({runs[name][1] for name in permutations}) == 1
        assert len({runs[name][2] for name in permutations}) > 2
    assert results["runs"]["rr"][0]["train_loss"] != results["runs"]["rr"][1]["train_loss"]


def test_rows_follow_from_runs(results: Any) -> None:
    for row in results["summary"]:
        final = [run["train_loss"][-1] for run in results["runs"][row["name"]]]
        assert row["train_loss"] == pytest.approx(sum(final) / 2)
    memory = {row["name"]: row["order_bytes"] for row in results["summary"]}
    assert memory["rr"] == 0
    assert memory["herding"] > 1437 * 650 * 4 > memory["grab"] > 3 * 650 * 4


def test_training_is_repeatable_and_leaves_torch_as_it_was() -> None:
    data, settings = demo.Digits.load().first(100), replace(TINY, epochs=3)
    state = torch.get_rng_state()
    one, two = (demo.train(data, ORDERS["grab"].build, seed=3, settings=settings)[0] for _ in range(2))
    assert one.train_loss == two.train_loss
    assert one.train_loss[-1] < one.train_loss[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_page_needs_nothing_else(folder: Path) -> None:
    html = (folder / "index.html").read_text()
    assert not re.search(r"https?://|file:|<script|<link|@import", html)
    assert set(re.findall(r'(?:src|href)="([^:]*:[^;]*);', html)) == {"data:image/png"}
    assert html.count('src="') == 3
    assert 'name="viewport"' in html
    assert all(label in html for label in ARMS.values())


def test_page_escapes_text(results: Any) -> None:
    row = summary.Row("rr", "<i>&", 1.0, None, 0.5, None, None, 0, 1.0, None, "cannot tell")
    html = render([row], results | {"command": "ordain <b>"}, {"loss": b"", "accuracy": b"", "prefix": b""})
    assert "&lt;i&gt;&amp;" in html
    assert "ordain &lt;b&gt;" in html
    assert "<i>" not in html


def runs(finals: list[float]) -> list[Run]:
    return [Run(seed, [2.0, 1.0, final], [0.1, 0.5, 0.9], 2.0, 8) for seed, final in enumerate(finals)]


def test_verdicts() -> None:
    found = summary.summarise(
        {
            "rr": runs([0.50, 0.52, 0.51, 0.50, 0.53]),
            "grab": runs([0.40, 0.42, 0.405, 0.41, 0.42]),
            "so": runs([0.60, 0.61, 0.605, 0.61, 0.62]),
            "flipflop": runs([0.51, 0.50, 0.52, 0.49, 0.53]),
            "grab-1step": runs([0.50, 0.52, 0.51, 0.50, 0.53]),
        }
    )
    words = ["the baseline", "lower than RR", "higher than RR", "cannot tell", "cannot tell"]
    assert [row.verdict for row in found] == words
    assert [row.epochs_to_baseline for row in found] == [2, 2, None, 2, 2]
    assert found[-1].p is None  # equal to RR: there is nothing to test
    assert summary.cells(found[2])[3] == "-"


def test_state_is_counted_in_bytes() -> None:
    state = {"a": torch.zeros(3), "b": {"c": torch.zeros(2, dtype=torch.float64)}, "d": [1, 2], "e": "word", "f": None}
    assert demo._bytes(state) == 12 + 16 + 16


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "Settings", partial(Settings, batch_size=256, prefix_vectors=50, prefix_dim=2))
    (tmp_path / "index.html").write_text("old")
    threads = torch.get_num_threads()
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--seeds", "1", "--epochs", "1"])
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert "<!doctype html>" in (tmp_path / "index.html").read_text()
    assert all(label in result.stdout for label in ARMS.values())
    assert "learning rate 0.3" in result.stdout
    assert "illustration" in result.stdout
    assert result.stderr.splitlines()[-1] == "training: 100 %"
    assert torch.get_num_threads() == threads


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert result.stderr.startswith("ordain: ")
