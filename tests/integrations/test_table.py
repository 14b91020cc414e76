"""The tables of docs/frameworks.md say nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "frameworks.md").read_text(encoding="utf-8").partition("## What works with what")[2]
FILES = {"transformers": "test_transformers.py", "Lightning": "test_lightning.py", "Accelerate": "test_accelerate.py"}
ALL = "test_ranks.py"  # every framework
WORDS = re.findall(r"^- \*(\w+)\*: ", TEXT, re.M)  # what a test may show


def rows() -> list[list[str]]:
    """The cells of all tables, without their headers."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| |", "| ---"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell: str) -> set[tuple[str, str]]:
    return set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell))


def test_every_test_that_is_named_exists() -> None:
    there = {
        (file.name, name)
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
    }
    found = set.union(*(named(row[-1]) for row in rows()))
    assert len(found) > 20
    assert found - there == set()


def test_every_tested_cell_has_a_test_of_its_framework() -> None:
    frameworks = [row for row in rows() if len(row) == len(FILES) + 2]
    assert len(frameworks) > 15
    assert len(WORDS) == 4
    for row in frameworks:
        files = {file for file, _ in named(row[-1])}
        for (name, file), cell in zip(FILES.items(), row[1:-1], strict=True):
            tested = cell.split(" ")[0] in WORDS
            assert tested or not cell or "untested" in cell, row
            assert not tested or files & {file, ALL}, f"{row[0]} of {name} without a test"
            assert tested or file not in files, f"{row[0]} of {name} is tested"


def test_every_other_row_that_is_tested_has_a_test() -> None:
    others = [row for row in rows() if len(row) == 3]
    assert len(others) > 5
    assert [row for row in others if not named(row[-1])] == []


def test_no_file_of_tests_is_without_a_row() -> None:
    files = {file.name for file in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert files - {file for row in rows() for file, _ in named(row[-1])} == set()
