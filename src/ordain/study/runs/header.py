"""``config.json`` of any study's folder: what was asked for, and what it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.runs.fields import Fields, read_object

__all__ = ["TRAINING", "Header", "read_header"]

TRAINING = "training"  # the kind of a folder with records of training
_FORMAT = 1


@dataclass(frozen=True)
class Header:
    """``config.json``: what a run was asked for and what it was made with."""

    kind: str
    task: str
    command: str
    config: Mapping[str, Any]
    problem: Mapping[str, Any]
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    revision: str | None
    started: str


def read_header(folder: Path) -> Header:
    """The ``config.json`` of any study's folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"{folder}, which has no config.json", expected="the folder of a run", remedy="`ordain run` writes one."
        )
    fields = Fields(read_object(path.read_bytes(), str(path)), str(path))
    found = fields.integer("format")
    if found != _FORMAT:
        raise InputError(
            f"format {found} in {path}", expected=f"format {_FORMAT}", remedy="Use the ordain that wrote it."
        )
    kind = fields.text("kind")
    return Header(
        kind=kind,
        task=fields.text("task") if kind == TRAINING else kind,
        command=fields.text("command"),
        config=fields.mapping("config"),
        problem=fields.mapping("problem") if kind == TRAINING else {},
        versions=fields.mapping("versions"),
        machine=fields.mapping("machine"),
        revision=fields.maybe_text("revision"),
        started=fields.text("started"),
    )
