"""docs/reliability.md promises nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_promise_names_a_test_that_exists() -> None:
    found = list(TESTS.rglob("test_*.py"))
    files = {file.name for file in found}
    there = {name for file in found for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert set(re.findall(r"\btest_\w+\.py", TEXT)) <= files
    named = set(re.findall(r"\btest_\w+\b(?!\.py)\*?", TEXT))
    assert {one for one in named if not any(re.fullmatch(one.replace("*", ".*"), name) for name in there)} == set()
    promises = [one for one in re.split(r"\n(?=- |\n)", TEXT) if one.startswith("- ")]
    assert len(promises) > 25
    assert [one for one in promises if not re.search(r"`test_\w+`", one)] == []
