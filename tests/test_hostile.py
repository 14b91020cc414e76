"""Files that somebody made to do harm: refused with our errors, without being believed, unpacked or run."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from study.hostile_files import damaged

import ordain
from ordain import GraB
from ordain.errors import InputError, OrdainError, StateError
from ordain.study.files import read_vectors
from ordain.study.vectors import STUDIES, run_study

# --- vectors --------------------------------------------------------------------------------------


def npy(header: str, data: bytes = bytes(64)) -> bytes:
    raw = header.encode("latin1")
    raw += b" " * (-(11 + len(raw)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + data


HEADERS = [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999, 99999999)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 2)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), 'more': 1}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1e9,)}",
    "{'descr': '<U999999999', 'fortran_order': False, 'shape': (1,)}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 70 + ")}",
    "{'descr': " + "(" * 3000 + ")" * 3000 + "}",
    "__import__('os').system('true')",
]


@pytest.mark.parametrize("header", HEADERS, ids=count())
def test_headers_of_arrays(header: str, tmp_path: Path) -> None:
    path = tmp_path / "z.npy"
    path.write_bytes(npy(header))
    with pytest.raises(InputError, match="not a complete"):
        read_vectors(path)


@given(draws=st.data())
def test_damaged_arrays(draws: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(12.0).reshape(4, 3))
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(draws.draw(damaged(file.getvalue())))
    try:
        read_vectors(path)
    except InputError:
        return


# --- folders of studies ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    run_study("statement1", folder, quick=True, seeds=1, report=lambda done, total: None)
    return folder


def show(folder: Path) -> None:
    study = STUDIES["statement1"]
    study.table(folder)
    study.sentences(folder)


HEADS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "deep": lambda head: "[" * 100_000,
    "no JSON": lambda head: '{"format": ',
    "no config": lambda head: {key: value for key, value in head.items() if key != "config"},
    "list": lambda head: head | {"config": []},
    "more": lambda head: head | {"config": head["config"] | {"evil": 1}},
    "text": lambda head: head | {"config": head["config"] | {"seeds": "1"}},
    "true": lambda head: head | {"config": head["config"] | {"seeds": True}},
    "negative": lambda head: head | {"config": head["config"] | {"seeds": -1}},
    "endless": lambda head: head | {"config": head["config"] | {"seeds": 10**15}},
    "sizes": lambda head: head | {"config": head["config"] | {"sizes": "16"}},
    "empty": lambda head: head | {"config": head["config"] | {"sizes": []}},
    "many": lambda head: head | {"config": head["config"] | {"sizes": list(range(100_000))}},
}


@pytest.mark.parametrize("change", HEADS)
def test_heads_of_studies(change: str, study_folder: Path, tmp_path: Path) -> None:
    head = HEADS[change](json.loads((study_folder / "config.json").read_text()))
    (tmp_path / "config.json").write_text(head if isinstance(head, str) else json.dumps(head))
    (tmp_path / "records.jsonl").write_bytes((study_folder / "records.jsonl").read_bytes())
    for use in (show, lambda folder: run_study("statement1", folder, quick=True, report=lambda done, total: None)):
        with pytest.raises(InputError, match=r"config\.json"):
            use(tmp_path)
    assert (tmp_path / "config.json").read_text() == (head if isinstance(head, str) else json.dumps(head))


VALUES = ["1e999", "-1e999", "9" * 5000, "NaN", "-Infinity", '"<script>"', "null", "[[1]]", "{}", "[" * 100_000, ""]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:8])
def test_values_of_records(value: str, study_folder: Path, tmp_path: Path) -> None:
    lines = (study_folder / "records.jsonl").read_text()
    greedy = json.dumps(json.loads(lines.splitlines()[0])["greedy"])
    (tmp_path / "config.json").write_bytes((study_folder / "config.json").read_bytes())
    (tmp_path / "records.jsonl").write_text(lines.replace(f'"greedy": {greedy}', f'"greedy": {value}'))
    with pytest.raises(InputError, match=r"records\.jsonl.*run the study again") as caught:
        show(tmp_path)
    assert str(caught.value).isprintable()


@given(draws=st.data())
def test_damaged_records(draws: st.DataObject, study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("config.json", "records.jsonl"):
        raw = (study_folder / name).read_bytes()
        (folder / name).write_bytes(draws.draw(damaged(raw) | st.just(raw)))
    try:
        show(folder)
    except InputError as error:
        assert str(error).isprintable()  # noqa: PT017


# --- states ---------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_states_are_loaded_without_running_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    order = GraB(None, 4)
    torch.save(order.state_dict() | {"log": Evil()}, "state.pt")
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        torch.load("state.pt", weights_only=True)
    with pytest.raises(StateError, match="never unpickled"):
        ordain.load("state.pt")
    assert not Path("evil").exists()
    torch.save(order.state_dict(), "state.pt")
    order.load_state_dict(torch.load("state.pt", weights_only=True))


def test_states_that_unpack_to_more_than_their_file(tmp_path: Path) -> None:
    """100 MB of zeros in a file of 100 kB: refused by what it declares, before anything is unpacked."""
    whole, bomb = tmp_path / "whole.pt", tmp_path / "bomb.pt"
    torch.save({"x": torch.zeros(100 * 2**20 // 4)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for one in old.infolist():
            new.writestr(one.filename, old.read(one))
    assert bomb.stat().st_size < 2**18
    tracemalloc.start()
    with pytest.raises(StateError, match=r"bomb\.pt, which cannot be read") as caught:
        ordain.load(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert "more data than the file contains" in str(caught.value.__cause__)
    assert len(ordain.load(whole)["x"]) == 100 * 2**20 // 4


@pytest.mark.parametrize("field", ["arrangement", "log", "table"])
def test_states_that_look_larger_than_they_are(field: str) -> None:
    """One number, repeated by a stride of 0 until it seems to be terabytes: nothing is copied, nothing changes."""
    order = GraB(None, 4)
    order.observe(torch.randn(len(list(order.sampler)), 3, generator=torch.Generator().manual_seed(0)))
    next(iter(order.sampler))
    state, many = order.state_dict(), 10**12
    if field == "arrangement":
        bad = state | {field: torch.zeros(1, dtype=torch.int64).expand(many)}
    elif field == "log":
        bad = state | {"epoch": many, field: torch.zeros(1, 1, dtype=torch.uint8).expand(many, 2)}
    else:
        bad = state | {"dim": many, "vectors": {field: torch.zeros(1, 1).expand(3, many)}}
    other = GraB(None, 4)
    before = str(other.state_dict())
    with pytest.raises(StateError, match=field):
        other.load_state_dict(bad)
    assert str(other.state_dict()) == before


@pytest.mark.parametrize("state", [None, [], "state", {}, {"version": {"version": 1}}, {"order": "<b>GraB</b>"}])
def test_states_that_are_none(state: Any) -> None:
    order = GraB(None, 4)
    with pytest.raises(OrdainError):
        order.load_state_dict(state)
    assert sorted(order.sampler) == [0, 1, 2, 3]
