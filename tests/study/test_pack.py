"""Records in one compressed file: the same numbers, the same pages, and runs that go on."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from study.recorded import DIGITS, call
from study.study_records import epoch, path_of, start, write_lines, write_run

from ordain.errors import InputError
from ordain.study import style
from ordain.study.runs.record_lines import pack, read_records, unpack
from ordain.study.runs.records import read_run
from ordain.study.runs.runner import run
from ordain.study.vectors import STUDIES, run_study


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_packed_run_is_read_as_before_and_unpacked_to_the_byte(tmp_path: Path) -> None:
    write_run(tmp_path, {"grab@16": 1.5, "rr": 1.0}, rates=(0.1, 0.01), seeds=2)
    write_lines(path_of(tmp_path, "so", 0.1, 0), [start("so", 0.1, 0), epoch(0, 2.0)])  # unfinished
    before, written = read_run(tmp_path), files(tmp_path)
    result = call("pack", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "records.jsonl.xz" in result.stdout
    assert set(files(tmp_path)) == {"config.json", "records.jsonl.xz"}
    after = read_run(tmp_path)
    assert after.arms == before.arms
    pd.testing.assert_frame_equal(after.jobs, before.jobs)
    pd.testing.assert_frame_equal(after.epochs, before.epochs)
    packed = files(tmp_path)
    assert pack(tmp_path) == tmp_path / "records.jsonl.xz"  # once is enough
    assert files(tmp_path) == packed
    unpack(tmp_path)
    assert files(tmp_path) == written
    unpack(tmp_path)
    assert files(tmp_path) == written


def test_reports_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "png", lambda figure, dpi: b"png")
    folder = write_run(tmp_path / "mnist", {"rr": 1.0, "grab": 1.5}, seeds=2)
    pages = []
    for out in (tmp_path / "before", tmp_path / "after"):
        assert call("report", folder, "--out", out).exit_code == 0
        pages.append(files(out))
        pack(folder)
    assert pages[0] == pages[1]


def test_a_packed_run_goes_on(tmp_path: Path) -> None:
    config = replace(DIGITS, arms=("rr",), epochs=1)
    run(config, tmp_path)
    first = files(tmp_path / "records")
    pack(tmp_path)
    assert len(run(replace(config, seeds=(0, 1)), tmp_path).states) == 1
    assert first.items() < files(tmp_path / "records").items()
    assert not (tmp_path / "records.jsonl.xz").exists()


def test_a_packed_vector_study_goes_on(tmp_path: Path) -> None:
    run_study("toy-herding", tmp_path, report=lambda done, total: None, quick=True)
    written, said = files(tmp_path), STUDIES["toy-herding"].sentences(tmp_path)
    pack(tmp_path)
    assert "records.jsonl" not in files(tmp_path)
    assert STUDIES["toy-herding"].sentences(tmp_path) == said
    run_study("toy-herding", tmp_path, report=lambda done, total: None, quick=True)
    assert files(tmp_path) == written


def test_damaged_files_are_named(tmp_path: Path) -> None:
    result = call("pack", tmp_path)
    assert (result.exit_code, "no config.json" in result.stderr) == (2, True)
    write_run(tmp_path, {"rr": 1.0}, seeds=1)
    path = pack(tmp_path)
    whole = path.read_bytes()
    lines = lzma.decompress(whole).splitlines(keepends=True)
    for content, message in (
        (whole[:-9], "not a complete xz file"),
        (b"plain", "not a complete xz file"),
        (lzma.compress(b"".join(lines[1:])), "line 1; expected a start line"),
        (lzma.compress(b"".join((*lines, lines[1]))), f"line {len(lines) + 1}; expected one start line"),
        (lzma.compress(b"[]\n"), "line 1"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            list(read_records(tmp_path))
        assert "records.jsonl.xz" in str(caught.value)
    empty = write_run(tmp_path / "empty", {}, seeds=1)
    with pytest.raises(InputError, match="without records"):
        pack(empty)
