"""The version is in one place, and what belongs to a release agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import ordain

ROOT = Path(__file__).parents[1]


def version() -> str:
    (found,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    return str(found)


def test_the_version_is_in_one_place() -> None:
    assert ordain.__version__ == version()
    sources = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"\b\d+\.\d+\.\d+\b", path.read_text())]
    assert [path.name for path in sources if version() in path.read_text()] == []


def test_the_changes_begin_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == version()
    assert len(set(headings)) == len(headings)


def test_every_extra_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    asked = {name.lower() for name in re.findall(r'"([\w-]+)(?:\[\w+\])?>=', listed)}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert asked - pinned == set()
