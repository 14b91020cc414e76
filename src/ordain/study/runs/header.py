"""``config.json`` of any study's folder: what was asked for, and what it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ordain.errors import InputError
from ordain.study.runs.fields import Fields, read_object

__all__ = ["TRAINING", "Header", "Made", "read_header"]

TRAINING = "training"  # the kind of a folder with records of training
_FORMAT = 1


@dataclass(frozen=True)
class Made:
    """One command that worked on a folder, and what it ran on."""

    command: str
    started: str
    revision: str | None
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass(frozen=True)
class Header:
    """``config.json``: what a run was asked for and what it was made with, the first command before any others."""

    kind: str
    task: str
    command: str
    config: Mapping[str, Any]
    problem: Mapping[str, Any]
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    revision: str | None
    started: str
    commands: tuple[Made, ...] = ()

    @property
    def made(self) -> list[Made]:
        """Every command that worked on the folder, the first one first."""
        first = Made(self.command, self.started, self.revision, self.machine, self.versions)
        return [first, *(made for made in self.commands if made != first)]


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
        commands=_commands(fields),
    )


def _commands(fields: Fields) -> tuple[Made, ...]:
    found = fields.values.get("commands", [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InputError(
            f"commands at {fields.where}",
            expected="a list of what each command ran on",
            remedy="Mend the file, or use another: --out.",
        )
    each = [Fields(one, f"{fields.where}, commands") for one in found]
    return tuple(
        Made(
            one.maybe_text("command") or "",
            one.maybe_text("started") or "",
            one.maybe_text("revision"),
            one.maybe_mapping("machine") or {},
            one.maybe_mapping("versions") or {},
        )
        for one in each
    )
