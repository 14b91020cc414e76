"""The studies of vectors: their loops against the library, resuming, and a small run of each from end to end."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ordain import herding, reference
from ordain.errors import InputError, StateError
from ordain.study.files import only_one
from ordain.study.style import png, style
from ordain.study.vectors import STUDIES, compiled, run_study
from ordain.study.vectors import vector_study as estimates


def quiet(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("runs")
    for name in STUDIES:
        run_study(name, base / name, quick=True, report=quiet)
    return {name: base / name for name in STUDIES}


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", list(STUDIES))
def test_a_small_run_of_each(name: str, folders: dict[str, Path]) -> None:
    study, folder = STUDIES[name], folders[name]
    head = json.loads((folder / "config.json").read_text())
    assert {"format", "kind", "command", "config", "versions", "machine", "revision", "started", "commands"} == set(
        head
    )
    assert (head["format"], head["kind"]) == (1, name)
    assert head["command"] == f"ordain run {name} --out {folder} --quick"
    assert len(read(folder)) == len(list(study.configure(quick=True).points()))
    headings, rows = study.table(folder)
    assert rows
    assert all(len(row) == len(headings) for row in rows)
    assert all(sentence.endswith(".") and "nan" not in sentence for sentence in study.sentences(folder))
    drawn = study.figures(folder)
    assert drawn
    assert all(isinstance(figure, Figure) and png(figure, dpi=40) for figure in drawn.values())


@pytest.mark.parametrize("name", list(STUDIES))
def test_going_on_gives_the_same_file(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run_study(name, tmp_path, quick=True, report=stop)
    records = tmp_path / "records.jsonl"
    assert len(read(tmp_path)) == 2
    with records.open("a") as file:
        file.write('{"seed": 0, "hal')  # killed while it wrote
    with pytest.raises(InputError, match=rf"where 2 of .* are measured; expected a finished .*ordain run {name}"):
        STUDIES[name].table(tmp_path)
    run_study(name, tmp_path, quick=True, report=quiet)
    untimed = [re.sub(rb'"seconds": [^,]*', b"", of.read_bytes()) for of in (records, folders[name] / "records.jsonl")]
    assert untimed[0] == untimed[1]


def test_more_seeds_are_added_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    run_study("statement1", tmp_path, quick=True, seeds=1, report=quiet)
    first = read(tmp_path)
    run_study("statement1", tmp_path, quick=True, seeds=2, report=quiet)
    both = read(tmp_path)
    assert both[: len(first)] == first
    assert [record["seed"] for record in both] == [0, 0, 0, 1, 1, 1]
    head = json.loads((tmp_path / "config.json").read_text())
    assert head["config"]["seeds"] == 2
    assert [one["command"].rpartition(" --seeds ")[2] for one in head["commands"]] == ["1 --quick", "2 --quick"]
    assert all(head[name] == head["commands"][0][name] for name in head["commands"][0])
    run_study("statement1", tmp_path, quick=True, seeds=1, report=quiet)
    assert read(tmp_path) == both
    assert json.loads((tmp_path / "config.json").read_text()) == head  # it did nothing
    with only_one(tmp_path), pytest.raises(StateError, match="another command"):
        run_study("statement1", tmp_path, quick=True, seeds=2, report=quiet)


def test_other_folders_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belongs to another kind of study"):
        run_study("rates", folders["statement1"], quick=True, report=quiet)
    study = STUDIES["statement1"]
    with pytest.raises(InputError, match="other sizes"):
        study.run(replace(study.configure(quick=True), sizes=(4, 8)), folders["statement1"], quiet)
    with pytest.raises(InputError, match=r"no config\.json"):
        STUDIES["rates"].table(tmp_path)
    with pytest.raises(InputError, match="one of toy-herding, balancing"):
        run_study("nothing", tmp_path, report=quiet)
    with pytest.raises(InputError, match="seeds=0"):
        run_study("rates", tmp_path, seeds=0, report=quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["{", "[]", "NaN"])
def test_a_damaged_record_is_named(line: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "records.jsonl"):
        (tmp_path / name).write_bytes((folders["statement1"] / name).read_bytes())
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(
        InputError, match=rf"records.jsonl: line {len(read(folders['statement1'])) + 1} is not a record"
    ):
        run_study("statement1", tmp_path, quick=True, report=quiet)


def test_naming_the_studies_imports_nothing_slow() -> None:
    code = (
        "import sys, torch, numpy; had = set(sys.modules); import ordain.study.vectors; "
        "print([n for n in ('numba', 'matplotlib', 'scipy', 'sklearn') if n in sys.modules and n not in had])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert out.stdout.strip() == "[]"


def test_slopes_of_power_laws() -> None:
    x, rng = [8.0, 16.0, 32.0, 64.0], np.random.default_rng(0)
    exact = estimates.slope(x, [[3 * v**-1.5 for v in x], [7 * v**-1.5 for v in x]])
    assert exact.mean == pytest.approx(-1.5)
    assert exact.error == pytest.approx(0, abs=1e-12)
    noisy = np.array(x) ** -2 * np.exp(rng.normal(scale=0.3, size=(400, 4)))
    found = estimates.slope(x, noisy)
    assert found.error is not None
    assert abs(found.mean + 2) < 4 * found.error
    # The error of one slope is 0.3 / |log x - mean|, and that of their mean is 20 times smaller.
    spread = np.log(x) - np.log(x).mean()
    assert found.error == pytest.approx(0.3 / math.sqrt(spread @ spread) / 20, rel=0.15)
    assert f"{estimates.slope(x, [[1.0] * 4]):.2f}" == "0.00"
    assert f"{estimates.Estimate(-0.001, 0.2):.2f}" == "0.00 ± 0.20"


def test_longest_prefixes() -> None:
    rng = np.random.default_rng(0)
    z, sigma = rng.random((50, 7)), rng.permutation(50)
    (l2,), (linf,) = compiled.measure_orders(z, [sigma]).values()
    assert l2 == pytest.approx(herding.herding_objective(z, sigma, norm=2))
    assert linf == pytest.approx(herding.herding_objective(z, sigma))


def test_clipped_walk() -> None:
    rng = np.random.default_rng(0)
    z, sigma, u = rng.normal(size=(60, 3)), rng.permutation(60), rng.random(60)
    mean = z.mean(axis=0)
    rows = (z - mean) / np.linalg.norm(z - mean, axis=1).max()
    s, expected = np.zeros(3), []
    for t, i in enumerate(sigma):
        plus = np.clip(0.5 - s @ rows[i] / (2 * 0.3), 0, 1)
        expected.append(1 if u[t] < plus else -1)
        s = s + expected[-1] * rows[i]
    assert compiled.clipped_walk(z, mean, sigma, u, 0.3).tolist() == expected
    # As c goes to 0 only Algorithm 5 is left.
    alg5 = [int(e) for e in herding.balance(z - mean, order=sigma)]
    assert compiled.clipped_walk(z, mean, sigma, u, 1e-12).tolist()[1:] == [
        e * (1 if u[0] >= 0.5 else -1) for e in alg5[1:]
    ]


def test_statement1_is_the_proofs_example(folders: dict[str, Path]) -> None:
    for record in read(folders["statement1"]):
        # After n/2 copies of (1, 1), each (-1.5, 1.5) from the mean.
        assert record["greedy"] == pytest.approx(record["n"] / 2 * 1.5 * math.sqrt(2))
        assert record["greedy-centred"] == pytest.approx(1.5 * math.sqrt(2))
    slopes = {row[0]: row[3] for row in STUDIES["statement1"].table(folders["statement1"])[1]}
    assert slopes["greedy of the proof (not centred)"] == "1.00 ± 0.00"


def test_toy_herding_is_figure_1b(folders: dict[str, Path]) -> None:
    config = STUDIES["toy-herding"].configure(quick=True)
    record = next(r for r in read(folders["toy-herding"]) if r["order"] == "herding-1")
    z = np.random.default_rng(record["seed"]).random((config.n, config.d))
    expected = herding.herding_objective(z, reference.herd(z, rounds=1), norm=2)
    assert record["l2"] == pytest.approx(expected)
    assert max(record["norms"]) == pytest.approx(record["l2"], rel=1e-4)


def test_a_picture_keeps_the_colour_of_a_single_mark() -> None:
    """Beside bands of many pale colours, of which a palette may have no room for a rare one."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for place in range(1, 9):
        line = style(place).line(1)
        x = np.linspace(0, 1, 50)
        axes.plot(x, np.sin(x * place), **line)
        for width in (0.1, 0.2, 0.4):
            axes.fill_between(x, np.sin(x * place) - width, np.sin(x * place) + width, color=line["color"], alpha=0.1)
    axes.plot([0.5], [2.0], "o", color="#FF00FF", markersize=4)
    with Image.open(io.BytesIO(png(figure, dpi=100))) as image:
        found = np.array(image.convert("RGB")).reshape(-1, 3).astype(int)
    assert np.abs(found - [255, 0, 255]).sum(axis=1).min() <= 6
